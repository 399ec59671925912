"""``every = "auto"`` under the agent: rank 0 chooses how often to commit, and the reasoning can be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.ckpt.loading.restore import read_manifest
from surefoot.ckpt.record import list_manifests
from surefoot.ckpt.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

JOB = """
[job]
name = "tiny"
steps = 60
root = "{root}"
[program]
train = "cli_jobs:slow"
data = "cli_jobs:data"
params = {{ text = "{text}" }}
[layout]
nodes = 2
[checkpoint]
every = "auto"
"""


def test_the_interval_is_chosen_and_the_reasoning_shown(
    home: Any, eventually: Callable[..., Any], tmp_path: Path
) -> None:
    """The first step is committed, and measured; `status` then says what was chosen and why, and so does the last manifest."""
    (tmp_path / "text").mkdir()
    pq.write_table(pa.table({"text": ["some words"] * 2000}), tmp_path / "text" / "part-0.parquet")
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(root=tmp_path / "objects", text=tmp_path / "text"))
    run = home.start("run", str(job), PYTHONPATH=str(Path(__file__).parent))

    def told() -> Any:
        result = home.call("status", str(job), "--json")
        nodes = json.loads(result.stdout)["nodes"] if result.returncode == 0 else []
        return [n["note"] for n in nodes if "checkpoints every" in n["note"]]

    (note,) = eventually(told, within_s=90)
    assert "of training, and a fault is expected every 24 h (0 faults in " in note
    _, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    store = open_store(tmp_path / "objects")
    steps = [m.step for m in list_manifests(store)]
    assert (steps[0], steps[-1]) == (1, 60)
    assert "Daly 2006" in read_manifest(store, 1, 60).facts["interval"]
    assert home.left() == []
