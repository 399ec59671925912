"""What processes say to each other: every value in etcd, every message on a socket, the plan in a record.

House rules. All of it is JSON by msgspec, on sockets one object a line. A message carries its ``type``; whatever crosses
a process boundary carries the generation. Unknown fields are ignored (an older reader meets a newer writer), unknown
types are an error. No field compares clocks of two machines: durations are measured by whoever reports them.

*Step t* is the t-th optimizer step, from 1. A snapshot or checkpoint *at step t* is the state after t steps; step 0 is
the initial state.
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeVar

import msgspec

from surefoot.controller.spec.tables import AXES

FORMAT = 1

Phase = Literal["start", "restore", "compile", "data", "step", "save", "eval", "done"]
"""What a rank is doing. ``step`` is forward, backward and optimizer; ``save`` the snapshot; ``done``: train() returned."""

Cause = Literal["workload", "infrastructure", "preemption", "controller", "operator", "none"]
NodeState = Literal["warming", "parked", "starting", "running", "leaving", "stopping", "done"]
"""``leaving``: told to end; its ranks run on until what they did is committed, or the grace is over. ``stopping``: it ends
them now, and itself."""
Ended = Literal["steps", "data", "stopped"]
"""What ended a rank's loop: the job's last step, the end of the data, or that all ranks were told to stop. Only the first two
are the end of the job."""
"""Whose budget a restart is charged to. ``none``: the first start, or a generation that nothing forced."""


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """A value stored under a key or inside a message."""


# ---------------------------------------------------------------- the plan, inside a record


class StartingPoint(_Value, frozen=True, kw_only=True):
    """(generation, step) that all ranks restore. ``memory``: snapshots on the nodes; ``object_store``: a manifest;
    ``nothing``: the initial state (generation 0, step 0)."""

    generation: int = 0
    step: int = 0
    tier: Literal["nothing", "memory", "object_store"] = "nothing"


class Member(_Value, frozen=True, kw_only=True):
    """One node of a generation and the ranks it runs: first_rank .. first_rank + ranks - 1."""

    uid: str
    incarnation: str
    index: int
    first_rank: int
    ranks: int


class SnapshotSource(_Value, frozen=True, kw_only=True):
    """The node that holds a rank's snapshot of the starting point (the tier ``memory`` only). A member that is not `uid`
    itself fetches it from that node's snapshot server."""

    rank: int
    uid: str


class Reason(_Value, frozen=True, kw_only=True):
    """Why a generation exists."""

    kind: Literal["first_start", "restart", "replace", "resume", "burnt", "start_failed"]
    cause: Cause = "none"
    fault: str = ""
    """The kind of fault as the incident names it: rank_exit, rank_exception, hang, node_loss; empty where there was none."""
    incident: str = ""
    detail: str = ""
    signature: str = ""
    """Names the crash that led here, so that equal ones can be counted over the records; empty where none is known."""


class Plan(_Value, frozen=True, kw_only=True):
    """The immutable assignment of one generation. It stands in the record's ``plan`` field."""

    format: int = FORMAT
    job: str
    run_id: str
    generation: int
    members: tuple[Member, ...]
    world_size: int
    mesh: dict[str, int]
    """Axis name to size: {"pp": 1, "dp": 4, "tp": 1}. Its order is nothing: on the wire mappings are sorted (`axes`)."""
    start: StartingPoint
    sources: tuple[SnapshotSource, ...] = ()
    peers: dict[str, str] = {}
    """Node uid to the uid of the node that holds copies of its snapshots; a node that is absent has no peer."""
    reason: Reason
    conditional: bool = True
    """Whether the object store creates conditionally, as its leader found; without, all writers do without, alike."""
    faults: int = 0
    """How many generations of this run something forced, this one included; with `ran_s`, how often the job is interrupted."""
    ran_s: float = 0.0
    """For how long generations of this run were in force before this one, by the clocks of those who led."""
    spec_hash: str
    code_version: str
    controller: str

    def member(self, uid: str) -> Member | None:
        return next((m for m in self.members if m.uid == uid), None)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh, outermost axis first: the order in which ranks are numbered."""
        return dict(sorted(self.mesh.items(), key=lambda item: AXES.index(item[0])))


class PlanPointer(_Value, frozen=True, kw_only=True):
    """The value of the ``plan`` key: which record is in force. `hash` is the sha256 of the record's bytes."""

    generation: int
    hash: str
    location: str


# ---------------------------------------------------------------- nodes, heartbeats, incidents


class NodeInfo(_Value, frozen=True, kw_only=True):
    """The value of ``nodes/<uid>``: presence and addresses of one life of an agent."""

    uid: str
    incarnation: str
    host: str
    control_port: int
    flight_port: int
    pid: int
    slots: int
    """How many ranks the node can run."""
    code_version: str


class DamagedStep(_Value, frozen=True, kw_only=True):
    """A committed step that turned out damaged. `key` names the object, `detail` says what is wrong with it."""

    generation: int
    step: int
    key: str
    detail: str


class ErrorReport(_Value, frozen=True, kw_only=True):
    """An exception that ended a rank's training code."""

    kind: Literal["collective", "workload", "data", "checkpoint", "startup", "agent_lost"]
    """``collective``: a communication error, so most likely an effect of somebody else's death."""
    type: str
    message: str
    traceback: str = ""
    """The last frames, bounded."""
    permanent: bool = False
    """The same code, spec and data would fail in the same way: no restart can help."""
    damaged: DamagedStep | None = None
    """Set where the starting point could not be read: nobody needs to try it again."""


class ExitReport(_Value, frozen=True, kw_only=True):
    """How a rank's process ended. Exactly one of `code` and `signal` is set. `teardown`: the agent itself ended it."""

    code: int | None = None
    signal: int | None = None
    error: ErrorReport | None = None
    last_words: str = ""
    """The last lines of its log."""
    teardown: bool = False


class RankStatus(_Value, frozen=True, kw_only=True):
    """One rank as its agent sees it. `step` is the step it is in or, in phase ``done``, the last one; `ended` says then what
    ended its loop."""

    rank: int
    pid: int
    phase: Phase
    step: int
    phase_age_s: float
    """Seconds since its last sign of progress, measured by the agent when the status was written."""
    loss: str | None = None
    """Global loss of the last finished step, as float.hex(): JSON has no word for NaN and infinity."""
    step_s: float | None = None
    exit: ExitReport | None = None
    ended: Ended | Literal[""] = ""


class SnapshotRef(_Value, frozen=True, kw_only=True):
    """A complete, sealed snapshot of one rank that this node holds; `replica`: a copy for another node's rank."""

    generation: int
    step: int
    rank: int
    replica: bool = False


class Rendezvous(_Value, frozen=True, kw_only=True):
    """Where the TCPStore of one generation listens. Readers match generation *and* incarnation."""

    generation: int
    incarnation: str
    host: str
    port: int


class Committed(_Value, frozen=True, kw_only=True):
    """The newest manifest this node's committer created and acknowledged, or ``fenced_by`` when it must not count itself."""

    generation: int
    step: int
    attempt: str = ""
    """Its nonce: two attempts at one step may fail with the same words, and both are news."""
    fenced_by: int | None = None
    failure: str = ""


class StartFailure(_Value, frozen=True, kw_only=True):
    """This node cannot start its ranks of `generation` as planned."""

    generation: int
    kind: Literal[
        "snapshot_missing", "snapshot_corrupt", "peer_unreachable", "record_unreadable", "launch_failed"
    ]
    detail: str
    error: ErrorReport | None = None
    """Set where the job itself is to blame (a module that cannot be imported, a memory budget too small): no other node and
    no other try will do better."""


class NodeStatus(_Value, frozen=True, kw_only=True):
    """The value of ``status/<uid>``: the heartbeat, and the answer to a probe."""

    uid: str
    incarnation: str
    seq: int
    generation: int = 0
    """The generation whose plan the agent follows; 0 before the first."""
    state: NodeState
    rendezvous: Rendezvous | None = None
    ranks: tuple[RankStatus, ...] = ()
    snapshots: tuple[SnapshotRef, ...] = ()
    committed: Committed | None = None
    start_failure: StartFailure | None = None
    note: str = ""


class Outcome(_Value, frozen=True, kw_only=True):
    """The value of ``outcome``: how the job ended. `exit_code` is what `surefoot run` exits with (docs/operations.md)."""

    state: Literal["done", "failed"]
    exit_code: int
    step: int
    reason: str
    generation: int
    run_id: str = ""
    """The run that ended: one of a former run says nothing about this one."""


class Held(_Value, frozen=True, kw_only=True):
    """The value of ``held``: why nothing is decided, and what to mend. Where the key is gone, the job is held no more."""

    reason: str


class Incident(_Value, frozen=True, kw_only=True):
    """One fault as handled, from evidence to the first step after it. Times are seconds on the controller's clock since
    the incident was opened; None until it happened."""

    id: str
    fault: str
    cause: Cause
    generation: int
    """The generation it struck."""
    step: int
    node: str = ""
    rank: int | None = None
    evidence: tuple[str, ...] = ()
    rule: str = ""
    """The rule that chose the reaction, in words."""
    decision: str = ""
    new_generation: int | None = None
    start: StartingPoint | None = None
    decided_s: float | None = None
    planned_s: float | None = None
    running_s: float | None = None
    """All ranks of the new generation have begun their first step."""
    first_step_s: float | None = None
    budget_left: int | None = None
    closed: bool = False


# ---------------------------------------------------------------- rank -> agent, over the agent's Unix socket


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One line on a socket."""


class HelloMsg(_Message, frozen=True, kw_only=True, tag="hello"):
    """A rank's first words."""

    token: str
    generation: int
    rank: int
    pid: int


class PhaseMsg(_Message, frozen=True, kw_only=True, tag="phase"):
    """The rank entered `phase` of step `step`."""

    phase: Phase
    step: int


class StepMsg(_Message, frozen=True, kw_only=True, tag="step"):
    """A step is finished. `loss` is the global loss as float.hex(), the same on all ranks; None without a report."""

    step: int
    loss: str | None
    step_s: float


class PoolMsg(_Message, frozen=True, kw_only=True, tag="pool"):
    """The rank needs `slots` snapshot slots of `slot_bytes` each; answered by `PoolReadyMsg`."""

    slot_bytes: int
    slots: int


class SnapshotMsg(_Message, frozen=True, kw_only=True, tag="snapshot"):
    """Slot `slot` holds the sealed snapshot of `step`. `attempt` is set when it is to be uploaded and committed."""

    step: int
    slot: int
    attempt: str | None = None


class CadenceMsg(_Message, frozen=True, kw_only=True, tag="cadence"):
    """Rank 0 has chosen how often to commit; `why` is the reasoning, in a sentence."""

    why: str


class FailedMsg(_Message, frozen=True, kw_only=True, tag="failed"):
    """Training code raised; the process exits next."""

    step: int
    error: ErrorReport


class DoneMsg(_Message, frozen=True, kw_only=True, tag="finished"):
    """train() returned and the last checkpoint, if one was due, is committed. `ended`: what ended its loop."""

    step: int
    ended: Ended


# ---------------------------------------------------------------- agent -> rank


class StartMsg(_Message, frozen=True, kw_only=True, tag="start"):
    """The answer to `HelloMsg`: what the rank needs of the plan."""

    plan: Plan
    restore_path: str | None = None
    """The slot file that holds this rank's snapshot of the starting point (tier ``memory``)."""


class PoolReadyMsg(_Message, frozen=True, kw_only=True, tag="pool_ready"):
    """Slot files, all of at least the size asked for; those in `held` carry snapshots (step by slot index) not to be
    overwritten before a newer pair is replicated for all ranks."""

    paths: tuple[str, ...]
    held: dict[int, int] = {}


class ReplicatedMsg(_Message, frozen=True, kw_only=True, tag="replicated"):
    """This rank's snapshot of `step` is safe on the peer (or there is no peer, and none is wanted)."""

    step: int


class CommittedMsg(_Message, frozen=True, kw_only=True, tag="committed"):
    """The manifest of (generation, step) exists and is acknowledged; or `failure` says why that attempt was given up."""

    generation: int
    step: int
    failure: str = ""


class StopMsg(_Message, frozen=True, kw_only=True, tag="stop"):
    """This rank's process will be ended, `grace_s` from now at the latest. Where all ranks are told so, they commit the step
    they are in and end together; where only some are, the step is committed and all train on until those are ended: what
    becomes of the job is the controller's to say. `reason` names why (re-form, shut down)."""

    reason: Literal["reform", "shutdown"]
    grace_s: float


RankToAgent = HelloMsg | PhaseMsg | StepMsg | PoolMsg | SnapshotMsg | CadenceMsg | FailedMsg | DoneMsg
AgentToRank = StartMsg | PoolReadyMsg | ReplicatedMsg | CommittedMsg | StopMsg


# ---------------------------------------------------------------- controller -> agent, over the agent's control socket


class ProbeMsg(_Message, frozen=True, kw_only=True, tag="probe"):
    """Asks an agent directly how it is; answered by `ProbeReplyMsg`."""

    token: str
    job: str


class ProbeReplyMsg(_Message, frozen=True, kw_only=True, tag="probe_reply"):
    status: NodeStatus


class RefusedMsg(_Message, frozen=True, kw_only=True, tag="refused"):
    """The peer's token or job is wrong; the connection ends."""

    reason: str


ControlMessage = ProbeMsg | ProbeReplyMsg | RefusedMsg

T = TypeVar("T")


def encode(value: msgspec.Struct) -> bytes:
    """Canonical bytes of a value or message: fields in their declared order, mappings sorted by key, no newline."""
    try:
        return msgspec.json.encode(value, order="deterministic")
    except TypeError:
        # msgspec sorts text keys only. The one mapping with numbers (`PoolReadyMsg.held`) is never hashed or compared.
        return msgspec.json.encode(value)


def decode(kind: type[T], data: bytes | str) -> T:
    """Read a value or message (a union is given as such).

    Raises:
        msgspec.ValidationError: the bytes are not a `kind`; msgspec.DecodeError: they are not JSON.
    """
    return msgspec.json.decode(data, type=kind)


def digest(data: bytes) -> str:
    """The hash that names a record or a spec: sha256, in hex."""
    return hashlib.sha256(data).hexdigest()
