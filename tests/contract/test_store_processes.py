"""Object stores used by several processes, by processes that are killed, and on disks that are full, read-only or not ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.ckpt.objects.files import FileObjectStore
from surefoot.ckpt.store import ObjectStoreDeniedError, open_store

pytestmark = pytest.mark.slow

CHILD = Path(__file__).parent / "store_child.py"
ROUNDS = 6
STORES = ["file", pytest.param("s3", marks=pytest.mark.s3)]


@pytest.fixture(params=STORES)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "root").as_uri()
    return request.getfixturevalue("s3_proxy").root


def child(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(CHILD), *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def test_of_two_racing_processes_one_wins_and_the_other_learns_it(
    request: pytest.FixtureRequest, root: str
) -> None:
    """CKP-33: for small objects and for large ones; nothing is renamed or copied, and the loser leaves nothing."""
    racers = [child("race", root, me, str(ROUNDS)) for me in "ab"]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    outcomes: list[list[bool]] = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        told, errors = racer.communicate(timeout=60)
        assert racer.returncode == 0, errors
        outcomes.append(json.loads(told))
    store = open_store(root)
    for i, (a, b) in enumerate(zip(*outcomes, strict=True)):
        assert a != b, f"round {i}: won by {'both' if a else 'nobody'}"
        data = store.read(f"race/{i}")
        assert set(data) == {ord("a" if a else "b")}
    assert len(store.list("")) == ROUNDS
    assert store.unfinished("") == []
    if root.startswith("s3"):
        asked = {r.operation for r in request.getfixturevalue("s3_proxy").requests}
        assert {"PutObject", "CompleteMultipartUpload"} <= asked
        assert not {"CopyObject", "UploadPartCopy"} & asked
        conditions = [
            r.headers.get("if-none-match")
            for r in request.getfixturevalue("s3_proxy").requests
            if r.operation in ("PutObject", "CompleteMultipartUpload")
        ]
        assert set(conditions) == {"*"}


def test_what_a_killed_writer_leaves_is_found_and_removed(root: str) -> None:
    """CKP-40: a stale multipart upload, or a temporary file; no reader ever saw it."""
    victim = child("die", root)
    victim.communicate(timeout=60)
    assert victim.returncode == -signal.SIGKILL, "it died where it should"
    store = open_store(root)
    store.create("gen-0002/k", b"x")
    (left,) = store.unfinished("gen-0001/")
    assert left.key == "gen-0001/k"
    assert abs(left.begun_at - time.time()) < 60
    assert [o.key for o in store.list("")] == ["gen-0002/k"]
    assert store.unfinished("gen-0002/") == []
    store.discard(left)
    assert store.unfinished("") == []
    store.create("gen-0001/k", b"y")


# ---------------------------------------------------------------- disks


@pytest.fixture(scope="module")
def on_a_small_disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `small_disk` found, in a mount namespace of its own: nothing stays mounted, whatever happens."""
    folder = tmp_path_factory.mktemp("small")
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        [*unshare, sys.executable, str(CHILD), "small_disk", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("when", ["preallocating", "writing"])
def test_a_full_disk(on_a_small_disk: dict[str, Any], when: str) -> None:
    """The error names the key and what to do, and the temporary is gone."""
    error, message = on_a_small_disk[when]
    assert error == "ObjectStoreUnavailableError"
    assert "a/large" in message
    assert "free some space" in message
    assert on_a_small_disk[f"left after {when}"] == ["k"]
    assert on_a_small_disk["a small one"] is None


def test_a_tmpfs_without_a_limit(on_a_small_disk: dict[str, Any]) -> None:
    """It says that it has no blocks, and takes what it is given."""
    assert on_a_small_disk["without a limit"] is None


def test_a_read_only_disk(on_a_small_disk: dict[str, Any]) -> None:
    for what in ("create", "upload", "delete"):
        error, message = on_a_small_disk[f"read-only: {what}"]
        assert error == "ObjectStoreDeniedError"
        assert "a/" in message
        assert "mounted read-only" in message
    assert on_a_small_disk["read-only: read"] is None
    assert on_a_small_disk["there"] == ["a/k", "a/small"]


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder that everybody may enter and only its owner change; for the length of the test root is `nobody`."""
    folder = Path(tempfile.mkdtemp())
    FileObjectStore(folder / "root").create("a/k", b"x")
    for path in (folder, folder / "root", folder / "root" / "a"):
        path.chmod(0o555)
    (folder / "root" / "a" / "k").chmod(0o000)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield folder / "root"
    finally:
        if was == 0:
            os.seteuid(0)
        for path in (folder, folder / "root", folder / "root" / "a"):
            path.chmod(0o755)
        shutil.rmtree(folder)


def test_no_permission(as_nobody: Path) -> None:
    store = FileObjectStore(as_nobody)
    calls = {
        "create a/more": lambda: store.create("a/more", b"x"),
        "create b/more": lambda: store.upload("b/more", 10, deadline_s=1.0),
        "read a/k": lambda: store.read("a/k"),
        "delete a/k": lambda: store.delete("a/k"),
    }
    for what, call in calls.items():
        needed = "read" if what.startswith("read") else "read and write"
        with pytest.raises(
            ObjectStoreDeniedError, match=rf"cannot {what}: .*give this user {needed} permission"
        ):
            call()
    with pytest.raises(ObjectStoreDeniedError, match="cannot read a/k"):
        store.read_into("a/k", 0, [memoryview(bytearray(1))])
    assert [o.key for o in store.list("")] == ["a/k"]
