"""What happened, as told to the core. PURE.

House rules. Past tense, one class per outcome: a refusal, a timeout and an unknown are never one class with a flag. An
answer carries the `op` of the decision that asked for it; an answer to a question nobody waits for any more is ignored.
Every event carries a `cause_id`, given by the shell, that runs on into the decisions it leads to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from surefoot.ckpt.record import ManifestRef, Record
from surefoot.controller.wire import Incident, NodeInfo, NodeStatus, Outcome, PlanPointer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Happened:
    """Base: `cause_id` names the stimulus in journal and logs."""

    cause_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer(_Happened):
    """Base: the end of the operation `op` that a decision asked for."""

    op: int


# ---------------------------------------------------------------- leadership and time


@dataclass(frozen=True, slots=True, kw_only=True)
class Elected(_Happened):
    """This controller's key stands; `token` is its creation revision."""

    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deposed(_Happened):
    """This controller leads no longer, or cannot prove that it does."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked(_Happened):
    """Time went by."""


# ---------------------------------------------------------------- what etcd shows


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAppeared(_Happened):
    """``nodes/<uid>`` was written; `revision` is its last change."""

    info: NodeInfo
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVanished(_Happened):
    """``nodes/<uid>`` is gone: its lease ended, or the agent left. A suspicion, no more."""

    uid: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReported(_Happened):
    """``status/<uid>`` was written."""

    status: NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerSeen(_Happened):
    """``plan`` was written, or is gone (None)."""

    pointer: PlanPointer | None
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeListed:
    """One node of a `WorldListed`."""

    info: NodeInfo
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldListed(_Happened):
    """All of the job's keys as they stood together at `revision`: the first look of a leader, and every relist."""

    revision: int

    nodes: tuple[NodeListed, ...]
    statuses: tuple[NodeStatus, ...]
    pointer: PlanPointer | None
    outcome: Outcome | None
    incidents: tuple[Incident, ...] = ()


# ---------------------------------------------------------------- probes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswered(_Answer):
    """The agent answered with its status, fresh."""

    uid: str
    status: NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRefused(_Answer):
    """The machine answered that nobody listens there: that life of the agent is over."""

    uid: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeBroken(_Answer):
    """A connection was made and broke before an answer: it may be dying, or something stands in between."""

    uid: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTimedOut(_Answer):
    """No answer within the deadline: busy, frozen, cut off or dead."""

    uid: str


# ---------------------------------------------------------------- records, manifests


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCreated(_Answer):
    """The record exists and is ours. `hash` is the sha256 of its bytes, `location` its key."""

    generation: int
    hash: str
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTaken(_Answer):
    """Somebody else's record has that number."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordUnknown(_Answer):
    """It may exist, now or later."""

    generation: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageListed(_Answer):
    """All records (with the hash of each one's bytes), all manifests, and which of these are set aside."""

    records: Mapping[int, Record]
    hashes: Mapping[int, str]
    manifests: tuple[ManifestRef, ...]
    aside: Mapping[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    """(generation, step) of those that were set aside as damaged, and why."""
    lacks: str = ""
    """What conditional creation lacks in this object store, in words; empty where it is as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageDamaged(_Answer):
    """A record cannot be read: damaged, or written by a newer version."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreUnavailable(_Answer):
    """The object store did not answer, or failed; nothing was done."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreDenied(_Answer):
    """The object store refuses us: the operator's to mend."""

    detail: str


# ---------------------------------------------------------------- fenced writes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPublished(_Answer):
    """The transaction held, at `revision`: the plan is in force."""

    generation: int
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRefused(_Answer):
    """The transaction's condition failed: somebody else leads, or nobody."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanUnknown(_Answer):
    """It may have taken effect, now or later."""

    generation: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRead(_Answer):
    """What ``plan`` holds, last changed at `revision`."""

    pointer: PlanPointer | None
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeWritten(_Answer):
    """The job's end is in etcd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRefused(_Answer):
    """Somebody else leads, or nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeUnknown(_Answer):
    """It may have taken effect; writing it again does no harm."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordStoreUnavailable(_Answer):
    """etcd did not answer; nothing was done."""

    detail: str


ProbeOutcome = ProbeAnswered | ProbeRefused | ProbeBroken | ProbeTimedOut
StoreOutcome = (
    RecordCreated
    | RecordTaken
    | RecordUnknown
    | LineageListed
    | LineageDamaged
    | ObjectStoreUnavailable
    | ObjectStoreDenied
)
WriteOutcomes = (
    PlanPublished
    | PlanRefused
    | PlanUnknown
    | PlanRead
    | OutcomeWritten
    | OutcomeRefused
    | OutcomeUnknown
    | CoordStoreUnavailable
)
Event = (
    Elected
    | Deposed
    | Ticked
    | NodeAppeared
    | NodeVanished
    | StatusReported
    | PointerSeen
    | WorldListed
    | ProbeOutcome
    | StoreOutcome
    | WriteOutcomes
)
