"""What a module's or an optimizer's own ``state_dict()`` tells and nothing else shows is stored, or refused by name: never lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from surefoot import ckpt


class Overrides(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = torch.ones(1)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs) | {"seen": self.seen}


class Saves(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seen"] = 7


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda m, told, prefix, _: told.update({f"{prefix}seen": 7}))
    return module


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Overrides, Saves, hooked, quantised])
def test_what_only_a_modules_state_dict_tells_is_refused_by_name(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(ckpt.StateError, match=r"model\.0\.\S*(seen|scale|_packed_params)"):
        ckpt.save(tmp_path, 1, {"model": nn.Sequential(make())})
    assert ckpt.steps(tmp_path) == []


class Renames(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"inner.{key}": value for key, value in super().state_dict(*args, **kwargs).items()}


class Counts(nn.Linear):
    """Tells its state in its own way, and tells no more than there is."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def get_extra_state(self) -> Any:
        return 3

    def set_extra_state(self, state: Any) -> None:
        assert state == 3


@pytest.mark.parametrize("kind", [Renames, Counts])
def test_a_way_of_its_own_to_tell_the_same_is_no_reason_to_refuse(
    kind: Callable[..., nn.Linear], tmp_path: Path
) -> None:
    saved, found = kind(2, 2), kind(2, 2)
    ckpt.save(tmp_path, 1, {"model": saved})
    ckpt.load(tmp_path, {"model": found})
    assert torch.equal(saved.weight, found.weight)


class Around(Optimizer):
    """Wraps an optimizer that holds the state."""

    def __init__(self, params: Any) -> None:
        self.inner = AdamW(params, lr=0.1)
        super().__init__([p for g in self.inner.param_groups for p in g["params"]], {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def train(model: nn.Module, optim: Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(3, 2)).square().sum().backward()
        optim.step()
        model.zero_grad()


def test_an_optimizer_that_wraps_another_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim = Around(model.parameters())
    train(model, optim, 3)
    ckpt.save(tmp_path, 3, {"model": model, "optim": optim})
    train(model, optim, 2)
    again = nn.Linear(2, 2)
    renewed = Around(again.parameters())
    ckpt.load(tmp_path, {"model": again, "optim": renewed})
    train(again, renewed, 2)
    assert torch.equal(model.weight, again.weight)


def test_what_a_hook_adds_to_an_optimizers_state_dict_is_stored(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim, seen = SGD(model.parameters(), lr=0.1), list[int]()
    optim.register_state_dict_post_hook(lambda _, told: told | {"seen": 7})
    ckpt.save(tmp_path, 1, {"model": model, "optim": optim})
    optim.register_load_state_dict_pre_hook(lambda _, told: seen.append(told["seen"]))
    ckpt.load(tmp_path, {"model": model, "optim": optim})
    assert seen == [7]


@pytest.mark.parametrize("n", [2, 1000])
@pytest.mark.parametrize("kind", [np.ma.MaskedArray, np.recarray])
def test_arrays_of_other_classes_than_numpys_own_are_refused(kind: Any, n: int, tmp_path: Path) -> None:
    """They came back without their mask."""
    value = np.arange(n).view(kind)
    with pytest.raises(ckpt.StateError, match=r"v: a value of type numpy\.\S+ cannot be stored"):
        ckpt.save(tmp_path, 1, {"v": value})
