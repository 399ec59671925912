"""The loader in real rank processes, forked from one that has imported torch and pyarrow: stops, reshapes and kills."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.loader import Mixture, Pack, Source, plan

pytestmark = pytest.mark.slow

WEIGHTS = {"books": 0.4, "code": 0.3, "news": 0.2, "talk": 0.1}
PACK = {"seq_len": 256, "step_tokens": 2048}
ROWS = 10_000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 sources of 10,000 rows, two files each, row groups of 700 rows; in `code` one large row group a file."""
    folder = tmp_path_factory.mktemp("mix")
    rng = random.Random(4)
    for source in WEIGHTS:
        (folder / source).mkdir()
        for file in range(2):
            rows = [f"{source} {file} {row} " + "x" * rng.randint(0, 60) for row in range(ROWS // 2)]
            pq.write_table(
                pa.table({"text": rows}),
                folder / source / f"part-{file}.parquet",
                row_group_size=ROWS if source == "code" else 700,
            )
    return folder


def job(data: Path, generations, **policy):
    sources = [
        {
            "name": name,
            "url": str(data / name),
            "weight": weight,
            "block_rows": 800,
            "window_blocks": 3,
            **policy,
        }
        for name, weight in WEIGHTS.items()
    ]
    return {"sources": sources, "seed": 11, "pack": PACK, "generations": generations}


def run(job):
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("loader_ranks.py")), json.dumps(job)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["threads_before_fork"] == 1, "a process with threads must not fork ranks"
    return told["generations"]


def reference(job, steps):
    mix = Mixture([Source(**source) for source in job["sources"]], seed=job["seed"])
    return plan(mix, Pack(**job["pack"]), steps)


def step_ids(step):
    """The ids of a step over all ranks, in order."""
    return tuple(sample_id for rank in step["ranks"] for sample_id in rank["ids"])


def assert_exact(steps, planned):
    """Committed steps are a prefix of the reference, ids in order, without a gap or a repeat."""
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert [step_ids(step) for step in steps] == [p.sample_ids for p in planned[: len(steps)]]


def test_ldr_01_five_stops_and_resumes_go_on_from_the_latest_position(data):
    """Reported as huggingface/datasets#8308 and #8295: after the first resume the saved position stayed at zero."""
    stops = [50, 100, 150, 200, 250, 300]
    asked = [{"dp_size": 2, "start": i, "until": stop, "kill": None} for i, stop in enumerate(stops)]
    told = job(data, asked)
    generations = run(told)
    assert [g["steps"][0]["step"] for g in generations] == [1, 51, 101, 151, 201, 251]
    assert_exact([step for g in generations for step in g["steps"]], reference(told, 300))


def test_ldr_12_a_cursor_of_dp_4_goes_on_at_dp_2_and_at_dp_8(data):
    """Reported as pytorch/torchtitan#811, huggingface/datasets#7927 and others. The whole pass, ids and their order."""
    asked = [
        {"dp_size": 4, "start": 0, "until": 150, "kill": None},
        {"dp_size": 2, "start": 1, "until": None, "kill": None},
        {"dp_size": 8, "start": 1, "until": None, "kill": None},
    ]
    told = job(data, asked, when_used_up="stop")
    at_4, at_2, at_8 = run(told)
    planned = reference(told, 10_000)
    for rest in (at_2, at_8):
        steps = at_4["steps"] + rest["steps"]
        assert len(steps) == len(planned)
        assert_exact(steps, planned)
        assert [step["ranks"][0]["valid"] for step in rest["steps"]] == [
            step["ranks"][0]["valid"] for step in at_2["steps"]
        ]
        for step in steps:
            assert len({(rank["microbatches"], rank["valid"]) for rank in step["ranks"]}) == 1
    every_row = {
        f"{source}:0:part-{file}.parquet:{row}"
        for source in WEIGHTS
        for file in range(2)
        for row in range(ROWS // 2)
    }
    delivered = [sample_id for step in at_4["steps"] + at_8["steps"] for sample_id in step_ids(step)]
    assert len(delivered) == len(every_row)
    assert set(delivered) == every_row


def test_ldr_15_the_cursor_advances_on_commit_not_on_fetch(data):
    """Reported as meta-pytorch/torchft#309 and #58. Rank 1 is killed holding the batch of step 40, which is never committed."""
    asked = [
        {"dp_size": 2, "start": 0, "until": None, "kill": [1, 40]},
        {"dp_size": 2, "start": 1, "until": 45, "kill": None},
    ]
    told = job(data, asked)
    before, after = run(told)
    assert before["died_of"] == signal.SIGKILL
    lost = before["steps"][-1]
    assert (lost["step"], lost["committed"]) == (40, False)
    assert after["steps"][0] == {**lost, "committed": True}, (
        "the same samples, and the same tokens, for every rank"
    )
    committed = [step for step in before["steps"] + after["steps"] if step["committed"]]
    assert_exact(committed, reference(told, 45))
    assert len(committed) == 45
