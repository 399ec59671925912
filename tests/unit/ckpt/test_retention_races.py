"""CKP-41: retention and sweeping beside a job that saves, is replaced, verifies, and has damaged checkpoints.

Three threads work on one root with seeded pauses before each of their calls: a saver (given-up attempts, a new generation
halfway, an attempt of the old one that is in flight until the new one has committed), a cleaner, and a verifier that finds
some steps damaged. Whatever they do, a guard in front of the store
checks every deletion: never the newest committed, the newest verified, an exempt step, or an attempt in flight; a manifest
before its data; nothing that Surefoot did not write.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ckpt_images import arrays, make_images

from surefoot.ckpt import tiers
from surefoot.ckpt.format.flags import raise_flag
from surefoot.ckpt.keeping.cleaning import apply_retention, carry_out, plan_gc, sweep_orphans
from surefoot.ckpt.keeping.retention import Retention
from surefoot.ckpt.manifest import (
    Manifest,
    ManifestRef,
    attempt_prefix,
    decode,
    manifest_key,
    object_key,
    step_prefix,
)
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import ObjectMissingError, ObjectStore, open_store
from surefoot.ckpt.tools.inspect import steps
from surefoot.ckpt.tools.verifying import verify_step

EXEMPT, DAMAGED = {30}, {60, 70}
STEPS = range(10, 101, 10)
FOREIGN = ("gen-0001/step-0000000010/notes.txt", "README")


class Guard:
    """What everybody knows, and the judge of deletions."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.lock = threading.RLock()
        self.in_flight: set[str] = set()
        self.committed: list[ManifestRef] = []
        self.verified: list[ManifestRef] = []
        self.found_damaged: dict[int, threading.Event] = {step: threading.Event() for step in DAMAGED}
        self.deleted: list[str] = []
        self.wrong: list[str] = []

    def judge(self, key: str) -> None:
        with self.lock:
            self.deleted.append(key)
            if key.endswith(("/verified.json", "/aside.json")):
                return  # a note, which whoever verifies may take back; nothing that a load needs
            guarded = {r.step: "exempt" for r in self.committed if r.step in EXEMPT}
            if self.verified:
                guarded[max(self.verified).step] = "the newest verified"
            guarded[max(self.committed).step] = "the newest committed"
            for ref in self.committed:
                if key.startswith(step_prefix(ref.generation, ref.step)) and ref.step in guarded:
                    if self._of_another_attempt(key, ref):
                        continue
                    self.wrong.append(f"{key} of {guarded[ref.step]}")
            if any(key.startswith(prefix) for prefix in self.in_flight):
                self.wrong.append(f"{key} of an attempt in flight")
            if key in FOREIGN:
                self.wrong.append(f"{key} is none of ours")
            if (m := re.match(r"gen-(\d+)/step-(\d+)/([^/]+)/", key)) and self._named(m) == m[3]:
                self.wrong.append(f"{key} before its manifest")

    def _named(self, m: re.Match[str]) -> str | None:
        try:
            key = manifest_key(int(m[1]), int(m[2]))
            return decode(Manifest, self.store.read(key), key=key).attempt
        except ObjectMissingError:
            return None

    def _of_another_attempt(self, key: str, ref: ManifestRef) -> bool:
        return "/dead-" in key.removeprefix(step_prefix(ref.generation, ref.step)[:-1])


class Paced:
    """A store whose calls wait a seeded moment first, and whose deletions are judged."""

    def __init__(self, guard: Guard, seed: str) -> None:
        self._guard = guard
        self._draw = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._guard.store, name)
        if not callable(call):
            return call

        def paced(*args: Any, **options: Any) -> Any:
            time.sleep(self._draw.random() * 0.002)  # the seeded timing that the row asks for
            if name == "delete":
                self._guard.judge(args[0])
            return call(*args, **options)

        return paced


def save(guard: Guard, store: Any, generation: int, step: int, attempt: str, *, commits: bool = True) -> None:
    prefix = attempt_prefix(generation, step, attempt)
    with guard.lock:
        guard.in_flight.add(prefix)
    images = make_images(arrays(), 2, generation=generation, step=step)
    tiers.upload_images(
        store, images, generation=generation, step=step, attempt=attempt, writer=0, deadline_s=30
    )
    if commits:
        if generation == 2:
            guard.in_flight.discard(attempt_prefix(1, 45, "late"))  # from its commit on, generation 1 is over
        outcome = tiers.commit(
            store, generation=generation, step=step, attempt=attempt, writers=1, deadline_s=30, facts={}
        )
        assert isinstance(outcome, tiers.Committed | tiers.Fenced), outcome
        if isinstance(outcome, tiers.Committed):
            key = manifest_key(generation, step)
            with guard.lock:
                guard.committed.append(ManifestRef(step=step, generation=generation, key=key))
    with guard.lock:
        guard.in_flight.discard(prefix)


def saver(guard: Guard, store: Any, raw: ObjectStore) -> None:
    """Ten steps; after the fourth it is replaced by a new generation, which goes on."""
    generation = 1
    for step in STEPS:
        if step == 50:
            late = attempt_prefix(1, 45, "late")
            save(guard, store, 1, 45, "late", commits=False)
            guard.in_flight.add(late)  # its manifest may still come, until generation 2 has committed
            start = StartRef(generation=1, step=40)
            create_record(store, Record(generation=2, start=start, reason="rank_exit", created_by="t2"))
            generation = 2
        save(guard, store, generation, step, f"dead-{step}", commits=False)  # given up
        save(guard, store, generation, step, f"good-{step}")
        ref = ManifestRef(step=step, generation=generation, key=manifest_key(generation, step))
        if step in EXEMPT:
            raise_flag(store, ref, "kept", "by name")
        if step in DAMAGED:
            spoil(raw, ref)
            assert guard.found_damaged[step].wait(30), "the newest committed step fails its verification"


def spoil(raw: ObjectStore, ref: ManifestRef) -> None:
    """One object of the step is not what it was."""
    key = object_key(ref.generation, ref.step, f"good-{ref.step}", 0)
    data = bytearray(raw.read(key))
    data[-1] ^= 1
    raw.delete(key)
    raw.create(key, data)


def cleaner(guard: Guard, store: Any, stop: threading.Event) -> int:
    rounds = 0
    while not stop.is_set():
        rounds += 1
        generation = max((r.generation for r in list(guard.committed)), default=0)
        if not generation:
            continue
        apply_retention(store, Retention(newest=2), generation=generation)
        sweep_orphans(store)
        if rounds % 3 == 0:
            carry_out(store, plan_gc(store, None))
    return rounds


def verifier(guard: Guard, store: Any, stop: threading.Event) -> None:
    while not stop.is_set():
        with guard.lock:
            ref = guard.committed[-1] if guard.committed else None
        if ref is None:
            continue
        try:
            report = verify_step(store, ref.step)
        except LookupError:
            continue  # gone by now, or meanwhile: a newer one exists
        assert report.step == ref.step
        if not report.ok:
            assert ref.step in DAMAGED, report
            guard.found_damaged[ref.step].set()
        elif ref.step not in DAMAGED:
            with guard.lock:
                guard.verified.append(ref)


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run them in threads; the first is the one that ends by itself. Raises what any of them raised."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    if errors:
        raise errors[0]
    return results


def one_round(url: str, seed: int) -> None:
    raw = open_store(url)
    guard = Guard(raw)
    stores = [Paced(guard, f"{seed} {who}") for who in ("saver", "cleaner", "verifier")]
    create_record(raw, Record(generation=1, start=StartRef(), reason="first_start", created_by="t1"))
    for key in FOREIGN:
        raw.create(key, b"the user's")
    stop = threading.Event()

    def saves() -> None:
        try:
            saver(guard, stores[0], raw)
        finally:
            stop.set()

    _, rounds, _ = together(
        saves, lambda: cleaner(guard, stores[1], stop), lambda: verifier(guard, stores[2], stop)
    )
    assert not guard.wrong, guard.wrong
    assert rounds > 2
    apply_retention(raw, Retention(newest=2), generation=2)
    sweep_orphans(raw)
    check_the_end(raw, guard, url)
    assert any("/late/" in key for key in guard.deleted), "and what the old generation left, once it was over"
    assert any("/dead-" in key for key in guard.deleted), "an orphan was swept while saves went on"
    assert any(key.endswith("manifest.json") for key in guard.deleted), "retention fired while saves went on"


def check_the_end(raw: ObjectStore, guard: Guard, url: str) -> None:
    left = steps(url)
    newest_verified = max((r.step for r in guard.verified), default=None)
    wanted = {90, 100, *EXEMPT} | ({newest_verified} if newest_verified else set())
    assert set(left) >= wanted
    for step in left:
        assert verify_step(raw, step).ok == (step not in DAMAGED)
    assert all(raw.read(key) for key in FOREIGN)
    assert not [
        o.key for o in raw.list("gen-0001/") if "/dead-" in o.key and not o.key.endswith("ledger.json")
    ]


SEEDS: Sequence[int] = (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_that_is_needed_is_ever_deleted_on_files(tmp_path: Path, seed: int) -> None:
    one_round((tmp_path / "root").as_uri(), seed)


@pytest.mark.slow
@pytest.mark.s3
def test_nothing_that_is_needed_is_ever_deleted_on_s3(s3_url: str) -> None:
    one_round(s3_url, 3)


def test_the_guard_sees_what_it_should(tmp_path: Path) -> None:
    """The negative control."""
    raw = open_store((tmp_path / "root").as_uri())
    guard = Guard(raw)
    store = Paced(guard, "0")
    create_record(raw, Record(generation=1, start=StartRef(), reason="first_start", created_by="t1"))
    save(guard, store, 1, 10, "good-10")
    store.delete(object_key(1, 10, "good-10", 0))
    assert [w.partition(" ")[2] for w in guard.wrong] == ["of the newest committed", "before its manifest"]
