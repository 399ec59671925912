"""One test per fault of the demo: the real job on real processes, struck once, judged against an undisturbed run.

The reference is run once for all of them. Each test shows that its fault took place (the trace proves where the victim
stood), and that nothing of it can be seen in losses, parameters or samples.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from surefoot.chaos import demo
from surefoot.chaos.faults import BETWEEN, Fired
from surefoot.chaos.judge import RunEvidence, Verdict, judge
from surefoot.chaos.schedule import Fault
from surefoot.examples import text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 12
OPTIONS = demo.Options(steps=STEPS, nodes=2, ranks_per_node=2, seed=11, root=None, keep=None, json=None)


def screen() -> demo.Screen:
    return demo.Screen(Console(file=io.StringIO(), force_terminal=False))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of the runs, and the text they train on."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, text.prepare(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def reference(place: tuple[Path, Path]) -> RunEvidence:
    folder, data = place
    evidence, fired = demo.run_once(OPTIONS, "reference", folder, data, screen(), ())
    assert fired == []
    return evidence


def survive(fault: Fault, reference: RunEvidence, place: tuple[Path, Path]) -> tuple[Fired, Verdict]:
    folder, data = place
    # A name of its own is a root of its own: a run on another's root would resume it.
    name = f"{fault.kind}-{fault.target}"
    disturbed, fired = demo.run_once(OPTIONS, name, folder, data, screen(), [fault])
    expected = demo.expected_samples(data, OPTIONS.seed, STEPS)
    verdict = judge(reference, disturbed, fired, expected, world_size=OPTIONS.world_size, kinds=[fault.kind])
    assert verdict.failures == ()
    assert len(fired) == 1
    return fired[0], verdict


def test_the_reference_itself_is_one_generation(reference: RunEvidence):
    assert {event["generation"] for event in reference.ranks if event["kind"] == "step_end"} == {1}


def test_a_rank_killed_between_forward_and_optimizer(reference: RunEvidence, place: tuple[Path, Path]):
    fired, verdict = survive(Fault(kind="rank_kill", step=5, target=2), reference, place)
    assert fired.proof is not None
    assert fired.proof["kind"] in BETWEEN
    assert verdict.generations == 2
    assert verdict.faults[0].restored_from == "memory"


def test_a_hung_rank_is_found_by_missing_progress(reference: RunEvidence, place: tuple[Path, Path]):
    fired, verdict = survive(Fault(kind="rank_hang", step=5, target=1), reference, place)
    assert fired.proof is not None
    assert verdict.generations == 2
    detected = verdict.faults[0].detected_s
    assert detected is not None
    assert detected > 1.0  # not by looking at its process state, which would tell at once


@pytest.mark.parametrize("node", [0, 1])
def test_a_lost_node_is_replaced_by_the_standby_from_the_peers_memory(
    node: int, reference: RunEvidence, place: tuple[Path, Path]
):
    """Node 0 also hosts the rendezvous and commits (CTL-17): the next generation must not read its old address."""
    _, verdict = survive(Fault(kind="node_loss", step=5, target=node), reference, place)
    assert verdict.faults[0].restored_from == "peer"


def test_training_goes_on_while_no_controller_leads(reference: RunEvidence, place: tuple[Path, Path]):
    _, verdict = survive(Fault(kind="controller_kill", step=3, target=0), reference, place)
    assert verdict.generations == 1
