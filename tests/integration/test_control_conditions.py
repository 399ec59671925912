"""An object store that does not create conditionally, or denies creation: found at the start of a run, told, and done without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.ckpt.objects.probe import ensure_exclusive
from surefoot.ckpt.record import (
    Record,
    RecordTakenError,
    StartRef,
    create_record,
    list_manifests,
    read_records,
)
from surefoot.ckpt.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.timeout(180)]

JOB = """
[job]
name = "tiny"
steps = 12
root = "{root}"
[program]
train = "cli_jobs:quick"
data = "cli_jobs:data"
params = {{ text = "{text}" }}
[layout]
nodes = 2
[checkpoint]
every_steps = 5
"""


@pytest.fixture
def job(tmp_path: Path, s3_url: str) -> Path:
    (tmp_path / "text").mkdir()
    pq.write_table(pa.table({"text": ["some words"] * 400}), tmp_path / "text" / "part-0.parquet")
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(root=s3_url, text=tmp_path / "text"))
    return path


def test_a_job_on_a_store_without_conditions(
    home: Any, job: Path, s3_url: str, knows_no_conditions: Callable[[], list[str]]
) -> None:
    """Controller and committer do without, alike; the user is warned, and the record says so."""
    result = home.call("run", str(job), PYTHONPATH=str(Path(__file__).parent))
    assert result.returncode == 0, result.stderr
    assert "NotImplemented" in result.stderr
    assert "let no other job write to this root" in result.stderr
    store = open_store(s3_url)
    records = read_records(store)
    assert [r.plan["conditional"] for r in records.values() if r.plan] == [False] * len(records)
    assert [m.step for m in list_manifests(store)][-1] == 12
    created = [key.rpartition("/")[2] for key in knows_no_conditions()]
    assert "0001.json" in created
    assert created.count("manifest.json") >= 2
    assert home.left() == []


def test_of_two_records_of_one_number_one_is_taken(
    s3_url: str, knows_no_conditions: Callable[[], list[str]]
) -> None:
    for who in ("a@1", "b@2"):
        store = open_store(s3_url)
        assert not ensure_exclusive(store).exclusive
        record = Record(generation=1, start=StartRef(), reason="first_start", created_by=who)
        if who == "a@1":
            create_record(store, record)
        else:
            with pytest.raises(RecordTakenError, match="a@1"):
                create_record(store, record)
    assert read_records(open_store(s3_url))[1].created_by == "a@1"
    assert any(key.endswith("generations/0001.json") for key in knows_no_conditions())


def test_a_store_that_denies_creation_is_told_at_once(
    home: Any, job: Path, s3_proxy: Any, s3_faults: Any
) -> None:
    """Listing is allowed, so nothing but the probe would find it before the first record."""
    fault = s3_proxy.fault("PutObject", s3_faults.status(403, "AccessDenied"), times=None)
    result = home.call("run", str(job), "--json", PYTHONPATH=str(Path(__file__).parent))
    assert result.returncode == 5
    assert fault.fired >= 1
    last = result.stderr.splitlines()[-1]
    for words in (
        "cannot create probes/",
        "AccessDenied",
        "that these keys may list, read, write and delete",
    ):
        assert words in last
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert home.left() == []
