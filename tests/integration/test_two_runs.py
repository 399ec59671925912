"""Two ``surefoot run`` of one job into one root, from two base folders, so that neither sees the other's lock: the newest
record wins, the other ends, and every sample is committed exactly once on the one lineage."""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.chaos import checkers
from surefoot.ckpt.record import list_manifests, list_records, read_record
from surefoot.ckpt.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 300
"""Half a minute of steps: the second run, begun later, must not find the first one done."""

JOB = """
[job]
name = "twice"
steps = {steps}
root = "{root}"
[program]
train = "cli_jobs:slow"
data = "cli_jobs:data"
params = {{ text = "{root}/../text" }}
[layout]
ranks_per_node = 1
[checkpoint]
every_steps = 5
"""


@pytest.mark.parametrize("together", [True, False])
def test_the_newest_record_wins(make_home, tmp_path: Path, eventually, together: bool) -> None:
    (tmp_path / "text").mkdir()
    rows = [f"row {i} " + "x" * (i % 17) for i in range(400)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "text" / "part-0.parquet", row_group_size=50)
    root = tmp_path / "objects"
    root.mkdir()
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(steps=STEPS, root=root))
    objects = open_store(str(root))
    here = {"PYTHONPATH": str(Path(__file__).parent)}

    first_home, second_home = make_home(), make_home()
    first = first_home.start("run", str(job), **here)
    if not together:
        eventually(lambda: len(list_manifests(objects)) >= 2, within_s=90)
    second = second_home.start("run", str(job), **here)
    ends = {run: run.communicate(timeout=200) for run in (first, second)}

    assert sorted(run.returncode for run in ends) == [0, 5], [err for _, err in ends.values()]
    loser = first if first.returncode else second
    records = {g: read_record(objects, g)[0] for g in list_records(objects)}
    newest = records[max(records)]
    assert newest.plan is not None
    message = ends[loser][1].splitlines()[-1]
    assert f"another run, {newest.plan['run_id']}, has taken over this root with generation" in message
    assert "only one run may train into a root" in message
    owners = [records[g].plan["run_id"] for g in sorted(records)]
    assert owners == sorted(owners, key=owners.index), "a run came back after another had followed it"
    if not together:
        assert loser is first
        assert newest.start.step >= 10
    committed_once(root)
    for home in (first_home, second_home):
        assert home.left() == []


def committed_once(root: Path) -> None:
    """Each step up to the last stands on the lineage of the newest record once, and so does each sample."""
    objects = checkers.Objects(str(root))
    records = checkers.records(objects)
    manifest = checkers.newest_manifest(objects, records)
    assert manifest["step"] == STEPS
    rows = checkers.committed_rows(objects, manifest, records)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    samples = Counter(sample for row in rows for sample in row["samples"])
    assert samples
    assert set(samples.values()) == {1}
