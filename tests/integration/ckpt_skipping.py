"""What the ranks of test_ckpt_skipping.py do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from surefoot import ckpt
from surefoot.ckpt.errors import CkptError, StateMismatchError


def build(classes: int) -> dict[str, Any]:
    """FSDP over all ranks: 5 rows, which no number of them divides."""
    torch.manual_seed(dist.get_world_size())
    model = nn.ModuleDict({"body": nn.Linear(3, 5), "head": nn.Linear(5, classes)})
    for layer in model.values():
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.5), "epoch": 0}


def train(state: dict[str, Any]) -> None:
    for p in state["model"].parameters():
        p.grad = torch.ones_like(p)
    state["optim"].step()


def full(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def told(state: dict[str, Any], part: str) -> list[list[float]]:
    """Weights and moments of one part, whole."""
    params = list(state["model"][part].parameters())
    moments = [t for p in params for t in state["optim"].state.get(p, {}).values()]
    return [full(t).flatten().tolist() for t in (*params, *moments)]


def save(root: str) -> list[list[float]]:
    state = build(classes=4)
    train(state)
    state["epoch"] = 7
    ckpt.save(root, 1, state)
    return told(state, "body")


def load_with_another_head(root: str) -> list[list[float]]:
    state = build(classes=6)
    head = told(state, "head")
    with pytest.raises(CkptError, match=r"model\.head"):
        ckpt.load(root, state, strict=False)
    ckpt.load(root, state, skip=["model.head"])
    assert told(state, "head") == head
    assert state["epoch"] == 7
    body = told(state, "body")
    train(state)
    return body


def find_nothing(root: str) -> None:
    """Refused where no rank finds any of its tensors, and by all of them; not where one does."""
    state = build(classes=4)
    for mine in (
        {"net": state["model"]},
        {"net": state["model"], "epoch": 0} if dist.get_rank() else {"net": state["model"]},
    ):
        with pytest.raises(
            StateMismatchError, match=r"it has net\.body\.bias, .* and the checkpoint model\.body\.bias, "
        ):
            ckpt.load(root, mine, strict=False)
    found = torch.zeros(5)
    loaded = ckpt.load(
        root, {"model": {"body": {"bias": found}}} if dist.get_rank() else {"other": found}, strict=False
    )
    assert loaded is not None
    assert bool(found.any()) is (dist.get_rank() > 0)
