"""Makes the helper modules beside the tests importable; in pytest's import mode `importlib` they are in no package.

And homes for tests that start the ``surefoot`` command.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot import marks

sys.path.append(str(Path(__file__).parent))

from homes import Home


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
