"""What tests let a process of its own do to an object store: race, die in the middle, or work on a disk that is small or
read-only. Run as a script; it prints one JSON value."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from surefoot.ckpt.objects import files, linuxfiles
from surefoot.ckpt.objects.s3 import S3ObjectStore
from surefoot.ckpt.store import ObjectExistsError, ObjectStore, ObjectStoreError, open_store

LARGE = 11 * 2**20
"""With parts of 5 MiB: three."""


def opened(root: str) -> ObjectStore:
    if not root.startswith("s3://"):
        return open_store(root)
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    return S3ObjectStore(bucket, prefix, deadline_s=30.0, part_nbytes=5 * 2**20)


def race(root: str, me: str, rounds: str) -> list[bool]:
    """Create race/0, race/1 … , the last by `upload`, and tell which of them this process won. Begins at a line on stdin."""
    store = opened(root)
    store.list("race/")
    print("ready", flush=True)
    sys.stdin.readline()
    won: list[bool] = []
    for i in range(int(rounds)):
        size = LARGE if i == int(rounds) - 1 else 100
        upload = store.upload(f"race/{i}", size, deadline_s=60.0)
        try:
            upload.put(memoryview(me.encode() * size))
            upload.finish()
            won.append(True)
        except ObjectExistsError:
            won.append(False)
        finally:
            upload.abort()
    return won


def die(root: str) -> None:
    """Be killed in the middle of an upload."""
    upload = opened(root).upload("gen-0001/k", LARGE, deadline_s=60.0)
    upload.put(memoryview(bytes(6 * 2**20)))
    upload.drain()
    os.kill(os.getpid(), signal.SIGKILL)


def small_disk(folder: str) -> dict[str, Any]:
    """On a disk of 3 MiB, which is then made read-only. Needs a mount namespace of its own (``unshare -m``)."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder], check=True)
    store = files.FileObjectStore(Path(folder) / "root")
    store.create("a/k", bytes(2**20))
    found: dict[str, Any] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
            found[name] = None
        except ObjectStoreError as e:
            found[name] = [type(e).__name__, str(e)]

    endless = Path(folder) / "endless"
    endless.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=0", "none", endless], check=True)
    note("without a limit", lambda: files.FileObjectStore(endless).create("a/large", bytes(2**24)))
    note("preallocating", lambda: store.upload("a/large", 2**24, deadline_s=1.0))
    found["left after preallocating"] = sorted(os.listdir(f"{folder}/root/a"))
    linuxfiles.PREALLOCATE_NBYTES = 2**60
    note("writing", lambda: store.create("a/large", bytes(2**24)))
    found["left after writing"] = sorted(os.listdir(f"{folder}/root/a"))
    note("a small one", lambda: store.create("a/small", b"x"))
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    note("read-only: create", lambda: store.create("a/more", b"x"))
    note("read-only: upload", lambda: store.upload("a/more", 10, deadline_s=1.0))
    note("read-only: delete", lambda: store.delete("a/k"))
    note("read-only: read", lambda: store.read("a/k"))
    found["there"] = [o.key for o in store.list("")]
    return found


if __name__ == "__main__":
    act, *arguments = sys.argv[1:]
    print(json.dumps({"race": race, "die": die, "small_disk": small_disk}[act](*arguments)), flush=True)
