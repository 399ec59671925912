"""What an agent decides, as pure functions: which plan to follow and how, what a slot may be given to, when to write.

The shell (follow.py, slots.py, heartbeat.py …) observes and acts; everything that could be argued about is here.

Three rules run through it:

* *Generations only go up.* A plan of the generation in force, or of an older one, is ignored for ever; so a generation is
  taken up once, and its ranks are started at most once.
* *The starting point is sacred until it is superseded*: a snapshot of it is overwritten only after a newer snapshot of
  the same rank and of the generation in force exists, which in turn means (the ranks' step protocol) that the one before
  it is complete on all nodes.
* *The heartbeat is a rate*: news of weight goes out at once, ordinary progress at most each 0.2 s, and silence is broken
  each period.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from surefoot.controller.wire import Member, NodeStatus, Plan, PlanPointer, Rendezvous, SnapshotRef

# ---------------------------------------------------------------- which plan to follow, and how


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this agent is."""

    job: str
    run_id: str
    uid: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldImage:
    """A complete snapshot in a slot file of this node. `path` may be read at any time; `replica` as on the wire."""

    rank: int
    generation: int
    step: int
    replica: bool
    path: str

    @property
    def point(self) -> tuple[int, int]:
        return (self.generation, self.step)

    def ref(self) -> SnapshotRef:
        return SnapshotRef(generation=self.generation, step=self.step, rank=self.rank, replica=self.replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A snapshot of the starting point to bring from another node before its rank can start."""

    rank: int
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What following a plan will consist of, computed before anything is done."""

    member: Member
    dump_stacks: bool
    """The generation before hung: look at its ranks' stacks before they are ended."""
    restore: dict[int, str]
    """Rank to the path of its snapshot of the starting point, where this node has one."""
    fetches: tuple[Fetch, ...]
    hosts_store: bool
    """Rank 0 is ours, and so the TCPStore."""
    store_node: Member
    """The member whose status tells where the TCPStore listens."""
    peer_uid: str | None
    """The node that is to hold copies of our ranks' snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """The plan has no place for this life of this node; its former ranks end all the same."""

    dump_stacks: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """The plan is none of ours to follow, and nothing is touched on its account."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserveable:
    """A member's plan that this node cannot serve; becomes a `wire.StartFailure`."""

    kind: Literal["snapshot_missing"]
    why: str
    dump_stacks: bool


PlanVerdict = Launch | Park | Foreign | Unserveable


def is_news(pointer: PlanPointer, followed: int) -> bool:
    """Whether a pointer leads to a generation that has not been taken up (see the module's first rule)."""
    return pointer.generation > followed


def judge_plan(me: Identity, plan: Plan, held: Iterable[HeldImage]) -> PlanVerdict:
    """What to do about a plan whose record is verified and whose generation is news."""
    if plan.job != me.job or plan.run_id != me.run_id:
        return Foreign(why=f"it is of job {plan.job!r}, run {plan.run_id!r}")
    stacks = plan.reason.fault == "hang"
    member = plan.member(me.uid)
    if member is None:
        return Park(dump_stacks=stacks, why="the plan does without this node")
    if member.incarnation != me.incarnation:
        return Park(dump_stacks=stacks, why=f"the plan means incarnation {member.incarnation} of this node")
    return _judge_membership(me, plan, member, held, stacks)


def _judge_membership(
    me: Identity, plan: Plan, member: Member, held: Iterable[HeldImage], stacks: bool
) -> Launch | Unserveable:
    restore = _restore_paths(plan, member, held)
    fetches: list[Fetch] = []
    if plan.start.tier == "memory":
        sources = {s.rank: s.uid for s in plan.sources}
        for rank in own_ranks(member):
            if rank in restore:
                continue
            source = sources.get(rank)
            if source is None or source == me.uid:
                why = (
                    f"no snapshot of rank {rank} at generation {plan.start.generation}, step {plan.start.step} is here, "
                    + ("and the plan names no other node" if source is None else "though the plan says so")
                )
                return Unserveable(kind="snapshot_missing", why=why, dump_stacks=stacks)
            fetches.append(Fetch(rank=rank, uid=source))
    return Launch(
        member=member,
        dump_stacks=stacks,
        restore=restore,
        fetches=tuple(fetches),
        hosts_store=member.first_rank == 0,
        store_node=next(m for m in plan.members if m.first_rank == 0),
        peer_uid=plan.peers.get(me.uid),
    )


def _restore_paths(plan: Plan, member: Member, held: Iterable[HeldImage]) -> dict[int, str]:
    if plan.start.tier != "memory":
        return {}
    wanted = (plan.start.generation, plan.start.step)
    ours = set(own_ranks(member))
    matching = [h for h in held if h.point == wanted and h.rank in ours]
    # A copy of our own comes last and wins over a replica: it is in the pool, where the rank will go on.
    return {h.rank: h.path for h in sorted(matching, key=lambda h: not h.replica)}


def own_ranks(member: Member) -> range:
    return range(member.first_rank, member.first_rank + member.ranks)


def rendezvous_in(status: NodeStatus, store_node: Member, generation: int) -> Rendezvous | None:
    """The TCPStore's address, if this status of the store's node tells it for this very generation and incarnation."""
    found = status.rendezvous
    if found is None or status.uid != store_node.uid:
        return None
    if found.generation != generation or found.incarnation != store_node.incarnation:
        return None
    return found


# ---------------------------------------------------------------- what a rank's process is told


def rank_environment(
    plan: Plan, member: Member, rank: int, rendezvous: Rendezvous, places: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one rank: torchrun's variables, and ours (`places`: SUREFOOT_… paths of this node)."""
    local_rank = rank - member.first_rank
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(member.ranks),
        "GROUP_RANK": str(member.index),
        "GROUP_WORLD_SIZE": str(len(plan.members)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": plan.run_id,
        # torch prefixes the store's keys with it; the store is fresh for each generation, so any fixed value would do.
        "TORCHELASTIC_RESTART_COUNT": str(plan.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.generation),
        "SUREFOOT_GENERATION": str(plan.generation),
        **places,
    }


# ---------------------------------------------------------------- slots


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot file of one rank: its index and the (generation, step) it holds; None: nothing of use."""

    index: int
    point: tuple[int, int] | None


def slot_to_overwrite(
    slots: Sequence[SlotView], *, generation: int, start: tuple[int, int], incoming: tuple[int, int]
) -> int | None:
    """The slot that a snapshot from elsewhere may take; None if each one is still needed.

    Args:
        slots: all slots of that rank in that area.
        generation: the generation in force.
        start: its starting point.
        incoming: what is to be stored. Storing the same point again takes its own slot.
    """
    for slot in slots:
        if slot.point == incoming:
            return slot.index
    # Of the generation in force, the newest two may be needed: the newest complete pair, and the one in the making.
    current = sorted(
        (s.point for s in slots if s.point is not None and s.point[0] == generation), reverse=True
    )
    needed = {*current[:2]} if len(current) > 1 else {*current, start}

    def worth(slot: SlotView) -> tuple[int, tuple[int, int]]:
        if slot.point is None:
            return (0, (0, 0))
        of_former = slot.point[0] != generation and slot.point != start
        return (1 if of_former else 2, slot.point)

    free = [s for s in slots if s.point is None or s.point not in needed]
    return min(free, key=worth).index if free else None


def pool_holdings(slots: Sequence[SlotView], start: tuple[int, int] | None) -> dict[int, int]:
    """Of a rank's own slots, those it must not overwrite before newer snapshots are complete: slot index to step.

    Only the starting point is worth keeping: all else of former generations lies off the path that the plan took.
    `start` is None where the plan does not start from memory.
    """
    return {s.index: s.point[1] for s in slots if s.point is not None and s.point == start}


SNAPSHOTS_LISTED_MAX = 4
"""Per rank; three slots, and a replica on its way. Keeps a status small however many generations passed."""


def listed_snapshots(held: Iterable[HeldImage]) -> tuple[SnapshotRef, ...]:
    """What the status tells of snapshots: per rank and kind the newest `SNAPSHOTS_LISTED_MAX`, in a fixed order."""
    by_rank: dict[tuple[bool, int], list[HeldImage]] = {}
    for image in held:
        by_rank.setdefault((image.replica, image.rank), []).append(image)
    listed: list[SnapshotRef] = []
    for key in sorted(by_rank):
        newest = sorted(by_rank[key], key=lambda h: h.point)[-SNAPSHOTS_LISTED_MAX:]
        listed.extend(h.ref() for h in newest)
    return tuple(listed)


def obsolete_ranks(present: Collection[int], needed: Collection[int], starting: Collection[int]) -> list[int]:
    """Ranks whose slot folder in one area can be removed: neither used under the plan nor holding its starting point."""
    return sorted(set(present) - set(needed) - set(starting))


# ---------------------------------------------------------------- uploads


UPLOADS_MAX = 2
"""Attempts held at once: one that uploads and one that waits. Bounds the memory for pinned copies to twice the images."""


def admit_upload(open_attempts: Sequence[tuple[int, int, str]], new: tuple[int, int, str]) -> bool:
    """Whether another attempt (generation, step, nonce) may be pinned; if not, it is given up at once, and training goes on."""
    return new in open_attempts or len(open_attempts) < UPLOADS_MAX


def memory_needed(slot_bytes: int, *, slots: int, own_ranks: int, copied_ranks: int) -> int:
    """Bytes of a node's memory that snapshots take at their fullest: pools, copies of a peer's ranks, pins of uploads."""
    return slot_bytes * (own_ranks * (slots + UPLOADS_MAX) + copied_ranks * slots)


# ---------------------------------------------------------------- heartbeat

WRITES_PER_S_MAX = 500
"""All heartbeats of a job together: etcd sustains thousands of small puts a second, and others share it (design: Control)."""

COALESCE_S = 0.2
"""Ordinary progress (phases, steps, snapshots) is told at most this often."""


def heartbeat_period_s(base_s: float, nodes: int) -> float:
    """The period at which a status is rewritten when nothing happens."""
    return max(base_s, nodes / WRITES_PER_S_MAX)


def status_due_s(now_s: float, *, written_s: float, period_s: float, changed: bool, urgent: bool) -> float:
    """When the status is to be written next, on the clock of `now_s`; not later than now means: now."""
    if urgent:
        return now_s
    if changed:
        return max(now_s, written_s + COALESCE_S)
    return written_s + period_s


def retry_delay_s(attempt: int, *, base_s: float = 0.1, max_s: float = 5.0) -> float:
    """The pause before try number `attempt` + 1 (from 1) of something that fails: doubling, bounded."""
    return min(max_s, base_s * math.pow(2, max(attempt - 1, 0)))
