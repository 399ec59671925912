"""Finding an etcd, judging its version, reading its last words; without starting one."""

from pathlib import Path

import pytest

from surefoot.controller import etcd


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put an "etcd" that prints the given text on an otherwise empty PATH."""

    def put(says: str, code: int = 0) -> Path:
        path = tmp_path / "etcd"
        path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return path

    return put


class TestFinding:
    def test_the_one_on_path_comes_first(self, fake):
        path = fake("etcd Version: 3.4.23\nGit SHA: x")
        assert etcd.find_etcd() == etcd.EtcdBinary(path, (3, 4, 23))

    def test_else_the_wheels(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert etcd.find_etcd().path.parent.name == "etcdbin"

    def test_none_at_all_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(etcd, "_in_wheel", lambda: None)
        with pytest.raises(etcd.EtcdMissingError, match="pip install"):
            etcd.find_etcd()

    @pytest.mark.parametrize(("says", "code"), [("hello", 0), ("etcd Version: 3.5.9", 1)])
    def test_something_else_of_that_name(self, fake, says: str, code: int):
        fake(says, code)
        with pytest.raises(etcd.EtcdMissingError):
            etcd.find_etcd()


class TestVersion:
    @pytest.mark.parametrize("version", [(3, 4, 23), (3, 5, 3), (3, 6, 0)])
    def test_good_ones(self, version: tuple[int, int, int]):
        assert etcd.check_version(etcd.EtcdBinary(Path("etcd"), version), machines=3) is None

    @pytest.mark.parametrize("version", [(3, 5, 0), (3, 5, 1), (3, 5, 2)])
    def test_those_that_lose_data(self, version: tuple[int, int, int]):
        binary = etcd.EtcdBinary(Path("etcd"), version)
        assert "can lose data" in (etcd.check_version(binary) or "")
        with pytest.raises(etcd.EtcdUnsafeError, match=r"3\.5\.3 or newer"):
            etcd.check_version(binary, machines=2)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            '{"level":"info","msg":"a"}\n{"level":"fatal","msg":"discovery failed","error":"bind"}\n',
            "discovery failed bind",
        ),
        ("surefoot: cannot run etcd: No such file\n", "surefoot: cannot run etcd: No such file"),
        (
            '{"level":"error","msg":"bad disk"}\n{"level":"info","msg":"x"}\n{"level":"warn","msg":"simple token"}\n',
            "bad disk",
        ),
        ('{"level":"info","msg":"x"}\n{"level":"warn","msg":"slow"}\n{"level":"info","msg":"y"}\n', "slow"),
        ('{"level":"info","msg":"ready"}\n', "(it said nothing)"),
        ("", "(it said nothing)"),
        (None, "(no log: No such file or directory)"),
    ],
)
def test_last_words(tmp_path: Path, log: str | None, words: str):
    if log is not None:
        (tmp_path / "log").write_text(log)
    assert etcd.last_words(tmp_path / "log") == words
