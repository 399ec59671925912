"""Shared fixtures. etcd3 0.12.0 was generated for protobuf 3 and imports only with the pure-Python implementation."""

import importlib.util
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _s3server() -> Any:
    """tests/contract/s3server.py; in pytest's import mode `importlib` the tests are no package to import from."""
    spec = importlib.util.spec_from_file_location(
        "s3server", Path(__file__).parent / "contract" / "s3server.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One real S3 server for the whole run (an `S3Server` of tests/contract/s3server.py) with a bucket ``test``."""
    server = _s3server()
    with server.run_s3(tmp_path_factory.mktemp("weed"), bucket="test") as running:
        yield running


@pytest.fixture
def s3_url(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A root of this test's own on the S3 server; the AWS variables of this process, and of what it starts, lead there."""
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    return f"s3://test/{uuid.uuid4().hex}"
