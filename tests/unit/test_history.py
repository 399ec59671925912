"""The history is append-only, survives SIGKILL line by line, and closes each operation as ok, fail or unknown."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot import history


@pytest.fixture
def lines(tmp_path: Path):
    path = tmp_path / "h" / "me.jsonl"
    history.open_history(path, "me")
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    history.close_history()


def test_an_operation_is_opened_and_closed(lines):
    with history.operation("commit", step=3) as result:
        result["manifest"] = "m"
    invoke, ok = lines()
    assert (invoke["kind"], invoke["op"], invoke["step"]) == ("invoke", "commit", 3)
    assert (ok["kind"], ok["of"], ok["manifest"]) == ("ok", invoke["n"], "m")
    assert ok["t"] >= invoke["t"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), "fail"),
        (TimeoutError("late"), "unknown"),
        (history.UnknownOutcomeError("?"), "unknown"),
        (ConnectionResetError(), "unknown"),
    ],
)
def test_a_timeout_is_unknown_and_a_refusal_a_failure(lines, error: Exception, kind: str):
    with pytest.raises(type(error)), history.operation("put"):
        raise error
    assert [line["kind"] for line in lines()] == ["invoke", kind]


def test_without_a_history_nothing_is_noted():
    history.close_history()
    assert history.note("anything") is None


def test_every_line_noted_before_a_sigkill_is_there(tmp_path: Path):
    path = tmp_path / "victim.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from surefoot import history\n"
        "history.open_history(Path(sys.argv[1]), 'victim')\n"
        "for i in range(100): history.note('line', i=i)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [json.loads(line)["i"] for line in path.read_text().splitlines()] == list(range(100))


def test_it_appends_to_what_another_life_wrote(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    for life in range(2):
        history.open_history(path, "a")
        history.note("life", life=life)
    history.close_history()
    assert [json.loads(line)["life"] for line in path.read_text().splitlines()] == [0, 1]
    assert os.stat(path).st_mode & 0o777 == 0o600
