"""Saves on real ranks: killed uploaders and ranks, late words, scripts that end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import RankHost

from surefoot import ckpt
from surefoot.ckpt import channel
from surefoot.ckpt.saving import flight

pytestmark = pytest.mark.slow

Ranks = Callable[..., list[Any]]
EVERYWHERE = pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.s3)])


def root_of(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("s3_url") if where == "s3" else (tmp_path / "root").as_uri()


@EVERYWHERE
@pytest.mark.parametrize(
    "rounds", [15, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_a_save_and_a_barrier_in_every_step(
    rounds: int, where: str, ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """CKP-21."""
    root = root_of(where, request, tmp_path)
    ranks(4, "saving_acts:save_at_every_step", root, rounds, timeout_s=1700)


@EVERYWHERE
def test_an_uploader_that_is_killed(
    where: str, ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """CKP-22."""
    took = ranks(4, "saving_acts:uploader_is_killed", root_of(where, request, tmp_path))
    assert max(took) < 10


@EVERYWHERE
@pytest.mark.parametrize("victim", [2, 0])
def test_a_rank_that_is_killed(
    victim: int, where: str, rank_host: RankHost, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """CKP-22's sibling: the process of a rank dies in the middle of a save. Here with quicker beats."""
    assert channel.SILENT_S + flight.BEAT_S < 10
    root = root_of(where, request, tmp_path)
    running = rank_host.start(3, "saving_acts:rank_is_killed", root, victim)
    running._killed.add(victim)
    ended = running.wait(30)
    assert [e.code for e in ended] == [-9 if r == victim else 0 for r in range(3)], "\n".join(map(str, ended))


@pytest.mark.parametrize("when", ["before", "during"])
def test_rank_0_is_stopped(when: str, rank_host: RankHost, eventually: Any, tmp_path: Path) -> None:
    """Not killed, so no connection breaks: the others name it all the same, long before the channel's timeout is over."""
    running = rank_host.start(3, "saving_acts:rank_0_is_stopped", (tmp_path / "root").as_uri(), when)
    try:
        eventually(lambda: all("named" in running.log(r) for r in (1, 2)), within_s=40)
    finally:
        running.kill(0)
    ended = running.wait(10)
    assert [e.code for e in ended] == [-9, 0, 0], "\n".join(map(str, ended))


def test_a_step_that_is_committed_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks(2, "saving_acts:save_a_step_again", (tmp_path / "root").as_uri())
    assert all("step 2 is committed already" in t for of_rank in told for t in of_rank), told
    assert ckpt.steps(tmp_path / "root") == [1, 2]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_closes_while_others_save(leaver: int, ranks: Ranks, tmp_path: Path) -> None:
    """Only some ranks call save, the commonest slip: they are told at once, and not when a timeout of minutes is over."""
    ranks(3, "saving_acts:one_rank_closes", (tmp_path / "root").as_uri(), leaver)


@EVERYWHERE
def test_late_words_of_an_attempt_that_was_given_up(
    where: str, ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """CKP-24."""
    ranks(2, "saving_acts:late_words", root_of(where, request, tmp_path))


@EVERYWHERE
def test_planning_needs_no_collective_and_no_device_memory(
    where: str, ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """CKP-26."""
    ranks(4, "saving_acts:no_collective_and_no_device", root_of(where, request, tmp_path))


@EVERYWHERE
def test_hsdp_with_tp_where_one_rank_cannot_write(
    where: str, ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """CKP-07."""
    ranks(8, "saving_acts:hsdp_and_tp", root_of(where, request, tmp_path))


@pytest.mark.s3
def test_a_part_that_is_never_answered(ranks: Ranks, s3_proxy: Any, s3_faults: Any) -> None:
    """CKP-37: the save has a deadline; the error names rank, key and upload on all ranks; training has gone on meanwhile."""
    fault = s3_proxy.fault("UploadPart", s3_faults.stall(), key="r00001", part=2, times=None)
    told = ranks(2, "saving_acts:save_that_is_never_answered", s3_proxy.root, 4.0)
    fault.stop()
    assert fault.fired >= 1
    for steps, words in told:
        assert steps >= 10, "training went on"
        assert re.search(r"r00001-0\.safetensors.*part 2 of upload \w+", words), told
    assert "rank 1" in told[0][1]


TOLD = {
    "the first": ("", ""),
    "tensors differ": ("ReplicasDifferError", "NoneType"),
    "values differ": ("ReplicasDifferError", "NoneType"),
    "a tensor or a value": ("ReplicasDifferError", "NoneType"),
    "cursors differ": ("ReplicasDifferError", "NoneType"),
    "shapes differ": ("StateError", "NoneType"),
    "one rank's state": ("StateError", "NoneType"),
    "one rank's cursor": ("StateError", "NoneType"),
    "one rank's state_dict": ("CommitError", None),
    "steps differ": ("CkptUserError", "NoneType"),
    "committed already": ("CkptUserError", "NoneType"),
    "one rank's upload": ("CommitError", None),
    "the object store": ("CommitError", "ObjectStoreDeniedError"),
    "the last": ("", ""),
    "stale": ("StaleStartError", "NoneType"),
    "not newer": ("CkptUserError", "NoneType"),
    "no generation": ("CommitError", "ObjectStoreDeniedError"),
}
"""What all ranks raise, and because of what; None: the cause is known as it was on one rank alone."""


@pytest.mark.parametrize("blocking", [False, True])
def test_all_ranks_raise_the_same(blocking: bool, ranks: Ranks, tmp_path: Path) -> None:
    """A loop that goes on after CommitError goes on everywhere, or nowhere."""
    told = ranks(2, "saving_acts:told_by_all", (tmp_path / "root").as_uri(), blocking)
    for of_rank in told:
        found = {name: (kind, cause if TOLD[name][1] is not None else None) for name, kind, cause in of_rank}
        assert found == TOLD


ENDS = {
    "committed_at_exit": (0, ""),
    "failed_at_exit": (1, "the save of step 1 failed"),
    "failed_and_noticed": (0, "noticed"),
    "failed_before_the_next": (1, "FailpointError"),
    "interrupted": (-2, "step 1 was still being saved"),
    "raised_without_close": (1, "ZeroDivisionError"),
    "failed_in_a_child": (41, "the save of step 1 failed"),
}


@EVERYWHERE
def test_the_end_of_a_script(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """CKP-23: the exit code, what is said, how long it takes, and that no process is left behind."""
    script = Path(__file__).parent / "exit_cases.py"
    root = root_of(where, request, tmp_path)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, str(script), root, *ENDS], capture_output=True, text=True, env=environ, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    found = {line.split(" ", 4)[0]: line.split(" ", 4)[1:] for line in ran.stdout.splitlines()}
    assert found.keys() == ENDS.keys(), ran.stdout
    for name, (code, words) in ENDS.items():
        assert int(found[name][0]) == code, (name, found[name])
        assert float(found[name][1]) < 60, (name, found[name])
        assert found[name][2] == "0", ("a process is left behind", name, found[name])
        assert words in found[name][3], (name, found[name])
    assert [name for name in ENDS if ckpt.steps(f"{root}/{name}")] == ["committed_at_exit"]
