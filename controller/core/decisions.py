"""What the core wants done. PURE.

House rules. Imperative; the shell carries each out exactly as it stands and answers those that have an `op` with exactly
one event that bears it. Whatever changes etcd carries the `token` that the transaction compares. `cause_id` is that of the
event (or of the incident) that led here.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.ckpt.record import Record
from surefoot.controller.wire import Incident, Outcome, PlanPointer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    cause_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowWorld(_Wanted):
    """List all of the job's keys, watch them from there, list again every 15 s: `WorldListed` and the changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDown(_Wanted):
    """Give up leadership at once; campaign again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """Whom to ask, and which life of it is meant."""

    uid: str
    incarnation: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeNodes(_Wanted):
    """Ask each of them directly, all at once; one answer event each."""

    op: int
    targets: tuple[ProbeTarget, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRecord(_Wanted):
    """Create the record conditionally. Doing it again with the same record resolves an unknown outcome."""

    op: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLineage(_Wanted):
    """List records and manifests, freshly."""

    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan(_Wanted):
    """Put the pointer (and remove an outcome of a former run) if the leader key still was created at `token`."""

    op: int
    token: int
    pointer: PlanPointer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan(_Wanted):
    """Read ``plan``: the outcome of publishing it is unknown."""

    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOutcome(_Wanted):
    """Put the outcome if the leader key still was created at `token`."""

    op: int
    token: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TellHeld(_Wanted):
    """Write the ``held`` key with this reason, fenced by `token`; remove it where the reason is empty. Nobody waits for it."""

    token: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIncident(_Wanted):
    """Write a new incident, fenced by `token`, and to the journal. Nobody waits for it."""

    token: int
    incident: Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateIncident(_Wanted):
    """The same incident with more known about it."""

    token: int
    incident: Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside(_Wanted):
    """Raise the flag beside a committed step that turned out damaged: no start takes it any more, and it is kept as it is.

    Nobody waits for it. A flag that stands already is no failure; what fails is wanted again after the next listing.
    """

    token: int
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(_Wanted):
    """For the log and the journal: what changed in the core's view, in words. Each change is said once."""

    topic: str
    text: str


Decision = (
    FollowWorld
    | StepDown
    | ProbeNodes
    | CreateRecord
    | ListLineage
    | PublishPlan
    | ReadPlan
    | WriteOutcome
    | TellHeld
    | OpenIncident
    | UpdateIncident
    | SetAside
    | Report
)
