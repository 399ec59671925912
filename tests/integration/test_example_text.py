"""The examples' real text: rows, determinism, the cache, and what is refused."""

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.examples import text
from surefoot.examples.text import PrepareError, Text, cut, docstrings, licence_texts, prepare
from surefoot.loader import Mixture, Pack, Source, plan


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("cache") / "text")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_rows_are_short_and_say_where_they_are_from(prepared):
    for source in ("code", "prose"):
        files = sorted((prepared / source).glob("*.parquet"))
        assert len(files) == text.SHARDS
        for file in files:
            assert pq.read_metadata(file).num_row_groups > 1
            table = pq.read_table(file)
            assert table.schema.names == ["text", "file", "line"]
            sizes = [len(row.encode()) for row in table["text"].to_pylist()]
            assert 0 < min(sizes) <= max(sizes) <= 256
    assert sum(p.stat().st_size for p in prepared.rglob("*.parquet")) > 2_000_000


def test_a_row_of_code_stands_in_its_file_at_its_line(prepared):
    stdlib = Path(json.__file__).parents[1]
    rows = [row for row in pq.read_table(prepared / "code").to_pylist() if row["file"] == "json/decoder.py"]
    assert rows
    lines = (stdlib / "json/decoder.py").read_text().splitlines(keepends=True)
    for row in rows:
        assert "".join(lines[row["line"] - 1 :]).startswith(row["text"])


def test_prose_comes_from_docstrings_topics_and_licences(prepared):
    files = set(pq.read_table(prepared / "prose", columns=["file"])["file"].to_pylist())
    assert {"json/__init__.py", "pydoc_data/topics/assignment", "surefoot/LICENSE"} <= files


def test_the_same_environment_gives_the_same_files(prepared, tmp_path):
    assert contents(prepare(tmp_path / "again")) == contents(prepared)


def test_a_prepared_folder_is_used_as_it_is(prepared, monkeypatch):
    def never(report):
        raise AssertionError("prepared again")

    monkeypatch.setattr(text, "_collect", never)
    assert prepare(prepared) == prepared
    for file in prepared.rglob("*.parquet"):
        os.utime(file)
    assert prepare(prepared) == prepared


def few_rows(report):
    return {source: [text.Row(f"{source} {i}\n", "f", i) for i in range(50)] for source in ("code", "prose")}


def test_a_damaged_or_outdated_folder_is_prepared_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_collect", few_rows)
    folder = prepare(tmp_path / "text")
    whole = contents(folder)
    (folder / "code/code-00001.parquet").unlink()
    assert contents(prepare(folder)) == whole
    monkeypatch.setattr(text, "FORMAT", text.FORMAT + 1)
    assert contents(prepare(folder)) != whole
    assert os.listdir(tmp_path) == ["text"], "nothing is left beside it"


def test_what_another_process_prepared_meanwhile_is_as_good(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_collect", few_rows)

    def meanwhile(report):
        monkeypatch.setattr(text, "_collect", few_rows)
        prepare(tmp_path / "text")
        return few_rows(report)

    monkeypatch.setattr(text, "_collect", meanwhile)
    folder = prepare(tmp_path / "text")
    assert text.is_prepared(folder, json.loads((folder / text.MARKER).read_text())["fingerprint"])
    assert os.listdir(tmp_path) == ["text"]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_collect", few_rows)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(text.pq, "write_table", full)
    with pytest.raises(
        PrepareError, match=r"cannot prepare the text in .*text: No space left on device; name a folder"
    ):
        prepare(tmp_path / "text")
    assert os.listdir(tmp_path) == []


def test_folders_that_are_not_ours_are_left_alone(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/thesis.txt").write_text("four years of work")
    with pytest.raises(PrepareError, match="theirs holds something else and is left alone"):
        prepare(tmp_path / "theirs")
    with pytest.raises(PrepareError, match=r"thesis.txt is a file; name a folder"):
        prepare(tmp_path / "theirs/thesis.txt")
    with pytest.raises(PrepareError, match="cannot prepare the text in"):
        prepare(tmp_path / "theirs/thesis.txt/text")
    assert (tmp_path / "theirs/thesis.txt").read_text() == "four years of work"


def test_progress_is_told_and_its_errors_are_the_callers_own(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_collect", few_rows)
    told = []
    prepare(tmp_path / "text", lambda what, done: told.append((what, done)))
    assert told[-1] == ("ready", 1.0)
    assert told == sorted(told, key=lambda pair: pair[1])

    def broken(what, done):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        prepare(tmp_path / "other", broken)


@given(st.text(), st.integers(4, 300))
def test_cutting_loses_nothing_but_white_space(whole, limit):
    rows = list(cut(whole, limit))
    assert all(0 < len(row.encode()) <= limit for _, row in rows)
    assert "".join("".join(row.split()) for _, row in rows) == "".join(whole.split())
    lines = whole.split("\n")
    for line, row in rows:
        assert row.split("\n")[0] in lines[line]


def test_rows_end_at_a_line_where_there_is_one():
    assert list(cut("one\ntwo\nthree\n", 9)) == [(0, "one\ntwo\n"), (2, "three\n")]
    assert list(cut("ééé", 4)) == [(0, "éé"), (0, "é")]
    with pytest.raises(ValueError, match="4 is the least"):
        next(cut("x", 3))


def test_docstrings_are_read_without_importing_anything():
    source = '"""Module."""\nraise SystemExit\nclass A:\n  """A.\n\n  More."""\n  def f(self): "F"\n'
    found = list(docstrings(Text("x.py", 1, source)))
    assert found == [Text("x.py", 1, "Module."), Text("x.py", 4, "A.\n\nMore."), Text("x.py", 7, "F")]
    assert list(docstrings(Text("x.py", 1, "not python ("))) == []


def test_the_same_licence_is_taken_once(tmp_path):
    for name in ("a-1.dist-info", "b-2.dist-info"):
        (tmp_path / name / "licenses").mkdir(parents=True)
        (tmp_path / name / "licenses/LICENSE").write_text("be nice")
    (tmp_path / "b-2.dist-info/COPYING.txt").write_text("copy")
    found = [t for t in licence_texts(tmp_path / "none", [tmp_path]) if t.text in ("be nice", "copy")]
    assert [t.file for t in found] == ["a-1.dist-info/licenses/LICENSE", "b-2.dist-info/COPYING.txt"]


def test_the_loader_takes_it(prepared):
    mix = Mixture(
        [Source("code", str(prepared / "code"), 0.6), Source("prose", str(prepared / "prose"), 0.4)], seed=7
    )
    steps = plan(mix, Pack(seq_len=256, step_tokens=2048), 60)
    ids = [sample_id for step in steps for sample_id in step.sample_ids]
    assert len(steps) == 60
    assert len(ids) == len(set(ids)) > 480
