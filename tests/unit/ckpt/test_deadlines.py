"""The deadline of a save bounds each call of the object store that it makes: none of them has its own patience on top."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from ckpt_faulty import FaultyStore
from ckpt_images import arrays, make_images

from surefoot.ckpt import tiers
from surefoot.ckpt.channel import Solo
from surefoot.ckpt.objects.s3 import S3ObjectStore
from surefoot.ckpt.objects.s3errors import Call
from surefoot.ckpt.objects.s3session import Patience
from surefoot.ckpt.objects.stream import Streaming, create_or_recognise, stream_object
from surefoot.ckpt.saving.commit import ANSWER_S
from surefoot.ckpt.saving.generation import OwnGeneration
from surefoot.ckpt.saving.upload import Attempt
from surefoot.ckpt.saving.uploader import NOTE_S, leave_failure
from surefoot.ckpt.store import (
    MemoryObjectStore,
    ObjectStore,
    ObjectStoreUnavailableError,
    ObjectUnknownError,
    until,
)


class Asked(Exception):
    """The call would have been made."""


class NoSession:
    """Stands for the S3 session: keeps how long each call may take, and makes none."""

    def __init__(self) -> None:
        self.patience: list[Patience] = []

    def run(self, attempt: object, call: Call, patience: Patience) -> Any:
        self.patience.append(patience)
        raise Asked

    def wait(self, coroutine: Any, call: Call, patience: Patience) -> Any:
        coroutine.close()
        self.run(None, call, patience)


def upload(store: ObjectStore) -> None:
    store.upload("k", 2**30, deadline_s=600.0)


def small_upload(store: ObjectStore) -> None:
    one = store.upload("k", 4, deadline_s=600.0)
    one.put(memoryview(b"data"))
    one.finish()


CALLS: list[Callable[[ObjectStore], object]] = [
    lambda s: s.create("k", b"data"),
    lambda s: s.read("k"),
    lambda s: s.read_into("k", 0, [memoryview(bytearray(2**20))]),
    lambda s: s.list("a/"),
    lambda s: s.delete("k"),
    lambda s: s.unfinished("a/"),
    upload,
    small_upload,
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("left_s", [2.0, -1.0])
def test_no_call_on_s3_outlasts_what_was_said(call: Callable[[ObjectStore], object], left_s: float) -> None:
    session: Any = NoSession()
    store = S3ObjectStore("b", "p", deadline_s=30.0, session=session)
    end = time.monotonic() + left_s
    bounded = until(until(store, end), end + 100)
    with pytest.raises(Asked):
        call(bounded)
    with pytest.raises(Asked):
        call(store)
    late, own = session.patience
    assert late.deadline <= end
    assert own.deadline > end + 10, "the store itself has its own patience"


class Bounded(FaultyStore):
    """Keeps until when it was to answer, and when it was asked last without that."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []
        self.unbounded: list[str] = []

    def until(self, deadline: float) -> ObjectStore:
        self.ends.append(deadline)
        return _Within(self)

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self.unbounded.append(key)
        super().create(key, data)


class _Within(FaultyStore):
    """The same objects."""

    def __init__(self, outer: Bounded) -> None:
        super().__init__()
        self._objects, self._times, self._uploads = outer._objects, outer._times, outer._uploads
        self.script = outer.script


A = "0123456789abcdef"
PLACE = Attempt(generation=1, step=20, attempt=A)


def test_what_a_save_stores_and_commits_is_bounded() -> None:
    store, began = Bounded(), time.monotonic()
    OwnGeneration(store, start_over=False).open(20, Solo(), deadline_s=5.0)
    for writer, image in enumerate(make_images(arrays(), 2, step=20)):
        tiers.upload_images(store, [image], generation=1, step=20, attempt=A, writer=writer, deadline_s=6.0)
    done = tiers.commit(store, generation=1, step=20, attempt=A, writers=2, deadline_s=7.0, facts={})
    assert isinstance(done, tiers.Committed)
    leave_failure(store, PLACE, 5, "for the record")
    now = time.monotonic()
    assert store.unbounded == []
    for end, allowed in zip(store.ends, (5.0, 6.0, 6.0, 7.0 + ANSWER_S, NOTE_S), strict=True):
        assert began + allowed <= end <= now + allowed


# ---------------------------------------------------------------- what is said then


class Away(MemoryObjectStore):
    """Takes what is created, answers nothing, and cannot be asked afterwards."""

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        raise ObjectUnknownError(f"{key}: the last words")

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        raise ObjectStoreUnavailableError("it cannot be read back")


def test_the_error_is_the_creations_and_not_that_nobody_could_look() -> None:
    with pytest.raises(ObjectUnknownError, match="k: the last words"):
        create_or_recognise(Away(), "k", b"data")
    what = Streaming(key="k", header=b"h", data_nbytes=4, block_nbytes=4, deadline_s=1.0)
    with pytest.raises(ObjectUnknownError, match="k: the last words"):
        stream_object(Away(), what, lambda _: [memoryview(b"data")])


def test_a_commit_names_the_error_that_was_in_the_way() -> None:
    store = FaultyStore()
    store.list_errors = [ObjectStoreUnavailableError("503 to everything")] * 1000
    given_up = tiers.commit(store, generation=1, step=20, attempt=A, writers=1, deadline_s=0.02, facts={})
    assert isinstance(given_up, tiers.GivenUp)
    assert given_up.cause is not None
    assert isinstance(given_up.cause.__cause__, ObjectStoreUnavailableError)
