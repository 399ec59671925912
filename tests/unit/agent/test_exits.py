"""The table of exits.py, row by row."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from surefoot.agent import exits
from surefoot.controller.wire import ErrorReport, ExitReport


def error(kind: str) -> ErrorReport:
    return ErrorReport(kind=kind, type="RuntimeError", message="boom")  # pyright: ignore[reportArgumentType]


ROWS = [
    (ExitReport(signal=9, teardown=True), False, False, "torn_down", "teardown", "none"),
    (
        ExitReport(code=1, error=error("workload"), teardown=True),
        False,
        False,
        "torn_down",
        "teardown",
        "none",
    ),
    (ExitReport(code=0), True, False, "finished", "none", "none"),
    (ExitReport(code=0), False, False, "left_early", "initiating", "workload"),
    (ExitReport(code=77), False, False, "agent_lost", "cascade", "infrastructure"),
    (ExitReport(code=1, error=error("agent_lost")), False, False, "agent_lost", "cascade", "infrastructure"),
    (ExitReport(code=1, error=error("collective")), False, False, "collective", "cascade", "infrastructure"),
    (
        ExitReport(signal=6, error=error("collective")),
        False,
        False,
        "collective",
        "cascade",
        "infrastructure",
    ),
    (ExitReport(code=1, error=error("workload")), False, False, "exception", "initiating", "workload"),
    (ExitReport(code=1, error=error("data")), False, False, "exception", "initiating", "workload"),
    (ExitReport(code=1, error=error("startup")), False, False, "exception", "initiating", "workload"),
    (
        ExitReport(code=1, error=error("checkpoint")),
        False,
        False,
        "exception",
        "initiating",
        "infrastructure",
    ),
    (ExitReport(signal=9), False, True, "out_of_memory", "initiating", "workload"),
    (ExitReport(signal=9), False, False, "killed", "initiating", "infrastructure"),
    (ExitReport(signal=15), False, False, "told_to_stop", "initiating", "preemption"),
    (ExitReport(signal=2), False, False, "told_to_stop", "initiating", "preemption"),
    (ExitReport(signal=7), False, False, "crashed", "initiating", "infrastructure"),
    (ExitReport(signal=11), False, False, "crashed", "initiating", "workload"),
    (ExitReport(signal=6), False, False, "crashed", "initiating", "workload"),
    (ExitReport(code=3), False, False, "exited", "initiating", "workload"),
    (ExitReport(code=1), True, False, "exited", "initiating", "workload"),
]


@pytest.mark.parametrize(("report", "finished", "oom", "kind", "role", "account"), ROWS)
def test_table(report: ExitReport, finished: bool, oom: bool, kind: str, role: str, account: str) -> None:
    verdict = exits.classify(report, finished=finished, out_of_memory=oom)
    assert (verdict.kind, verdict.role, verdict.account) == (kind, role, account)
    assert verdict.words


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(3)", ExitReport(code=3)),
        ("import os; os.kill(os.getpid(), 9)", ExitReport(signal=9)),
        ("import os; os.kill(os.getpid(), 11)", ExitReport(signal=11)),
    ],
)
def test_report_of_a_real_wait_status(code: str, expected: ExitReport) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    _, status = os.waitpid(process.pid, 0)
    process.returncode = 0  # reaped here, not by Popen
    assert exits.exit_report(status, error=None, last_words="", teardown=False) == expected


def test_last_words_are_bounded_and_survive_a_cut_character() -> None:
    tail = "ü".encode()[1:] + b"\n" + b"\n".join(b"line %d" % n for n in range(100)) + b"\n"
    words = exits.last_words(tail)
    assert words.splitlines()[-1] == "line 99"
    assert len(words.splitlines()) == exits.LAST_WORDS_LINES
    assert len(exits.last_words(b"x" * 10_000)) == exits.LAST_WORDS_CHARS
    assert exits.last_words(b"") == ""


STACKS = """Process 4711: python -m surefoot.agent.zygote
Python v3.11.7 (/usr/bin/python3.11)

Thread 4711 (idle): "MainThread"
    {innermost}
    train_step (examples/gpt.py:80)
    train (examples/gpt.py:120)
    main (surefoot/agent/session.py:300)
Thread 4712 (idle): "agent-link"
    recv (surefoot/agent/link.py:10)
"""


@pytest.mark.parametrize(
    ("innermost", "place"),
    [
        ("wait (torch/distributed/distributed_c10d.py:100)", "collective"),
        ("read_table (surefoot/loader/source.py:10)", "data"),
        ("stage (surefoot/ckpt/tiers.py:10)", "checkpoint"),
        ("busy (examples/gpt.py:10)", "code"),
    ],
)
def test_whereabouts(innermost: str, place: str) -> None:
    assert exits.whereabouts(STACKS.format(innermost=innermost)) == place


def test_whereabouts_unknown_without_a_main_thread() -> None:
    assert exits.whereabouts("Error: Failed to find python version") == "unknown"


def test_signals_are_named() -> None:
    assert "SIGSEGV" in exits.classify(ExitReport(signal=signal.SIGSEGV), finished=False).words
    assert "signal 40" in exits.classify(ExitReport(signal=40), finished=False).words
