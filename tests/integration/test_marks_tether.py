"""A tethered process is asked to end when its starter dies, however that happens."""

import os
import signal
import subprocess
import sys

import pytest

from surefoot import marks, tether

pytestmark = pytest.mark.slow

STARTER = """
import signal, subprocess, sys
from surefoot import tether
code = ("import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('told to end', flush=True), os._exit(0)));"
        "print(os.getpid(), flush=True); signal.pause()")
subprocess.Popen(tether.command([sys.executable, "-c", code]), start_new_session=True)
signal.pause()
"""


def test_the_child_of_a_killed_starter_gets_sigterm() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        assert marks.start_time(child)
        starter.kill()
        assert starter.stdout.readline() == "told to end\n"
        assert starter.stdout.read() == ""  # the child has ended too: it held the other end of the pipe


def test_it_becomes_the_command() -> None:
    argv = tether.command([sys.executable, "-c", "import os; print(os.getpid(), os.environ['X'])"])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ | {"X": "kept"}) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"{process.pid} kept\n"


def test_nothing_is_started_for_a_dead_starter() -> None:
    argv = tether.command(["true"])
    argv[argv.index(str(os.getpid()))] = "1" if os.getppid() != 1 else "2"
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "its starter" in result.stderr


def test_a_command_that_is_not_there() -> None:
    result = subprocess.run(tether.command(["/nonexistent"]), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "surefoot: cannot run /nonexistent: No such file or directory\n"


def test_the_mark_is_there_from_the_start() -> None:
    mark = marks.Mark("gpt", "20260101T000000-00000f", "n0", "0")
    code = "import signal; print('up', flush=True); signal.pause()"
    argv = tether.command([sys.executable, "-c", code])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=os.environ | mark.env()) as process:
        assert [p.pid for p in marks.find(run_id=mark.run_id)] == [process.pid]
        marks.end_run(mark.run_id)
        assert process.wait() == -signal.SIGKILL
