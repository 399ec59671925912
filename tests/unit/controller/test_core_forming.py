"""Forming a generation, to the letter: burnt numbers, successors, outcomes that nobody knows, starts that fail, budgets, ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from surefoot.ckpt.record import Record, StartRef
from surefoot.controller import wire
from surefoot.controller.core import decisions as dec
from surefoot.controller.core import events as ev
from surefoot.controller.core.moves import Mind


def kill(bench: Any, rank: int = 1) -> None:
    bench.end(rank, signal=9)


def record_by(bench: Any, generation: int, start: StartRef, *, run_id: str = "run1") -> Record:
    """A record by another controller: of this run, or of another one."""
    point = wire.StartingPoint(generation=start.generation, step=start.step, tier="object_store")
    plan = msgspec.structs.replace(bench.plan, generation=generation, run_id=run_id, start=point)
    return Record(
        generation=generation,
        start=start,
        reason="resume",
        created_by="z@3",
        plan=msgspec.to_builtins(plan),
    )


# ---------------------------------------------------------------- the second listing


def test_burnt_record(bench: Any, committed: Any) -> None:
    """The worked race: step 7 is chosen, record 2 created; manifest (1, 20) turns up in the second listing."""
    bench.running(step=8)
    kill(bench)
    bench.perform(leave=(dec.CreateRecord,))
    create = bench.take(dec.CreateRecord)
    created = bench.create(create.op, create.record)
    bench.manifests.append(committed(1, 20))
    bench.send(created)
    bench.perform()
    assert sorted(bench.records) == [1, 2, 3]
    assert bench.records[2].start == StartRef(generation=1, step=7)
    plan = bench.plan
    assert (plan.generation, plan.reason.kind, plan.reason.cause) == (3, "burnt", "none")
    assert (plan.start.generation, plan.start.step, plan.start.tier) == (1, 20, "object_store")
    assert [p.generation for p in bench.ledger.published] == [1, 3]
    assert bench.incidents["inc-0001"].new_generation == 3


def test_manifest_after_the_second_listing_is_left_to_its_writer(bench: Any, committed: Any) -> None:
    """(1, 20) appears after the listing: generation 2 goes on from 7, and 20 is off the lineage."""
    bench.running(step=8)
    kill(bench)
    bench.perform(leave=(dec.PublishPlan,))
    bench.manifests.append(committed(1, 20))
    bench.perform()
    bench.follow()
    bench.step(9)
    bench.step(10)
    kill(bench)
    bench.perform()
    plan = bench.plan
    assert (plan.generation, plan.start.generation, plan.start.step) == (3, 2, 9)


def test_same_step_in_memory_and_in_the_object_store(bench: Any, committed: Any) -> None:
    """The same state at two places: the nearer one is taken."""
    bench.running(step=21)
    bench.manifests.append(committed(1, 20))
    kill(bench)
    bench.perform()
    assert (bench.plan.start.step, bench.plan.start.tier) == (20, "memory")
    assert bench.plan.generation == 2


def test_newer_manifest_beats_memory(bench: Any, committed: Any) -> None:
    """Snapshots of some rank are gone with two nodes; a commit told of by a status is looked for before a number is used."""
    bench.running(step=8)
    bench.manifests.append(committed(1, 20))
    bench.nodes["n0"].extra["committed"] = wire.Committed(generation=1, step=20)
    kill(bench)
    bench.perform()
    assert (bench.plan.generation, bench.plan.start.step, bench.plan.start.tier) == (2, 20, "object_store")


def test_member_lost_between_record_and_plan_burns_the_number(bench: Any) -> None:
    bench.running("n0", "n1", "n2", step=8)
    kill(bench)
    bench.perform(leave=(dec.CreateRecord,))
    create = bench.take(dec.CreateRecord)
    bench.vanish("n1", perform=False)
    bench.send(bench.create(create.op, create.record))
    bench.perform()
    plan = bench.plan
    assert plan.generation == 3
    assert [m.uid for m in plan.members] == ["n0", "n2"]
    assert (plan.reason.kind, plan.reason.cause) == ("burnt", "none")


def test_taken_number(bench: Any) -> None:
    """A controller that was thought dead has created record 2."""
    bench.running(step=8)
    kill(bench)
    bench.perform(leave=(dec.CreateRecord,))
    theirs = bench.records[2] = record_by(bench, 2, StartRef(generation=1, step=7))
    bench.perform()
    assert bench.plan.generation == 3
    assert bench.records[2] == theirs


def test_record_of_a_woken_controller_above_the_running_plan(bench: Any) -> None:
    """A woken controller's record appears while generation 1 runs: it fences 1's commits, so the next one is formed."""
    bench.running(step=8)
    bench.records[2] = record_by(bench, 2, StartRef(generation=1, step=3))
    for _ in range(8):
        bench.now += 2
        bench.step(9)
        bench.step(8)
    bench.step(9)
    bench.tick()
    plan = bench.plan
    assert (plan.generation, plan.reason.kind, plan.reason.cause) == (3, "burnt", "none")
    assert (plan.start.generation, plan.start.step) == (1, 8)


def test_fenced_committer_makes_the_leader_look_at_once(bench: Any) -> None:
    bench.running(step=8)
    bench.records[2] = record_by(bench, 2, StartRef(generation=1, step=3))
    bench.nodes["n0"].extra["committed"] = wire.Committed(generation=1, step=8, fenced_by=2)
    bench.report("n0")
    bench.perform()
    assert bench.plan.generation == 3


# ---------------------------------------------------------------- outcomes that nobody knows


def test_unknown_record_is_settled_before_another_number(bench: Any) -> None:
    bench.running(step=8)
    kill(bench)
    bench.perform(leave=(dec.CreateRecord,))
    first = bench.take(dec.CreateRecord)
    bench.create(first.op, first.record)  # it took effect, and nobody was told
    bench.send(ev.RecordUnknown(op=first.op, generation=2, detail="timed out"))
    bench.perform()
    assert bench.wanted == []
    bench.send(ev.Ticked(), after_s=0.25)
    again = bench.take(dec.CreateRecord)
    assert again.record == first.record
    bench.send(bench.create(again.op, again.record))
    bench.perform()
    assert bench.plan.generation == 2


def test_late_answer_of_an_abandoned_try_is_ignored(bench: Any) -> None:
    bench.running(step=8)
    kill(bench)
    bench.perform(leave=(dec.CreateRecord,))
    first = bench.take(dec.CreateRecord)
    bench.send(ev.RecordUnknown(op=first.op, generation=2, detail="timed out"))
    bench.send(ev.RecordCreated(op=first.op, generation=2, hash="x", location="y"))
    assert bench.stage() == "CheckingRecord" or bench.stage() == "WritingRecord"
    bench.tick(0.25)
    bench.tick(0.25)
    assert bench.plan.generation == 2


@pytest.mark.parametrize("took_effect", [True, False])
def test_unknown_publication_is_read_back(bench: Any, took_effect: bool) -> None:
    bench.running(step=8)
    kill(bench)
    bench.perform(leave=(dec.PublishPlan,))
    publish = bench.take(dec.PublishPlan)
    if took_effect:
        bench.outcomes(publish)
    bench.send(ev.PlanUnknown(op=publish.op, generation=2, detail="timed out"))
    assert isinstance(bench.wanted[0], dec.ReadPlan)
    bench.perform()
    assert bench.plan.generation == 2
    assert bench.pointer.generation == 2
    assert len(bench.decided(dec.PublishPlan)) == (2 if took_effect else 3)


def test_refused_publication_steps_down(bench: Any) -> None:
    bench.running(step=8)
    kill(bench)
    bench.perform(leave=(dec.PublishPlan,))
    publish = bench.take(dec.PublishPlan)
    decided = bench.send(ev.PlanRefused(op=publish.op, generation=2))
    assert any(isinstance(x, dec.StepDown) for x in decided)
    assert bench.state.token is None
    assert bench.tick(5.0) == []


def test_deposed_controller_decides_nothing(bench: Any) -> None:
    bench.running(step=8)
    bench.send(ev.Deposed(reason="the lease could not be renewed"))
    assert bench.end(1, signal=9) == []
    assert bench.tick(60.0) == []


# ---------------------------------------------------------------- successors


def test_successor_adopts_an_intact_generation(bench: Any) -> None:
    bench.running(step=8)
    successor = bench.other("b")
    successor.lead(token=50)
    assert successor.mind is Mind.RUNNING
    assert successor.plan.generation == 1
    assert successor.decided(dec.CreateRecord) == []
    successor.tick(3.0)
    assert successor.mind is Mind.RUNNING


def test_successor_finds_the_fault_that_its_predecessor_died_over(bench: Any) -> None:
    bench.running(step=8)
    kill(bench)
    successor = bench.other("b")
    successor.lead(token=50)
    assert successor.plan.generation == 2
    assert (successor.plan.reason.fault, successor.plan.start.step) == ("rank_exit", 7)


def test_successor_of_a_controller_that_died_after_the_record(bench: Any, committed: Any) -> None:
    """Record 2 stands, no plan points to it: it is burnt, and what was committed meanwhile is not lost."""
    bench.running(step=8)
    kill(bench)
    bench.perform(leave=(dec.CreateRecord,))
    create = bench.take(dec.CreateRecord)
    bench.create(create.op, create.record)
    bench.manifests.append(committed(1, 20))
    successor = bench.other("b")
    successor.lead(token=50)
    plan = successor.plan
    assert (plan.generation, plan.reason.kind, plan.reason.cause) == (3, "burnt", "none")
    assert (plan.start.generation, plan.start.step) == (1, 20)
    assert plan.reason.fault == "rank_exit"


def test_successor_of_a_controller_that_died_after_publishing(bench: Any) -> None:
    bench.running(step=8)
    kill(bench)
    bench.perform(leave=(dec.PublishPlan,))
    bench.outcomes(bench.take(dec.PublishPlan))
    successor = bench.other("b")
    successor.lead(token=50)
    assert (successor.plan.generation, successor.stage()) == (2, "ComingUp")
    assert sorted(bench.records) == [1, 2]


def test_successor_without_the_lost_node(bench: Any) -> None:
    """The node's key is gone already when the successor comes: after the TTL without a word it is lost."""
    bench.running("n0", "n1", "n2", step=8)
    bench.nodes["n1"].answer = "gone"
    successor = bench.other("b")
    successor.lead(token=50)
    successor.tick(9.0)
    assert successor.plan.generation == 1
    successor.tick(1.5)
    assert [m.uid for m in successor.plan.members] == ["n0", "n2"]


def test_wiped_etcd_under_running_ranks(bench: Any) -> None:
    """The plan key is gone, all members follow generation 1 still: it is pointed to again, no rank is restarted."""
    bench.running(step=8)
    bench.pointer = None
    successor = bench.other("b")
    successor.lead(token=2)
    assert successor.mind is Mind.RUNNING
    assert successor.pointer.generation == 1
    assert sorted(bench.records) == [1]


def test_plan_key_deleted_under_a_leader(bench: Any) -> None:
    bench.running(step=8)
    bench.pointer = None
    bench.revision += 1
    bench.send(ev.PointerSeen(pointer=None, revision=bench.revision))
    bench.perform()
    assert bench.mind is Mind.RUNNING
    assert bench.pointer.generation == 1


def test_plan_key_deleted_while_the_object_store_is_away(bench: Any) -> None:
    bench.running(step=8)
    bench.send(ev.Ticked(), after_s=bench.settings.times.relist_s)
    bench.send(ev.ObjectStoreUnavailable(op=bench.take(dec.ListLineage).op, detail="away"))
    assert bench.mind is Mind.HOLD_COMMITS
    bench.pointer = None
    bench.revision += 1
    bench.send(ev.PointerSeen(pointer=None, revision=bench.revision))
    assert bench.mind is Mind.FORMING
    bench.perform()
    assert bench.mind is Mind.RUNNING
    assert bench.pointer.generation == 1


def test_wiped_etcd_and_dead_agents_go_on_above_the_highest_record(bench: Any, committed: Any) -> None:
    bench.running(step=30)
    bench.manifests.append(committed(1, 20))
    bench.pointer = None
    bench.nodes.clear()
    successor = bench.other("b")
    successor.lead(token=2)
    successor.appear("n0", "n1", incarnation="new")
    plan = successor.plan
    assert (plan.generation, plan.reason.kind) == (2, "resume")
    assert (plan.start.generation, plan.start.step, plan.start.tier) == (1, 20, "object_store")


def test_etcd_above_the_records_is_refused_until_it_fits(bench: Any) -> None:
    """CTL-15: the root is another one, or was lost."""
    bench.pointer = wire.PlanPointer(generation=7, hash="h", location="generations/0007.json")
    bench.lead()
    bench.appear("n0", "n1")
    assert bench.mind is Mind.HELD
    assert "generation 7" in bench.state.held_why
    assert bench.decided(dec.CreateRecord) == []
    bench.pointer = None
    bench.revision += 1
    bench.send(ev.PointerSeen(pointer=None, revision=bench.revision))
    bench.tick(16.0)
    assert bench.mind is Mind.FORMING
    assert bench.plan.generation == 1


def test_agents_above_the_records_are_refused(bench: Any) -> None:
    bench.appear("n0", "n1", generation=9)
    bench.lead()
    assert bench.mind is Mind.HELD
    assert "follows generation 9" in bench.state.held_why


def test_another_record_than_the_plan_names_is_refused(bench: Any) -> None:
    bench.running(step=8)
    bench.pointer = msgspec.structs.replace(bench.pointer, hash="other")
    successor = bench.other("b")
    successor.lead(token=50)
    assert successor.mind is Mind.HELD


def test_missing_record_of_a_generation_that_committed_holds(bench: Any, committed: Any) -> None:
    """No record is left at all, and a manifest shows that there was one."""
    bench.manifests.append(committed(1, 20))
    bench.lead()
    bench.appear("n0", "n1")
    assert bench.mind is Mind.HELD
    bench.tick(4.0)
    assert bench.mind is Mind.HELD
    assert "restore generations/0001.json" in bench.state.held_why
    assert bench.decided(dec.CreateRecord) == []


DAMAGED = "generations/0003.json is damaged: restore it"


def damaged(bench: Any) -> Any:
    """A leader that cannot read a record, at its first look and at each later one."""
    bench.send(ev.Elected(token=1))
    bench.perform(leave=(dec.ListLineage,))
    still_damaged(bench)
    assert bench.mind is Mind.HELD
    return bench


def still_damaged(bench: Any, detail: str = DAMAGED) -> None:
    listing = bench.take(dec.ListLineage)
    bench.send(ev.LineageDamaged(op=listing.op, detail=detail))
    bench.perform(leave=(dec.ListLineage,))


def look(bench: Any) -> None:
    """Time for the next look of a job that is held."""
    bench.send(ev.Ticked(), after_s=bench.settings.times.held_look_s)


def test_damaged_record_holds_and_tells_why(bench: Any) -> None:
    damaged(bench)
    assert bench.held == DAMAGED
    for _ in range(20):
        look(bench)
        still_damaged(bench)
    assert bench.mind is Mind.HELD  # an operator may take his time
    assert len(bench.decided(dec.TellHeld)) == 1  # each change is told once
    look(bench)
    still_damaged(bench, "another one")
    assert bench.held == "another one"


def test_held_no_more(bench: Any) -> None:
    damaged(bench)
    look(bench)
    bench.perform()
    assert bench.held == ""
    bench.appear("n0", "n1")
    assert bench.plan.generation == 1


def test_without_an_operator_a_held_job_fails_after_a_while(make_bench: Any) -> None:
    bench = damaged(make_bench(held_patience_s=15.0))
    for _ in range(4):
        look(bench)
        still_damaged(bench)
        assert bench.mind is Mind.HELD
    look(bench)
    bench.perform(leave=(dec.ListLineage,))
    assert bench.mind is Mind.FAILED
    assert (bench.outcome.exit_code, bench.outcome.reason) == (5, DAMAGED)


def test_a_running_generation_is_held_too(bench: Any) -> None:
    """Its ranks train on, nothing is decided; when that is over it is adopted as it stands."""
    bench.running(step=8)
    bench.state = dataclasses.replace(bench.state, next_listing_s=bench.now)
    bench.send(ev.Ticked())
    still_damaged(bench)
    assert bench.mind is Mind.HELD
    look(bench)
    bench.perform()
    assert (bench.mind, bench.held, bench.plan.generation) == (Mind.RUNNING, "", 1)


# ---------------------------------------------------------------- starts that fail


def test_snapshot_that_cannot_be_served(bench: Any, committed: Any) -> None:
    """Generation 2 cannot start from memory at 7; the next names the manifest of that step."""
    bench.running(step=8)
    bench.manifests.append(committed(1, 7))
    kill(bench)
    bench.perform()
    assert bench.plan.start.step == 7
    bench.nodes["n1"].generation = 2
    bench.nodes["n1"].ranks = {}
    bench.nodes["n1"].extra["start_failure"] = wire.StartFailure(
        generation=2, kind="snapshot_corrupt", detail="rank 2: checksum"
    )
    bench.report("n1")
    bench.perform()
    plan = bench.plan
    assert (plan.generation, plan.reason.kind, plan.reason.cause) == (3, "start_failed", "infrastructure")
    assert (plan.start.generation, plan.start.step, plan.start.tier) == (1, 7, "object_store")
    assert not bench.records[3].rollback


def test_next_best_snapshot(bench: Any) -> None:
    """Without a manifest the older snapshot is taken, never the beginning."""
    bench.running(step=8)
    kill(bench)
    bench.perform()
    bench.nodes["n1"].generation = 2
    bench.nodes["n1"].extra["start_failure"] = wire.StartFailure(
        generation=2, kind="snapshot_missing", detail="rank 2"
    )
    bench.report("n1")
    bench.perform()
    assert (bench.plan.start.generation, bench.plan.start.step, bench.plan.start.tier) == (1, 6, "memory")


def fail_to_load(bench: Any) -> None:
    bench.follow(phase="restore", step=bench.plan.start.step)
    error = wire.ErrorReport(kind="checkpoint", type="DamagedError", message="checksum differs")
    bench.end(0, code=1, error=error)
    bench.perform()


def test_manifest_that_cannot_be_loaded_is_left_behind(bench: Any, committed: Any) -> None:
    """The manifest of step 20 fails twice; the next record goes back to 10, and says that it is a rollback."""
    bench.running(step=3)
    bench.manifests += [committed(1, 10), committed(1, 20)]
    for node in bench.nodes.values():
        node.snapshots.clear()
    kill(bench)
    bench.perform()
    assert bench.plan.start.step == 20
    fail_to_load(bench)
    assert bench.plan.start.step == 20
    fail_to_load(bench)
    assert bench.plan.start.step == 10
    assert bench.records[bench.plan.generation].rollback
    for _ in range(2):
        fail_to_load(bench)
    assert bench.mind is Mind.FAILED
    assert bench.outcome.exit_code == 4
    assert "(10, 20)" in bench.outcome.reason
    assert "surefoot ckpt verify" in bench.outcome.reason


# ---------------------------------------------------------------- steps that turn out damaged

WHY = "gen-0001/step-0000000020/a/r00001-0.safetensors: block 0 has another checksum"


def without_memory(bench: Any, committed: Any, *steps: int) -> None:
    """Generation 1 has committed these steps, all node memory is lost, and generation 2 starts from the newest."""
    bench.running(step=3)
    bench.manifests += [committed(1, step) for step in steps]
    lose_memory(bench)


def lose_memory(bench: Any) -> None:
    for node in bench.nodes.values():
        node.snapshots.clear()
    kill(bench)
    bench.perform()


def find_damage(bench: Any, *, leave: tuple[type[Any], ...] = ()) -> None:
    """All ranks find the step that they are to restore damaged, as `restore_committed` tells all of them."""
    start = bench.plan.start
    bench.follow(phase="restore", step=start.step)
    damaged = wire.DamagedStep(
        generation=start.generation, step=start.step, key=WHY.partition(":")[0], detail=WHY
    )
    error = wire.ErrorReport(kind="checkpoint", type="StartDamagedError", message="m", damaged=damaged)
    for rank in range(4):
        bench.rank(rank, exit=wire.ExitReport(code=1, error=error))
    for uid in bench.nodes:
        bench.report(uid)
    bench.perform(leave=leave)


def test_a_damaged_step_is_set_aside_at_once_and_the_one_before_is_named(bench: Any, committed: Any) -> None:
    without_memory(bench, committed, 10, 20)
    assert bench.plan.start.step == 20
    find_damage(bench)
    plan, record = bench.plan, bench.records[3]
    assert (plan.generation, plan.start.step, plan.start.tier, record.rollback) == (
        3,
        10,
        "object_store",
        True,
    )
    assert (plan.reason.kind, plan.reason.cause, plan.reason.fault) == (
        "start_failed",
        "infrastructure",
        "step_damaged",
    )
    assert (
        "step 20 of generation 1 turned out damaged; step 20 is passed over: set aside as damaged: " + WHY
        in (record.reason)
    )
    incident = bench.incidents["inc-0002"]
    assert incident.fault == "step_damaged"
    assert incident.evidence[0].startswith("step 20 of generation 1 is damaged: gen-0001/step-0000000020/")
    assert "set aside" in incident.rule
    assert bench.aside == {(1, 20): WHY}
    bench.follow()
    assert bench.mind is Mind.RUNNING
    lose_memory(bench)
    assert bench.plan.start.step == 10  # it is not tried again later on


def test_damage_is_told_even_where_something_else_struck_first(bench: Any, committed: Any) -> None:
    """A node is lost while the others have found the damage: the next record answers both."""
    without_memory(bench, committed, 10, 20)
    bench.appear("n2")
    bench.nodes["n1"].answer = "refuses"
    find_damage(bench)
    assert (bench.plan.reason.fault, bench.plan.start.step) == ("node_loss", 10)
    assert "step 20 is passed over" in bench.plan.reason.detail
    assert bench.aside == {(1, 20): WHY}


def test_a_fresh_controller_never_starts_from_what_is_set_aside(bench: Any, committed: Any) -> None:
    """It reads the flags with the first listing; the record says what it passed over."""
    without_memory(bench, committed, 10, 20)
    bench.pointer, bench.aside = None, {(1, 20): WHY}
    bench.nodes.clear()
    successor = bench.other("b")
    successor.lead(token=99)
    successor.appear("n0", "n1", incarnation="new")
    assert successor.plan.start.step == 10
    assert WHY in bench.records[successor.plan.generation].reason
    assert bench.records[successor.plan.generation].rollback


def test_the_flag_is_wanted_until_it_stands(bench: Any, committed: Any) -> None:
    """The object store takes it late: with each listing that does not show it, it is wanted again; the choice does not wait."""
    without_memory(bench, committed, 10, 20)
    find_damage(bench, leave=(dec.SetAside,))
    assert bench.plan.start.step == 10
    wanted = [w for w in bench.wanted if isinstance(w, dec.SetAside)]
    assert {(w.generation, w.step, w.reason) for w in wanted} == {(1, 20, WHY)}
    bench.wanted.clear()
    bench.follow()
    bench.tick(16.0)
    assert bench.aside == {(1, 20): WHY}
    bench.history.clear()
    bench.tick(16.0)
    bench.tick(16.0)
    assert bench.decided(dec.ListLineage) != []
    assert bench.decided(dec.SetAside) == []


def test_whoever_brings_a_step_back_has_it_back(bench: Any, committed: Any) -> None:
    """`ckpt verify` lowers the flag of a step whose bytes are whole again."""
    bench.running(step=3)
    bench.manifests += [committed(1, 10), committed(1, 20)]
    bench.aside[1, 20] = WHY
    bench.tick(16.0)
    bench.follow()
    assert bench.state.truth.aside == {(1, 20): WHY}
    bench.aside.clear()
    lose_memory(bench)
    assert (bench.plan.generation, bench.plan.start.step) == (2, 20)


def test_what_is_committed_beyond_a_rollback_burns_its_number(bench: Any, committed: Any) -> None:
    """Step 20 is left behind on purpose; step 30, which appears before the record does, may be acknowledged already."""
    bench.running(step=3)
    bench.manifests += [committed(1, 10), committed(1, 20)]
    bench.aside[1, 20] = WHY
    for node in bench.nodes.values():
        node.snapshots.clear()
    kill(bench)
    bench.perform(leave=(dec.CreateRecord,))
    create = bench.take(dec.CreateRecord)
    assert (create.record.start.step, create.record.rollback) == (10, True)
    bench.manifests.append(committed(1, 30))
    bench.send(bench.create(create.op, create.record))
    bench.perform()
    assert (bench.plan.generation, bench.plan.start.step) == (3, 30)
    assert not bench.records[3].rollback


def test_a_start_that_is_flagged_before_its_plan_stands_is_burnt(bench: Any, committed: Any) -> None:
    bench.running(step=3)
    bench.manifests += [committed(1, 10), committed(1, 20)]
    for node in bench.nodes.values():
        node.snapshots.clear()
    kill(bench)
    bench.perform(leave=(dec.CreateRecord,))
    create = bench.take(dec.CreateRecord)
    bench.aside[1, 20] = WHY
    bench.send(bench.create(create.op, create.record))
    bench.perform()
    assert (bench.plan.generation, bench.plan.start.step) == (3, 10)


def test_where_every_step_is_damaged_the_end_says_what_is(bench: Any, committed: Any) -> None:
    without_memory(bench, committed, 20)
    find_damage(bench)
    assert bench.mind is Mind.FAILED
    assert bench.outcome.exit_code == 4
    assert WHY in bench.outcome.reason
    assert "surefoot ckpt verify" in bench.outcome.reason


def test_a_job_whose_last_checkpoint_is_damaged_is_not_done(
    bench: Any, committed: Any, make_bench: Any
) -> None:
    """Run again: it goes on from the step before, and commits the last one anew."""
    bench.running(step=3)
    again = make_bench(run_id="run2")
    again.records = bench.records
    again.manifests = [committed(1, 40), committed(1, 60)]
    again.aside = {(1, 60): WHY}
    again.lead()
    again.appear("n0", "n1")
    assert (again.plan.start.step, again.plan.reason.kind) == (40, "resume")


# ---------------------------------------------------------------- budgets


def test_budget_is_spent_and_the_fourth_ends_the_job(bench: Any) -> None:
    bench.running(step=4)
    for number in range(3):
        error = wire.ErrorReport(kind="workload", type="ValueError", message="bad")
        bench.end(0, code=1, error=error)
        bench.perform()
        assert bench.mind is Mind.FORMING, number
        bench.follow()
        bench.step(5 + number)
    bench.end(1, signal=11)
    bench.perform()
    assert bench.mind is Mind.FAILED
    assert bench.outcome.exit_code == 4
    assert "policy.restarts.workload" in bench.outcome.reason
    assert len(bench.records) == 4


def test_committed_progress_gives_budget_back(bench: Any, committed: Any) -> None:
    bench.running(step=4)
    for number in range(6):
        bench.end(0, code=9)
        bench.perform()
        assert bench.mind is Mind.FORMING, number
        bench.follow()
        bench.step(bench.plan.start.step + 2)
        if number % 2:
            bench.manifests.append(committed(bench.plan.generation, bench.plan.start.step + 1))
    assert bench.mind is Mind.RUNNING


def test_budget_is_judged_by_a_fresh_listing(bench: Any, committed: Any) -> None:
    """The commit that gives budget back was made after the last listing."""
    bench.running(step=4)
    for _ in range(3):
        bench.end(0, code=9)
        bench.perform()
        bench.follow()
        bench.step(bench.plan.start.step + 2)
    bench.manifests.append(committed(bench.plan.generation, bench.plan.start.step + 1))
    bench.end(0, code=9)
    bench.perform()
    assert bench.mind is Mind.FORMING
    assert bench.plan.generation == 5


def test_infrastructure_has_a_budget_of_its_own(bench: Any) -> None:
    bench.running(step=4)
    for _ in range(20):
        kill(bench)
        bench.perform()
        bench.follow()
    kill(bench)
    bench.perform()
    assert bench.mind is Mind.FAILED
    assert len(bench.records) == 21


def test_same_crash_three_times(make_bench: Any) -> None:
    """CTL-41, and the user's error in step 1 of the first generation: it would crash again."""
    bench = make_bench(restarts={"workload": 10, "infrastructure": 20, "preemption": 100})
    bench.running(step=1)
    error = wire.ErrorReport(
        kind="workload", type="NameError", message="x", traceback='File "/job/train.py", line 12, in train'
    )
    for number in range(2):
        bench.end(0, code=1, error=error)
        bench.perform()
        assert bench.mind is Mind.FORMING, number
        bench.follow()
    bench.end(2, code=1, error=error)
    bench.perform()
    assert bench.mind is Mind.FAILED
    assert bench.outcome.exit_code == 4
    assert "NameError at train.py:12, step 1" in bench.outcome.reason
    assert bench.incidents["inc-0003"].decision.startswith("given up")


def test_what_must_fail_again_is_not_tried_again(bench: Any) -> None:
    bench.running(step=1)
    error = wire.ErrorReport(
        kind="data", type="ColumnMissingError", message="no column 'text'", permanent=True
    )
    bench.end(0, code=1, error=error)
    bench.perform()
    assert bench.mind is Mind.FAILED
    assert len(bench.records) == 1
    assert bench.outcome.exit_code == 4
    assert "no column 'text'" in bench.outcome.reason
    assert bench.outcome.reason.endswith("no restart can help")


def test_a_new_run_has_a_full_budget(bench: Any, make_bench: Any) -> None:
    bench.running(step=4)
    for _ in range(3):
        bench.end(0, code=9)
        bench.perform()
        bench.follow()
    later = make_bench(run_id="run2")
    later.records = bench.records
    later.running()
    assert later.plan.reason.kind == "resume"
    later.end(0, code=9)
    later.perform()
    assert later.mind is Mind.FORMING


# ---------------------------------------------------------------- the end


def finish(bench: Any, step: int) -> None:
    bench.follow(phase="done", step=step)


def test_done(bench: Any, committed: Any) -> None:
    bench.running(step=60)
    bench.manifests.append(committed(1, 60))
    finish(bench, 60)
    assert bench.mind is Mind.DONE
    assert (bench.outcome.state, bench.outcome.exit_code, bench.outcome.step) == ("done", 0, 60)
    assert bench.outcome.run_id == "run1"
    assert bench.state.the_end.written


def test_ranks_that_were_stopped_are_not_at_the_end_of_the_job(make_bench: Any, committed: Any) -> None:
    """SIGTERM to all agents: all ranks commit and end together, long before the last step."""
    bench = make_bench(wait_for_node_s=30.0).running(step=20)
    bench.manifests.append(committed(1, 20))
    for uid in ("n0", "n1"):
        bench.nodes[uid].state = "leaving"
        stop(bench, uid, step=20)
    bench.perform()
    assert bench.outcome is None
    assert (bench.mind, bench.stage()) == (Mind.FORMING, "AwaitingNodes")
    incident = bench.incidents["inc-0001"]
    assert (incident.fault, incident.cause) == ("stopped", "preemption")
    bench.tick(31.0)
    assert (bench.outcome.state, bench.outcome.exit_code, bench.outcome.step) == ("failed", 3, 20)


def test_stopped_ranks_go_on_with_new_agents(bench: Any, committed: Any) -> None:
    bench.running(step=20)
    bench.manifests.append(committed(1, 20))
    for uid in ("n0", "n1"):
        bench.nodes[uid].state = "leaving"
        stop(bench, uid, step=20)
    bench.perform()
    bench.appear("n0", "n1", incarnation="b")
    assert (bench.plan.generation, bench.plan.start.step) == (2, 20)


def test_stopped_at_the_last_step_is_done(bench: Any, committed: Any) -> None:
    bench.running(step=60)
    bench.manifests.append(committed(1, 60))
    for uid in ("n0", "n1"):
        bench.nodes[uid].state = "leaving"
    finish_as(bench, 60, "steps")
    assert bench.outcome.exit_code == 0


def stop(bench: Any, uid: str, *, step: int) -> None:
    """The ranks of a node end as those do that were all told to stop."""
    for r in bench.nodes[uid].ranks:
        bench.rank(r, phase="done", step=step, ended="stopped", exit=wire.ExitReport(code=0))
    bench.report(uid)


def finish_as(bench: Any, step: int, ended: str) -> None:
    for uid in ("n0", "n1"):
        for r in bench.nodes[uid].ranks:
            bench.rank(r, phase="done", step=step, ended=ended)
        bench.report(uid)
    bench.perform()


def test_a_node_that_leaves_is_left_to_commit_and_then_replaced(bench: Any) -> None:
    """The others train on; once it ends its ranks the standby takes its place, on nobody's account."""
    bench.running("n0", "n1", "n2", step=20)
    bench.nodes["n1"].state = "leaving"
    bench.report("n1")
    bench.tick()
    assert (bench.mind, bench.plan.generation) == (Mind.RUNNING, 1)
    bench.step(21)
    bench.nodes["n1"].state = "stopping"
    bench.report("n1")
    bench.perform()
    assert bench.plan.generation == 2
    assert [m.uid for m in bench.plan.members] == ["n0", "n2"]
    assert (bench.plan.reason.fault, bench.plan.reason.cause) == ("node_loss", "preemption")
    assert (bench.plan.start.tier, bench.plan.start.step) == ("memory", 20)


@pytest.mark.parametrize("last_word", ["leaving", "stopping"])
def test_a_node_that_left_is_no_fault_of_the_machine(make_bench: Any, last_word: str) -> None:
    """Without a standby the job ends so that it is started again, whether the agent's last status came or not."""
    bench = make_bench(wait_for_node_s=30.0).running(step=20)
    bench.nodes["n1"].state = last_word
    bench.report("n1")
    bench.lose("n1")
    bench.vanish("n1")
    bench.tick()
    assert bench.incidents["inc-0001"].cause == "preemption"
    bench.tick(31.0)
    assert (bench.outcome.state, bench.outcome.exit_code) == ("failed", 3)


def test_a_leaving_and_a_crashed_node_are_charged_to_the_machine(bench: Any) -> None:
    bench.running("n0", "n1", "n2", "n3", step=20)
    bench.nodes["n1"].state = "stopping"
    bench.lose("n0")
    bench.report("n1")
    bench.perform()
    assert bench.plan.reason.cause == "infrastructure"
    assert [m.uid for m in bench.plan.members] == ["n2", "n3"]


def test_done_needs_the_last_checkpoint(bench: Any) -> None:
    bench.running(step=60)
    finish(bench, 60)
    for _ in range(3):
        bench.tick(1.0)
    assert bench.mind is Mind.RUNNING
    for _ in range(3):
        bench.tick(1.0)
    assert bench.plan.reason.fault == "ended_early"
    assert bench.plan.start.step == 59


def test_data_that_ends_before_the_steps_do(bench: Any, committed: Any) -> None:
    bench.running(step=33)
    bench.manifests.append(committed(1, 33))
    finish(bench, 33)
    assert bench.mind is Mind.DONE
    assert bench.outcome.reason == "the data ended at step 33"


def test_one_rank_that_ends_early(bench: Any) -> None:
    bench.running(step=10)
    bench.report(bench.rank(2, phase="done", step=10, exit=wire.ExitReport(code=0)))
    bench.perform()
    assert bench.mind is Mind.RUNNING
    for _ in range(12):
        bench.nodes["n0"].ranks[0] = msgspec.structs.replace(bench.nodes["n0"].ranks[0], step=11)
        bench.report("n0")
        bench.tick(1.0)
    assert bench.plan.reason.fault == "ended_early"


def test_root_that_is_done_already(bench: Any, committed: Any, make_bench: Any) -> None:
    bench.running(step=60)
    bench.manifests.append(committed(1, 60))
    later = make_bench(run_id="run2")
    later.records, later.manifests = bench.records, bench.manifests
    later.lead()
    assert later.mind is Mind.DONE
    assert later.outcome.exit_code == 0
    assert later.decided(dec.CreateRecord) == []


def test_node_lost_after_the_last_commit(bench: Any, committed: Any) -> None:
    """Some ranks are done, then a node goes: no generation is formed for a job whose last step is committed."""
    bench.running(step=60)
    bench.manifests.append(committed(1, 60))
    bench.report(bench.rank(0, phase="done", step=60))
    bench.lose("n1")
    bench.vanish("n1")
    assert bench.mind is Mind.DONE


def test_outcome_of_a_former_run_is_none_of_this_one(bench: Any) -> None:
    bench.outcome = wire.Outcome(state="failed", exit_code=3, step=0, reason="x", generation=1, run_id="run0")
    bench.lead()
    assert bench.mind is Mind.FORMING
    bench.appear("n0", "n1")
    assert bench.plan.generation == 1


def test_successor_accepts_the_outcome(bench: Any, committed: Any) -> None:
    bench.running(step=60)
    bench.manifests.append(committed(1, 60))
    finish(bench, 60)
    successor = bench.other("b")
    successor.outcome = bench.outcome
    successor.lead(token=50)
    assert successor.mind is Mind.DONE
    assert successor.state.the_end.written


def test_outcome_is_written_until_it_stands(bench: Any, committed: Any) -> None:
    bench.running(step=60)
    bench.manifests.append(committed(1, 60))
    bench.follow(phase="done", step=60)
    assert bench.state.the_end.written
    bench = bench.other("b")
    bench.outcome = None
    bench.send(ev.Elected(token=9))
    bench.perform(leave=(dec.WriteOutcome,))
    write = bench.take(dec.WriteOutcome)
    bench.send(ev.OutcomeUnknown(op=write.op, detail="timed out"))
    bench.tick(0.5)
    assert bench.state.the_end.written


# ---------------------------------------------------------------- stores away


def test_a_plan_tells_how_often_its_run_was_interrupted(bench: Any) -> None:
    """What is chosen from it is rank 0's business; a record that is burnt is no interruption of its own."""
    bench.running(step=8)
    assert (bench.plan.faults, bench.plan.ran_s) == (0, 0.0)
    begun = bench.state.in_force.since_s
    bench.now += 100.0
    kill(bench)
    bench.perform(leave=(dec.CreateRecord,))
    create = bench.take(dec.CreateRecord)
    lasted = bench.now - begun
    bench.records[2] = msgspec.structs.replace(create.record, created_by="b@9")
    bench.send(bench.create(create.op, create.record))
    bench.perform()
    assert (bench.plan.generation, bench.plan.faults) == (3, 2)  # b's record charged one, this one another
    assert 100.0 <= lasted <= bench.plan.ran_s
    bench.follow()
    kill(bench)
    bench.perform()
    assert (bench.plan.generation, bench.plan.faults) == (4, 3)
    assert bench.plan.ran_s > lasted


def test_a_store_without_conditions_is_told_once_and_in_the_plan(bench: Any) -> None:
    bench.lacks = "s3://b: a second creation succeeded"
    bench.running(step=8)
    assert bench.plan.conditional is False
    told = [r for r in bench.decided(dec.Report) if r.topic == "store"]
    assert [r.text for r in told] == [
        "records and checkpoints are created without conditions: s3://b: a second creation succeeded"
    ]
    kill(bench)
    bench.perform()
    assert (bench.plan.generation, bench.plan.conditional) == (2, False)


def test_object_store_away_while_running(bench: Any) -> None:
    bench.running(step=8)
    bench.state = dataclasses.replace(bench.state, next_listing_s=bench.now)
    bench.send(ev.Ticked())
    listing = bench.take(dec.ListLineage)
    bench.send(ev.ObjectStoreUnavailable(op=listing.op, detail="no answer"))
    assert bench.mind is Mind.HOLD_COMMITS
    bench.now += 3
    bench.step(9)
    bench.tick(2.5)
    assert bench.mind is Mind.RUNNING


def test_object_store_away_while_forming(bench: Any) -> None:
    """Formation waits, with growing pauses, and goes on when the store is back."""
    bench.running(step=8)
    kill(bench)
    for _ in range(6):
        bench.perform(leave=(dec.CreateRecord,))
        create = bench.take(dec.CreateRecord)
        bench.send(ev.ObjectStoreUnavailable(op=create.op, detail="no answer"))
        assert bench.wanted == []
        bench.send(ev.Ticked(), after_s=5.1)
    bench.perform()
    assert bench.plan.generation == 2
    assert sorted(bench.records) == [1, 2]


def test_denied_object_store_at_the_start_ends_the_job(bench: Any) -> None:
    bench.send(ev.Elected(token=1))
    listing = bench.take(dec.ListLineage)
    bench.perform()
    bench.send(ev.ObjectStoreDenied(op=listing.op, detail="s3://x: access denied, check AWS_ACCESS_KEY_ID"))
    bench.perform()
    assert bench.mind is Mind.FAILED
    assert (bench.outcome.exit_code, "access denied" in bench.outcome.reason) == (5, True)


def test_unreachable_object_store_at_the_start_is_waited_for_a_while(bench: Any) -> None:
    bench.send(ev.Elected(token=1))
    bench.perform(leave=(dec.ListLineage,))
    for _ in range(30):
        if bench.mind is Mind.FAILED:
            break
        listing = bench.take(dec.ListLineage)
        bench.send(ev.ObjectStoreUnavailable(op=listing.op, detail="no answer from http://x"))
        bench.send(ev.Ticked(), after_s=5.1)
    assert bench.mind is Mind.FAILED
    assert bench.now - 100 > 60


def test_etcd_away_while_publishing(bench: Any) -> None:
    bench.running(step=8)
    kill(bench)
    bench.perform(leave=(dec.PublishPlan,))
    publish = bench.take(dec.PublishPlan)
    bench.send(ev.CoordStoreUnavailable(op=publish.op, detail="no leader"))
    assert bench.wanted == []
    bench.tick(0.5)
    assert bench.plan.generation == 2


# ---------------------------------------------------------------- views


def test_relist_mends_the_view_and_counts_the_drift(bench: Any) -> None:
    """CTL-21: the delete event of a node was swallowed."""
    bench.running("n0", "n1", "n2", step=6)
    bench.nodes["n1"].answer = "gone"
    bench.send(bench.world())
    assert bench.state.drift == 1
    assert not bench.state.nodes["n1"].registered


def test_stale_listing_undoes_nothing(bench: Any) -> None:
    """A listing taken before a node appeared is delivered after its watch event."""
    bench.lead()
    early = bench.world()
    bench.appear("n0")
    bench.send(early)
    assert bench.state.nodes["n0"].registered
    assert bench.state.drift == 0


def test_older_status_is_not_believed(bench: Any) -> None:
    bench.running(step=6)
    old = bench.nodes["n0"].status()
    bench.step(7)
    bench.send(ev.StatusReported(status=old))
    assert bench.state.nodes["n0"].status.ranks[0].step == 7
