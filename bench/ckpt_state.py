"""The state that the checkpoint benchmark saves and loads, and the training loop around it.

A small trained core and *ballast*: layers that belong to model and optimizer (weights and both moments of AdamW) but take
no part in a step, so that steps stay short beside the bytes. Every element follows from its tensor's name and its own
global index, so a load can be checked.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CORE_WIDTH = 256
TOKENS = 256
PERIOD = 65521
"""Elements count up to here and begin again: exact in float32."""


class Block(nn.Module):
    """One transformer block's matrices, 12 width² parameters and a little."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.proj(q * torch.sigmoid(k) + v)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.core = Block(CORE_WIDTH)
        self.ballast = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(x).square().mean()


def sizes(nbytes: int) -> tuple[int, int]:
    """Width and depth of a ballast whose weights and moments (float32) take about `nbytes` together."""
    width = 1024 if nbytes > 2**30 else 256
    return width, max(1, round(nbytes / (3 * 4 * 12 * width**2)))


def build(layout: str, nbytes: int) -> dict[str, Any]:
    """Model and AdamW in a layout: ``fsdp``, ``tp`` (over all ranks) or ``plain`` (whole on every rank)."""
    width, depth = sizes(nbytes)
    with torch.device("meta"):
        model = Model(width, depth)
    if layout != "plain":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        _shard_fsdp(model, mesh) if layout == "fsdp" else _shard_tp(model, mesh)
    model.to_empty(device="cpu")
    optim = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for p in model.parameters():
        moments = {name: torch.zeros_like(p.detach()) for name in ("exp_avg", "exp_avg_sq")}
        optim.state[p] = {"step": torch.tensor(1.0), **moments}
    state = {"model": model, "optim": optim}
    fill(state)
    return state


def _shard_fsdp(model: Model, mesh: DeviceMesh) -> None:
    for block in (model.core, *model.ballast):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _shard_tp(model: Model, mesh: DeviceMesh) -> None:
    for block in (model.core, *model.ballast):
        plan = {"qkv": ColwiseParallel(), "proj": RowwiseParallel()}
        parallelize_module(block, mesh, plan | {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tensors(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight and moment by name."""
    optim = state["optim"].state
    for name, p in state["model"].named_parameters():
        yield name, p.detach()
        yield f"{name}.exp_avg", optim[p]["exp_avg"]
        yield f"{name}.exp_avg_sq", optim[p]["exp_avg_sq"]


def locals_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """What this rank holds of every tensor, where it lies."""
    found = (t.to_local() if isinstance(t, DTensor) else t for _, t in tensors(state))
    return [t for t in found if t.numel()]


def _expected(name: str, t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor as it was filled."""
    shift = zlib.crc32(name.encode()) % PERIOD
    if isinstance(t, DTensor):
        shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    else:
        shape, offset = t.shape, (0,) * t.ndim
    index = torch.zeros(tuple(shape), dtype=torch.int64)
    for dim, (n, begin) in enumerate(zip(shape, offset, strict=True)):
        axis = torch.arange(begin, begin + n) * t.shape[dim + 1 :].numel()
        index += axis.view(-1, *(1,) * (len(shape) - dim - 1))
    values = ((index + shift) % PERIOD).float()
    # The core is trained: weights that a forward pass can bear.
    trained = name.startswith("core.") and not name.endswith(("exp_avg", "exp_avg_sq"))
    return (values / PERIOD - 0.5) / 10 if trained else values


def fill(state: dict[str, Any]) -> None:
    for name, t in tensors(state):
        local = t.to_local() if isinstance(t, DTensor) else t
        local.copy_(_expected(name, t))


def blank(state: dict[str, Any]) -> None:
    """Overwrite everything, so that a load that does nothing cannot pass `check`."""
    for t in locals_of(state):
        t.fill_(-1.0)


def check(state: dict[str, Any]) -> None:
    """Raises ValueError naming a tensor that does not hold what `fill` put there."""
    for name, t in tensors(state):
        local = t.to_local() if isinstance(t, DTensor) else t
        if not torch.equal(local, _expected(name, t)):
            raise ValueError(f"{name} is not what was saved")


class Loop:
    """The training loop: forward, backward, AdamW and one small collective, timed step by step."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._model, self._optim = state["model"], state["optim"]
        self._batch = torch.randn(TOKENS, CORE_WIDTH)
        self.busy = False
        """Whether any rank said it was busy in the last step."""

    def step(self, busy: bool = False) -> float:
        """One step; returns its seconds. Ranks learn of each other's `busy` in the step's own reduction."""
        begun = time.perf_counter()
        loss = self._model(self._batch)
        loss.backward()
        self._optim.step()
        self._optim.zero_grad()
        word = torch.tensor([float(loss.detach()), float(busy)])
        dist.all_reduce(word)
        self.busy = bool(word[1] > 0)
        return time.perf_counter() - begun
