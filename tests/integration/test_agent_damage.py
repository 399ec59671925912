"""A committed step that turns out damaged, under the agent: found by ranks, told by name, set aside, and left behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.ckpt.loading.restore import committed_rows
from surefoot.ckpt.manifest import ManifestRef
from surefoot.ckpt.record import lineage, list_manifests, read_records
from surefoot.ckpt.store import ObjectStore, open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

JOB = """
[job]
name = "tiny"
steps = {steps}
root = "{root}"
[program]
train = "cli_jobs:{train}"
data = "cli_jobs:data"
params = {{ text = "{text}" }}
[layout]
nodes = 2
ranks_per_node = 1
[checkpoint]
every_steps = 5
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    rows = [f"row {i} " + "x" * (i % 17) for i in range(400)]
    pq.write_table(pa.table({"text": rows}), folder / "part-0.parquet", row_group_size=50)
    return folder


def line_of(store: ObjectStore) -> list[ManifestRef]:
    return lineage(read_records(store), list_manifests(store))


def flip_a_bit(folder: Path) -> Path:
    """In the data of one object of a checkpoint, at its end; returns the object's path."""
    path = sorted(folder.glob("*/*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_a_damaged_step_is_told_set_aside_and_left_behind(
    home: Any, eventually: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    """The run ends, and with it all node memory; a bit of the newest step flips. Run again, ranks find it, and the job goes on from
    the step before: once, at once, told why. The damaged step stays as it is."""
    root, job, here = tmp_path / "objects", tmp_path / "job.toml", {"PYTHONPATH": str(Path(__file__).parent)}
    job.write_text(JOB.format(steps=1000, root=root, train="slow", text=text))
    store = open_store(root)
    run = home.start("run", str(job), **here)
    eventually(lambda: root.exists() and len(line_of(store)) >= 3, within_s=90)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err

    *_, before, newest = line_of(store)
    generations = max(read_records(store))
    folder = root / Path(newest.key).parent
    damaged = flip_a_bit(folder)
    objects = {path: path.read_bytes() for path in folder.glob("*/*")}

    job.write_text(JOB.format(steps=newest.step + 7, root=root, train="quick", text=text))
    again = home.call("run", str(job), "--json", **here)
    assert again.returncode == 0, again.stderr
    assert home.left() == []

    tried, went_on = json.loads(again.stdout)["generations"][generations:]
    assert (tried["start_step"], tried["kind"]) == (newest.step, "resume")
    assert (went_on["start_step"], went_on["kind"]) == (before.step, "start_failed")
    key = str(damaged.relative_to(root))
    assert f"step {newest.step} is passed over: set aside as damaged: " in went_on["reason"]
    assert key in went_on["reason"]
    incident = json.loads(home.call("why", "last", str(job), "--json").stdout)
    assert (incident["fault"], incident["cause"]) == ("step_damaged", "infrastructure")
    assert incident["start"]["step"] == before.step
    assert key in home.call("events", str(job)).stdout

    assert key in json.loads((folder / "aside.json").read_text())["about"]
    assert {path: path.read_bytes() for path in objects} == objects

    line = [(m.generation, m.step) for m in line_of(store)]
    assert (newest.generation, newest.step) not in line
    assert line[-1] == (generations + 2, newest.step + 7)
    rows = [(row.step, row.dp_rank) for row in committed_rows(store)]
    assert rows == [(step, rank) for step in range(1, newest.step + 8) for rank in range(2)]
