"""The restart benchmark's arithmetic; what it measures is measured by running it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "restart.py"
    spec = importlib.util.spec_from_file_location("bench_restart", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


restart = _load()


def _event(kind: str, t: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "t": t, **fields}


def _ranks(kind: str, times: list[float], generation: int = 2) -> list[dict[str, Any]]:
    return [_event(kind, t, rank=r, generation=generation) for r, t in enumerate(times)]


def test_the_parts_add_up_to_the_whole() -> None:
    ranks = [
        *_ranks("joined", [0.5] * 4, generation=1),
        *_ranks("joined", [10.5, 10.6, 10.4, 10.5]),
        *_ranks("restored", [10.9, 10.8, 10.8, 11.0]),
    ]
    agent = [
        _event("rank_exit", 9.0, rank=0),  # before the kill: another story
        _event("rank_exit", 10.1, rank=1),
        _event("rank_exit", 10.2, rank=0),
        _event("plan_seen", 10.3, generation=2),
    ]
    parts = restart.parts_of(ranks, agent, 10.0, 11.5)
    values = [getattr(parts, name) for name in restart.PARTS]
    assert values == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert sum(values) == pytest.approx(1.5)


def test_a_silent_agent_is_no_measurement() -> None:
    with pytest.raises(restart.BenchError, match="rank_exit"):
        restart.parts_of([], [], 10.0, 11.0)


def test_the_step_has_ended_when_the_last_rank_has() -> None:
    assert restart.all_stepped(_ranks("step_end", [3.0, 1.0, 2.0]), 2) is None
    assert restart.all_stepped(_ranks("step_end", [3.0, 1.0, 2.0, 2.5]), 2) == 3.0
    again = [*_ranks("step_end", [3.0, 1.0, 2.0, 2.5]), *_ranks("step_end", [9.0] * 4)]
    assert restart.all_stepped(again, 2) == 3.0


def test_medians_and_spread() -> None:
    def pair(surefoot_s: float, torchrun_s: float) -> dict[str, float]:
        return {
            "rank": 1,
            "surefoot_s": surefoot_s,
            "torchrun_s": torchrun_s,
            **dict.fromkeys(restart.PARTS, 0.2),
        }

    result = restart.summary([pair(1.0, 9.0), pair(1.5, 10.0), pair(4.0, 30.0)])
    assert (result["surefoot_s"], result["torchrun_s"], result["speedup"]) == (1.5, 10.0, 6.67)
    assert result["spread"]["surefoot_s"] == [1.0, 4.0]
    assert {"detect_s", "plan_s", "launch_s", "restore_s", "first_step_s"} <= set(result)
    assert len(result["pairs"]) == 3
