"""The embedded etcd as a process: ports, data, environment, and that it never outlives its starter."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.controller import etcd
from surefoot.controller.store import connect

pytestmark = pytest.mark.slow


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_data_and_a_given_port_survive_a_restart(tmp_path: Path):
    port = free_port()
    for expected in (None, b"1"):
        with etcd.start_etcd(tmp_path / "data", tmp_path / "log", client_port=port) as running:
            assert running.endpoint == f"127.0.0.1:{port}"
            store = connect(running.endpoint)
            item = store.get("/a")
            assert (item and item.value) == expected
            store.put("/a", b"1")
            store.close()
        assert not running.alive()
        running.stop()  # twice is no error


def test_a_given_port_in_use_is_one_clear_error(tmp_path: Path, taken_port: int):
    with pytest.raises(etcd.EtcdPortError, match=f"port {taken_port} .* in use"):
        etcd.start_etcd(tmp_path / "data", tmp_path / "log", client_port=taken_port)


def test_a_chosen_port_that_was_taken_in_between_is_chosen_again(
    tmp_path: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch
):
    chosen = [taken_port, free_port(), free_port(), taken_port]
    choose = etcd._free_port
    monkeypatch.setattr(etcd, "_free_port", lambda: chosen.pop(0) if chosen else choose())
    with etcd.start_etcd(tmp_path / "data", tmp_path / "log") as running:
        assert running.alive()
    assert chosen == [], "both traps, of the client's and of the peer's port, were sprung"


def test_what_keeps_it_from_starting_is_said(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "member").write_text("no folder")
    with pytest.raises(etcd.EtcdStartError, match=r"last words: .*member.*not a directory"):
        etcd.start_etcd(tmp_path / "data", tmp_path / "log")


def test_it_bears_the_mark_and_no_foreign_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://127.0.0.1:1")
    environment = {"SUREFOOT_MARK": "j/r/etcd/1"}
    with etcd.start_etcd(tmp_path / "data", tmp_path / "log", environment=environment) as running:
        said = Path(f"/proc/{running.pid}/environ").read_bytes().split(b"\0")
        assert b"SUREFOOT_MARK=j/r/etcd/1" in said
        assert not [variable for variable in said if variable.startswith(b"ETCD_")]
        assert os.getsid(running.pid) == running.pid, "a Ctrl-C at the terminal is not for it"


def test_stop_ends_a_frozen_one(tmp_path: Path):
    running = etcd.start_etcd(tmp_path / "data", tmp_path / "log")
    os.kill(running.pid, signal.SIGSTOP)
    running.stop(grace_s=0.2)
    assert not running.alive()


def test_it_ends_with_its_starter_whatever_ends_that(tmp_path: Path, eventually: Callable[..., Any]):
    code = """
import sys, pathlib, signal
from surefoot.controller.etcd import start_etcd
folder = pathlib.Path(sys.argv[1])
print(start_etcd(folder / "data", folder / "log").pid, flush=True)
signal.pause()
"""
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    with starter.stdout:
        pid = int(starter.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    starter.kill()
    starter.wait()
    eventually(lambda: _is_gone(pid))


def _is_gone(pid: int) -> bool:
    """True also of a zombie whose new parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
