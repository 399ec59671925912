"""Real ranks under a small agent of the test's own (fakeagent.py): the protocol, restarts to the last bit, and every way out."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.fakeagent import FakeAgent, Launcher, write_job, write_text

from surefoot.agent.exits import AGENT_LOST_CODE
from surefoot.ckpt.record import list_manifests
from surefoot.ckpt.store import open_store
from surefoot.ckpt.tiers import committed_rows
from surefoot.controller.wire import (
    DoneMsg,
    FailedMsg,
    PhaseMsg,
    SnapshotMsg,
    StepMsg,
    StopMsg,
)

pytestmark = pytest.mark.slow

Make = Callable[..., FakeAgent]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


@pytest.fixture
def make(launcher: Launcher, text: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes agents with a job of their own each: keywords are those of `write_job` and of `FakeAgent`."""
    made: list[FakeAgent] = []

    def make(*, world: int = 2, params: dict[str, Any] | None = None, **keywords: Any) -> FakeAgent:
        folder = tmp_path / f"job-{len(made)}"
        folder.mkdir()
        own = {k: keywords.pop(k) for k in ("commits", "replicates") if k in keywords}
        job = write_job(folder, world=world, params={"data_root": str(text)} | (params or {}), **keywords)
        made.append(FakeAgent(folder, job, launcher, world=world, **own))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def crash(where: str, hit: int) -> dict[str, str]:
    return {"SUREFOOT_CHAOS": "1", "SUREFOOT_FAILPOINTS": f"{where}=crash@{hit}"}


def losses(agent: FakeAgent, generation: int, rank: int = 0) -> dict[int, str | None]:
    return {m.step: m.loss for m in agent.messages(StepMsg, rank=rank, generation=generation)}


def samples(agent: FakeAgent, rank: int, generation: int) -> dict[int, list[str]]:
    """Step to the samples the rank finished it with."""
    return {e["step"]: e["ids"] for e in agent.events(rank, generation, "step_end")}


def parameters(agent: FakeAgent) -> str:
    found = re.search(r"parameters (\S+)", agent.log(0).read_text())
    assert found
    return found[1]


# ---------------------------------------------------------------- an undisturbed run


def test_a_run_from_start_to_end(make: Make) -> None:
    agent = make(steps=6, every_steps=3)
    agent.start(1)
    assert agent.exit_codes() == [0, 0]

    assert losses(agent, 1, rank=0) == losses(agent, 1, rank=1)
    assert sorted(losses(agent, 1)) == [1, 2, 3, 4, 5, 6]
    assert [m.step for m in agent.messages(DoneMsg)] == [6, 6]
    attempts = {(m.step, m.attempt) for m in agent.messages(SnapshotMsg) if m.attempt}
    assert sorted(step for step, _ in attempts) == [3, 6], "one attempt a due step, the same on both ranks"
    store = open_store(agent.spec.job.root)
    assert [(m.generation, m.step) for m in list_manifests(store)] == [(1, 3), (1, 6)]
    phases = [m.phase for m in agent.messages(PhaseMsg, rank=0)]
    assert phases[:5] == ["start", "restore", "step", "data", "step"]
    assert phases[-2:] == ["eval", "save"]


def test_the_trace_tells_each_step(make: Make) -> None:
    agent = make(steps=2)
    agent.start(1)
    agent.exit_codes()
    lines = [json.loads(line) for line in (agent.folder / "rank-1-g1.jsonl").read_text().splitlines()]
    kinds = [(e["kind"], e["step"]) for e in lines]
    step = ["step_begin"] + ["forward_end", "reported"] * 2 + ["optimizer_begin", "step_end", "snapshot"]
    expected = [(kind, t) for t in (1, 2) for kind in step]
    assert kinds == [("launched", 0), ("joined", 0), ("restored", 0), *expected, ("finished", 2)]
    assert {(e["rank"], e["generation"]) for e in lines} == {(1, 1)}
    end = agent.events(1, 1, "step_end")[0]
    assert end["loss"] == losses(agent, 1)[1]
    assert end["samples"] == len(end["ids"]) > 0


def test_two_runs_are_alike_to_the_last_bit(make: Make) -> None:
    agents = [make(), make()]
    for agent in agents:
        agent.start(1)
    assert [agent.exit_codes() for agent in agents] == [[0, 0], [0, 0]]
    assert losses(agents[0], 1) == losses(agents[1], 1)
    assert parameters(agents[0]) == parameters(agents[1])


def test_gradients_of_all_kinds_are_clipped_alike_on_all_ranks(make: Make) -> None:
    agent = make(train="session_trainers:clips", steps=1)
    agent.start(1)
    assert agent.exit_codes() == [0, 0]
    lines = [re.findall(r"clipped (\S+) (\S+) (\S+)", agent.log(rank).read_text()) for rank in (0, 1)]
    assert lines[0] == lines[1]
    ((norm, expected, left),) = lines[0]
    assert float.fromhex(norm) == pytest.approx(float(expected), rel=1e-12)
    assert float(left) == pytest.approx(0.5, rel=1e-5)
    assert float(expected) > 0.5


# ---------------------------------------------------------------- restarts


@pytest.fixture(scope="module")
def reference(
    launcher: Launcher, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FakeAgent]:
    """An undisturbed run of the default job."""
    folder = tmp_path_factory.mktemp("reference")
    agent = FakeAgent(folder, write_job(folder, params={"data_root": str(text)}), launcher)
    agent.start(1)
    assert agent.exit_codes() == [0, 0]
    yield agent
    agent.close()


def test_killed_between_forward_and_optimizer_goes_on_from_memory(make: Make, reference: FakeAgent) -> None:
    """Rank 1 dies in step 5, half-way; generation 2 starts from the snapshots of step 4."""
    agent = make()
    agent.start(1, env={1: crash("step.before_optimizer", 5)})
    assert agent.exit_code(1) == -signal.SIGKILL
    agent.kill_all()
    assert agent.newest_complete() == (1, 4)
    agent.start(2, of=1, step=4, tier="memory")
    assert agent.exit_codes() == [0, 0]

    assert losses(agent, 1) == {t: losses(reference, 1)[t] for t in (1, 2, 3, 4)}
    assert losses(agent, 2) == {t: losses(reference, 1)[t] for t in (5, 6)}
    assert parameters(agent) == parameters(reference)
    restored = agent.events(0, 2, "restored")
    assert [(e["tier"], e["start_generation"], e["start_step"]) for e in restored] == [("memory", 1, 4)]


def test_ldr_15_a_step_that_was_not_committed_is_given_again(make: Make, reference: FakeAgent) -> None:
    """Rank 1 is killed in step 3 after its batch was taken: fetched is not committed.

    After recovery all ranks receive exactly the samples of step 3 again, then those of step 4.
    """
    agent = make()
    agent.start(1, env={1: crash("step.after_batch", 3)})
    assert agent.exit_code(1) == -signal.SIGKILL
    agent.kill_all()
    generation, step = agent.newest_complete()
    assert (generation, step) == (1, 2)
    agent.start(2, of=1, step=2, tier="memory")
    assert agent.exit_codes() == [0, 0]

    for rank in (0, 1):
        after = samples(agent, rank, 2)
        assert sorted(after) == [3, 4, 5, 6]
        assert after == {t: samples(reference, rank, 1)[t] for t in (3, 4, 5, 6)}
    assert losses(agent, 2) == {t: losses(reference, 1)[t] for t in (3, 4, 5, 6)}


def test_from_the_object_store(make: Make, reference: FakeAgent) -> None:
    """All memory is lost after the commit of step 3."""
    agent = make()
    agent.start(1, env={0: crash("step.before_exchange", 5)})
    assert agent.exit_code(0) == -signal.SIGKILL
    agent.kill_all()
    for path in [path for slots in agent.slots.values() for path in slots]:
        path.unlink()
    agent.start(2, of=1, step=3, tier="object_store")
    assert agent.exit_codes() == [0, 0]
    assert losses(agent, 2) == {t: losses(reference, 1)[t] for t in (4, 5, 6)}
    assert parameters(agent) == parameters(reference)


def test_killed_while_staging_falls_back_to_the_snapshot_before(make: Make, reference: FakeAgent) -> None:
    """A torn snapshot is no snapshot: rank 0 dies with step 4 half written."""
    agent = make()
    agent.start(1, env={0: crash("snapshot.before_seal", 4)})
    assert agent.exit_code(0) == -signal.SIGKILL
    agent.kill_all()
    assert agent.newest_complete() == (1, 3)
    agent.start(2, of=1, step=3, tier="memory")
    assert agent.exit_codes() == [0, 0]
    assert losses(agent, 2) == {t: losses(reference, 1)[t] for t in (4, 5, 6)}


def test_the_example_goes_on_to_the_last_bit(make: Make) -> None:
    """examples/gpt: FSDP2 per block, fused AdamW, a schedule."""
    gpt = {"train": "surefoot.examples.gpt:train", "data": "surefoot.examples.gpt:data", "steps": 4}
    reference, agent = make(**gpt), make(**gpt)
    reference.start(1)
    assert reference.exit_codes() == [0, 0]
    agent.start(1, env={0: crash("step.after_forward", 3)})
    assert agent.exit_code(0) == -signal.SIGKILL
    agent.kill_all()
    agent.start(2, of=1, step=2, tier="memory")
    assert agent.exit_codes() == [0, 0]
    assert losses(agent, 1) | losses(agent, 2) == losses(reference, 1)
    first, *_, last = (float.fromhex(loss or "nan") for loss in losses(reference, 1).values())
    assert last < first


def test_ranks_with_different_starting_points_do_not_train(make: Make) -> None:
    agent = make(commits=False)
    agent.start(1, env={1: crash("step.after_batch", 5)})
    agent.exit_code(1)
    agent.kill_all()
    wrong = str(agent.slot_of(1, 1, 3))
    agent.start(2, of=1, step=4, tier="memory", restore={1: wrong})
    assert agent.exit_code(1) == 1
    agent.kill(0)
    (failed,) = agent.messages(FailedMsg, generation=2, rank=1)
    assert failed.error.type == "StartupError"
    assert "step 4 of generation 1" in failed.error.message
    assert not agent.messages(StepMsg, generation=2)


# ---------------------------------------------------------------- meshes


def numbers(agent: FakeAgent, generation: int) -> list[float]:
    """The losses of a generation, then its norms."""
    told = [float.fromhex(loss or "nan") for loss in losses(agent, generation).values()]
    return told + [float.fromhex(n) for n in re.findall(r"norm (\S+)", agent.log(0).read_text())]


@pytest.mark.parametrize("mesh", [{"pp": 1, "dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 1}])
def test_a_mesh_trains_what_dp_alone_trains(make: Make, mesh: dict[str, int]) -> None:
    """Data is dealt over dp, losses count once, norms are the whole model's; and a killed rank comes back to the last bit."""
    gpt = {"train": "gpt_jobs:train", "data": "gpt_jobs:data", "steps": 4}
    agents = [make(world=2, **gpt), make(world=4, **gpt), make(world=4, **gpt)]
    alone, whole, broken = agents
    for agent in (whole, broken):
        agent.mesh = mesh
    alone.start(1)
    assert alone.exit_codes() == [0, 0]
    whole.start(1)
    assert whole.exit_codes() == [0] * 4
    assert numbers(whole, 1) == pytest.approx(numbers(alone, 1), rel=1e-4)
    assert len(numbers(whole, 1)) == 8
    for rank in range(4):
        coordinate = rank // 2 if mesh["tp"] == 2 else rank % 2
        assert samples(whole, rank, 1) == samples(alone, coordinate, 1)
    rows = committed_rows(open_store(whole.spec.job.root))
    assert [(r.step, r.dp_rank) for r in rows] == [(t, d) for t in (1, 2, 3, 4) for d in (0, 1)]

    broken.start(1, env={3: crash("step.before_optimizer", 3)})
    assert broken.exit_code(3) == -signal.SIGKILL
    broken.kill_all()
    broken.start(2, of=1, step=2, tier="memory")
    assert broken.exit_codes() == [0] * 4
    assert losses(broken, 2) == {t: losses(whole, 1)[t] for t in (3, 4)}


# ---------------------------------------------------------------- ways out


def test_a_lost_agent_ends_the_ranks(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    agent = make(train="session_trainers:slow", params={"gate": str(gate), "gate_step": 2})
    agent.start(1)
    agent.wait(lambda: len(agent.messages(StepMsg)) == 2, "step 1")
    agent.hang_up()
    assert agent.exit_codes() == [AGENT_LOST_CODE, AGENT_LOST_CODE]
    assert agent.events(0, 1, "agent_lost")
    assert "the agent is gone" in agent.log(0).read_text()


def test_training_code_that_raises(make: Make) -> None:
    agent = make(train="session_trainers:raises")
    agent.start(1)
    assert agent.exit_code(1) == 1
    agent.kill(0)
    (failed,) = agent.messages(FailedMsg, rank=1)
    assert (failed.step, failed.error.kind, failed.error.type) == (2, "workload", "ValueError")
    assert failed.error.message == "the training code is unhappy"
    assert "session_trainers.py" in failed.error.traceback
    last = agent.log(1).read_text().splitlines()[-1]
    assert last == "surefoot: failed in step 2 (workload): ValueError: the training code is unhappy"


def test_the_survivors_error_is_a_communication_error(make: Make, tmp_path: Path) -> None:
    agent = make(train="session_trainers:slow", params={"gate": str(tmp_path / "gate"), "gate_step": 2})
    agent.start(1)
    agent.wait(lambda: len(agent.messages(StepMsg)) == 2, "step 1")
    agent.kill(1)
    agent.exit_code(1)
    (tmp_path / "gate").touch()
    assert agent.exit_code(0) == 1
    assert agent.messages(FailedMsg, rank=0)[0].error.kind == "collective"


@pytest.mark.parametrize(
    ("train", "kind", "step", "words"),
    [
        ("raises_early", "startup", 0, "unhappy before the first step"),
        ("takes_two", "workload", 1, "a second time in step 1"),
        ("takes_none", "startup", 1, "step 1 ended without next(data)"),
        ("trane", "startup", 0, "no function 'trane'; the nearest name is 'train'"),
        ("leaves_early", "workload", 1, "train() returned after step 0 of 6"),
    ],
)
def test_misuse_is_one_clear_message(make: Make, train: str, kind: str, step: int, words: str) -> None:
    agent = make(train=f"session_trainers:{train}", params={"leave": True})
    agent.start(1)
    assert agent.exit_codes() == [1, 1]
    for failed in agent.messages(FailedMsg):
        assert (failed.error.kind, failed.step) == (kind, step)
        assert words in failed.error.message
    assert len(agent.messages(FailedMsg)) == 2


def test_data_that_is_not_there(make: Make, tmp_path: Path) -> None:
    agent = make(params={"data_root": str(tmp_path / "nowhere")})
    agent.start(1)
    assert agent.exit_codes() == [1, 1]
    assert {m.error.kind for m in agent.messages(FailedMsg)} == {"data"}
    assert "nowhere" in agent.messages(FailedMsg)[0].error.message


def test_a_wrong_token_is_no_start(make: Make) -> None:
    agent = make()
    (agent.folder / "token").write_text("another")
    agent.start(1)
    assert agent.exit_codes() == [1, 1]
    assert "no start from the agent" in agent.log(0).read_text()


def test_stop_of_all_commits_and_ends_well(make: Make, tmp_path: Path) -> None:
    """Asked to stop in step 2, all ranks commit it together and leave, long before step 100, and say so."""
    gate = tmp_path / "gate"
    agent = make(
        train="session_trainers:slow", steps=100, every_steps=50, params={"gate": str(gate), "gate_step": 2}
    )
    agent.start(1)
    agent.wait(lambda: len(agent.messages(StepMsg)) == 2, "step 1")
    for rank in (0, 1):
        agent.say(rank, StopMsg(reason="shutdown", grace_s=30))
    gate.touch()
    assert agent.exit_codes() == [0, 0]
    done = agent.messages(DoneMsg)
    assert len({m.step for m in done}) == 1
    assert 2 <= done[0].step < 100
    assert [m.ended for m in done] == ["stopped", "stopped"]
    assert len(list_manifests(open_store(agent.spec.job.root))) == 1


def test_stop_of_one_commits_and_ends_nobody(make: Make, tmp_path: Path) -> None:
    """One of two is asked: what is done so far is committed, and both train on to the last step."""
    gate = tmp_path / "gate"
    agent = make(
        train="session_trainers:slow", steps=6, every_steps=50, params={"gate": str(gate), "gate_step": 2}
    )
    agent.start(1)
    agent.wait(lambda: len(agent.messages(StepMsg)) == 2, "step 1")
    agent.say(1, StopMsg(reason="shutdown", grace_s=30))
    gate.touch()
    assert agent.exit_codes() == [0, 0]
    assert [(m.step, m.ended) for m in agent.messages(DoneMsg)] == [(6, "steps"), (6, "steps")]
    first, last = (m.step for m in agent.messages(SnapshotMsg, rank=0) if m.attempt)
    assert 2 <= first < last == 6


def test_the_last_commit_is_tried_again(make: Make) -> None:
    agent = make(train="session_trainers:quiet", steps=2, every_steps=2)
    agent.commit_failures = ["the object store is away"]
    agent.start(1)
    assert agent.exit_codes() == [0, 0]
    attempts = [m.attempt for m in agent.messages(SnapshotMsg, rank=0) if m.attempt]
    assert len(attempts) == len(set(attempts)) == 2
    assert len(list_manifests(open_store(agent.spec.job.root))) == 1


def test_the_session_runs_by_exec_too(make: Make) -> None:
    """Where the zygote must not fork, the agent starts ``python -m surefoot.agent.session``."""
    agent = make(world=1, train="session_trainers:quiet", steps=2, data="session_trainers:data")
    agent.start(1, by_exec=True)
    assert agent.exit_codes() == [0]
    assert [m.step for m in agent.messages(DoneMsg)] == [2]


def test_nothing_is_left_behind(make: Make) -> None:
    agent = make(train="session_trainers:quiet", steps=1)
    agent.start(1)
    agent.exit_codes()
    for pid in agent.pids.values():
        assert not os.path.exists(f"/proc/{pid}")
