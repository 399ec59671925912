"""``python -m surefoot.ckpt``: tables, JSON, and one line with an exit code for what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ckpt_images import arrays, make_images

from surefoot.ckpt import tiers
from surefoot.ckpt.__main__ import main
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import open_store
from surefoot.ckpt.tables import human
from surefoot.exitcodes import ExitCode


@pytest.fixture
def root(tmp_path: Path) -> str:
    url = (tmp_path / "root").as_uri()
    store = open_store(url)
    create_record(store, Record(generation=1, start=StartRef(), reason="first_start", created_by="t"))
    for step in (20, 40):
        images = make_images(arrays(), 2, step=step)
        tiers.upload_images(store, images, generation=1, step=step, attempt="a1", writer=0, deadline_s=10)
        outcome = tiers.commit(
            store, generation=1, step=step, attempt="a1", writers=1, deadline_s=5, facts={}
        )
        assert isinstance(outcome, tiers.Committed)
    start = StartRef(generation=1, step=20)
    create_record(store, Record(generation=2, start=start, reason="rank_exit", created_by="t"))
    return url


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["surefoot ckpt", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_ls(run: Any, root: str) -> None:
    code, out, _ = run("ls", root)
    assert code == 0
    lines = out.splitlines()
    assert "newest" in next(line for line in lines if line.strip().startswith("20"))
    assert "off the lineage" in next(line for line in lines if line.strip().startswith("40"))


def test_ls_json(run: Any, root: str) -> None:
    code, out, _ = run("ls", root, "--json")
    rows = msgspec.json.decode(out)
    assert code == 0
    assert [(r["step"], r["counts"], r["newest"], r["world_size"]) for r in rows] == [
        (20, True, True, 2),
        (40, False, False, 2),
    ]
    assert rows[0]["nbytes"] == sum(a.nbytes for a in arrays().values())


def test_show(run: Any, root: str) -> None:
    code, out, _ = run("show", root)
    assert code == 0
    assert "model.w" in out
    assert "[7, 3]" in out
    code, out, _ = run("show", root, "--step", "40", "--generation", "1", "--json")
    shown = msgspec.json.decode(out)
    assert (shown["step"], shown["counts"], shown["cursor"]) == (40, False, {"at": 5})
    tied = next(t for t in shown["tensors"] if t["name"] == "model.tied")
    assert (tied["tied_to"], tied["nbytes"], tied["pieces"]) == ("model.w", 84, 2)


@pytest.mark.parametrize("byte", [-1, 20], ids=["data", "header"])
def test_verify(run: Any, root: str, byte: int) -> None:
    code, out, _ = run("verify", root, "--json")
    report = msgspec.json.decode(out)
    assert code == 0
    assert report["ok"]
    assert report["nbytes"] == sum(a.nbytes for a in arrays().values())
    (path,) = Path(root.removeprefix("file://")).glob("gen-0001/step-0000000020/*/r00001-0.safetensors")
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
    code, out, _ = run("verify", root)
    assert code == ExitCode.UNEXPECTED
    assert "NOT SOUND" in out
    assert "r00001-0.safetensors" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ls", "ftp://x"], ExitCode.USAGE, "is no root"),
        (["verify", "{root}", "--step", "7"], ExitCode.USAGE, "no step 7"),
        (["ls", "{root}/gen-0001/step-0000000020/manifest.json"], 0, ""),
        (["nonsense"], ExitCode.USAGE, "nonsense"),
    ],
)
def test_what_is_wrong_is_one_line(run: Any, root: str, words: list[str], code: int, said: str) -> None:
    ended, out, err = run(*[w.format(root=root) for w in words])
    assert ended == code
    assert said in err
    assert "Traceback" not in out + err


def test_an_empty_root(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("ls", str(tmp_path))
    assert code == 0
    assert "no job has ever begun" in out
    assert run("ls", str(tmp_path), "--json")[1].strip() == "[]"


def test_a_damaged_manifest_is_listed_with_its_problem(run: Any, root: str) -> None:
    (path,) = Path(root.removeprefix("file://")).glob("gen-0001/step-0000000040/manifest.json")
    path.write_bytes(b"{}")
    code, out, _ = run("ls", root)
    assert code == 0
    assert "unreadable" in out
    assert run("verify", root, "--step", "40", "--generation", "1")[0] == ExitCode.UNEXPECTED


def test_human() -> None:
    assert [human(n) for n in (0, 999, 1000, 9_400_000, 2 * 10**12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "9.4 MB",
        "2.0 TB",
    ]
