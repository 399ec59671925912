"""Starting points: what a rank restores, and what it does when that is damaged or another step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_bench import GENERATION, MEMORY, STORE, Bench, FakeRestored

from surefoot.agent.exchange import StepWord
from surefoot.agent.failures import StartCursorError, StartDamagedError, StartupError, report
from surefoot.ckpt.errors import DamagedError, ImageError, StepMissingError
from surefoot.ckpt.manifest import LedgerRow
from surefoot.controller.wire import SnapshotMsg, StartingPoint


def test_from_memory(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=MEMORY, steps=14, every=6)
    rows = tuple(LedgerRow(step=t, generation=3, dp_rank=0) for t in (9, 10))
    bench.stager.restored.ledger = rows
    bench.link.held = {0: 9, 1: 10, 2: 11}
    assert bench.run() == [11, 12, 13, 14]
    assert [m.slot for m in bench.link.of(SnapshotMsg)][:3] == [0, 2, 1], "the starting point goes last"
    assert [steps for _, _, steps in bench.stager.staged] == [
        (9, 10, 11),
        (9, 10, 11, 12),
        (13,),
        (13, 14),
    ]


def test_from_the_object_store(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=STORE, steps=12)
    bench.stager.restored.ledger = (LedgerRow(step=10, generation=3, dp_rank=0),)
    assert bench.run() == [11, 12]
    assert bench.committed_calls == [(3, 10)]
    assert bench.stager.staged[0] == (GENERATION, 11, (11,)), "what the manifest holds is not committed again"


def test_what_was_restored_must_be_what_was_planned(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=MEMORY)
    bench.stager.restored = FakeRestored(3, 9, {"step": 9})
    with pytest.raises(StartupError, match=r"step 10 of generation 3.*step 9 of generation 3"):
        bench.run()


@pytest.mark.parametrize("start", [MEMORY, STORE])
def test_a_damaged_tier_is_never_made_up_for_by_another(tmp_path: Path, start: StartingPoint) -> None:
    """CKP-44: memory is at one step and the object store at another. Where the planned tier is damaged, or holds another step,
    the rank gives up, with the cursor untouched: what comes next is the next plan's to say."""
    for restored in (None, FakeRestored(3, 4, {"step": 4})):
        bench = Bench(tmp_path, start=start)
        before = bench.loop.data.state_dict()

        def restore(*_: Any, found: FakeRestored | None = restored) -> FakeRestored:
            if found is None:
                raise ImageError("corrupt", "one bit") if start is MEMORY else DamagedError("r0", key="r0")
            return found

        if start is MEMORY:
            bench.stager.restore = restore
        else:
            bench.loop.restore_committed = restore
        wrong = (ImageError, StartDamagedError) if restored is None else StartupError
        with pytest.raises(wrong):
            bench.run()
        assert bench.loop.data.state_dict() == before
        assert not bench.committed_calls, "no other tier was asked"


@pytest.mark.parametrize(
    ("error", "key"),
    [
        (DamagedError("rank 1: r1: block 0 differs " + "x" * 1000, key="r1"), "r1"),
        (StepMissingError("there is none"), "gen-0003/step-0000000010/manifest.json"),
    ],
)
def test_a_damaged_step_is_told_by_name(tmp_path: Path, error: Exception, key: str) -> None:
    """Generation, step and object, for the controller; in few words, since all ranks of a node say it."""
    bench = Bench(tmp_path, start=STORE)

    def restore(*_: Any) -> FakeRestored:
        raise error

    bench.loop.restore_committed = restore
    with pytest.raises(StartDamagedError, match="step 10 of generation 3 cannot be restored") as raised:
        bench.run()
    told = report(raised.value, area="checkpoint", first_step_begun=False)
    assert told.kind == "checkpoint"
    assert told.damaged is not None
    assert (told.damaged.generation, told.damaged.step, told.damaged.key) == (3, 10, key)
    assert told.damaged.detail == str(error)[:500]


@pytest.mark.parametrize(
    ("cursor", "says"),
    [
        ({}, "was saved without a loader cursor"),
        ({"epoch": 3}, r"none of surefoot.loader's: \{'epoch': 3\}"),
        ({"step": 9}, "the loader's cursor after step 9"),
    ],
)
def test_a_step_that_does_not_say_where_the_data_goes_on(
    tmp_path: Path, cursor: dict[str, Any], says: str
) -> None:
    """A script saved it: the data would be read from elsewhere, and nobody would notice."""
    bench = Bench(tmp_path, start=STORE, steps=12)
    bench.stager.restored = FakeRestored(3, 10, cursor)
    with pytest.raises(StartCursorError, match=rf"step 10 of generation 3 .*{says}.*strict=False") as raised:
        bench.run()
    told = report(raised.value, area=None, first_step_begun=False)
    assert (told.kind, told.permanent) == ("startup", True)


def test_all_ranks_must_have_restored_the_same(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=MEMORY)
    bench.other = lambda word: StepWord(generation=2, step=word.step)
    with pytest.raises(StartupError, match=r"others from \[\(2, 10\)\]"):
        bench.run()


def test_nothing_is_left_to_do(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=STORE, steps=10)
    assert bench.run() == []
    assert bench.loop.ended
