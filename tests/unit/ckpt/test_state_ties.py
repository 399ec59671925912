"""Tied tensors: stored once, tied again; also where saver and loader differ in what they tie. (CKP-17)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from surefoot import ckpt
from surefoot.ckpt.errors import StateError, StateMismatchError
from surefoot.ckpt.state import collect


@pytest.fixture(params=["files", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "root") if request.param == "files" else request.getfixturevalue("s3_url")


@pytest.fixture
def files(tmp_path: Path) -> str:
    return str(tmp_path / "root")


class Net(nn.Module):
    def __init__(self, *, tied: bool, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(x))


def build(*, tied: bool, seed: int = 1) -> dict[str, Any]:
    model = Net(tied=tied, seed=seed)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.arange(6)).square().mean().backward()
    state["optim"].step()
    state["optim"].zero_grad()


def test_stored_once_and_tied_again(root: str, tmp_path: Path) -> None:
    """CKP-17: bytes of one; both names load; sharing is restored; the export opens with the safetensors library."""
    state = build(tied=True)
    train(state)
    manifest = ckpt.save(root, 1, state)
    assert manifest.nbytes == 3 * 24 * 4 + 4, "weight and two moments once, and the step"
    assert manifest.aliases == {"model.head.weight": "model.emb.weight"}
    fresh = build(tied=True, seed=2)
    ckpt.load(root, fresh)
    assert fresh["model"].head.weight is fresh["model"].emb.weight
    assert torch.equal(fresh["model"].emb.weight, state["model"].emb.weight)
    for name in ("model.emb.weight", "model.head.weight"):
        assert torch.equal(ckpt.read(root, 1, name), state["model"].emb.weight)
    ckpt.export(root, 1, str(tmp_path / "export"))
    with safe_open(next((tmp_path / "export").glob("*.safetensors")), framework="pt") as opened:
        assert any(torch.equal(opened.get_tensor(k), state["model"].emb.weight) for k in opened.keys())  # noqa: SIM118


def test_tied_when_saved_and_untied_when_loaded(root: str) -> None:
    """Both get the values, and both get the optimizer's state."""
    state = build(tied=True)
    train(state)
    ckpt.save(root, 1, state)
    fresh = build(tied=False)
    ckpt.load(root, fresh)
    model, optim = fresh["model"], fresh["optim"]
    assert model.head.weight is not model.emb.weight
    for p in (model.head.weight, model.emb.weight):
        assert torch.equal(p, state["model"].emb.weight)
        assert torch.equal(
            optim.state[p]["exp_avg"], state["optim"].state[state["model"].emb.weight]["exp_avg"]
        )
    train(fresh)


def test_untied_when_saved_and_tied_when_loaded(root: str) -> None:
    """Where both hold the same, the one takes it; otherwise one of them would be lost, which is refused."""
    state = build(tied=False)
    with torch.no_grad():
        state["model"].head.weight.copy_(state["model"].emb.weight)
    ckpt.save(root, 1, state)
    fresh = build(tied=True, seed=2)
    ckpt.load(root, fresh)
    assert torch.equal(fresh["model"].head.weight, state["model"].emb.weight)
    with torch.no_grad():
        state["model"].head.weight[5, 3] += 1
    ckpt.save(root, 2, state)
    words = r"model\.emb\.weight and model\.head\.weight are one tensor here, and two with different values"
    with pytest.raises(StateMismatchError, match=words):
        ckpt.load(root, fresh)
    ckpt.load(root, fresh, strict=False)
    assert torch.equal(fresh["model"].head.weight, state["model"].emb.weight)


def test_optimizer_state_of_two_does_not_fit_one(files: str) -> None:
    state = build(tied=False)
    train(state)
    with torch.no_grad():
        state["model"].head.weight.copy_(state["model"].emb.weight)
    ckpt.save(files, 1, state)
    fresh = build(tied=True)
    with pytest.raises(
        StateMismatchError, match=r"optim\.params\.model\.head\.weight is in the checkpoint and not in"
    ):
        ckpt.load(files, fresh)
    ckpt.load(files, fresh, strict=False)
    moment = fresh["optim"].state[fresh["model"].emb.weight]["exp_avg"]
    assert torch.equal(moment, state["optim"].state[state["model"].emb.weight]["exp_avg"])


def test_two_parameters_on_one_memory(files: str) -> None:
    """Tied by their data: the optimizer may hold either of them, or both."""

    def two() -> dict[str, Any]:
        model = Net(tied=False)
        model.head.weight = nn.Parameter(model.emb.weight.data)
        return {"model": model, "optim": torch.optim.SGD([model.head.weight], lr=0.5, momentum=0.9)}

    state = two()
    train(state)
    assert ckpt.save(files, 1, state).nbytes == 2 * 24 * 4
    fresh = two()
    ckpt.load(files, fresh)
    assert torch.equal(fresh["model"].emb.weight, state["model"].emb.weight)
    assert fresh["model"].emb.weight.data_ptr() == fresh["model"].head.weight.data_ptr()
    train(fresh)
    train(state)
    assert torch.equal(fresh["model"].emb.weight, state["model"].emb.weight)


def test_views_that_overlap_in_part_are_stored_by_value(files: str) -> None:
    base = torch.arange(6.0)
    manifest = ckpt.save(files, 1, {"a": base[:4], "b": base[2:], "c": base[:4].view(2, 2), "d": base[:4]})
    assert manifest.nbytes == 3 * 16
    assert manifest.aliases == {"d": "a"}
    target = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(2, 2), "d": torch.zeros(4)}
    ckpt.load(files, target)
    assert {k: v.tolist() for k, v in target.items()} == {
        "a": [0, 1, 2, 3],
        "b": [2, 3, 4, 5],
        "c": [[0, 1], [2, 3]],
        "d": [0, 1, 2, 3],
    }
    again = torch.zeros(6)
    ckpt.load(files, {"a": again[:4], "b": again[2:], "c": again[:4].view(2, 2), "d": again[:4]})
    assert again.tolist() == [0, 1, 2, 3, 4, 5]


class Box:
    """An object that keeps its state in plain values."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_ties_inside_of_objects_and_between_them(files: str) -> None:
    """A model given as its state_dict; an object that refers to the same tensors, or twice to its own."""
    w, own = torch.arange(4.0), torch.ones(2)
    manifest = ckpt.save(files, 1, {"sd": {"w": w, "v": w}, "o": Box({"w": w, "own": own, "again": [own]})})
    assert manifest.nbytes == 16 + 8
    one = torch.zeros(4)
    fresh = {"sd": {"w": one, "v": one}, "o": Box({})}
    ckpt.load(files, fresh)
    assert fresh["o"].state["w"] is one
    assert fresh["o"].state["own"] is fresh["o"].state["again"][0]
    assert fresh["o"].state["own"].tolist() == [1, 1]
    assert one.tolist() == [0, 1, 2, 3]


def test_passing_tensors_are_not_taken_for_one_another() -> None:
    """state_dict() may give tensors that nobody else keeps: memory used again is no tie."""

    class Passing(Box):
        def state_dict(self) -> dict[str, Any]:
            return {"n": torch.full((5,), float(self.state["n"])), "e": torch.empty(0)}

    found = collect({str(i): Passing({"n": i}) for i in range(50)})
    assert len(found.leaves) == 100
    assert [found.leaves[f"{i}.n"].views[0][0].item() for i in range(50)] == list(range(50))


def test_two_objects_under_one_name() -> None:
    for state in (
        {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
        {"a": {"b": 1}, "a.b": torch.ones(1)},
        {1: torch.ones(1), "1": torch.ones(1)},
        {"m": nn.Linear(1, 1), "m.weight": 5},
    ):
        with pytest.raises(StateError, match=r"two entries of the state are called (a\.b|1|m\.weight)"):
            collect(state)
