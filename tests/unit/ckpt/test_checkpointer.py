"""`Checkpointer` in one process, on files."""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot import ckpt, failpoint
from surefoot.ckpt.errors import (
    CkptUserError,
    CommitError,
    DamagedError,
    FencedError,
    LineageError,
    StateError,
    StateMismatchError,
    StepMissingError,
)
from surefoot.ckpt.keeping.cleaning import plan_gc
from surefoot.ckpt.keeping.retention import Retention
from surefoot.ckpt.record import Record, StartRef, create_record, read_records
from surefoot.ckpt.saving import equipment
from surefoot.ckpt.saving.generation import StaleStartError
from surefoot.ckpt.saving.handles import SaveHandle
from surefoot.ckpt.store import open_store


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def build() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "epoch": 0}


def train(state: dict[str, Any]) -> float:
    loss = state["model"](torch.ones(2, 4)).square().sum()
    loss.backward()
    state["optim"].step()
    state["optim"].zero_grad()
    state["epoch"] += 1
    return loss.item()


def flip(root: str, step: int) -> str:
    """Flip one bit of a step's data; returns the object's name."""
    (path,) = Path(root.removeprefix("file://")).glob(f"gen-*/step-{step:010d}/*/r00000-0.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    return path.name


def test_resume_goes_on_bit_for_bit(root: str) -> None:
    state = build()
    losses: list[float] = []
    with ckpt.Checkpointer(root) as c:
        assert c.load(state) is None
        for step in range(1, 5):
            losses.append(train(state))
            c.save(step, state, cursor={"at": step})
    resumed = build()
    with ckpt.Checkpointer(root) as c:
        loaded = c.load(resumed, step=2)
        assert loaded is not None
        assert (loaded.step, loaded.cursor, resumed["epoch"]) == (2, {"at": 2}, 2)
        assert [train(resumed), train(resumed)] == losses[2:]


def test_each_start_is_a_generation_and_steps_beyond_leave_the_lineage(root: str) -> None:
    state = build()
    with ckpt.Checkpointer(root) as c:
        for step in (1, 2, 3):
            c.save(step, state)
    with ckpt.Checkpointer(root) as c:
        c.load(state, step=2)
        assert ckpt.steps(root) == [1, 2, 3], "a load alone changes nothing"
        c.save(4, state).wait()
    assert ckpt.steps(root) == [1, 2, 4]
    records = read_records(open_store(root))
    assert (records[2].start, records[2].rollback) == (StartRef(generation=1, step=2), True)


@pytest.mark.parametrize("how", ["one-shot", "a Checkpointer"])
def test_a_load_from_a_root_that_holds_nothing_says_so_and_a_first_start_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """It may be the first start; it may be a root that was mistyped."""
    state = {"w": torch.ones(3)}
    root = tmp_path / "typo"
    if how == "one-shot":
        assert ckpt.load(root, state) is None
    else:
        with ckpt.Checkpointer(root) as c:
            assert c.load(state) is None
            c.save(1, state).wait()
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said == [
        f"nothing was loaded: {root.as_uri()} holds no checkpoint yet. If it should, look whether the address is right"
    ]
    assert torch.equal(state["w"], torch.ones(3))


def test_a_name_that_is_not_there_is_told_from_those_like_it(tmp_path: Path) -> None:
    ckpt.save(tmp_path, 1, {"model": nn.Linear(2, 2)})
    with pytest.raises(StepMissingError, match=r"no tensor 'model\.wieght'; similar names: model\.weight"):
        ckpt.read(tmp_path, 1, "model.wieght")


def test_saving_without_loading_what_is_there(root: str) -> None:
    ckpt.save(root, 5, build())
    with ckpt.Checkpointer(root) as c, pytest.raises(StaleStartError, match="load first"):
        c.save(6, build())
    with ckpt.Checkpointer(root, start_over=True) as c:
        c.save(1, build())
    assert ckpt.steps(root) == [1]


def test_every_and_keep(root: str) -> None:
    state = build()
    with ckpt.Checkpointer(root, every=2, keep=2, keep_every=6) as c:
        for step in range(1, 13):
            handle = c.save(step, state)
            assert (handle.wait() is None) == (step % 2 == 1)
    assert ckpt.steps(root) == [6, 10, 12]


def test_what_changes_after_save_is_not_saved(root: str) -> None:
    state = build()
    with ckpt.Checkpointer(root) as c:
        handle = c.save(1, state)
        before = state["model"].weight.detach().clone()
        with torch.no_grad():
            state["model"].weight.add_(1)
        handle.wait()
    assert torch.equal(ckpt.read(root, 1, "model.weight"), before)


def test_one_shot(root: str) -> None:
    state = build()
    manifest = ckpt.save(root, 1, state, cursor={"a": 1}, extra={"b": 2})
    assert (manifest.generation, manifest.step) == (1, 1)
    train(state)
    ckpt.save(root, 2, state)
    fresh = build()
    loaded = ckpt.load(root, fresh)
    assert loaded is not None
    assert loaded.step == 2
    assert torch.equal(fresh["model"].weight, state["model"].weight)
    loaded = ckpt.load(root, fresh, step=1)
    assert loaded is not None
    assert (loaded.cursor, loaded.extra) == ({"a": 1}, {"b": 2})
    with pytest.raises(CkptUserError, match="step 2 is not newer than step 2"):
        ckpt.save(root, 2, state)


def test_missing_steps_and_names(root: str) -> None:
    assert ckpt.steps(root) == []
    with pytest.raises(StepMissingError, match="no committed step 4"):
        ckpt.load(root, build(), step=4)
    ckpt.save(root, 1, build())
    with pytest.raises(StepMissingError, match=r"similar names: .*model\.weight"):
        ckpt.read(root, 1, "net.weight")
    with pytest.raises(StepMissingError):
        ckpt.verify(root, 3)


def test_a_damaged_step_is_passed_over_and_kept(root: str, caplog: pytest.LogCaptureFixture) -> None:
    state = build()
    with ckpt.Checkpointer(root) as c:
        c.save(20, state)
        c.save(40, state)
    name = flip(root, 40)
    with caplog.at_level(logging.WARNING), ckpt.Checkpointer(root) as c:
        loaded = c.load(state)
        assert loaded is not None
        assert loaded.step == 20
        assert loaded.passed_over[0][0] == 40
        assert name in loaded.passed_over[0][1]
        c.save(40, state).wait()
    assert "step 40 was passed over" in caplog.text
    assert "load an older step" not in caplog.text, "it is what this load is doing"
    assert [(m.generation, m.step) for m in _line(root)] == [(1, 20), (2, 40)]
    assert not ckpt.verify(root, 40).problems
    assert len(list(Path(root.removeprefix("file://")).glob("gen-0001/step-0000000040/manifest.json"))) == 1


def _line(root: str) -> list[Any]:
    from surefoot.ckpt.loading.together import find_line

    return find_line(open_store(root))


def test_a_damaged_step_that_was_asked_for(root: str) -> None:
    ckpt.save(root, 20, build())
    flip(root, 20)
    with pytest.raises(DamagedError, match="block 0"):
        ckpt.load(root, build(), step=20)
    with pytest.raises(DamagedError, match="block 0"):
        ckpt.load(root, build())
    report = ckpt.verify(root, 20)
    assert not report.ok
    assert "r00000-0.safetensors" in report.problems[0]


@pytest.mark.parametrize("damage", ["gone", "short", "garbage manifest"])
def test_other_damage_is_found_as_well(root: str, damage: str) -> None:
    ckpt.save(root, 20, build())
    ckpt.save(root, 40, build())
    folder = Path(root.removeprefix("file://"))
    (data,) = folder.glob("gen-0002/*/*/*.safetensors")
    if damage == "gone":
        data.unlink()
    elif damage == "short":
        data.write_bytes(data.read_bytes()[:-1])
    else:
        next(folder.glob("gen-0002/*/manifest.json")).write_bytes(b'{"format": 1}')
    loaded = ckpt.load(root, build())
    assert loaded is not None
    assert loaded.step == 20
    assert ckpt.verify(root, 40).problems


def test_a_manifest_from_the_future_is_no_reason_to_fall_back(root: str) -> None:
    ckpt.save(root, 20, build())
    ckpt.save(root, 40, build())
    (path,) = Path(root.removeprefix("file://")).glob("gen-0002/*/manifest.json")
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2', 1))
    with pytest.raises(Exception, match="format 2"):
        ckpt.load(root, build())


def test_errors_surface_at_the_next_call_and_the_next_save_works(root: str) -> None:
    state = build()
    c = ckpt.Checkpointer(root)
    c.save(1, state).wait()
    failpoint.arm(failpoint.parse("ckpt.before_part=error"))
    try:
        handle = c.save(2, state)
        while not handle.done():
            pass
    finally:
        failpoint.arm(None)
    with pytest.raises(CommitError, match="FailpointError"):
        c.save(3, state)
    c.save(3, state).wait()
    c.close()
    assert ckpt.steps(root) == [1, 3]


def test_errors_surface_at_close(root: str) -> None:
    failpoint.arm(failpoint.parse("upload.after_object=error"))
    try:
        with pytest.raises(CommitError, match="FailpointError"), ckpt.Checkpointer(root) as c:
            c.save(1, build())
    finally:
        failpoint.arm(None)
    assert ckpt.steps(root) == []


def test_another_error_is_not_hidden_by_close(root: str) -> None:
    def script() -> None:
        with ckpt.Checkpointer(root) as c:
            c.save(1, build())
            raise ZeroDivisionError

    failpoint.arm(failpoint.parse("upload.after_object=error"))
    try:
        with pytest.raises(ZeroDivisionError):
            script()
    finally:
        failpoint.arm(None)


def test_fenced_by_another_start(root: str) -> None:
    c = ckpt.Checkpointer(root)
    c.save(1, build()).wait()
    start = StartRef(generation=1, step=1)
    create_record(open_store(root), Record(generation=2, start=start, reason="other", created_by="other"))
    with pytest.raises(FencedError, match="generation 2 exists"):
        c.save(2, build()).wait()
    with pytest.raises(FencedError):
        c.save(3, build())
    with pytest.raises(CommitError):
        c.save(3, build())
    c.close()
    assert ckpt.steps(root) == [1]


def test_what_does_not_fit_the_budget_is_written_straight_from_memory(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = build() | {
        "large": torch.arange(4_000_000.0),
        "turned": torch.arange(3_000_000.0).view(3, -1).t(),
    }
    with ckpt.Checkpointer(root, memory_budget=1000) as c:
        for step in (1, 2):
            handle = c.save(step, state)
            with torch.no_grad():
                state["large"].add_(1)
            handle.wait()
    assert caplog.text.count("memory_budget is 1000") == 1, "said once"
    assert torch.equal(ckpt.read(root, 1, "large"), torch.arange(4_000_000.0))
    assert torch.equal(ckpt.read(root, 2, "turned"), state["turned"])
    assert ckpt.verify(root, 2).ok


def test_a_state_that_cannot_be_stored(root: str) -> None:
    with ckpt.Checkpointer(root) as c:
        with pytest.raises(StateError):
            c.save(1, {"x": object()})
        c.save(1, {"x": 1}).wait()
    assert ckpt.steps(root) == [1]


def test_lenient_load(root: str) -> None:
    ckpt.save(root, 1, {"a": torch.ones(2), "b": 5})
    state = {"a": torch.zeros(2), "c": 7}
    loaded = ckpt.load(root, state, strict=False)
    assert loaded is not None
    assert loaded.missing == ("c",)
    assert state["a"].tolist() == [1, 1]
    assert state["c"] == 7


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("live", [torch.zeros(3, 2), torch.zeros(2, 2).double()])
def test_another_shape_or_type_is_refused_either_way(root: str, live: torch.Tensor, *, strict: bool) -> None:
    """The error names the tensor, what it is on both sides, and what to do; nothing is touched."""
    ckpt.save(root, 1, {"m": {"head": torch.ones(2, 2), "body": torch.ones(2)}})
    state = {"m": {"head": live, "body": torch.zeros(2)}}
    kind = f"{str(live.dtype).removeprefix('torch.')}{list(live.shape)}"
    words = rf"m\.head is {re.escape(kind)} here and float32\[2, 2\] in the checkpoint .*skip=\['m\.head'\]; ckpt\.read gives m\.head"
    with pytest.raises(StateMismatchError, match=words):
        ckpt.load(root, state, strict=strict)
    assert not live.any()
    assert state["m"]["body"].tolist() == [0, 0]
    ckpt.load(root, state, strict=strict, skip=["m.head"])
    assert not live.any()
    assert state["m"]["body"].tolist() == [1, 1]


def test_all_but_one_tensor_of_a_module(root: str) -> None:
    """As docs/checkpoint.md says, for a head of another size."""
    saved = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 2, bias=False)})
    ckpt.save(root, 1, {"model": saved})
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 5, bias=False)})
    rest = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    loaded = ckpt.load(root, {"model": rest}, strict=False)
    assert loaded is not None
    assert loaded.missing == ()
    assert [name.partition(" ")[0] for name in loaded.left_over] == ["model.head.weight"]
    assert torch.equal(model.state_dict()["body.weight"], saved.state_dict()["body.weight"])
    assert torch.equal(ckpt.read(root, loaded.step, "model.head.weight"), saved.state_dict()["head.weight"])


@pytest.mark.parametrize(("options", "words"), [({"keep": 1}, "at least 2"), ({"every": 0}, "at least 1")])
def test_options_are_checked(root: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ckpt.Checkpointer(root, **options)


def test_the_public_names() -> None:
    assert set(ckpt.__all__) <= set(dir(ckpt))
    for name in ckpt.__all__:
        assert getattr(ckpt, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        _ = ckpt.nothing_of_ours  # pyright: ignore[reportAttributeAccessIssue]


def test_a_forked_process_leaves_the_checkpointer_to_its_owner(tmp_path: Path) -> None:
    """A worker of a data loader that leaves the block, or saves: nothing of the owner's is touched, and it is told."""
    with ckpt.Checkpointer(str(tmp_path / "root")) as c:
        c.save(1, {"w": torch.ones(3)}).wait()
        pid = os.fork()
        if pid == 0:  # no pytest in here: whatever happens ends by _exit
            code = 1
            try:
                c.close()
                c.save(2, {"w": torch.ones(3)})
            except CkptUserError as e:
                code = 0 if "forked" in str(e) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        c.save(3, {"w": torch.ones(3)}).wait()
    assert ckpt.steps(str(tmp_path / "root")) == [1, 3]


def test_a_root_may_be_a_path_and_step_0_a_step(tmp_path: Path) -> None:
    root = tmp_path / "root"
    ckpt.save(root, 0, {"w": torch.zeros(3)})
    ckpt.save(root, 1, {"w": torch.ones(3)})
    assert ckpt.steps(root) == [0, 1]
    assert ckpt.verify(root, 0).ok
    assert ckpt.read(root, 0, "w").tolist() == [0, 0, 0]
    with pytest.raises(CkptUserError, match="step 1 is not newer"):
        ckpt.save(root, 1, {"w": torch.ones(3)})


def test_the_last_step_is_saved_though_it_is_not_due(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    with ckpt.Checkpointer(tmp_path, every=10) as c:
        assert c.save(7, state).wait() is None
        assert c.save(10, state) is c.save(10, state, force=True)
        c.save(13, state, force=True)
    assert ckpt.steps(tmp_path) == [10, 13]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": "3"}, "keep = '3': a whole number, at least 2"),
        ({"keep": 1}, "keep = 1: a whole number, at least 2, since the newest may"),
        ({"memory_budget": "1GB"}, "memory_budget = '1GB'"),
        ({"keep_every": 5}, "give keep as well"),
        ({"deadline_s": -1}, "deadline_s = -1"),
        ({"busy": "drop"}, "busy = 'drop'"),
    ],
)
def test_options_are_looked_at_at_once(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        ckpt.Checkpointer(tmp_path, **options)


def test_what_is_no_step_and_no_plain_cursor(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as c:
        for step in ("5", -1, 1.5, 10**25):
            with pytest.raises(CkptUserError, match="is no step"):
                c.save(step, {"w": torch.ones(3)})  # pyright: ignore[reportArgumentType]
        with pytest.raises(StateError, match=r"cursor\['at'\] is a Tensor, .*put it into the state"):
            c.save(1, {"w": torch.ones(3)}, cursor={"at": torch.ones(3)})
        assert ckpt.steps(tmp_path) == [], "refused before anything is stored"
        c.save(1, {"w": torch.ones(3)}, cursor={"at": [1, 2]})
        c.save(2**62, {"w": torch.ones(3)}).wait()
    assert ckpt.steps(tmp_path) == [1, 2**62]


@pytest.mark.parametrize("blocking", [False, True])
def test_a_step_is_saved_once_and_a_lower_one_may_follow(root: str, *, blocking: bool) -> None:
    with ckpt.Checkpointer(root) as c:
        c.save(5, {"w": torch.ones(3)})
        with pytest.raises(CkptUserError, match="step 5 is committed already by this start"):
            c.save(5, {"w": torch.zeros(3)}, blocking=blocking)
        assert c.save(5, {"w": torch.zeros(3)}, force=True).done(), "that is it"
        c.save(3, {"w": torch.full((3,), 3.0)}, blocking=blocking).wait()
        stored = list(Path(root.removeprefix("file://")).glob("gen-*/step-*/*/"))
        assert len(stored) == 2, "what is refused stores nothing"
        c.load({"w": torch.zeros(3)}, step=3)
        c.save(5, {"w": torch.full((3,), 5.0)}, blocking=blocking).wait()
    assert ckpt.read(root, 5, "w")[0] == 5.0


def test_force_saves_again_what_broke_off(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = build()

    def breaks(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise OSError("on cue")

    with ckpt.Checkpointer(root) as c:
        monkeypatch.setattr(equipment, "store_job", breaks)
        with pytest.raises(CommitError, match="on cue"):
            c.save(10, state, blocking=True)
        handle = c.save(10, state, blocking=True, force=True)
        assert handle.wait() is not None
    assert ckpt.steps(root) == [10]


def test_a_step_whose_save_failed_may_be_saved_again(root: str) -> None:
    with ckpt.Checkpointer(root) as c:
        failpoint.arm(failpoint.parse("upload.before_objects=error"))
        try:
            with pytest.raises(CommitError):
                c.save(5, {"w": torch.zeros(3)}).wait()
        finally:
            failpoint.arm(None)
        c.save(5, {"w": torch.ones(3)}).wait()
    assert ckpt.read(root, 5, "w")[0] == 1.0


@pytest.mark.parametrize("starts", [1, 2])
def test_a_record_that_was_deleted_is_named_and_its_number_is_not_given_out_again(
    tmp_path: Path, starts: int
) -> None:
    state = {"w": torch.ones(3)}
    for start in range(starts):
        ckpt.save(tmp_path, start, state)
    missing = f"generations/{starts:04d}.json"
    (tmp_path / missing).unlink()
    before = sorted(tmp_path.rglob("*"))
    for do in (
        lambda: ckpt.load(tmp_path, state),
        lambda: ckpt.load(tmp_path, state, 0),
        lambda: ckpt.save(tmp_path, 7, state),
        lambda: ckpt.steps(tmp_path),
        lambda: ckpt.read(tmp_path, 0, "w"),
        lambda: plan_gc(open_store(tmp_path), None, off_lineage=True),
        lambda: plan_gc(open_store(tmp_path), Retention(newest=2)),
    ):
        with pytest.raises(LineageError, match=f"restore {missing} from a backup"):
            do()
    with ckpt.Checkpointer(tmp_path, start_over=True) as c, pytest.raises(LineageError, match=missing):
        c.save(7, state)
    assert sorted(tmp_path.rglob("*")) == before


def test_cursor_and_extra_come_back_equal(tmp_path: Path) -> None:
    """`inf` is what a best loss starts with."""
    cursor = {"at": (3, [1, 2.5]), "seed": 2**80}
    extra = {"best": float("inf"), "worst": float("-inf"), "last": float("nan")}
    ckpt.save(tmp_path, 1, {"w": torch.ones(3)}, cursor=cursor, extra=extra)
    loaded = ckpt.load(tmp_path, {"w": torch.ones(3)})
    assert loaded is not None
    assert loaded.cursor == cursor
    assert repr(loaded.extra) == repr(dict(sorted(extra.items())))


@pytest.mark.parametrize("state", [nn.Linear(2, 2), [torch.ones(2)]], ids=["Linear", "list"])
def test_a_state_that_is_no_mapping_is_told_what_to_be(
    tmp_path: Path, state: Any, request: pytest.FixtureRequest
) -> None:
    with ckpt.Checkpointer(tmp_path) as c:
        calls = [
            lambda: ckpt.save(tmp_path, 1, state),
            lambda: ckpt.load(tmp_path, state),
            lambda: c.save(1, state),
            lambda: c.load(state),
            lambda: c.prepare(state),
        ]
        for call in calls:
            with pytest.raises(
                StateError, match=rf"state is a {request.node.callspec.id}: give a mapping, such as"
            ):
                call()


def test_all_that_is_raised_can_be_imported() -> None:
    from surefoot.ckpt import errors

    named = {n for n in vars(errors) if n.endswith("Error")} - {"ImageError", "SlotTooSmallError"}
    assert {*named, "StaleStartError", "ObjectStoreError", "ElsewhereError"} <= set(ckpt.__all__)
    assert all(issubclass(getattr(ckpt, n), Exception) for n in named)


def test_what_is_handed_out_says_in_a_line_what_it_is(tmp_path: Path) -> None:
    """A notebook shows it."""
    state = {"model": nn.Linear(2, 2), "many": [torch.ones(1) for _ in range(200)]}
    with ckpt.Checkpointer(tmp_path, every=2) as c:
        assert repr(c.save(1, state)) == "SaveHandle(step=1, not due)"
        handle = c.save(2, state)
        manifest = handle.wait()
        assert repr(handle) == "SaveHandle(step=2, committed)"
    assert re.fullmatch(
        r"Manifest\(step=2, generation=1, attempt='\w+', world_size=1, 202 tensors, .*\)", repr(manifest)
    )
    assert len(repr(manifest)) < 200
    plan = ckpt.export(tmp_path, 2, tmp_path / "out")
    assert repr(plan) == "ExportPlan(step=2, generation=1, 2 tensors, 24 bytes in 1 files, 200 left out)"


def test_a_handle_says_that_its_save_failed() -> None:
    handle = SaveHandle(3)
    assert repr(handle) == "SaveHandle(step=3, being copied)"
    handle.copied()
    assert repr(handle) == "SaveHandle(step=3, under way)"
    handle.finish(None, CommitError("no"))
    assert repr(handle) == "SaveHandle(step=3, failed: CommitError)"


def test_calls_come_one_after_the_other(tmp_path: Path) -> None:
    """From another thread, and from below (a signal handler): neither may save what the first has looked at, under its own step."""
    said: list[str] = []

    class Meddling:
        """In the middle of a save, when its state is asked for, it saves as well."""

        def state_dict(self) -> dict[str, Any]:
            again()
            thread = threading.Thread(target=again)
            thread.start()
            thread.join()
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with ckpt.Checkpointer(tmp_path) as c:

        def again() -> None:
            try:
                c.save(2, {"w": torch.ones(3)})
            except ckpt.CkptUserError as e:
                said.append(str(e))

        c.save(1, {"w": torch.zeros(3), "m": Meddling()}).wait()
        c.save(3, {"w": torch.ones(3)}).wait()
    assert ckpt.steps(tmp_path) == [1, 3]
    assert torch.equal(ckpt.read(tmp_path, 1, "w"), torch.zeros(3))
    assert len(said) >= 2
    assert all("another call of this Checkpointer is under way" in s for s in said)
