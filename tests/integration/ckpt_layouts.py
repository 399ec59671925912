"""A small transformer with experts and AdamW in many layouts, every element of which is its own global index.

The model has its values before it is sharded, so torch itself puts them where they belong, and not ckpt's boxes. Nothing is
trained: layouts that no forward would accept (uneven tensor parallelism) are there too, and a build takes 50 ms.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from surefoot import ckpt

DIM = 6
LAYERS = ("0", "1")


class Block(nn.Module):
    """Few of its sizes can be divided by 2, 3, 4 or 5; the second norm is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(7, DIM, bias=False)
        self.norm = nn.RMSNorm(DIM)
        self.norm_again = self.norm
        self.experts = nn.Parameter(torch.empty(5, DIM, 3))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


class Gpt(nn.Module):
    """The whole, or one stage of a pipeline: each stage has its own of the same names."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({n: Block() for i, n in enumerate(LAYERS) if stage in (None, i)})
        if stage in (None, 0):
            self.emb = nn.Embedding(11, DIM)
            self.prefix = nn.Parameter(torch.empty(1, 5, DIM))
        if stage in (None, 1):
            self.head = nn.Linear(DIM, 11, bias=False)
        fill_with_indices(self)


def fill_with_indices(model: nn.Module) -> None:
    """Every element becomes its index in its tensor, plus a thousand times a number made of the tensor's name."""
    for name, t in model.state_dict().items():
        first = 1000 * (zlib.crc32(name.encode()) % 1000)
        t.copy_(torch.arange(first, first + t.numel()).view(t.shape))


TP_PLAN = {
    "emb": RowwiseParallel(),
    "head": ColwiseParallel(),
    "layers.*.qkv": ColwiseParallel(),
    "layers.*.out": RowwiseParallel(),
}


def tensor_parallel(model: Gpt, mesh: DeviceMesh) -> None:
    here = {k: v for k, v in TP_PLAN.items() if "*" in k or hasattr(model, k)}
    parallelize_module(model, mesh, here)
    expert_parallel(model, mesh)


def expert_parallel(model: Gpt, mesh: DeviceMesh) -> None:
    block: Any
    for block in model.layers.values():
        sharded = distribute_tensor(block.experts.detach(), mesh, [Shard(0)])
        block.experts = nn.Parameter(sharded)


def fsdp(model: Gpt, mesh: DeviceMesh) -> None:
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def mesh_of(**dims: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def whole() -> nn.Module:
    return Gpt()


def ddp() -> nn.Module:
    return DistributedDataParallel(Gpt())


def dp() -> nn.Module:
    fsdp(model := Gpt(), mesh_of(dp=dist.get_world_size()))
    return model


def dp_permuted() -> nn.Module:
    fsdp(model := Gpt(), DeviceMesh("cpu", [3, 1, 0, 2]))
    return model


def hsdp() -> nn.Module:
    fsdp(model := Gpt(), mesh_of(replicate=2, shard=2))
    return model


def tp() -> nn.Module:
    tensor_parallel(model := Gpt(), mesh_of(tp=dist.get_world_size()))
    return model


def dp_tp() -> nn.Module:
    mesh = mesh_of(dp=dist.get_world_size() // 2, tp=2)
    tensor_parallel(model := Gpt(), mesh["tp"])
    fsdp(model, mesh["dp"])
    return model


def hsdp_tp() -> nn.Module:
    mesh = mesh_of(replicate=2, shard=2, tp=2)
    tensor_parallel(model := Gpt(), mesh["tp"])
    fsdp(model, mesh["replicate", "shard"])
    return model


def pp_dp() -> nn.Module:
    mesh = mesh_of(pp=2, dp=2)
    fsdp(model := Gpt(mesh.get_local_rank("pp")), mesh["dp"])
    return model


def pp_tp() -> nn.Module:
    mesh = mesh_of(pp=2, tp=2)
    tensor_parallel(model := Gpt(mesh.get_local_rank("pp")), mesh["tp"])
    return model


def ep() -> nn.Module:
    expert_parallel(model := Gpt(), mesh_of(ep=dist.get_world_size()))
    return model


def ep_permuted() -> nn.Module:
    expert_parallel(model := Gpt(), DeviceMesh("cpu", [2, 0, 4, 3, 1]))
    return model


class Layout(NamedTuple):
    world: int
    model: Callable[[], nn.Module]


LAYOUTS = {
    "1": Layout(1, whole),
    "ddp2": Layout(2, ddp),
    "dp3": Layout(3, dp),
    "dp4": Layout(4, dp),
    "dp4permuted": Layout(4, dp_permuted),
    "dp5": Layout(5, dp),
    "hsdp2x2": Layout(4, hsdp),
    "tp4": Layout(4, tp),
    "dp2tp2": Layout(4, dp_tp),
    "pp2dp2": Layout(4, pp_dp),
    "pp2tp2": Layout(4, pp_tp),
    "ep4": Layout(4, ep),
    "ep5permuted": Layout(5, ep_permuted),
    "dp3tp2": Layout(6, dp_tp),
    "hsdp2x2tp2": Layout(8, hsdp_tp),
}


# ---------------------------------------------------------------- every element its own index


class State(NamedTuple):
    live: dict[str, Any]
    values: dict[str, torch.Tensor]
    """What this rank must hold of each tensor, by the tensor's name."""


def build(layout: str) -> State:
    """A model and an optimizer that has taken one step, every element of which is its own index."""
    model = LAYOUTS[layout].model()
    optim = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        optim.state[p] = {"step": torch.tensor(1.0), "exp_avg": _moment(p), "exp_avg_sq": _moment(p)}
    values = {name: _local(t).clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    for name, _ in model.named_parameters():
        values[f"{name}.exp_avg"] = values[name] + 0.25
        values[f"{name}.exp_avg_sq"] = values[name] + 0.5
    return State({"model": model, "optim": optim, "epoch": 0}, values)


def tensors(live: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of every parameter, moment and buffer."""
    for name, p in live["model"].named_parameters():
        yield name, _local(p)
        for key, moment in live["optim"].state[p].items():
            if key != "step":
                yield f"{name}.{key}", _local(moment)
    for name, b in live["model"].named_buffers():
        yield name, b


def _moment(p: torch.Tensor) -> torch.Tensor:
    """What AdamW makes of zeros_like(p), which for a DTensor takes 5 ms of finding out its placements."""
    if not isinstance(p, DTensor):
        return torch.zeros_like(p)
    local = torch.zeros_like(_local(p))
    return DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def _local(t: torch.Tensor) -> torch.Tensor:
    return (t.to_local() if isinstance(t, DTensor) else t).detach()


def fill(state: State) -> None:
    for name, t in tensors(state.live):
        t.copy_(state.values[name])
    state.live["epoch"] = 3


def spoil(state: State) -> None:
    for _, t in tensors(state.live):
        t.fill_(-7)
    state.live["epoch"] = -7


def check(state: State, about: str) -> None:
    found = dict(tensors(state.live))
    assert found.keys() == state.values.keys(), about
    for name, t in found.items():
        assert torch.equal(t, state.values[name]), f"{about}: {name} is {t}, not {state.values[name]}"
    assert state.live["epoch"] == 3, about
    assert all(s["step"].item() == 1 for s in state.live["optim"].state.values()), about


def distinct_nbytes() -> int:
    """What a checkpoint of the whole model has to store, and not one byte more."""
    model = Gpt()
    parameters = list(model.parameters())
    steps = 4 * len(parameters)
    return sum(3 * 4 * p.numel() for p in parameters) + steps + sum(8 * b.numel() for b in model.buffers())


# ---------------------------------------------------------------- what ranks do


def save_in(root: str, layouts: dict[str, int]) -> None:
    """Save in each of the layouts, all of which have as many ranks as there are, as the step that is given for it."""
    with ckpt.Checkpointer(root) as c:
        c.continue_from_newest()
        for layout, step in layouts.items():
            _save(c, step, build(layout))


def load_in(root: str, layouts: list[str], saved: dict[str, int]) -> int:
    """Load all that was saved in each of the layouts. Returns the number of loads."""
    with ckpt.Checkpointer(root) as c:
        return sum(_load_all(c, build(layout), layout, saved) for layout in layouts)


def save_and_load_in(root: str, layouts: dict[str, int], saved: dict[str, int]) -> int:
    """`save_in`, then `load_in`, with the same live states."""
    states = {layout: build(layout) for layout in layouts}
    with ckpt.Checkpointer(root) as c:
        c.continue_from_newest()
        for layout, state in states.items():
            _save(c, layouts[layout], state)
        return sum(_load_all(c, state, layout, saved) for layout, state in states.items())


def _save(c: ckpt.Checkpointer, step: int, state: State) -> None:
    """What is committed are the bytes of all distinct elements and not one more, whoever held how many copies."""
    fill(state)
    manifest = c.save(step, state.live).wait()
    assert manifest is not None
    assert sum(o.data_nbytes for o in manifest.objects) == distinct_nbytes()


def _load_all(c: ckpt.Checkpointer, state: State, layout: str, saved: dict[str, int]) -> int:
    """The first load finds an optimizer without state."""
    for number, (was, step) in enumerate(saved.items()):
        spoil(state)
        if number == 0:
            state.live["optim"].state.clear()
        c.load(state.live, step)
        check(state, f"{was} -> {layout}")
    return len(saved)
