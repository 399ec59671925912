"""Which step a load takes, what it leaves behind, and what it reads. One process, on files."""

from __future__ import annotations

import gc
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from surefoot import ckpt
from surefoot.ckpt.channel import Solo
from surefoot.ckpt.errors import (
    DamagedError,
    ElsewhereError,
    FormatError,
    StateMismatchError,
    StepMissingError,
)
from surefoot.ckpt.loading import aside, carrying
from surefoot.ckpt.loading import together as loading
from surefoot.ckpt.loading.aside import choose, note_resume, resumes_among
from surefoot.ckpt.loading.fetching import load_together, shared_manifest
from surefoot.ckpt.loading.sharing import Party
from surefoot.ckpt.loading.together import find_line, load_agreed
from surefoot.ckpt.manifest import ManifestRef, encode, manifest_key
from surefoot.ckpt.objects.files import FileObjectStore
from surefoot.ckpt.store import ObjectStore, open_store
from surefoot.ckpt.tools import onetensor
from surefoot.ckpt.tools.inspect import find


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((5, 3), value), "lr": value}


def save(root: str, *steps: int) -> None:
    with ckpt.Checkpointer(root, start_over=True) as c:
        for step in steps:
            c.save(step, state_of(step), cursor={"at": step}).wait()


def path_of(root: str, key: str) -> Path:
    return Path(root.removeprefix("file://")) / key


def keys_of(root: str) -> list[str]:
    return [o.key for o in open_store(root).list("gen-")]


class Counting(FileObjectStore):
    """Counts the bytes it gives out of data objects."""

    nbytes = 0

    def look(self, key: str, start: int, nbytes: int) -> memoryview | None:
        return None

    def read_into(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        found = super().read_into(key, start, views)
        self.nbytes += found
        return found


# ---------------------------------------------------------------- damage


def test_every_flipped_bit_of_a_step_is_found(root: str) -> None:
    """CKP-34: in the data, and anywhere in the manifest: the load names the object, falls back, and sets the step aside."""
    save(root, 20, 40, 60)
    manifest, _ = find(open_store(root), 60)
    key = manifest_key(1, 60)
    whole = path_of(root, key).read_bytes()
    for at in range(0, len(whole), 17):
        path_of(root, key).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises((DamagedError, FormatError), match="manifest") as e:
            find(open_store(root), 60)
        assert key in str(e.value)
    path_of(root, key).write_bytes(whole)
    data = path_of(root, manifest.objects[0].key)
    data.write_bytes(data.read_bytes()[:-1] + b"\x7f")
    state = state_of(0)
    loaded = ckpt.load(root, state)
    assert loaded is not None
    assert (loaded.step, loaded.cursor, state["lr"], state["w"].unique().tolist()) == (
        40,
        {"at": 40},
        40,
        [40],
    )
    assert manifest.objects[0].key in loaded.passed_over[0][1]
    assert "gen-0001/step-0000000060/aside.json" in keys_of(root)
    assert key in keys_of(root), "set aside, not deleted"
    assert 60 in [m.step for m in find_line(open_store(root))]


@pytest.mark.parametrize("sums", [(), ("",)])
def test_a_checksum_that_is_missing_is_a_failure(root: str, sums: tuple[str, ...]) -> None:
    """CKP-35, second run: everything is whole, but one checksum is not there."""
    save(root, 20, 40)
    manifest, _ = find(open_store(root), 40)
    bare = msgspec.structs.replace(manifest.objects[0], checksums=sums)
    path_of(root, manifest_key(1, 40)).write_bytes(encode(msgspec.structs.replace(manifest, objects=(bare,))))
    loaded = ckpt.load(root, state_of(0))
    assert loaded is not None
    assert loaded.step == 20
    assert re.search("0 checksums|without a checksum", loaded.passed_over[0][1])


def test_a_manifest_without_a_checksum_of_its_own_is_damaged(root: str) -> None:
    """CKP-35: somebody else's hand, or an older writer's."""
    save(root, 20, 40)
    path = path_of(root, manifest_key(1, 40))
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {"checksum": ""}))
    loaded = ckpt.load(root, state_of(0))
    assert loaded is not None
    assert loaded.step == 20
    assert "does not end with its checksum" in loaded.passed_over[0][1]


def test_what_was_set_aside_is_tried_where_it_is_asked_for(root: str) -> None:
    save(root, 20, 40)
    (ref,) = [m for m in find_line(open_store(root)) if m.step == 40]
    aside.set_aside(open_store(root), ref, "a bad day")
    loaded = ckpt.load(root, state_of(0))
    assert loaded is not None
    assert (loaded.step, loaded.passed_over) == (
        20,
        ((40, "set aside: a bad day (found by an earlier load)"),),
    )
    loaded = ckpt.load(root, state_of(0), step=40)
    assert loaded is not None
    assert loaded.step == 40


def test_bytes_that_were_only_read_badly_are_read_again(root: str) -> None:
    """The network or a memory module: the second read is right, and nothing is set aside."""
    save(root, 20)

    class Flaky(FileObjectStore):
        faults = 1

        def look(self, key: str, start: int, nbytes: int) -> memoryview | None:
            return None

        def read_into(self, key: str, start: int, views: Sequence[memoryview]) -> int:
            found = super().read_into(key, start, views)
            if self.faults:
                self.faults -= 1
                views[0][0] ^= 1
            return found

    store = Flaky(path_of(root, ""))
    state = state_of(0)
    loaded = load_agreed(store, Solo(), state, step=None, strict=True)
    assert loaded is not None
    assert store.faults == 0
    assert (loaded.step, state["w"].unique().tolist()) == (20, [20])
    assert not [k for k in keys_of(root) if k.endswith("aside.json")]


def test_a_root_that_cannot_be_written_to_can_be_loaded_from(root: str) -> None:
    save(root, 20, 40)
    manifest, _ = find(open_store(root), 40)
    path_of(root, manifest.objects[0].key).unlink()

    class ReadOnly(FileObjectStore):
        def create(self, key: str, data: Any) -> None:
            from surefoot.ckpt.store import ObjectStoreDeniedError

            raise ObjectStoreDeniedError(f"{key}: look, do not touch")

    loaded = load_agreed(ReadOnly(path_of(root, "")), Solo(), state_of(0), step=None, strict=True)
    assert loaded is not None
    assert loaded.step == 20
    assert "is missing" in loaded.passed_over[0][1]


# ---------------------------------------------------------------- steps that are not there yet


def test_a_step_in_flight_is_not_there_yet(root: str) -> None:
    """CKP-28: step 40 is being saved and step 20 committed."""
    save(root, 20)
    store = open_store(root)
    begun = "gen-0001/step-0000000040/a/r00000-0.safetensors"
    store.create(begun, b"half of it")
    loaded = ckpt.load(root, state_of(0))
    assert loaded is not None
    assert loaded.step == 20
    with pytest.raises(StepMissingError, match="step 40 is not committed") as e:
        ckpt.load(root, state_of(0), step=40)
    assert begun in str(e.value)
    assert "the newest that count are: 20" in str(e.value)
    with pytest.raises(StepMissingError, match="no committed step 60"):
        ckpt.load(root, state_of(0), step=60)


def test_a_step_that_was_left_behind_is_told_from_one_that_never_was(root: str) -> None:
    """What it is, who has left it behind, and where to look: a load of it is refused with that."""
    save(root, 20, 40)
    with ckpt.Checkpointer(root) as c:
        c.load(state_of(0), step=20)
        c.save(30, state_of(30)).wait()
    said = (
        "step 40 is committed, by generation 1, and does not count: generation 2 went on from step 20 of generation 1, and so left it "
        "behind; the newest that count are: 20, 30."
    )
    with pytest.raises(StepMissingError) as e:
        ckpt.load(root, state_of(0), step=40)
    assert said in str(e.value)
    assert f"ckpt show {root} 40 --generation 1" in str(e.value)
    save(root, 50)
    with pytest.raises(
        StepMissingError, match=r"step 30 is committed, by generation 2, .* generation 3 went on from nothing"
    ):
        ckpt.load(root, state_of(0), step=30)


def test_a_load_can_wait_for_a_step(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CKP-28: it is committed while the load waits; where it is not, the load ends in time."""
    monkeypatch.setattr(loading, "WAIT_ROUND_S", 0.05)
    save(root, 20)
    looked = threading.Event()

    class Watched(FileObjectStore):
        def list(self, prefix: str) -> Any:
            looked.set()
            return super().list(prefix)

    def save_later() -> None:
        assert looked.wait(10)
        with ckpt.Checkpointer(root) as c:
            c.continue_from_newest()
            c.save(40, state_of(40)).wait()

    saver = threading.Thread(target=save_later)
    saver.start()
    state = state_of(0)
    loaded = load_agreed(Watched(path_of(root, "")), Solo(), state, step=40, strict=True, wait_s=20)
    saver.join()
    assert loaded is not None
    assert (loaded.step, state["lr"]) == (40, 40)
    with pytest.raises(StepMissingError):
        load_agreed(open_store(root), Solo(), state, step=60, strict=True, wait_s=0.1)


# ---------------------------------------------------------------- repeated failed resumes


LINE = [ManifestRef(step=s, generation=1, key="") for s in (20, 40, 60)]


@pytest.mark.parametrize(
    ("bad", "died", "tries", "candidates", "passed"),
    [
        ((), {}, 3, [60, 40, 20], []),
        ((), {60: 2}, 3, [60, 40, 20], []),
        ((), {60: 3}, 3, [40, 20, 60], [60]),
        ((), {60: 3, 40: 9}, 3, [40, 20, 60], [60]),
        ((), {60: 99}, None, [60, 40, 20], []),
        ((60,), {60: 9}, 3, [40, 20], [60]),
        ((60,), {40: 3}, 3, [20, 40], [60, 40]),
        ((40,), {}, 3, [60, 20], []),
        ((20, 40), {60: 3}, 3, [60], []),
        ((20, 40, 60), {}, 3, [], [60, 40, 20]),
    ],
)
def test_choice(
    bad: tuple[int, ...], died: dict[int, int], tries: int | None, candidates: list[int], passed: list[int]
) -> None:
    """Newest first; what was set aside never; one step back, and no more, from one that starts keep dying of."""
    found = choose(LINE, {(1, s): "bad" for s in bad}, {(1, s): n for s, n in died.items()}, tries=tries)
    assert [m.step for m in found.candidates] == candidates
    assert [m.step for m, _ in found.passed_over] == passed


def start_that_dies(root: str, of: BaseException, save: int | None = None, **options: Any) -> int:
    """Load, perhaps save, and die; returns the step it had resumed from."""
    step = -1
    try:
        with ckpt.Checkpointer(root, **options) as c:
            loaded = c.load(state_of(0))
            assert loaded is not None
            step = loaded.step
            if save is not None:
                c.save(save, state_of(save)).wait()
            raise of
    except type(of):
        return step


def died_after_loading(root: str, **options: Any) -> int:
    return start_that_dies(root, ZeroDivisionError(), **options)


def test_after_repeated_failed_resumes_one_step_older(root: str) -> None:
    save(root, 20, 40, 60)
    assert [died_after_loading(root, resume_tries=2) for _ in range(4)] == [60, 60, 40, 40]
    assert died_after_loading(root, resume_tries=None) == 60
    with ckpt.Checkpointer(root, resume_tries=2) as c:
        loaded = c.load(state_of(0))
        assert loaded is not None
        ((step, why),) = loaded.passed_over
        assert step == 60
        assert why.startswith(
            "3 starts resumed from it, and none of them got any further; `load(state, 60)` takes it"
        )
        c.save(50, state_of(50)).wait()
    assert ckpt.steps(root) == [20, 40, 50]
    assert died_after_loading(root) == 50


def test_a_start_that_commits_or_ends_in_peace_leaves_no_marker(root: str) -> None:
    save(root, 20)
    with ckpt.Checkpointer(root) as c:
        c.load(state_of(0))
        assert list(resumes_among(keys_of(root)).values()) == [1]
    assert not resumes_among(keys_of(root))
    ckpt.load(root, state_of(0))
    start_that_dies(root, ZeroDivisionError(), save=40)
    start_that_dies(root, KeyboardInterrupt())
    assert not resumes_among(keys_of(root))


def test_a_marker_says_who_resumed(root: str) -> None:
    save(root, 20)
    resume = note_resume(open_store(root), find_line(open_store(root))[0])
    assert resume is not None
    word = msgspec.json.decode(open_store(root).read(resume.key), type=aside.Resumed)
    assert ":" in word.by
    resume.settle()
    resume.settle()


# ---------------------------------------------------------------- what is read


def big(root: str) -> torch.Tensor:
    value = torch.arange(8 * 2**20, dtype=torch.float32).view(8, 1024, 1024)
    ckpt.save(root, 1, {"w": value, "other": torch.zeros(2**20)})
    return value


def test_an_eighth_of_a_tensor_takes_an_eighth_of_its_bytes(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKP-10: a tensor of 32 MiB, whose blocks are counted; and 20 rows in the middle of one block."""
    value = big(root)
    stores: list[Counting] = []

    def opened(url: str) -> ObjectStore:
        stores.append(Counting(path_of(url, "")))
        return stores[-1]

    monkeypatch.setattr(onetensor, "open_store", opened)
    found = ckpt.read(root, 1, "w", [slice(3, 4)])
    assert torch.equal(found, value[3:4])
    assert stores[-1].nbytes == value.nbytes // 8
    found = ckpt.read(root, 1, "w", [slice(5, 6), slice(100, 120), slice(-7, None)])
    assert torch.equal(found, value[5:6, 100:120, -7:])
    assert stores[-1].nbytes == 4 * 2**20
    assert ckpt.read(root, 1, "w", [slice(2, 2)]).shape == (0, 1024, 1024)
    assert stores[-1].nbytes == 0
    with pytest.raises(ValueError, match="step"):
        ckpt.read(root, 1, "w", [slice(0, 8, 2)])


def test_contiguous_tensors_are_read_in_place_and_others_through_scratch(root: str) -> None:
    value = big(root)
    store = Counting(path_of(root, ""))
    views: list[int] = []
    inner = store.read_into

    def noted(key: str, start: int, into: Sequence[memoryview]) -> int:
        views.extend(memory_at(v) for v in into)
        return inner(key, start, into)

    store.read_into = noted  # pyright: ignore[reportAttributeAccessIssue]
    for state in (
        {"w": torch.zeros_like(value), "other": torch.zeros(2**20)},
        {"w": torch.zeros(1024, 8, 1024).transpose(0, 1), "other": torch.zeros(2**20)},
    ):
        views.clear()
        load_agreed(store, Solo(), state, step=None, strict=True)
        assert torch.equal(state["w"], value)
        begin = state["w"].data_ptr()
        inside = [begin <= at < begin + value.nbytes for at in views]
        assert any(inside) == state["w"].is_contiguous()


def memory_at(view: memoryview) -> int:
    import numpy as np

    return np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0


Wrong = Callable[[Path], None]


@pytest.mark.parametrize(
    "wrong",
    [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-3]), lambda p: p.write_bytes(b"")],
)
def test_objects_that_are_missing_or_cut_short(root: str, wrong: Wrong) -> None:
    save(root, 20, 40)
    manifest, _ = find(open_store(root), 40)
    wrong(path_of(root, manifest.objects[0].key))
    with pytest.raises(DamagedError, match=r"r00000-0\.safetensors"):
        ckpt.load(root, state_of(0), step=40)
    loaded = ckpt.load(root, state_of(0))
    assert loaded is not None
    assert loaded.step == 20


def test_a_load_keeps_no_object_open(root: str) -> None:
    """What retention deletes later, in whichever process, gives its room back at once."""
    save(root, 20)
    with ckpt.Checkpointer(root) as c:
        c.load(state_of(0))
        held = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        assert not [
            path for path in held if path.startswith(str(path_of(root, ""))) and path.endswith(".safetensors")
        ]


def test_a_mismatch_on_one_rank_is_one_on_all(root: str) -> None:
    """Whoever catches it does the same everywhere."""
    save(root, 1)
    store, met, words = open_store(root), threading.Barrier(2), [b"", b""]

    def load(rank: int) -> StateMismatchError:
        def exchange(data: bytes) -> list[bytes]:
            words[rank] = data
            met.wait(30)
            told = list(words)
            met.wait(30)
            return told

        party, state = Party(rank, 2, exchange), state_of(0)
        if rank == 1:
            state["more"] = torch.ones(1)
        manifest = shared_manifest(store, party, 1, 1)
        with pytest.raises(StateMismatchError) as refused:
            load_together(store, manifest, party, state)
        return refused.value

    with ThreadPoolExecutor(2) as threads:
        mine, own = threads.map(load, (0, 1))
    assert str(own).startswith("the checkpoint of step 1")
    assert str(mine) == f"rank 1: {own}"
    assert "more is not in the checkpoint" in str(mine)


def test_what_goes_wrong_before_the_first_byte_is_told_to_all(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in the load already, and wait for this rank's word."""
    save(root, 1)
    store, met, words, failing = open_store(root), threading.Barrier(2), [b"", b""], threading.local()
    part_of = carrying.part_of

    def failing_part_of(leaf: Any, box: Any) -> torch.Tensor:
        if getattr(failing, "here", False):
            raise MemoryError("no more of it")
        return part_of(leaf, box)

    monkeypatch.setattr(carrying, "part_of", failing_part_of)

    def load(rank: int) -> BaseException | None:
        def exchange(data: bytes) -> list[bytes]:
            words[rank] = data
            met.wait(30)
            told = list(words)
            met.wait(30)
            return told

        failing.here = rank == 1
        party = Party(rank, 2, exchange)
        manifest = shared_manifest(store, party, 1, 1)
        try:
            load_together(store, manifest, party, state_of(0))
        except Exception as e:
            return e
        return None

    with ThreadPoolExecutor(2) as threads:
        mine, own = threads.map(load, (0, 1))
    assert isinstance(own, MemoryError)
    assert isinstance(mine, ElsewhereError)
    assert str(mine) == "rank 1: MemoryError: no more of it"


def test_nothing_of_a_load_holds_on_to_the_state(root: str) -> None:
    """Its memory is free when the caller lets go of it, without waiting for the garbage collector."""
    save(root, 20)
    state = state_of(0)
    seen = weakref.ref(state["w"])
    gc.collect()
    gc.disable()
    try:
        ckpt.load(root, state)
        del state
        assert seen() is None
    finally:
        gc.enable()
