import sys
from pathlib import Path

import pytest

from surefoot.agent.entry import resolve
from surefoot.agent.failures import EntryPointError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "resolved_job"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "gpt.py").write_text("def train(run): ...\nLIMIT = 3\n")
    (folder / "broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return "resolved_job"


def test_finds_a_function(package: str) -> None:
    assert resolve(f"{package}.gpt:train", key="program.train").__name__ == "train"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("resolved_job.gpt:trian", ["program.train", "no function 'trian'", "nearest name is 'train'"]),
        ("resolved_job.gtp:train", ["no module 'resolved_job.gtp'", "nearest name is 'resolved_job.gpt'"]),
        ("resolved_jbo.gpt:train", ["no module 'resolved_jbo'", "nearest name is 'resolved_job'"]),
        ("resolved_job.gpt:LIMIT", ["LIMIT is a int, not a function"]),
        ("resolved_job.gpt", ['"module:function"']),
        (":train", ['"module:function"']),
    ],
)
def test_says_what_is_wrong_and_the_nearest_name(package: str, reference: str, words: list[str]) -> None:
    with pytest.raises(EntryPointError) as e:
        resolve(reference, key="program.train")
    for word in words:
        assert word in str(e.value)


def test_a_missing_import_inside_the_module_is_its_own_error(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        resolve(f"{package}.broken:train", key="program.train")
