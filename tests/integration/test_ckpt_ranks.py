"""Real ranks over gloo: saved on one layout, loaded on others, every element in its place; failures are everybody's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "ckpt_ranks.py"


def play(root: str, *acts: str) -> None:
    """Run acts one after the other, in a process of their own."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(SCRIPT), root, *acts]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-8000:]


def test_fsdp_on_4_ranks_loads_on_2_3_1_and_4(tmp_path: Path) -> None:
    root = (tmp_path / "root").as_uri()
    play(root, "save_fsdp:4", "load_fsdp:2", "load_fsdp:3", "load_fsdp:1", "load_fsdp:4", "load_plain:1")


@pytest.mark.s3
def test_fsdp_on_4_ranks_loads_on_3_from_s3(s3_url: str) -> None:
    play(s3_url, "save_fsdp:4", "load_fsdp:3")


def test_fsdp_and_tensor_parallel_load_in_each_other(tmp_path: Path) -> None:
    play(
        (tmp_path / "a").as_uri(), "save_fsdp_tp:4", "load_fsdp_tp:4", "load_fsdp_even:3", "load_plain_even:1"
    )
    play((tmp_path / "b").as_uri(), "save_fsdp_even:3", "load_fsdp_tp:4")


def test_a_ddp_script_loads_in_fsdp(tmp_path: Path) -> None:
    play((tmp_path / "root").as_uri(), "save_ddp:2", "load_plain:1", "load_fsdp:3")


def test_boxes_are_where_torch_puts_them(tmp_path: Path) -> None:
    play((tmp_path / "root").as_uri(), "check_placements:4", "check_fsdp_over_tp:6")


@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.s3)])
def test_checkpointer_on_plain_ranks(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    root = request.getfixturevalue("s3_url") if where == "s3" else (tmp_path / "root").as_uri()
    play(root, "checkpointer:3")


def test_all_ranks_fall_back_to_the_same_step(tmp_path: Path) -> None:
    play((tmp_path / "root").as_uri(), "fall_back_together:3")


def test_a_failure_on_one_rank_is_everybodys_and_the_next_save_works(tmp_path: Path) -> None:
    play((tmp_path / "root").as_uri(), "failures:2")
