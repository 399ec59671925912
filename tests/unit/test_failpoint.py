"""Failpoints are off unless two variables agree, and do what they were armed for at the right pass."""

import os
import signal
import subprocess
import sys

import pytest

from surefoot import failpoint as fp
from surefoot.failpoint import Arming, FailpointError, failpoint, from_environment, parse


@pytest.fixture(autouse=True)
def _disarm():
    yield
    fp.arm(None)


def test_clauses_are_read_with_hit_and_seconds():
    assert parse("a.b=crash; c.d=delay:0.5@3;e.f=error@2") == {
        "a.b": Arming(action="crash"),
        "c.d": Arming(action="delay", seconds=0.5, hit=3),
        "e.f": Arming(action="error", hit=2),
    }


def test_an_unknown_action_is_refused_with_the_ones_there_are():
    with pytest.raises(ValueError, match="crash, freeze, error, delay"):
        parse("a.b=explode")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SUREFOOT_FAILPOINTS": "a=crash"},
        {"SUREFOOT_CHAOS": "1"},
        {"SUREFOOT_CHAOS": "yes", "SUREFOOT_FAILPOINTS": "a=crash"},
    ],
)
def test_one_variable_alone_arms_nothing(environ: dict[str, str]):
    assert from_environment(environ) is None


def test_error_is_raised_at_the_named_hit_only():
    fp.arm(parse("x=error@2"))
    failpoint("x")
    with pytest.raises(FailpointError):
        failpoint("x")
    failpoint("x")
    failpoint("another")


def test_crash_and_freeze_act_on_a_real_process():
    code = "from surefoot.failpoint import failpoint; failpoint('p'); print('passed')"
    env = {**os.environ, "SUREFOOT_CHAOS": "1", "SUREFOOT_FAILPOINTS": "p=crash"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")

    frozen = subprocess.Popen(
        [sys.executable, "-c", code], env={**env, "SUREFOOT_FAILPOINTS": "p=freeze"}, stdout=subprocess.PIPE
    )
    try:
        pid, status = os.waitpid(frozen.pid, os.WUNTRACED)
        assert pid == frozen.pid
        assert os.WIFSTOPPED(status)
        frozen.send_signal(signal.SIGCONT)
        assert frozen.communicate(timeout=10)[0] == b"passed\n"
    finally:
        frozen.kill()
        frozen.wait()
