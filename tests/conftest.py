"""Fixtures for all tests: a real etcd, a real S3 server, and a way to wait that is no sleep.

The servers are one per run and start when a test first asks for them; each test has keys or a prefix of its own there.
Whatever a fixture started is ended by the process that started it, by its pid.
"""

import importlib.util
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from surefoot.controller.etcd import EmbeddedEtcd, start_etcd
from surefoot.controller.store import CoordStore, connect

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch asks the DNS for a name of ::ffff:127.0.0.1 at every connection to a TCPStore. Where the answer is lost, and it often is
# when several ranks ask at once, that takes 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Two cores are shared by whatever runs: a slow example is no failure, and pytest-timeout ends one that hangs. A failure
# prints what replays it.
settings.register_profile("surefoot", deadline=None, print_blob=True)
settings.load_profile("surefoot")
# A shell ignores SIGINT for what it starts in the background, and children inherit that: tests of Ctrl-C would find
# processes that are deaf to it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _eventually(holds: Callable[[], Any], within_s: float = 10.0, what: str = "") -> Any:
    """Poll until `holds()` is true, and return what it returned; fail after `within_s`."""
    until = time.monotonic() + within_s
    while not (result := holds()):
        if time.monotonic() > until:
            pytest.fail(f"not within {within_s:g} s: {what or holds}")
        time.sleep(0.02)  # the pace of polling
    return result


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """``eventually(lambda: ..., within_s=10.0, what="")`` polls until the function returns something true."""
    return _eventually


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """One real etcd for the whole run, for tests that do it no harm; share it by using keys of your own (`job`)."""
    folder = tmp_path_factory.mktemp("etcd")
    with start_etcd(folder / "data", folder / "log") as running:
        yield running


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """A real etcd for this test alone, to stop, freeze, kill or compact."""
    with start_etcd(tmp_path / "etcd", tmp_path / "etcd.log") as running:
        yield running


@pytest.fixture
def coord(etcd: EmbeddedEtcd) -> Iterator[CoordStore]:
    """A connection to `etcd`."""
    store = connect(etcd.endpoint)
    yield store
    store.close()


@pytest.fixture
def job() -> str:
    """A job's name that no other test has."""
    return f"job-{uuid.uuid4().hex[:12]}"


def _contract(name: str) -> Any:
    """tests/contract/<name>.py; in pytest's import mode `importlib` the tests are no package to import from."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "contract" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One real S3 server for the whole run (an `S3Server` of tests/contract/s3server.py) with a bucket ``test``."""
    server = _contract("s3server")
    with server.run_s3(tmp_path_factory.mktemp("weed"), bucket="test") as running:
        yield running


@pytest.fixture
def s3_url(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A root of this test's own on the S3 server; the AWS variables of this process, and of what it starts, lead there."""
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    return f"s3://test/{uuid.uuid4().hex}"


@pytest.fixture
def s3_proxy(s3_server: Any, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An `S3Proxy` (tests/contract/s3proxy.py tells how to use it) that stands before the S3 server for this test; the AWS
    variables lead to it. Its `root` is `s3_url`."""
    with _contract("s3proxy").run_proxy(s3_server, s3_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture(scope="session")
def s3_faults() -> Any:
    """The module tests/contract/s3proxy.py, for what faults do: ``s3_faults.status(503, "SlowDown")``."""
    return _contract("s3proxy")
