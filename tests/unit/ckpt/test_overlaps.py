"""Live tensors that are one memory, for what the checkpoint has as several: never is one filled over the other. (CKP-17)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from surefoot import ckpt
from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import StateMismatchError
from surefoot.ckpt.live.overlaps import Claim, clashes, shares_within


@pytest.fixture
def files(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def claim(name: str, view: torch.Tensor, *, stored: str = "", movable: bool = False) -> Claim:
    box = Box((0,) * view.dim(), tuple(view.shape))
    return Claim(name=name, stored=stored or name, boxes=(box,), views=(view,), movable=movable)


# ---------------------------------------------------------------- which share elements


def addresses(view: torch.Tensor) -> list[int]:
    places = torch.zeros((), dtype=torch.int64).expand(view.shape)
    for dim, (n, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        shape = [n if d == dim else 1 for d in range(view.dim())]
        places = places + (torch.arange(n) * stride).view(shape)
    return places.add(view.storage_offset()).flatten().tolist()


def test_against_what_lies_where() -> None:
    """Random views of one buffer, against a list of all their elements."""
    generator = np.random.default_rng(7)
    base = torch.zeros(64)
    met = apart = within = 0
    for _ in range(400):
        views: list[torch.Tensor] = []
        for _ in range(2):
            sizes = tuple(int(n) for n in generator.integers(1, 4, size=2))
            strides = tuple(int(n) for n in generator.integers(0, 9, size=2))
            views.append(base.as_strided(sizes, strides, int(generator.integers(0, 24))))
        one, other = (addresses(v) for v in views)
        share = bool(set(one) & set(other))
        same = one == other and views[0].shape == views[1].shape
        found = clashes([claim("a", views[0]), claim("b", views[1])])
        assert found == ([(1, (0,))] if share else []), views
        if same:
            assert clashes([claim("a", views[0], stored="s"), claim("b", views[0], stored="s")]) == []
        for view, places in zip(views, (one, other), strict=True):
            assert shares_within(view) == (len(set(places)) < len(places))
            within += shares_within(view)
        met += share
        apart += not share
    assert min(met, apart, within) > 50


def test_what_cannot_be_moved_comes_first() -> None:
    base = torch.zeros(8)
    found = clashes([claim("a", base, movable=True), claim("b", base[:4]), claim("c", base[4:])])
    assert found == [(0, (1, 2))]


# ---------------------------------------------------------------- objects and optimizers


class Averages:
    """Begins with the parameters' own memory, and is updated out of place."""

    def __init__(self, model: nn.Module, *, arrays: bool = False) -> None:
        self.model = model
        self.arrays = arrays
        self.shadow: dict[str, Any] = {n: self._of(p) for n, p in model.named_parameters()}

    def _of(self, p: torch.Tensor) -> Any:
        return p.data.numpy() if self.arrays else p.data

    def update(self) -> None:
        self.shadow = {n: 0.5 * self.shadow[n] + 0.5 * self._of(p) for n, p in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        again = {} if self.arrays else self.shadow  # arrays are stored by value
        return {"shadow": self.shadow, "again": again}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert all(state["shadow"][n] is t for n, t in state["again"].items()), "one tensor stays one"
        self.shadow = state["shadow"]


@pytest.mark.parametrize("width", [4, 1500])
@pytest.mark.parametrize("arrays", [False, True])
def test_averages_that_begin_as_the_parameters(files: str, width: int, arrays: bool) -> None:
    """Small enough for one block and larger than a segment; as tensors and as arrays."""
    torch.manual_seed(1)
    model = nn.Linear(width, width)
    averages = Averages(model, arrays=arrays)
    averages.update()  # from here on they have memory of their own
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    averages.update()
    ckpt.save(files, 1, {"model": model, "averages": averages})
    other = nn.Linear(width, width)
    fresh = Averages(other, arrays=arrays)
    assert ckpt.load(files, {"model": other, "averages": fresh}) is not None
    for n, p in model.named_parameters():
        assert torch.equal(dict(other.named_parameters())[n], p)
        assert not torch.equal(torch.as_tensor(averages.shadow[n]), p)
        assert torch.equal(torch.as_tensor(fresh.shadow[n]), torch.as_tensor(averages.shadow[n]))


class Lookahead(torch.optim.Optimizer):
    """Its slow weights begin as the parameters themselves."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.data

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def test_optimizer_state_that_begins_as_the_parameter(files: str) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = Lookahead(model.parameters())
    optimizer.state[model.weight]["slow"] = model.weight.data * 2
    ckpt.save(files, 1, {"model": model, "optim": optimizer})
    other = nn.Linear(3, 2, bias=False)
    fresh = Lookahead(other.parameters())
    ckpt.load(files, {"model": other, "optim": fresh})
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(fresh.state[other.weight]["slow"], model.weight * 2)


class Holder:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.numpy()])
def test_two_in_one_object(files: str, make: Callable[[torch.Tensor], Any]) -> None:
    ckpt.save(files, 1, {"s": Holder({"a": make(torch.ones(3000)), "b": make(torch.ones(3000) * 2)})})
    memory = make(torch.zeros(3000))
    fresh = Holder({"a": memory, "b": memory})
    ckpt.load(files, {"s": fresh})
    assert [float(fresh.state[k].sum()) for k in "ab"] == [3000.0, 6000.0]


# ---------------------------------------------------------------- what is filled where it lies


PAIRS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "transposed": lambda t: (t, t.t()),
    "flat": lambda t: (t, t.view(-1)),
    "windows": lambda t: (t.view(-1)[:8], t.view(-1)[4:]),
    "expanded": lambda t: (t, t[0].expand(5, 4)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("strict", [True, False])
def test_different_values_for_one_memory_are_refused(files: str, pair: str, strict: bool) -> None:
    a, b = PAIRS[pair](torch.arange(12.0).view(3, 4))
    ckpt.save(files, 1, {"a": a.clone(), "b": b.clone() - 20})
    live = PAIRS[pair](torch.zeros(3, 4))
    with pytest.raises(StateMismatchError, match=r"^a and b share memory here, and have different values"):
        ckpt.load(files, {"a": live[0], "b": live[1]}, strict=strict)
    whole = {"a": torch.empty_like(a).contiguous(), "b": torch.empty(b.shape)}
    ckpt.load(files, whole)  # nothing was set aside
    assert torch.equal(whole["b"], b - 20)


@pytest.mark.parametrize("pair", PAIRS)
def test_views_of_one_tensor_come_back(files: str, pair: str) -> None:
    a, b = PAIRS[pair](torch.arange(12.0).view(3, 4))
    ckpt.save(files, 1, {"a": a, "b": b})
    live = PAIRS[pair](torch.zeros(3, 4))
    ckpt.load(files, {"a": live[0], "b": live[1]})
    assert torch.equal(live[0], a)
    assert torch.equal(live[1], b)


def test_a_tensor_that_overlaps_itself(files: str) -> None:
    ckpt.save(files, 1, {"a": torch.arange(6.0).view(3, 2)})
    with pytest.raises(StateMismatchError, match="overlaps itself"):
        ckpt.load(files, {"a": torch.zeros(4).as_strided((3, 2), (1, 1))})


def test_columns_of_one_buffer_share_nothing(files: str) -> None:
    """They are filled where they lie, modules' and objects' alike."""
    whole = torch.arange(48.0).view(4, 12)
    ckpt.save(files, 1, {"a": whole[:, :5], "b": whole[:, 5:7], "s": Holder({"c": whole[:, 7:]})})
    buffer = torch.zeros(4, 12)
    held = Holder({"c": buffer[:, 7:]})
    ckpt.load(files, {"a": buffer[:, :5], "b": buffer[:, 5:7], "s": held})
    assert torch.equal(buffer, whole)
    assert held.state["c"].data_ptr() == buffer[:, 7:].data_ptr()
