"""Two runs at once on one root: the newest record wins, the other run stops, and nothing acknowledged is left behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from surefoot.ckpt.record import Record, StartRef
from surefoot.controller import wire
from surefoot.controller.core import decisions as dec
from surefoot.controller.core.moves import Mind


@pytest.fixture
def two(make_bench: Any) -> Any:
    """``two(steps=...)``: two runs, each with an etcd and nodes of its own, over one object store."""

    def make(**settings: Any) -> tuple[Any, Any]:
        first, second = make_bench(**settings), make_bench(run_id="run2", **settings)
        second.records, second.manifests = first.records, first.manifests
        return first, second

    return make


def assert_taken_over(bench: Any, *, by: int, run_id: str) -> None:
    assert bench.mind is Mind.FAILED
    assert bench.outcome.state == "failed"
    assert bench.outcome.exit_code == 5
    assert bench.outcome.reason == (
        f"another run, {run_id}, has taken over this root with generation {by}; only one run may train into a root"
    )
    assert bench.tick(60.0) == []


def test_a_run_that_starts_takes_the_root_over(two: Any, committed: Any) -> None:
    """The second run resumes from what the first has committed; the first finds out at its next look, and ends."""
    first, second = two()
    first.running(step=12)
    first.manifests.append(committed(1, 10))
    second.running()
    plan = second.plan
    assert (plan.generation, plan.run_id, plan.reason.kind) == (2, "run2", "resume")
    assert (plan.start.generation, plan.start.step) == (1, 10)
    first.tick(16.0)
    assert_taken_over(first, by=2, run_id="run2")
    assert sorted(first.records) == [1, 2]


def test_a_fenced_commit_makes_the_first_run_look_at_once(two: Any) -> None:
    first, second = two()
    first.running(step=12)
    second.running()
    first.nodes["n0"].extra["committed"] = wire.Committed(generation=1, step=10, fenced_by=2)
    first.report("n0")
    first.perform()
    assert_taken_over(first, by=2, run_id="run2")


def test_a_number_taken_by_another_run(two: Any) -> None:
    """A fault in the first run, which finds the next number taken by the second one."""
    first, second = two()
    first.running(step=12)
    first.end(1, signal=9)
    first.perform(leave=(dec.CreateRecord,))
    second.running()
    first.perform()
    assert_taken_over(first, by=2, run_id="run2")


def test_both_begin_at_once(two: Any) -> None:
    """Both want generation 1. The second loses it, and having formed nothing yet, takes over."""
    first, second = two()
    second.lead()
    second.appear("n0", "n1", leave=(dec.CreateRecord,))
    create = second.take(dec.CreateRecord)
    assert create.record.generation == 1
    first.running()
    second.send(second.create(create.op, create.record))
    second.perform()
    assert (second.plan.generation, second.plan.start.tier) == (2, "nothing")
    first.tick(16.0)
    assert_taken_over(first, by=2, run_id="run2")


def test_between_record_and_plan(two: Any) -> None:
    """Another run's record appears above the one that is being checked: it is not merely burnt."""
    first, second = two()
    first.running(step=12)
    first.end(1, signal=9)
    first.perform(leave=(dec.CreateRecord,))
    create = first.take(dec.CreateRecord)
    created = first.create(create.op, create.record)
    second.running()
    first.send(created)
    first.perform()
    assert_taken_over(first, by=3, run_id="run2")
    assert [p.generation for p in first.ledger.published] == [1]


def test_not_done_below_a_record_of_another_run(two: Any, committed: Any) -> None:
    """All steps are committed and all ranks are done; but the second run has begun before that, from step 10."""
    first, second = two()
    first.running(step=60)
    first.manifests.append(committed(1, 10))
    second.running()
    first.manifests.append(committed(1, 60))
    first.follow(phase="done", step=60)
    assert_taken_over(first, by=2, run_id="run2")
    assert second.mind is Mind.RUNNING


def test_done_is_never_said_on_an_old_listing(two: Any, committed: Any) -> None:
    """The last step was listed long ago; a fault makes the leader look at it: it lists again before it says done."""
    first, second = two()
    first.running(step=60)
    first.manifests.append(committed(1, 60))
    first.state = dataclasses.replace(first.state, next_listing_s=first.now)
    first.tick()
    assert first.mind is Mind.RUNNING
    first.records[2] = Record(generation=2, start=StartRef(), reason="save", created_by="alone-7", plan=None)
    first.lose("n1")
    first.vanish("n1")
    assert_taken_over(first, by=2, run_id="alone-7")
    assert second.decided(dec.WriteOutcome) == []


def test_a_generation_that_shows_only_later_that_it_ran(two: Any, committed: Any) -> None:
    """Generation 2 of the first run starts from step 7 in memory and has committed nothing yet; (1, 10), which its writer
    never acknowledged, is what the second run would start from. Then (2, 15) appears before the second run's record: it was
    acknowledged, so the second run must start from there.
    """
    first, second = two()
    first.running(step=8)
    first.end(1, signal=9)
    first.perform(leave=(dec.PublishPlan,))
    first.manifests.append(committed(1, 10))
    first.perform()
    assert (first.plan.generation, first.plan.start.step) == (2, 7)

    second.lead()
    second.appear("n0", "n1", leave=(dec.CreateRecord,))
    create = second.take(dec.CreateRecord)
    assert create.record.start == StartRef(generation=1, step=10)
    first.manifests.append(committed(2, 15))
    second.send(second.create(create.op, create.record))
    second.perform()
    assert (second.plan.generation, second.plan.reason.kind) == (4, "burnt")
    assert (second.plan.start.generation, second.plan.start.step) == (2, 15)


def test_a_standby_controller_of_the_run_that_was_taken_over(two: Any) -> None:
    """It was not the leader, and ends the run all the same."""
    first, second = two()
    first.running(step=12)
    second.running()
    successor = first.other("b")
    successor.lead(token=50)
    assert_taken_over(successor, by=2, run_id="run2")


def test_a_run_that_had_ended_before_stays_done(two: Any, committed: Any) -> None:
    first, second = two()
    first.running(step=60)
    first.manifests.append(committed(1, 60))
    first.follow(phase="done", step=60)
    assert first.mind is Mind.DONE
    first.records[2] = Record(generation=2, start=StartRef(), reason="save", created_by="alone-7", plan=None)
    successor = first.other("b")
    successor.outcome = first.outcome
    successor.lead(token=50)
    assert successor.mind is Mind.DONE
    assert second.mind is Mind.FORMING


def test_a_third_run_resumes_on_the_lineage_of_the_newest_record(
    two: Any, make_bench: Any, committed: Any
) -> None:
    first, second = two()
    first.running(step=12)
    first.manifests.append(committed(1, 10))
    second.running()
    first.manifests += [committed(1, 20), committed(2, 15)]
    third = make_bench(run_id="run3")
    third.records, third.manifests = first.records, first.manifests
    third.running()
    assert (third.plan.start.generation, third.plan.start.step) == (2, 15)
