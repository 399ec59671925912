"""What starts leave that die one after the other before any commits: an operator may have it deleted, and nothing else goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surefoot import ckpt
from surefoot.ckpt.keeping import cleaning
from surefoot.ckpt.keeping.cleaning import GcPlan, carry_out, plan_gc
from surefoot.ckpt.manifest import Manifest, encode, manifest_key, object_key, part_key
from surefoot.ckpt.objects import stream
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.saving import upload
from surefoot.ckpt.store import ObjectStore, open_store

HOUR_S = 3600.0


def start(store: ObjectStore, generation: int, step: int, half_nbytes: int = 9) -> None:
    """A start that dies while it saves: two objects and a part record, and a third object half written."""
    create_record(
        store, Record(generation=generation, start=StartRef(), reason="start", created_by=f"t{generation}")
    )
    attempt = f"g{generation}"
    for rank in (0, 1):
        store.create(object_key(generation, step, attempt, rank), b"data")
    store.create(part_key(generation, step, attempt, 0), b"part")
    half = store.upload(object_key(generation, step, attempt, 2), half_nbytes, deadline_s=9)
    half.put(memoryview(b"half"))


def age(root: Path, generation: int, seconds: float) -> None:
    then = time.time() - seconds
    for path in (root / f"gen-{generation:04d}").rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Generations 1 to 3 died two hours ago and longer, 4 is the newest start; none has committed."""
    store = open_store(tmp_path)
    for generation in (1, 2, 3, 4):
        start(store, generation, 10)
        age(tmp_path, generation, (6 - generation) * HOUR_S)
    return tmp_path


def named(plan: GcPlan) -> list[int]:
    return [o.attempt.generation for o in plan.abandoned]


def left(root: Path) -> set[int]:
    return {g for g in range(1, 6) if any(p.is_file() for p in (root / f"gen-{g:04d}").rglob("*"))}


def test_without_an_age_nothing_is_taken_for_abandoned(root: Path) -> None:
    plan = plan_gc(open_store(root), None)
    assert (named(plan), plan.nbytes, plan.waiting, plan.waiting_uploads) == ([], 0, 4, 4)
    carry_out(open_store(root), plan)
    assert left(root) == {1, 2, 3, 4}


def test_what_is_older_and_was_followed_by_another_start_goes(root: Path) -> None:
    store = open_store(root)
    before = sorted(root.rglob("*"))
    plan = plan_gc(store, None, abandoned_s=3.5 * HOUR_S)
    assert sorted(root.rglob("*")) == before, "a plan deletes nothing"
    assert named(plan) == [1, 2]
    assert plan.nbytes == 2 * len(b"datadatapart")
    assert (len(plan.unfinished), plan.waiting, plan.waiting_uploads) == (2, 2, 2)
    carry_out(store, plan)
    assert left(root) == {3, 4}
    assert plan_gc(store, None).waiting == 2


def test_what_the_newest_start_is_writing_never_goes(root: Path) -> None:
    """However old: a start that nobody followed may be standing still, and go on."""
    age(root, 4, 1000 * HOUR_S)
    store = open_store(root)
    plan = plan_gc(store, None, abandoned_s=HOUR_S)
    assert named(plan) == [1, 2, 3]
    carry_out(store, plan)
    assert left(root) == {4}


def test_an_attempt_of_which_one_object_is_young_stays(root: Path) -> None:
    """Somebody who does not know yet that another has started."""
    os.utime(root / object_key(1, 10, "g1", 1))
    plan = plan_gc(open_store(root), None, abandoned_s=3.5 * HOUR_S)
    assert named(plan) == [2]


@pytest.mark.parametrize("how", ["an object", "the manifest"])
def test_what_is_gone_on_with_after_the_look_stays(root: Path, how: str) -> None:
    store = open_store(root)
    plan = plan_gc(store, None, abandoned_s=3.5 * HOUR_S)
    if how == "an object":
        store.create(object_key(1, 10, "g1", 3), b"late")
    else:
        manifest = Manifest(generation=1, step=10, attempt="g1", world_size=1)
        store.create(manifest_key(1, 10), encode(manifest))
    carry_out(store, plan)
    assert {o.key for o in store.list("gen-0001/")} >= {
        object_key(1, 10, "g1", 0),
        object_key(1, 10, "g1", 1),
        part_key(1, 10, "g1", 0),
    }
    assert left(root) == {1, 3, 4}


def test_a_committed_step_is_not_abandoned(root: Path) -> None:
    """Of the newest that has committed nothing goes; what is below it is over anyway."""
    store = open_store(root)
    manifest = Manifest(generation=2, step=10, attempt="g2", world_size=1)
    store.create(manifest_key(2, 10), encode(manifest))
    age(root, 2, 5 * HOUR_S)
    plan = plan_gc(store, None, abandoned_s=HOUR_S)
    assert [o.attempt.generation for o in plan.orphans] == [1]
    assert named(plan) == [3]
    carry_out(store, plan)
    assert left(root) == {2, 4}
    assert {o.key for o in store.list("gen-0002/")} >= {manifest_key(2, 10), object_key(2, 10, "g2", 0)}


def test_parts_go_first(root: Path) -> None:
    """A committer that waits for them cannot commit what is being deleted."""
    deleted: list[str] = []
    store = open_store(root)
    delete = store.delete
    store.delete = lambda key: (deleted.append(key), delete(key))[1]  # pyright: ignore[reportAttributeAccessIssue]
    carry_out(store, plan_gc(store, None, abandoned_s=4.5 * HOUR_S))
    assert deleted == [part_key(1, 10, "g1", 0), *(object_key(1, 10, "g1", r) for r in (0, 1))]


# ---------------------------------------------------------------- on any store, by its own clock

MULTIPART_NBYTES = 64 * 2**20
"""An object of this size goes up in parts on S3: one that is begun is found there, as a temporary file is."""


@pytest.fixture(params=["file", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow])])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "root") if request.param == "file" else request.getfixturevalue("s3_url")


@pytest.fixture
def later(
    url: str, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any]
) -> Callable[[ObjectStore], None]:
    """Wait until the store's clock shows another time than all that is there bears; what is there by then is older than an hour
    for gc, what comes is not. (Stores tell times by whole seconds.)"""
    clock = open_store(f"{url}-clock")
    ticks = count()

    def call(store: ObjectStore) -> None:
        begun = [u.begun_at for u in store.unfinished("")]
        newest = max([*(o.modified_at for o in store.list("")), *begun])

        def now() -> float:
            clock.create(f"tick/{(n := next(ticks))}", b"")
            return next(o.modified_at for o in clock.list("tick/") if o.key == f"tick/{n}")

        then = eventually(lambda: (at := now()) > newest and at)
        monkeypatch.setattr(cleaning, "time", SimpleNamespace(time=lambda: then + HOUR_S))

    return call


def generations_left(store: ObjectStore) -> dict[int, int]:
    """How many objects each generation has, with what is unfinished."""
    keys = [o.key for o in store.list("gen-")] + [u.key for u in store.unfinished("gen-")]
    found = [int(key[4:8]) for key in keys]
    return {g: found.count(g) for g in sorted(set(found))}


def test_the_command_deletes_what_is_abandoned_on_any_store(run: Any, url: str, later: Any) -> None:
    store = open_store(url)
    for generation in (1, 2):
        start(store, generation, 10, MULTIPART_NBYTES)
    later(store)
    for generation in (3, 4):
        start(store, generation, 10, MULTIPART_NBYTES)
    assert generations_left(store) == dict.fromkeys((1, 2, 3, 4), 4)
    assert run("gc", url, "--abandoned", "1")[0] == 0
    assert generations_left(store) == dict.fromkeys((1, 2, 3, 4), 4), "nothing without --yes"
    assert run("gc", url, "--abandoned", "1", "--yes")[0] == 0
    assert generations_left(store) == {3: 4, 4: 4}


def test_what_is_gone_on_with_after_the_look_stays_on_any_store(url: str, later: Any) -> None:
    store = open_store(url)
    for generation in (1, 2, 3):
        start(store, generation, 10)
    later(store)
    plan = plan_gc(store, None, abandoned_s=HOUR_S)
    assert named(plan) == [1, 2]
    store.create(object_key(1, 10, "g1", 3), b"late")
    carry_out(store, plan)
    assert [o.key for o in store.list("gen-0001/") if o.key.endswith("part.json")] == [
        part_key(1, 10, "g1", 0)
    ]
    assert store.list("gen-0002/") == []


@pytest.mark.parametrize(
    "at", ["upload.before_objects", "upload.before_finish", "upload.after_object", "ckpt.after_part"]
)
def test_an_attempt_of_a_live_writer_never_goes(url: str, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Whatever the age that is asked for: the newest start is at it. It commits, and every byte is there."""
    store = open_store(url)
    start(store, 1, 5)
    looked: list[list[int]] = []

    def collect_garbage(name: str) -> None:
        if name == at:
            plan = plan_gc(open_store(url), None, abandoned_s=-HOUR_S)
            looked.append(named(plan))
            carry_out(open_store(url), plan)

    monkeypatch.setattr(upload, "failpoint", collect_garbage)
    monkeypatch.setattr(stream, "failpoint", collect_garbage)
    with ckpt.Checkpointer(url, start_over=True) as c:
        c.save(10, {"w": torch.arange(1000.0)}, blocking=True)
    assert looked == [[1]], "gc was there, and took what is dead alone"
    assert ckpt.verify(url, 10).ok
