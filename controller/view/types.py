"""The snapshot of a job, `JobView`, and its parts. PURE."""

from __future__ import annotations

from typing import Literal

import msgspec

from surefoot.controller import wire

JobPhase = Literal["waiting", "forming", "starting", "running", "held", "done", "failed", "unknown"]
"""``waiting``: no plan yet; ``forming``: a record without its plan, or a fault not yet answered; ``starting``: not all ranks
of the plan have begun a step; ``held``: what etcd, records and agents say contradicts itself, and until that is mended nothing
is decided; ``unknown``: etcd is not there to say."""

QUIET_S = 3.0
"""A rank without a sign of progress for this long is mentioned. A matter of display only: verdicts are the detectors'."""


class _View(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the snapshot."""


class JobFacts(_View, frozen=True, kw_only=True):
    """What the JobSpec says, as far as a view needs it; `steps` and `nodes` are None where no job file is at hand."""

    name: str
    steps: int | None
    nodes: int | None
    root: str


class RankView(_View, frozen=True, kw_only=True):
    """One rank as its agent last told. `ended`: how its process ended, in words; empty while it lives."""

    rank: int
    pid: int
    phase: wire.Phase
    step: int
    phase_age_s: float
    loss: float | None
    step_s: float | None
    ended: str = ""


class NodeView(_View, frozen=True, kw_only=True):
    """One node. `role`: ``member`` of the plan in force, ``standby``, ``lost`` (a member whose keys are gone), or ``free`` as
    long as there is no plan."""

    uid: str
    role: Literal["member", "standby", "lost", "free"]
    state: str
    generation: int
    pid: int | None
    ranks: tuple[RankView, ...]
    snapshot_step: int | None
    """The newest step of which the node holds the snapshots of all its own ranks."""
    copies_step: int | None
    """The newest step of which it holds a copy for another node."""
    note: str


class CommitView(_View, frozen=True, kw_only=True):
    """A checkpoint on the lineage."""

    generation: int
    step: int


class GenerationView(_View, frozen=True, kw_only=True):
    """One record: a generation, why it came to be, and what it started from."""

    generation: int
    kind: str
    members: tuple[str, ...]
    start_generation: int
    start_step: int
    restored_from: Literal["nothing", "memory", "peer", "object_store"]
    reason: str
    incident: str = ""
    """The incident that it answers; empty where there is none."""


class EventView(_View, frozen=True, kw_only=True):
    """One line of the story. Order is by generation and step, never by clocks."""

    kind: Literal["generation", "commit", "incident", "outcome"]
    generation: int
    step: int
    text: str


class LossPoint(_View, frozen=True, kw_only=True):
    step: int
    loss: float


class JobView(_View, frozen=True, kw_only=True):
    """A snapshot of one job. `step` is the newest step any rank is in (or, done, the last one)."""

    job: str
    root: str
    phase: JobPhase
    now: str
    """What is happening and why, in one sentence."""
    leader: str | None
    generation: int
    """The generation in force; 0 before the first."""
    reason: str
    step: int
    steps: int | None
    loss: float | None
    steps_per_s: float | None
    committed: CommitView | None
    nodes: tuple[NodeView, ...]
    generations: tuple[GenerationView, ...]
    incidents: tuple[wire.Incident, ...]
    events: tuple[EventView, ...]
    losses: tuple[LossPoint, ...]
    outcome: wire.Outcome | None
