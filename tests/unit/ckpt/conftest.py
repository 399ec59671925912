"""Makes ckpt_images.py importable (in pytest's import mode `importlib` the tests are no package), and runs ``surefoot ckpt``."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.ckpt.__main__ import main

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``surefoot ckpt`` with these words, in this process: exit code, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["surefoot ckpt", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call
