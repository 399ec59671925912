"""CKP-39: the object store answers 503 to everything for a while. Steps go on, saves are tried again, it is shown how old the
last commit is and why; afterwards the newest state is committed. Nothing crashes, and saving does not end silently."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from homes import Home
from ranks import RankHost

from surefoot.ckpt.store import ObjectStore, open_store
from surefoot.ckpt.tools.inspect import list_checkpoints
from surefoot.ckpt.tools.verifying import verify_step

pytestmark = [pytest.mark.slow, pytest.mark.s3]

JOB = """
[job]
name = "outage"
steps = 5000
root = "{root}"
[program]
train = "cli_jobs:slow"
data = "cli_jobs:data"
params = {{ text = "{folder}/text" }}
[layout]
nodes = 1
ranks_per_node = 1
[checkpoint]
every_steps = 20
"""


def test_on_ones_own(
    rank_host: RankHost, s3_proxy: Any, s3_faults: Any, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    """Saves that are due while one cannot get through are skipped on all ranks, and the log says why."""
    over = tmp_path / "over"
    running = rank_host.start(2, "outage_acts:train", s3_proxy.root, str(over))

    def reached() -> int:
        return max(map(int, re.findall(r"^step (\d+)$", running.log(0), re.MULTILINE)), default=0)

    store = open_store(s3_proxy.root)
    eventually(lambda: reached() and list_checkpoints(store), within_s=30, what="a first commit")
    fault = s3_proxy.fault("*", s3_faults.status(503, "SlowDown"), times=None)
    at = reached()
    eventually(lambda: reached() >= at + 100 and fault.fired >= 5, within_s=40, what="steps go on")
    fault.stop()
    over.touch()
    ended = running.wait(60)
    assert [e.code for e in ended] == [0, 0], "\n".join(map(str, ended))
    newest, seen_over = ended[0].value
    assert re.search(r"step \d+ is not saved: .*the last commit, of step \d+, is \d+ s old", ended[0].log)
    assert newest > seen_over > at
    steps = [row.step for row in list_checkpoints(store)]
    assert steps[-1] == newest
    assert set(range(20, newest, 20)) - set(steps), "some were skipped"
    assert verify_step(store, None).problems == ()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_under_the_agent(home: Home, s3_proxy: Any, s3_faults: Any, eventually: Callable[..., Any]) -> None:
    (home.folder / "text").mkdir()
    rows = [f"row {i} " + "x" * (i % 17) for i in range(40000)]
    pq.write_table(pa.table({"text": rows}), home.folder / "text" / "part-0.parquet", row_group_size=50)
    job = home.folder / "outage.toml"
    job.write_text(JOB.format(root=s3_proxy.root, folder=home.folder))
    run = home.start("run", str(job), "--json", PYTHONPATH=str(Path(__file__).parent))

    def seen() -> tuple[int, str, str]:
        """The step, what the node has to say, and what the command says of what it could not read."""
        told = home.call("status", str(job), "--json")
        view = json.loads(told.stdout) if told.returncode == 0 else {"step": 0, "nodes": []}
        return view["step"], " ".join(node["note"] for node in view["nodes"]), told.stderr

    eventually(lambda: seen()[0] >= 25, within_s=60, what="the first commit and on")
    fault = s3_proxy.fault("*", s3_faults.status(503, "SlowDown"), times=None)
    at = seen()[0]

    def shown() -> tuple[int, str, str] | None:
        told = seen()
        return told if "is not committed" in told[1] else None

    during, note, trouble = eventually(shown, within_s=120, what="it is shown that nothing is committed")
    assert re.search(r"the last commit, of step \d+, is \d+ s old", note)
    assert "SlowDown" in trouble
    assert during > at + 40, "steps went on"
    assert fault.fired > 20, "and everything was refused meanwhile"
    fault.stop()
    store = open_store(s3_proxy.root)
    newest = eventually(lambda: newest_beyond(store, during), within_s=60, what="a step of after the outage")
    eventually(lambda: "is not committed" not in seen()[1], within_s=30, what="the trouble is over")
    assert verify_step(store, newest).problems == ()
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=60)


def newest_beyond(store: ObjectStore, step: int) -> int | None:
    newest = max(row.step for row in list_checkpoints(store))
    return newest if newest > step else None
