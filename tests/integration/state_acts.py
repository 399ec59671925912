"""What the ranks of test_ckpt_state.py do: values of their own, and replicas that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot import ckpt
from surefoot.ckpt.errors import CkptError


def own(seed: int) -> dict[str, Any]:
    """A value of each kind that every rank has its own of, of another shape on each, beside one that all share."""
    return {
        "rng": ckpt.PerRank(torch.Generator().manual_seed(seed)),
        "seen": ckpt.PerRank({"ids": list(range(seed)), "t": torch.full((seed,), float(seed))}),
        "shared": torch.arange(4.0),
    }


def save_own(root: str) -> list[float]:
    """Returns what the rank's generator gives after the save."""
    state = own(10 + dist.get_rank())
    ckpt.save(root, 1, state)
    return torch.rand(3, generator=state["rng"].value).tolist()


def load_own(root: str, strict: bool) -> dict[str, Any]:
    state = own(10)
    state["seen"].value["t"] = torch.zeros(10 + dist.get_rank())
    try:
        loaded = ckpt.load(root, state, strict=strict)
    except CkptError as e:
        return {"error": f"{type(e).__name__}: {e}"}
    assert loaded is not None
    return {
        "error": "",
        "missing": loaded.missing,
        "left_over": loaded.left_over,
        "drawn": torch.rand(3, generator=state["rng"].value).tolist(),
        "ids": len(state["seen"].value["ids"]),
        "t": state["seen"].value["t"].tolist(),
    }


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _optimizer(rank: int) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1)
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1 + (rank == 1))}


DIFFERENT: dict[str, Callable[[int], dict[str, Any]]] = {
    "tensor": lambda r: {"t": torch.full((5,), float(r == 1))},
    "one bit": lambda r: {"t": torch.tensor([0.0, -0.0 if r == 1 else 0.0])},
    "number": lambda r: {"t": torch.tensor(r == 1)},
    "in a value": lambda r: {"h": Holder([{"t": torch.full((2,), float(r == 1))}])},
    "shape": lambda r: {"t": torch.zeros(2 + (r == 1))},
    "type": lambda r: {"t": torch.zeros(2, dtype=torch.float16 if r == 1 else torch.bfloat16)},
    "value": lambda r: {"n": {"a": [1, r == 1]}},
    "value's type": lambda r: {"n": 1.0 if r == 1 else (1,)},
    "state_dict": lambda r: {"h": Holder({"deep": (1, {"seed": 7 + (r == 1)})})},
    "generator": lambda r: {"rng": torch.Generator().manual_seed(int(r == 1))},
    "group": _optimizer,
    "kind": lambda r: {"x": torch.zeros(1) if r == 1 else Holder(torch.zeros(1))},
    "tie": lambda r: {"a": (t := torch.zeros(2)), "b": t if r == 1 else torch.zeros(2)},
}


def save_different(root: str, kinds: list[str]) -> dict[str, str]:
    """Rank 1 has something else than the others under one name. Returns the error of each save."""
    told: dict[str, str] = {}
    for i, kind in enumerate(kinds):
        try:
            ckpt.save(f"{root}/{i}", 1, DIFFERENT[kind](dist.get_rank()))
            told[kind] = ""
        except CkptError as e:
            told[kind] = f"{type(e).__name__}: {e}"
    return told


def load_into_ddp(root: str) -> list[float]:
    """A checkpoint of a plain model, into the same behind DDP around compile, and its optimizer."""
    model = DistributedDataParallel(torch.compile(nn.Linear(2, 2), backend="eager"))  # pyright: ignore[reportArgumentType]
    ckpt.load(root, {"model": model})
    return [p.sum().item() for p in model.parameters()]
