"""bench/plan_worlds.py for tests: thousands of simulated ranks."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _load() -> ModuleType:
    path = Path(__file__).parents[3] / "bench" / "plan_worlds.py"
    spec = importlib.util.spec_from_file_location("plan_worlds", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


worlds = _load()
