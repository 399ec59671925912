"""Makes loop_bench.py importable (in pytest's import mode `importlib` the tests are no package), and gives its bench."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from loop_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
