"""CKP-30 on four real ranks: step 20 is committed, and in the save of a later step one rank's store fails, at each phase in
turn. Nothing is committed and every rank raises, or all is well everywhere; step 20 is untouched, and the next save works.

Every operation of every actor fails in tests/unit/ckpt/test_commit_boundaries.py; here are ranks, uploaders and their talk.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from kill_points import Kill, Point, points_of

from surefoot.ckpt.record import lineage, list_manifests, read_records
from surefoot.ckpt.store import open_store
from surefoot.ckpt.tools.verifying import verify_step

pytestmark = pytest.mark.slow

WORLD = 4
ROLE = re.compile(r"rank(2|0)\b.*")
"""The rank that fails, with its uploader; and the one that commits."""


def phases(points: list[Point]) -> list[Point]:
    """Of rank 2 what it stores, of rank 0 the commit: making the file, writing it, making it durable, its name."""
    mine = [p for p in points if p.role.startswith("rank2") and "gen-" in p.name]
    commits = [p for p in points if p.role.startswith("rank0") and p.name.endswith("manifest.json")]
    chosen = [p for p in (*mine, *commits) if p.what in ("open", "write", "fsync", "link") and p.nth == 1]
    return [p for p in chosen if "." in p.name]


def moved(point: Point, step: int) -> Kill:
    name = point.name.replace("step-0000000040", f"step-{step:010d}")
    return Kill(role=point.role, what=point.what, name=name, nth=1, errno=errno.EIO)


PHASES_ON_S3 = {
    41: ("PutObject", "r00002-0.safetensors", "rank 2"),
    42: ("PutObject", "n00002.part.json", "rank 2"),
    43: ("GetObject", "n00003.part.json", "n00003.part.json"),
    44: ("PutObject", "manifest.json", "manifest.json"),
}
"""By the step that is saved: which request is refused, and what all are told besides: the rank, or what the commit of them all failed at."""


@pytest.mark.s3
def test_one_rank_fails_at_each_phase_on_s3(
    ranks: Callable[..., list[Any]], s3_proxy: Any, s3_faults: Any
) -> None:
    denied = s3_faults.status(403, "AccessDenied")
    faults = {
        step: s3_proxy.fault(operation, denied, key=f"step-{step:010d}/*{name}", times=None)
        for step, (operation, name, _) in PHASES_ON_S3.items()
    }
    heard = ranks(WORLD, "kill_acts:fail_each", s3_proxy.root, list(faults))
    assert all(fault.fired for fault in faults.values())
    for rank, words in enumerate(heard):
        for i, (_, _, named) in enumerate(PHASES_ON_S3.values()):
            assert "denied" in words[i].lower(), (rank, words[i])
            assert named in words[i] or named == f"rank {rank}", (rank, words[i])
    store = open_store(s3_proxy.root)
    assert [m.step for m in lineage(read_records(store), list_manifests(store))] == [20, 45]
    for step in (20, 45):
        assert verify_step(store, step).problems == ()


def test_one_rank_fails_at_each_phase(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    recorded = str(tmp_path / "recorded")
    ranks(WORLD, "kill_acts:record", (tmp_path / "a").as_uri(), recorded)
    kills = [moved(p, 40 + i) for i, p in enumerate(phases(points_of(recorded)))]
    assert len(kills) >= 12, "data, part and manifest, each with its four phases or so"

    root = (tmp_path / "b").as_uri()
    heard = ranks(WORLD, "kill_acts:fail_at", root, str(tmp_path / "failed"), [asdict(k) for k in kills])
    store = open_store(root)
    steps = [m.step for m in lineage(read_records(store), list_manifests(store))]
    assert (steps[0], steps[-1]) == (20, 40 + len(kills))
    for step in (20, steps[-1]):
        assert verify_step(store, step).problems == ()
    for i, kill in enumerate(kills):
        fired, words = {h[i][0] for h in heard}, [h[i][1] for h in heard]
        assert fired == {True}, kill
        committed = 40 + i in steps
        assert not committed, kill
        assert all(words), (kill, words)
