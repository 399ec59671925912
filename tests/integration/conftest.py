"""Makes the helper modules beside the tests importable; in pytest's import mode `importlib` they are in no package.

And homes for tests that start the ``surefoot`` command, and ranks for tests of what several ranks do together.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot import marks

sys.path.append(str(Path(__file__).parent))

from homes import Home
from ranks import RankHost


@pytest.fixture
def make_home() -> Iterator[Callable[[], Home]]:
    """Makes homes; at the end everything under them is ended and removed."""
    homes: list[Home] = []

    def make() -> Home:
        homes.append(Home(Path(tempfile.mkdtemp(prefix="sf-"))))
        return homes[-1]

    yield make
    for home in homes:
        for process in home.started:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        marks.sweep(home.folder)
        for pid in home.processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(home.folder)


@pytest.fixture
def home(make_home: Callable[[], Home]) -> Home:
    """One home."""
    return make_home()


@pytest.fixture(scope="session")
def _rank_host() -> Iterator[RankHost]:
    host = RankHost()
    yield host
    host.close()


@pytest.fixture
def rank_host(_rank_host: RankHost) -> Iterator[RankHost]:
    """Starts acts to be interfered with: ``running = rank_host.start(4, "module:function"); running.kill(1); running.wait()``."""
    yield _rank_host
    _rank_host.settle()


@pytest.fixture
def ranks(rank_host: RankHost) -> Callable[..., list[Any]]:
    """``ranks(4, "module:function", *args)``: what the function, of a module beside the tests, returned on each of 4 ranks of
    a gloo group. A failure on any rank, a hang or a process left behind fails the test, with all tracebacks or stacks."""
    return rank_host.play


@pytest.fixture
def knows_no_conditions(s3_proxy: Any, s3_faults: Any) -> Callable[[], list[str]]:
    """The store before the proxy refuses every creation with a condition; returns what was created without."""

    def act(exchange: Any) -> None:
        if "if-none-match" in exchange.request.headers:
            s3_faults.status(501, "NotImplemented")(exchange)
        else:
            exchange.send(exchange.forward())

    fault = s3_proxy.fault("PutObject", act, times=None)

    def created() -> list[str]:
        assert fault.fired > 0
        puts = [r for r in s3_proxy.of("PutObject") if "if-none-match" not in r.headers]
        return [r.key for r in puts if r.status == 200]

    return created
