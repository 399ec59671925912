"""``surefoot run`` from start to end, and whatever may come in between: it resumes, it tells, and it leaves nothing behind."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot import marks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

JOB = """
[job]
name = "{name}"
steps = {steps}
root = "{root}"
[program]
train = "{module}:{train}"
data = "cli_jobs:data"
params = {{ text = "{folder}/text" }}
[layout]
nodes = {nodes}
ranks_per_node = 1
[checkpoint]
every_steps = 5
[policy]
wait_for_node_s = {wait_for_node_s}
grace_s = {grace_s}
"""


@pytest.fixture
def write_job(home) -> Callable[..., str]:
    """Writes a job file, and what it trains on, into the home; returns its path."""
    (home.folder / "text").mkdir()
    rows = [f"row {i} " + "x" * (i % 17) for i in range(400)]
    pq.write_table(pa.table({"text": rows}), home.folder / "text" / "part-0.parquet", row_group_size=50)

    def write(train: str, *, name: str = "tiny", **changes: Any) -> str:
        path = home.folder / f"{name}.toml"
        facts = {"steps": 12, "nodes": 1, "module": "cli_jobs", "root": f"{home.folder}/objects-{name}"}
        facts |= {"wait_for_node_s": 60, "grace_s": 30}
        path.write_text(JOB.format(name=name, train=train, folder=home.folder, **(facts | changes)))
        return str(path)

    return write


@pytest.fixture
def here() -> dict[str, str]:
    """The environment in which ranks find `cli_jobs`."""
    return {"PYTHONPATH": str(Path(__file__).parent)}


def running(home, name: str = "tiny") -> Callable[[], Any]:
    """True once a run of that job has begun to step, by what `status` says."""

    def ask() -> Any:
        result = home.call("status", str(home.folder / f"{name}.toml"), "--json")
        seen = json.loads(result.stdout) if result.returncode == 0 else {"phase": ""}
        return seen if seen["phase"] == "running" and seen["step"] >= 3 else None

    return ask


def test_a_job_runs_to_its_end_and_again_is_done_at_once(home, write_job, here) -> None:
    job = write_job("quick")
    first = home.call("run", job, **here)
    assert (first.returncode, first.stdout.count("\n")) == (0, 1), first.stderr
    assert "generation 1" in first.stderr
    assert home.left() == []

    again = home.call("run", job, "--json", **here)
    assert again.returncode == 0, again.stderr
    seen = json.loads(again.stdout)
    assert (seen["phase"], seen["step"], seen["generation"]) == ("done", 12, 1)
    assert home.left() == []

    status = home.call("status", "--root", f"{home.folder}/objects-tiny", "--json")
    assert json.loads(status.stdout)["committed"] == {"generation": 1, "step": 12}
    ls = home.call("ckpt", "ls", f"{home.folder}/objects-tiny")
    assert (ls.returncode, "12" in ls.stdout) == (0, True), ls.stderr


def test_a_killed_rank_is_told_by_status_events_and_why_without_etcd(home, write_job, here) -> None:
    job = write_job("dies_once")
    result = home.call("run", job, "--json", CLI_JOBS_MARKER=str(home.folder / "marker"), **here)
    assert result.returncode == 0, result.stderr
    assert (home.folder / "marker").exists()
    seen = json.loads(result.stdout)
    assert seen["generation"] == 2
    assert seen["generations"][1]["restored_from"] == "memory"

    # etcd is gone with the run: all of this comes from the object store.
    why = home.call("why", "last", job, "--json")
    incident = json.loads(why.stdout)
    assert (incident["fault"], incident["rank"], incident["new_generation"]) == ("rank_exit", 0, 2)
    text = home.call("why", incident["id"], job).stdout
    assert "signal 9" in text or "SIGKILL" in text
    assert incident["id"] in home.call("events", "--root", f"{home.folder}/objects-tiny").stdout


def test_a_training_function_that_raises_ends_the_job_with_its_error(home, write_job, here) -> None:
    result = home.call("run", write_job("broken", nodes=2), **here)
    assert result.returncode == 4, result.stderr
    assert "broken on purpose" in result.stderr.splitlines()[-1]
    assert "cli_jobs.py" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert home.left() == []
    # The whole traceback is kept, and the message says where.
    kept = next((home.folder / "failed").iterdir())
    assert str(kept) in result.stderr
    assert any("broken on purpose" in log.read_text() for log in kept.glob("nodes/*/logs/*"))


@pytest.mark.parametrize(
    ("module", "train", "says"),
    [("cli_jobs", "quik", "quick"), ("no_such_module", "train", "no_such_module")],
)
def test_a_function_that_does_not_exist(home, write_job, here, module: str, train: str, says: str) -> None:
    result = home.call("run", write_job(train, module=module), **here)
    assert result.returncode == 4, result.stderr
    assert says in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert home.left() == []


def test_data_without_the_column(home, write_job, here) -> None:
    pq.write_table(pa.table({"words": ["a"]}), home.folder / "text" / "part-0.parquet")
    result = home.call("run", write_job("quick"), **here)
    assert result.returncode == 4, result.stderr
    last = result.stderr.splitlines()[-1]
    assert "part-0.parquet" in last
    assert "'text'" in last
    assert "words" in last
    assert "Traceback" not in result.stderr
    assert home.left() == []


@pytest.mark.s3
def test_a_job_on_s3(home, write_job, here, s3_url: str) -> None:
    job = write_job("quick", root=s3_url)
    result = home.call("run", job, **here)
    assert result.returncode == 0, result.stderr
    assert json.loads(home.call("status", job, "--json").stdout)["committed"] == {"generation": 1, "step": 12}
    assert home.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(home, write_job, here, eventually, number: signal.Signals) -> None:
    run = home.start("run", write_job("slow_with_children", steps=1000), **here)
    eventually(running(home), within_s=60)
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert err.splitlines()[-1] == "surefoot: interrupted"
    assert "Traceback" not in err
    assert "" not in err.splitlines()
    assert home.left() == []


def test_after_kill_9_of_the_runner_a_new_start_sweeps_and_resumes(home, write_job, here, eventually) -> None:
    """A second run beside it is untouched by all of that."""
    job, other = write_job("slow_with_children", steps=1000), write_job("slow", steps=1000, name="other")
    beside = home.start("run", other, "--json", **here)
    run = home.start("run", job, **here)
    eventually(running(home), within_s=60)
    eventually(running(home, "other"), within_s=60)
    beside_before = [r for r in marks.living_runs(home.folder) if r.facts["job"] == "other"]
    pids_before = {p.pid for p in marks.find(run_id=beside_before[0].run_id)}
    run.kill()
    run.wait()

    (killed,) = [f.name for f in home.folder.glob("2*") if f.name != beside_before[0].run_id]
    write_job("quick", steps=300)
    again = home.call("run", job, "--json", **here)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["generation"] >= 1
    assert marks.find(run_id=killed) == []
    assert not Path(f"/dev/shm/surefoot-{killed}").exists()

    assert beside.poll() is None
    assert pids_before <= {p.pid for p in marks.find(run_id=beside_before[0].run_id)}
    assert [r.run_id for r in marks.living_runs(home.folder)] == [beside_before[0].run_id]
    beside.send_signal(signal.SIGINT)
    beside.communicate(timeout=60)
    assert home.left() == []


def test_an_agent_that_is_gone_is_not_started_again_and_ends_the_run(
    home, write_job, here, eventually
) -> None:
    run = home.start("run", write_job("slow", steps=1000), **here)
    seen = eventually(running(home), within_s=60)
    os.kill(seen["nodes"][0]["pid"], signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 3, err
    last = err.splitlines()[-1]
    assert (
        "node n0 lost, and no standby is left (layout.standbys = 0): agent-n0 was ended by SIGKILL; run again"
        in last
    )
    assert "INFO" not in last
    assert home.left() == []


def test_one_of_two_nodes_is_gone_and_the_controller_decides(home, write_job, here, eventually) -> None:
    run = home.start("run", write_job("slow", steps=1000, nodes=2, wait_for_node_s=20), **here)
    eventually(lambda: (seen := running(home)()) and seen["committed"], within_s=90)
    seen = running(home)()
    os.kill(next(n["pid"] for n in seen["nodes"] if n["uid"] == "n1"), signal.SIGKILL)
    _, err = run.communicate(timeout=90)
    assert run.returncode == 3, err
    last = err.splitlines()[-1]
    assert "node n1 lost, and no standby is left (layout.standbys = 0): 1 of 2 nodes are ready" in last
    assert "for 20 s (policy.wait_for_node_s); run again: it resumes from step" in last
    assert home.left() == []


@pytest.mark.parametrize(("nodes", "hosts_rank_0"), [(2, True), (2, False), (1, True)])
def test_a_node_that_is_told_to_go_never_makes_the_job_done(
    home, write_job, here, eventually, nodes: int, hosts_rank_0: bool
) -> None:
    """CTL-02, CTL-03: SIGTERM to one agent, and a last commit that takes its time. What was done is committed, the node goes
    then and not when the grace is over, and the run ends so that it is started again."""
    slowly = {"SUREFOOT_CHAOS": "1", "SUREFOOT_FAILPOINTS": "ckpt.before_manifest=delay:1.5"}
    job = write_job("slow", steps=1000, nodes=nodes, wait_for_node_s=5, grace_s=600)
    run = home.start("run", job, **here, **slowly)
    seen = eventually(running(home), within_s=90)
    hosts = {n["uid"]: any(r["rank"] == 0 for r in n["ranks"]) for n in seen["nodes"]}
    os.kill(next(n["pid"] for n in seen["nodes"] if hosts[n["uid"]] is hosts_rank_0), signal.SIGTERM)
    _, err = run.communicate(timeout=90)
    assert run.returncode == 3, err
    last = err.splitlines()[-1]
    assert "and no standby is left" in last
    assert "it resumes from step " in last, err
    resumes = int(last.split("run again: it resumes from step ")[1].split()[0])
    assert resumes >= seen["step"] - 1
    assert home.left() == []


def test_a_killed_etcd_is_named(home, write_job, here, eventually) -> None:
    run = home.start("run", write_job("slow", steps=1000), **here)
    eventually(running(home), within_s=60)
    (living,) = marks.living_runs(home.folder)
    (etcd,) = marks.find(run_id=living.run_id, node="etcd")
    os.kill(etcd.pid, signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 5, err
    assert "surefoot: etcd was ended by SIGKILL; run again: it" in err.splitlines()[-1]
    assert "token" not in err
    assert home.left() == []


def test_a_damaged_record_is_told_and_ends_the_run(home, write_job, here, eventually) -> None:
    """Nobody is there to mend it while the run waits: it is shown as held, and after a short grace that is the end."""
    job = write_job("quick")
    assert home.call("run", job, **here).returncode == 0
    record = home.folder / "objects-tiny" / "generations" / "0001.json"
    whole = record.read_bytes()
    record.write_bytes(whole[: len(whole) // 2])

    def held() -> dict | None:
        result = home.call("status", job, "--json")
        seen = json.loads(result.stdout) if result.returncode == 0 else {"phase": ""}
        return seen if seen["phase"] == "held" else None

    run = home.start("run", job, **here)
    seen = eventually(held, within_s=60)
    says = "generations/0001.json"
    assert seen["now"].startswith("held: ")
    assert says in seen["now"]
    _, err = run.communicate(timeout=60)
    assert run.returncode == 5, err
    assert any(f"held: {says}" in line for line in err.splitlines()), err
    last = err.splitlines()[-1]
    assert says in last
    assert "restore it from a backup of the object store" in last
    assert home.left() == []

    record.write_bytes(whole)
    assert home.call("run", job, **here).returncode == 0


def test_the_only_controller_is_started_again_when_it_was_killed(home, write_job, here, eventually) -> None:
    run = home.start("run", write_job("slow", steps=60), "--json", **here)
    eventually(running(home), within_s=60)
    (living,) = marks.living_runs(home.folder)
    (controller,) = marks.find(run_id=living.run_id, node="controller-a")
    os.kill(controller.pid, signal.SIGKILL)
    out, err = run.communicate(timeout=150)
    assert run.returncode == 0, err
    assert "controller-a was ended by SIGKILL" in err
    seen = json.loads(out)
    assert (seen["step"], seen["generation"]) == (60, 1)
    assert home.left() == []


def test_a_second_run_into_the_same_root_is_refused(home, write_job, here, eventually) -> None:
    job = write_job("slow", steps=1000)
    first = home.start("run", job, **here)
    eventually(lambda: marks.living_runs(home.folder) and marks.living_runs(home.folder)[0].facts.get("root"))
    second = home.call("run", job, **here)
    assert second.returncode == 5
    assert f"objects-tiny is in use by another run of job tiny (pid {first.pid})" in second.stderr
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert home.left() == []
