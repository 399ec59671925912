"""The agent's decisions, as tables."""

from __future__ import annotations

import itertools

from surefoot.agent import decide
from surefoot.agent.decide import (
    Fetch,
    Foreign,
    HeldImage,
    Identity,
    Launch,
    Park,
    SlotView,
    Unserveable,
    judge_plan,
    slot_to_overwrite,
)
from surefoot.controller.wire import (
    Member,
    NodeStatus,
    Plan,
    PlanPointer,
    Reason,
    Rendezvous,
    SnapshotRef,
    SnapshotSource,
    StartingPoint,
)

ME = Identity(job="gpt", run_id="r1", uid="n0", incarnation="i0")


def plan(
    *,
    run_id: str = "r1",
    uids: tuple[str, ...] = ("n0", "n1"),
    start: StartingPoint | None = None,
    sources: dict[int, str] | None = None,
    fault: str = "",
) -> Plan:
    members = tuple(
        Member(uid=uid, incarnation=f"i{uid[1:]}", index=i, first_rank=2 * i, ranks=2)
        for i, uid in enumerate(uids)
    )
    return Plan(
        job="gpt",
        run_id=run_id,
        generation=4,
        members=members,
        world_size=4,
        mesh={"dp": 4},
        start=start or StartingPoint(),
        sources=tuple(SnapshotSource(rank=r, uid=u) for r, u in (sources or {}).items()),
        peers={"n0": "n1", "n1": "n0"},
        reason=Reason(kind="restart", fault=fault),
        spec_hash="",
        code_version="",
        controller="a",
    )


def image(rank: int, step: int, *, generation: int = 3, replica: bool = False) -> HeldImage:
    area = "replica" if replica else "own"
    return HeldImage(
        rank=rank, generation=generation, step=step, replica=replica, path=f"{area}/r{rank}/{step}"
    )


MEMORY = StartingPoint(generation=3, step=10, tier="memory")


def test_only_a_higher_generation_is_news() -> None:
    pointers = [PlanPointer(generation=g, hash="", location="") for g in (2, 3, 4)]
    assert [decide.is_news(p, 3) for p in pointers] == [False, False, True]


def test_another_runs_plan_touches_nothing() -> None:
    assert isinstance(judge_plan(ME, plan(run_id="old"), []), Foreign)


def test_no_place_and_another_life_park() -> None:
    assert isinstance(judge_plan(ME, plan(uids=("n1", "n2")), []), Park)
    other_life = Identity(job="gpt", run_id="r1", uid="n0", incarnation="i9")
    verdict = judge_plan(other_life, plan(fault="hang"), [])
    assert isinstance(verdict, Park)
    assert verdict.dump_stacks
    assert "incarnation i0" in verdict.why


def test_first_start_restores_nothing() -> None:
    verdict = judge_plan(ME, plan(), [image(0, 10)])
    assert isinstance(verdict, Launch)
    assert (verdict.restore, verdict.fetches, verdict.hosts_store) == ({}, (), True)
    assert verdict.peer_uid == "n1"
    assert not verdict.dump_stacks


def test_own_copy_wins_over_a_replica_and_a_replica_over_a_fetch() -> None:
    held = [image(0, 10), image(0, 10, replica=True), image(1, 10, replica=True), image(1, 9)]
    verdict = judge_plan(ME, plan(start=MEMORY, sources={0: "n0", 1: "n0"}), held)
    assert isinstance(verdict, Launch)
    assert verdict.restore == {0: "own/r0/10", 1: "replica/r1/10"}
    assert verdict.fetches == ()


def test_what_is_not_here_is_fetched_from_the_named_node() -> None:
    held = [
        image(0, 10),
        image(1, 10, generation=2),
    ]  # the same step of another generation is another snapshot
    verdict = judge_plan(ME, plan(start=MEMORY, sources={0: "n0", 1: "n1"}), held)
    assert isinstance(verdict, Launch)
    assert verdict.fetches == (Fetch(rank=1, uid="n1"),)


def test_a_snapshot_that_nobody_has_cannot_be_served() -> None:
    for sources in ({0: "n1"}, {0: "n1", 1: "n0"}):
        verdict = judge_plan(ME, plan(start=MEMORY, sources=sources), [])
        assert isinstance(verdict, Unserveable)
        assert verdict.kind == "snapshot_missing"
        assert "rank 1" in verdict.why


def test_the_store_is_on_rank_0s_node() -> None:
    verdict = judge_plan(ME, plan(uids=("n1", "n0")), [])
    assert isinstance(verdict, Launch)
    assert not verdict.hosts_store
    assert verdict.store_node.uid == "n1"


def test_a_rendezvous_counts_only_for_its_generation_and_incarnation() -> None:
    node = Member(uid="n1", incarnation="i1", index=0, first_rank=0, ranks=2)

    def status(generation: int, incarnation: str, uid: str = "n1") -> NodeStatus:
        found = Rendezvous(generation=generation, incarnation=incarnation, host="h", port=1)
        return NodeStatus(uid=uid, incarnation=incarnation, seq=1, state="starting", rendezvous=found)

    assert decide.rendezvous_in(status(4, "i1"), node, 4) is not None
    for other in (status(3, "i1"), status(5, "i1"), status(4, "i0"), status(4, "i1", uid="n10")):
        assert decide.rendezvous_in(other, node, 4) is None
    assert (
        decide.rendezvous_in(NodeStatus(uid="n1", incarnation="i1", seq=1, state="parked"), node, 4) is None
    )


def test_ranks_get_torchruns_environment() -> None:
    p = plan()
    rendezvous = Rendezvous(generation=4, incarnation="i0", host="10.0.0.1", port=4711)
    env = decide.rank_environment(p, p.members[1], 3, rendezvous, {"SUREFOOT_JOB": "job.toml"})
    assert {k: env[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "4711")
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert (env["SUREFOOT_GENERATION"], env["SUREFOOT_JOB"]) == ("4", "job.toml")


# ---------------------------------------------------------------- slots


def slots(*points: tuple[int, int] | None) -> list[SlotView]:
    return [SlotView(index=i, point=p) for i, p in enumerate(points)]


def test_an_empty_slot_goes_first_then_what_former_generations_left() -> None:
    def choose(*points: tuple[int, int] | None) -> int | None:
        return slot_to_overwrite(slots(*points), generation=4, start=(3, 10), incoming=(4, 11))

    assert choose((3, 10), None, (3, 11)) == 1
    assert choose((3, 9), (3, 10), (3, 11)) == 0
    assert choose((3, 10), (3, 11), (2, 30)) == 2


def test_the_same_point_takes_its_own_slot() -> None:
    chosen = slot_to_overwrite(slots(None, (4, 11), None), generation=4, start=(3, 10), incoming=(4, 11))
    assert chosen == 1


def test_the_starting_point_stays_until_two_newer_ones_exist() -> None:
    def choose(*points: tuple[int, int] | None) -> int | None:
        return slot_to_overwrite(slots(*points), generation=4, start=(3, 10), incoming=(4, 13))

    assert choose((3, 10), (4, 11), None) == 2
    assert choose((3, 10), (4, 12), (4, 11)) == 0
    assert choose((3, 10)) is None


def test_rotation_never_overwrites_the_newest_complete_pair() -> None:
    """Whatever three slots held before, after any number of steps the point before the incoming one is still there."""
    leftovers: list[tuple[int, int] | None] = [None, (3, 9), (3, 10), (3, 11), (2, 50)]
    for first in itertools.permutations(leftovers, 3):
        held = list(first)
        for step in range(11, 20):
            before = (4, step - 1) if step > 11 else (3, 10)
            was_there = before in held
            index = slot_to_overwrite(slots(*held), generation=4, start=(3, 10), incoming=(4, step))
            assert index is not None
            held[index] = (4, step)
            assert (before in held) == was_there


def test_a_rank_keeps_only_the_starting_point_of_its_pool() -> None:
    own = slots((3, 9), (3, 10), (2, 10))
    assert decide.pool_holdings(own, (3, 10)) == {1: 10}
    assert decide.pool_holdings(own, None) == {}


def test_the_status_lists_the_newest_few_of_each_rank() -> None:
    held = [image(0, step) for step in range(10)] + [image(0, 3, replica=True), image(1, 4)]
    listed = decide.listed_snapshots(reversed(held))
    assert [r.step for r in listed if r.rank == 0 and not r.replica] == [6, 7, 8, 9]
    assert SnapshotRef(generation=3, step=3, rank=0, replica=True) in listed
    assert len(listed) == 6


def test_folders_of_ranks_without_use_are_dropped() -> None:
    assert decide.obsolete_ranks([0, 1, 2, 3], needed=[0, 1], starting=[3]) == [2]


# ---------------------------------------------------------------- uploads and heartbeat


def test_uploads_are_bounded() -> None:
    one, two, three = (3, 20, "a"), (3, 40, "b"), (3, 60, "c")
    assert decide.admit_upload([], one)
    assert decide.admit_upload([one], two)
    assert not decide.admit_upload([one, two], three)
    assert decide.admit_upload([one, two], two)  # another rank's snapshot of an attempt under way


def test_memory_needed_counts_pools_copies_and_pins() -> None:
    assert decide.memory_needed(10, slots=3, own_ranks=2, copied_ranks=2) == 10 * (6 + 4 + 6)


def test_heartbeat_times() -> None:
    def due(*, changed: bool = False, urgent: bool = False) -> float:
        return decide.status_due_s(100.05, written_s=100.0, period_s=1.0, changed=changed, urgent=urgent)

    assert due() == 101.0
    assert due(changed=True) == 100.2
    assert due(changed=True, urgent=True) == 100.05
    assert decide.status_due_s(200.0, written_s=100.0, period_s=1.0, changed=True, urgent=False) == 200.0


def test_the_period_stretches_with_the_job() -> None:
    assert decide.heartbeat_period_s(1.0, 100) == 1.0
    assert decide.heartbeat_period_s(1.0, 10_000) == 20.0


def test_retries_back_off_and_are_bounded() -> None:
    assert [decide.retry_delay_s(n) for n in (1, 2, 3, 50)] == [0.1, 0.2, 0.4, 5.0]
