"""The trace reader takes whole lines only, finds new files, and outlives a file that vanishes."""

import json
from pathlib import Path

from surefoot.chaos.trace import TraceTail, parse_line, read_all


def line(**fields: object) -> str:
    return json.dumps({"t": 1.0, "n": 1, "who": "x", "pid": 1, **fields}) + "\n"


def test_a_torn_line_is_kept_back_until_it_is_whole(tmp_path: Path):
    path = tmp_path / "n0" / "history" / "rank-0.jsonl"
    path.parent.mkdir(parents=True)
    whole = line(kind="a")
    path.write_text(whole + whole[:7])
    tail = TraceTail(tmp_path, "*/history/rank-*.jsonl")
    assert tail.read() == []
    tail.look()
    assert [e["kind"] for e in tail.read()] == ["a"]
    with path.open("a") as f:
        f.write(whole[7:] + line(kind="b"))
    assert [e["kind"] for e in tail.read()] == ["a", "b"]
    path.unlink()
    assert tail.read() == []


def test_what_is_no_event_is_passed_over():
    assert parse_line(b"") is None
    assert parse_line(b"[1]") is None
    assert parse_line(b'{"t": 1') is None


def test_all_files_are_merged_by_time(tmp_path: Path):
    for name, t in (("a", 2.0), ("b", 1.0)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"t": t, "n": 1, "kind": name}) + "\n")
    assert [e["kind"] for e in read_all([tmp_path], "*.jsonl")] == ["b", "a"]
