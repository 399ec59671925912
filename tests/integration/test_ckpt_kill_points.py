"""SIGKILL of real processes (a rank and its uploader) at every point of a save at which anything is written, and in the
middle of bytes; on files and on a real S3 server (CKP-31, CKP-32). The points come from a recorded run.

Two series: step 40 is saved for the first time, and over the remains of a dead attempt at step 40. After each kill the next
start finds the newest committed step whole, passes the leftovers over, and commits a step of its own; then all is swept.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from kill_points import Kill, Point, Watch, fired, points_of
from ranks import Ended, RankHost

from surefoot.ckpt.keeping.cleaning import carry_out, plan_gc
from surefoot.ckpt.record import lineage, list_manifests, read_records
from surefoot.ckpt.store import ObjectStore, open_store
from surefoot.ckpt.tools.verifying import verify_step

pytestmark = pytest.mark.slow

SEED = 20
PATIENCE_S = 100.0
"""For one victim: a second or two, and over a minute on a machine that is busy with other things."""
KILLED = -9


class Series:
    """Victims that save step 40 on a root where step 20 is committed, one after the other, each on a root of its own."""

    def __init__(self, host: RankHost, folder: Path, make_root: Callable[[int], str], port: int = 0) -> None:
        self._host = host
        self._folder = folder
        self._make_root = make_root
        self._port = port
        self._runs = 0

    def victim(self, kill: Kill | None, world: int = 1) -> tuple[str, str, list[Ended]]:
        """One run, on a root as it was before; returns its root, its log, and how its ranks ended."""
        self._runs += 1
        root = self._make_root(self._runs)
        log = str(self._folder / f"run{self._runs}")
        folder = root.removeprefix("s3://").removeprefix("file://")
        watch = asdict(Watch(log=log, folder=folder, port=self._port))
        words = asdict(kill) if kill else None
        started = self._host.start(world, "kill_acts:save", root, 40, watch, words)
        return root, log, started.wait(PATIENCE_S)

    def record(self, world: int = 1) -> list[Point]:
        root, log, ended = self.victim(None, world)
        assert [e.code for e in ended] == [0] * world, "\n".join(map(str, ended))
        assert require_whole(root) == [20, 40]
        return points_of(log)

    def hit(self, kill: Kill) -> tuple[str, list[int]]:
        """Kill a victim there; returns the root, and what is committed on it."""
        root, log, ended = self.victim(kill)
        assert fired(log), f"{kill} was not come to:\n{ended[0]}"
        assert ended[0].code == KILLED
        line = require_whole(root)
        assert line in ([20], [20, 40])
        assert line == [20, 40] or "acknowledged" not in ended[0].log
        return root, line

    def hit_all(self, kills: Iterable[Kill]) -> None:
        ends = [self.hit(kill) for kill in kills]
        assert {len(line) for _, line in ends} == {1, 2}, "there are points on both sides of the commit"
        self._host.play(1, "kill_acts:go_on", [(root, line[-1]) for root, line in ends], 60, timeout_s=600)
        for root, line in ends:
            assert require_whole(root) == [*line, 60]
            sweep(open_store(root), {*line, 60})


def require_whole(root: str) -> list[int]:
    """The steps on the lineage, every byte of which is as its checksums say."""
    store = open_store(root)
    line = [m.step for m in lineage(read_records(store), list_manifests(store))]
    for step in line:
        assert verify_step(store, step).problems == ()
    return line


def sweep(store: ObjectStore, steps: set[int]) -> None:
    """Nothing is left but what the lineage names."""
    carry_out(store, plan_gc(store, None, off_lineage=True))
    kept = tuple(f"step-{step:010d}/" for step in steps)
    stray = [o.key for o in store.list("gen-") if not o.key.partition("/")[2].startswith(kept)]
    assert stray == []
    assert store.unfinished("gen-") == []
    for step in steps:
        assert verify_step(store, step).problems == ()


def before_each(points: Iterable[Point]) -> list[Kill]:
    """How often a committer has to look for parts is a matter of time: its second look is no point."""
    return [
        Kill(role=p.role, what=p.what, name=p.name, nth=p.nth)
        for p in points
        if p.nth == 1 or "step-0000000040%2F*%2F" not in p.name
    ]


def in_the_middle(points: Iterable[Point], seed: int = SEED) -> list[Kill]:
    """Of everything that carries bytes, after some of them."""
    draw = random.Random(seed)
    return [
        Kill(role=p.role, what=p.what, name=p.name, nth=p.nth, after_nbytes=draw.randrange(1, p.nbytes))
        for p in points
        if p.nbytes > 1
    ]


def before_manifest(points: Iterable[Point]) -> Kill:
    """The last point before the commit: everything else of the attempt is there."""
    last = next(p for p in points if p.name.endswith("/manifest.json") and p.what in ("link", "send"))
    return Kill(role=last.role, what=last.what, name=last.name, nth=last.nth)


# ---------------------------------------------------------------- roots


MakeSeries = Callable[[str], Series]


@pytest.fixture
def on_files(rank_host: RankHost, tmp_path: Path) -> MakeSeries:
    """A series on copies of a root: ``first`` has step 20, ``second`` also the remains of a dead attempt at step 40."""

    def series(name: str) -> Series:
        template = tmp_path / "template"
        rank_host.play(1, "kill_acts:save", template.as_uri(), 20)

        def copy(n: int) -> str:
            return shutil.copytree(template, tmp_path / f"root{n}").as_uri()

        made = Series(rank_host, tmp_path, copy)
        if name == "second":
            root, _ = made.hit(before_manifest(made.record()))
            shutil.rmtree(template)
            shutil.move(root.removeprefix("file://"), template)
        return made

    return series


@pytest.fixture
def on_s3(rank_host: RankHost, tmp_path: Path, s3_server: Any, s3_url: str) -> MakeSeries:
    """Likewise on S3."""

    def series(name: str) -> Series:
        template = f"{s3_url}/template"
        rank_host.play(1, "kill_acts:save", template, 20)
        objects = objects_of(template)

        def copy(n: int) -> str:
            store = open_store(f"{s3_url}/root{n}")
            for key, data in objects.items():
                store.create(key, data)
            return store.root

        made = Series(rank_host, tmp_path, copy, int(s3_server.endpoint.rpartition(":")[2]))
        if name == "second":
            root, _ = made.hit(before_manifest(made.record()))
            objects = objects_of(root)
        return made

    return series


def objects_of(root: str) -> dict[str, bytes]:
    store = open_store(root)
    return {o.key: store.read(o.key) for o in store.list("")}


# ---------------------------------------------------------------- tests


def test_around_every_object_on_files(on_files: MakeSeries) -> None:
    """CKP-31, first series: before and after every name and in the middle of every object's bytes. (All points: soak.)"""
    series = on_files("first")
    points = series.record()
    assert {p.what for p in points} >= {"open", "write", "fsync", "link", "unlink", "mkdir"}
    assert {p.role for p in points} == {"rank0", "rank0's child"}, "the uploader is watched as well"
    names = [p for p in points if p.what == "link" or (p.what == "unlink" and p.nth == 1)]
    series.hit_all([*before_each(names), *in_the_middle(points)])


def test_at_every_name_over_an_older_attempt_on_files(on_files: MakeSeries) -> None:
    """CKP-31, CKP-32, second series: before and after every name."""
    series = on_files("second")
    series.hit_all(before_each(p for p in series.record() if p.what in ("link", "unlink") and p.nth == 1))


@pytest.mark.s3
@pytest.mark.timeout(300)
def test_around_every_object_on_s3(on_s3: MakeSeries) -> None:
    """CKP-31: before and in the middle of every request that makes an object, and around the commit. (All points: soak.)"""
    series = on_s3("first")
    sent = [p for p in series.record() if p.what == "send"]
    puts = [p for p in sent if p.name.startswith("PUT /gen")]
    commit = next(p for p in puts if p.name.endswith("/manifest.json"))
    after = sent[sent.index(commit) + 1 :][:2]
    series.hit_all([*before_each([*puts, *after]), *in_the_middle(puts)])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["first", "second"])
def test_at_every_point_and_random_bytes_on_files(on_files: MakeSeries, name: str, seed: int) -> None:
    """CKP-31, CKP-32: both series."""
    series = on_files(name)
    points = series.record()
    series.hit_all([*before_each(points), *in_the_middle(points, seed)])


@pytest.mark.soak
@pytest.mark.s3
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["first", "second"])
def test_at_every_point_and_random_bytes_on_s3(on_s3: MakeSeries, name: str) -> None:
    """CKP-31, CKP-32: both series."""
    series = on_s3(name)
    points = series.record()
    assert {"PUT", "GET"} <= {p.name.partition(" ")[0] for p in points}
    series.hit_all([*before_each(points), *in_the_middle(points)])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_when_one_of_the_two_dies_alone_on_files(on_files: MakeSeries) -> None:
    """CKP-22 at every point: an uploader that dies is an error with the rank's name; a rank that dies takes its uploader along."""
    series = on_files("first")
    for kill in before_each(series.record()):
        root, log, (ended,) = series.victim(replace(kill, alone=True))
        assert fired(log)
        line = require_whole(root)
        assert line in ([20], [20, 40])
        if "child" in kill.role:
            assert ended.code in (0, 1), str(ended)
            assert ended.code == 0 or "rank 0" in ended.error
            assert line == [20, 40] or ended.code == 1
        else:
            assert ended.code == KILLED
