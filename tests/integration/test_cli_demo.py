"""What is left of a demo that was interrupted, or killed: nothing. (That it ends well is test_demo_faults.py's and `make demo`'s.)"""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from surefoot import marks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def both_runs_up(home) -> Callable[[], Any]:
    """True once the demo has a run of its own, and one of the job with all its agents."""

    def ask() -> Any:
        runs = {run.facts["job"]: run.run_id for run in marks.living_runs(home.folder)}
        if "demo" not in runs or "demo-reference" not in runs:
            return None
        nodes = {p.mark.node for p in marks.find(run_id=runs["demo-reference"])}
        return {"etcd", "controller-a", "controller-b", "n0", "n1", "n2"} <= nodes

    return ask


def test_an_interrupted_demo_leaves_nothing(home, eventually) -> None:
    demo = home.start("demo")
    eventually(both_runs_up(home), within_s=90)
    demo.send_signal(signal.SIGINT)
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 130, err
    assert "Traceback" not in err
    assert home.left() == []


def test_a_killed_demo_is_swept_by_the_next_start_and_the_one_beside_it_lives(home, eventually) -> None:
    demo, beside = home.start("demo"), home.start("demo", "--seed", "8")
    eventually(lambda: len(marks.living_runs(home.folder)) == 4, within_s=90)
    demo.kill()
    demo.communicate()
    again = home.start("demo")
    eventually(lambda: len(marks.living_runs(home.folder)) == 4, within_s=90)
    living = {run.folder.name for run in marks.living_runs(home.folder)}
    assert {folder.name for folder in home.folder.glob("2*")} == living
    assert beside.poll() is None
    for process in (beside, again):
        process.send_signal(signal.SIGINT)
    for process in (beside, again):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
    assert home.left() == []
