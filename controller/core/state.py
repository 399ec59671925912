"""What the core knows. PURE; everything here is frozen.

`State` is the whole of it. A deposed controller keeps its state but decides nothing; once elected again it looks afresh.
While the mind is FORMING, `State.forming` says how far it has come::

    TakingOver -> (Reviewing) -> Choosing -> [AwaitingNodes] -> [Consulting] -> WritingRecord -> CheckingRecord -> Publishing -> ComingUp
                                    ^                                               |                |
                                    +-----------------------------------------------+----------------+   taken or burnt: the next number

An `Inquiry` runs beside it: something looks wrong, and members are being asked directly before anything is concluded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from surefoot.ckpt.record import ManifestRef, Record
from surefoot.controller.core.moves import Mind
from surefoot.controller.core.settings import Settings
from surefoot.controller.wire import (
    Cause,
    DamagedStep,
    Incident,
    NodeInfo,
    NodeStatus,
    Outcome,
    Phase,
    Plan,
    PlanPointer,
    Reason,
)

# ---------------------------------------------------------------- nodes


class Answer(Enum):
    """How the last probe of a node ended."""

    ANSWERED = "answered"
    REFUSED = "refused the connection"
    BROKEN = "broke the connection"
    TIMED_OUT = "did not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The last probe that came to an end."""

    answer: Answer
    op: int
    at_s: float
    incarnation: str = ""
    """The life that answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a rank was when it last made progress, and when this controller heard of it."""

    step: int
    phase: Phase
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    """One node, as far as it is known. `info` outlives the key: it holds the address for a probe."""

    uid: str
    info: NodeInfo | None = None
    revision: int = 0
    """Of the last change of its presence key, its end included: what is older does not count."""
    registered: bool = False
    gone_s: float | None = None
    """When its presence key was found missing."""
    status: NodeStatus | None = None
    heard_s: float = 0.0
    """When the newest status came in."""
    probed: Probed | None = None
    asked_s: float | None = None
    """When it was last asked."""
    lost: str = ""
    """Why the life `info` tells of is known to be over; empty while it is not. A new registration clears it."""
    marks: Mapping[int, Mark] = field(default_factory=dict[int, Mark])
    """By rank, of the generation its status follows."""

    @property
    def incarnation(self) -> str:
        return self.info.incarnation if self.info is not None else ""

    @property
    def present_status(self) -> NodeStatus | None:
        """The status, if it is of the life that is registered."""
        if self.status is None or self.info is None or self.status.incarnation != self.info.incarnation:
            return None
        return self.status


# ---------------------------------------------------------------- what the stores hold

StepKey = tuple[int, int]
"""(generation, step) of a manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Records and manifests as last listed; `listed_s` is when that listing was asked for."""

    records: Mapping[int, Record]
    hashes: Mapping[int, str]
    manifests: tuple[ManifestRef, ...]
    listed_s: float
    aside: Mapping[StepKey, str] = field(default_factory=dict[tuple[int, int], str])
    """Manifests that are flagged as damaged, and why."""
    lacks: str = ""
    """What conditional creation lacks in this object store."""

    @property
    def top(self) -> int:
        """The highest record; 0 where there is none."""
        return max(self.records, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """The plan that the ``plan`` key points to. `since_s`: when this controller published or adopted it."""

    plan: Plan
    since_s: float


StartKey = tuple[int, int, str]
"""(generation, step, tier) of a starting point."""


# ---------------------------------------------------------------- suspicion and fault


class SuspicionKind(Enum):
    """What a detector saw; the words complete "rank 2 on n1 …" or "node n1 …"."""

    EXIT = "ended"
    START_FAILURE = "cannot start"
    VANISHED = "lost its lease"
    REBORN = "came back as another life"
    QUIET = "stopped reporting"
    NO_PROGRESS = "makes no progress"
    NOT_READY = "does not come up"
    ENDED_EARLY = "ended before the others"
    LEAVING = "was told to end"
    STOPPED = "stopped because it was told to"


HARD = frozenset(
    {
        SuspicionKind.EXIT,
        SuspicionKind.START_FAILURE,
        SuspicionKind.REBORN,
        SuspicionKind.NO_PROGRESS,
        SuspicionKind.NOT_READY,
        SuspicionKind.ENDED_EARLY,
        SuspicionKind.STOPPED,
    }
)
"""These stop the generation whatever a probe says; the others are about one node, and only it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """One thing a detector saw. `rank` is -1 where it is about a node. Two that differ in words only are the same."""

    uid: str
    kind: SuspicionKind
    rank: int = -1
    detail: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """Members are being asked what is going on.

    `asked` maps each to the op of the probe that counts. `settled`: the wait for what initiated mere cascade evidence is
    over, and everybody was asked again.
    """

    opened_s: float
    suspicions: tuple[Suspicion, ...]
    asked: Mapping[str, int] = field(default_factory=dict[str, int])
    settled: bool = False

    @property
    def hard(self) -> bool:
        return any(s.kind in HARD for s in self.suspicions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault as diagnosed: what, whose account, where, and by which rule."""

    kind: str
    cause: Cause
    node: str = ""
    rank: int | None = None
    step: int = 0
    evidence: tuple[str, ...] = ()
    rule: str = ""
    signature: str = ""
    lost: Mapping[str, str] = field(default_factory=dict[str, str])
    """Members whose life is over, and why."""
    start_at_fault: bool = False
    """The starting point could not be served or loaded."""
    start_is_gone: bool = False
    """… and trying it again is pointless."""
    permanent: bool = False
    """No restart can help: the spec, the training code or the data has to be mended."""
    damaged: DamagedStep | None = None
    """A committed step that a rank could not restore because its objects are damaged."""


# ---------------------------------------------------------------- forming


@dataclass(frozen=True, slots=True, kw_only=True)
class TakingOver:
    """A new leader looks: at etcd, and at records and manifests."""

    op: int
    world: bool = False
    listed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewing:
    """The budget seems spent: the newest commits are listed before the job is given up."""

    op: int
    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """Members and starting point are to be chosen (at the next chance: a store failed a moment ago)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingNodes:
    """Not enough nodes. `since_s`: since when it did not get better; `found` of the wanted nodes are there."""

    since_s: float
    found: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Consulting:
    """The starting point is a manifest or nothing: the lineage is listed before the record names one."""

    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingRecord:
    """The record is being created. `unknown`: an earlier try may have succeeded, so this number must be settled first."""

    op: int
    record: Record
    plan: Plan
    unknown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckingRecord:
    """The record exists; the manifests are being listed again."""

    op: int
    record: Record
    plan: Plan
    pointer: PlanPointer


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """The transaction is under way; `reading`: its outcome is unknown and the key is being read back."""

    op: int
    plan: Plan
    pointer: PlanPointer
    reading: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingUp:
    """The plan is in force; not all ranks have begun their first step."""


Stage = (
    TakingOver
    | Reviewing
    | Choosing
    | AwaitingNodes
    | Consulting
    | WritingRecord
    | CheckingRecord
    | Publishing
    | ComingUp
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming:
    """How far the next generation has come, and why there is to be one.

    `why.cause` is the account of the *next* record: once a record has charged it, the records that replace it charge nobody.
    """

    why: Reason
    stage: Stage
    since_s: float
    retry_s: float | None = None
    """The stage's operation failed and is tried again then."""
    failures: int = 0
    """Failed tries in a row."""


# ---------------------------------------------------------------- the end, incidents, the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """The incident that is being handled, and when it was opened on this controller's clock."""

    incident: Incident
    opened_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """All ranks are done: the last checkpoint is being looked for."""

    op: int | None
    looks: int
    next_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TheEnd:
    """How the job ended, and whether etcd has it."""

    outcome: Outcome
    op: int | None
    written: bool = False
    retry_s: float | None = None
    failures: int = 0


STORY_MAX = 24
"""So many lines of the story are kept for the message of an illegal move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The controller's mind and all it rests on."""

    settings: Settings
    mind: Mind = Mind.FORMING
    token: int | None = None
    """Creation revision of our leader key; None: we do not lead, and decide nothing."""
    nodes: Mapping[str, KnownNode] = field(default_factory=dict[str, KnownNode])
    pointer: PlanPointer | None = None
    """What ``plan`` holds, as far as is known."""
    pointer_revision: int = 0
    """etcd's revision of that knowledge: whatever is older does not count."""
    stale_outcome: Outcome | None = None
    """An outcome that etcd held when this leader looked first."""
    truth: Truth | None = None
    in_force: InForce | None = None
    forming: Forming | None = None
    inquiry: Inquiry | None = None
    progress_s: float = 0.0
    """When any rank of the plan in force last made progress."""
    learned_step_s: float | None = None
    """What a step usually takes, of steps past the warm-up."""
    failed_starts: Mapping[StartKey, int] = field(default_factory=dict[StartKey, int])
    """Starting points that could not be served since a generation last came up, and how often."""
    damaged: Mapping[StepKey, str] = field(default_factory=dict[StepKey, str])
    """Committed steps that ranks found damaged, and why, until a listing shows them as set aside."""
    tracked: Tracked | None = None
    ending: Ending | None = None
    the_end: TheEnd | None = None
    held_why: str = ""
    held_since_s: float = 0.0
    listing: int | None = None
    """The op of the listing under way that no stage waits for."""
    listings: Mapping[int, float] = field(default_factory=dict[int, float])
    """Listings of the object store under way, by op, and when each was asked for."""
    next_listing_s: float = 0.0
    drift: int = 0
    """Differences that relists found between the watched view and the keys."""
    reported: frozenset[str] = frozenset()
    """What observe-only detectors have said of the present generation."""
    next_op: int = 1
    story: tuple[str, ...] = ()

    @property
    def leads(self) -> bool:
        return self.token is not None
