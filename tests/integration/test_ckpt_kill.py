"""SIGKILL at every edge of a commit, on files and on a real S3 server: the newest committed step stays whole and readable,
what was acknowledged is there, what a dead attempt left behind is passed over, and the next start goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import RankHost

from surefoot.ckpt.record import lineage, list_manifests, read_records
from surefoot.ckpt.store import ObjectStore, open_store
from surefoot.ckpt.tools.verifying import verify_step

pytestmark = pytest.mark.slow

EDGES = {
    # edge of the second save: is its step on the lineage afterwards?
    "upload.after_object=crash@1": False,
    "upload.after_object=crash@2": False,
    "ckpt.before_part=crash@1": False,
    "ckpt.after_part=crash@1": False,
    "ckpt.before_part=crash@2": False,
    "ckpt.after_part=crash@2": False,
    "ckpt.before_manifest=crash": False,
    "ckpt.after_manifest=crash": True,
    "ckpt.before_ack=crash": True,
}
FILE_EDGES = {
    # The creations of the second save on files: two data objects with their parts, the ledger, the manifest.
    **{f"store.before_link=crash@{n}": False for n in range(1, 7)},
    **{f"store.after_link=crash@{n}": n == 6 for n in range(1, 7)},
}


Save = Callable[..., tuple[int, list[int]]]


@pytest.fixture
def save(rank_host: RankHost) -> Save:
    """Runs the victim; returns its exit status and the steps it acknowledged."""

    def run(
        root: str, generation: int, start: tuple[int, int], steps: list[int], failpoint: str = ""
    ) -> tuple[int, list[int]]:
        (ended,) = rank_host.start(1, "ckpt_victim:save", root, generation, start, steps, failpoint).wait()
        assert ended.code in (0, -signal.SIGKILL), str(ended)
        return ended.code, [int(line) for line in ended.log.split()]

    return run


def counting(store: ObjectStore) -> list[tuple[int, int]]:
    return [(m.generation, m.step) for m in lineage(read_records(store), list_manifests(store))]


def check(save: Save, root: str, failpoint: str, committed: bool) -> None:
    status, acknowledged = save(root, 1, (0, 0), [20, 40], failpoint)
    assert status == -signal.SIGKILL, "the fault fired"
    assert acknowledged == [20], "and the step was not acknowledged"
    store = open_store(root)
    expected = [(1, 20), (1, 40)] if committed else [(1, 20)]
    assert counting(store) == expected
    for _, step in expected:
        assert verify_step(store, step).problems == ()

    generation, step = expected[-1]
    status, acknowledged = save(root, 2, (generation, step), [step + 20])
    assert (status, acknowledged) == (0, [step + 20])
    assert counting(store) == [*expected, (2, step + 20)]
    assert verify_step(store, None).problems == ()


@pytest.mark.parametrize("failpoint", [*EDGES, *FILE_EDGES])
def test_killed_on_files(save: Save, failpoint: str, tmp_path: Path) -> None:
    check(save, (tmp_path / "root").as_uri(), failpoint, (EDGES | FILE_EDGES)[failpoint])


@pytest.mark.s3
@pytest.mark.parametrize("failpoint", EDGES)
def test_killed_on_s3(save: Save, failpoint: str, s3_url: str) -> None:
    check(save, s3_url, failpoint, EDGES[failpoint])


@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.s3)])
def test_killed_at_a_repeated_attempt_at_the_same_step(
    save: Save, where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The remains of a dead attempt at step 40 do not complete, or get in the way of, the next generation's."""
    root = request.getfixturevalue("s3_url") if where == "s3" else (tmp_path / "root").as_uri()
    save(root, 1, (0, 0), [20, 40], "ckpt.after_part=crash@1")
    save(root, 2, (1, 20), [40], "ckpt.before_manifest=crash")
    store = open_store(root)
    assert counting(store) == [(1, 20)]
    assert save(root, 3, (1, 20), [40]) == (0, [40])
    assert counting(store) == [(1, 20), (3, 40)]
    assert verify_step(store, 40).problems == ()


def test_every_edge_was_meant(save: Save, tmp_path: Path) -> None:
    """A negative control: without a failpoint both steps are acknowledged, and on files each creation passes both edges once."""
    status, acknowledged = save((tmp_path / "root").as_uri(), 1, (0, 0), [20, 40])
    assert (status, acknowledged) == (0, [20, 40])
    status, _ = save((tmp_path / "other").as_uri(), 1, (0, 0), [20, 40], "store.before_link=crash@7")
    assert status == 0, "there is no seventh creation in a save"
