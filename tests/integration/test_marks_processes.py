"""Ending what bears a mark, with real processes: hard to kill, hidden, look-alike, and owners that are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot import marks
from surefoot.marks import Mark, MarkedProcess, RunOwner

pytestmark = pytest.mark.slow

# A process with three descendants that are hard to find: re-parented to init, in a session of its own, and blocked
# writing to a pipe that nobody reads. All ignore SIGTERM. It prints their pids and its own, then waits.
FAMILY = """
import ctypes, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
r, w = os.pipe()
def announce(name): os.write(1, f"{name} {os.getpid()}\\n".encode())
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        announce("reparented")
        signal.pause()
    os._exit(0)
if os.fork() == 0:
    os.setsid()
    ctypes.CDLL(None).prctl(15, b"innocent", 0, 0, 0)   # PR_SET_NAME
    announce("renamed")
    signal.pause()
if os.fork() == 0:
    os.setpgid(0, 0)
    announce("blocked")
    while True: os.write(w, b"x" * 65536)
os.wait()
announce("head")
signal.pause()
"""

OWNER = """
import os, subprocess, sys, signal
from pathlib import Path
from surefoot.marks import RunOwner
owner = RunOwner.create("gpt", Path(sys.argv[1]))
(owner.shm_dir / "n0").mkdir()
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True,
                         env=os.environ | owner.mark("n0").env())
print(owner.run_id, child.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def base() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="sf-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python code as a child; what is left at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def _start(
        code: str, *args: str, mark: Mark | None = None, executable: str = sys.executable
    ) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if k != marks.MARK_ENV} | (mark.env() if mark else {})
        process = subprocess.Popen(
            [executable, "-c", code, *args],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield _start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def read_family(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stdout is not None
    family: dict[str, int] = {}
    while len(family) < 4:
        name, pid = process.stdout.readline().split()
        family[name] = int(pid)
    return family


def lives(pid: int) -> bool:
    """False for a zombie too: dead, and only not yet reaped by its parent."""
    return marks.start_time(pid) is not None


def new_mark(node: str = "n0", incarnation: str = "0") -> Mark:
    return Mark("gpt", f"20260101T000000-{os.urandom(3).hex()}", node, incarnation)


def test_a_family_is_found_and_ended_however_it_hides(start) -> None:
    """CTL-33: descendants re-parented, in a group of their own, blocked on a pipe, deaf to SIGTERM: ended within 10 s."""
    mark = new_mark()
    family = read_family(start(FAMILY, mark=mark))
    found = marks.find(run_id=mark.run_id)
    assert {p.pid for p in found} == set(family.values())
    assert marks.end(found, timeout_s=10) == []
    assert not any(lives(pid) for pid in family.values())
    assert marks.find(run_id=mark.run_id) == []


def test_a_stopped_process_is_ended(start) -> None:
    mark = new_mark()
    process = start("import signal; print('up', flush=True); signal.pause()", mark=mark)
    process.stdout.readline()
    os.kill(process.pid, signal.SIGSTOP)
    assert marks.end_run(mark.run_id) == []
    assert process.wait() == -signal.SIGKILL


def test_look_alikes_siblings_and_launchers_survive(start) -> None:
    """CTL-34: whatever does not bear the mark receives no signal, even with the very same command line."""
    mark = new_mark()
    code = "import signal; print('up', flush=True); signal.pause()"
    ours = start(code, mark=mark)
    look_alike = start(code)
    other_run = start(code, mark=new_mark())
    not_a_mark = start(
        "import os, signal, sys; os.environ['SUREFOOT_MARK'] = sys.argv[1]; print('up', flush=True); signal.pause()",
        str(mark),
    )
    for process in (ours, look_alike, other_run, not_a_mark):
        process.stdout.readline()
    assert [p.pid for p in marks.find(run_id=mark.run_id)] == [ours.pid]
    assert marks.end_run(mark.run_id) == []
    assert ours.wait() == -signal.SIGKILL
    assert [p.poll() for p in (look_alike, other_run, not_a_mark)] == [None, None, None]
    assert lives(os.getpid())
    assert lives(os.getppid())


def test_an_agent_finds_its_predecessors_only(start) -> None:
    old = new_mark(incarnation="1")
    new = Mark(old.job, old.run_id, old.node, "2")
    neighbour = Mark(old.job, old.run_id, "n1", "1")
    code = "import signal; print('up', flush=True); signal.pause()"
    processes = [start(code, mark=m) for m in (old, new, neighbour)]
    for process in processes:
        process.stdout.readline()
    found = marks.find(run_id=old.run_id, node="n0", other_than_incarnation="2")
    assert [p.pid for p in found] == [processes[0].pid]
    assert marks.end(found) == []
    assert [p.poll() for p in processes] == [-signal.SIGKILL, None, None]


def test_a_reused_pid_is_not_signalled(start) -> None:
    """The process that has the pid now started at another time than the one that was noted."""
    mark = new_mark()
    process = start("import signal; print('up', flush=True); signal.pause()", mark=mark)
    process.stdout.readline()
    started = marks.start_time(process.pid)
    assert started is not None
    foreign = Mark(mark.job, new_mark().run_id, mark.node, mark.incarnation)
    assert marks.end([MarkedProcess(process.pid, started - 1, foreign)], timeout_s=1) == []
    assert marks.end([MarkedProcess(process.pid, started, foreign)], timeout_s=1) == []
    assert process.poll() is None


def test_processes_that_keep_forking_are_ended(start) -> None:
    """Some start children all the time, and those outlive them for a while."""
    mark = new_mark()
    process = start(
        "import os, time\n"
        "for _ in range(3): os.fork()\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "  if os.fork() == 0: time.sleep(0.2); os._exit(0)\n"
        "  time.sleep(0.02)\n",
        mark=mark,
    )
    process.stdout.readline()
    assert marks.end_run(mark.run_id, timeout_s=20) == []
    assert marks.find(run_id=mark.run_id) == []


def test_sweep_ends_the_run_of_a_killed_owner_and_no_other(start, base: Path) -> None:
    killed, living = start(OWNER, str(base)), start(OWNER, str(base))
    killed_run, killed_child = killed.stdout.readline().split()
    living_run, living_child = living.stdout.readline().split()
    killed.kill()
    killed.wait()
    assert lives(int(killed_child))
    swept = marks.sweep(base)
    assert killed_run in swept
    assert living_run not in swept
    assert not lives(int(killed_child))
    assert not Path(f"/dev/shm/surefoot-{killed_run}").exists()
    assert not (base / killed_run).exists()
    assert lives(int(living_child))
    assert Path(f"/dev/shm/surefoot-{living_run}/n0").is_dir()
    assert [r.run_id for r in marks.living_runs(base)] == [living_run]
    living.kill()
    living.wait()
    assert living_run in marks.sweep(base)
    assert not lives(int(living_child))


def test_sweepers_race_and_each_run_is_cleaned_once(start, base: Path) -> None:
    owners = [start(OWNER, str(base)) for _ in range(4)]
    runs = [owner.stdout.readline().split()[0] for owner in owners]
    for owner in owners:
        owner.kill()
        owner.wait()
    sweepers = [
        start(
            "import sys, json; from pathlib import Path; from surefoot import marks; print('up', flush=True);"
            "sys.stdin; print(json.dumps(marks.sweep(Path(sys.argv[1]))), flush=True)",
            str(base),
        )
        for _ in range(2)
    ]
    swept: list[str] = []
    for sweeper in sweepers:
        sweeper.stdout.readline()
        swept += json.loads(sweeper.stdout.readline())
        assert sweeper.wait() == 0
    assert sorted(run for run in swept if run in runs) == sorted(runs)
    assert list(base.iterdir()) == []
    assert all(marks.find(run_id=run) == [] for run in runs)


def test_close_ends_the_runs_processes(start, base: Path) -> None:
    with RunOwner.create("gpt", base) as owner:
        family = read_family(start(FAMILY, mark=owner.mark("n0", "1")))
        begun = time.monotonic()
    assert time.monotonic() - begun < 10
    assert not any(lives(pid) for pid in family.values())
    assert list(base.iterdir()) == []
