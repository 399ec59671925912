"""What the ranks of test_ckpt_ranks.py do: each act is called on every rank with the root."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from surefoot import ckpt, failpoint
from surefoot.ckpt import tiers
from surefoot.ckpt.errors import CkptError, CkptUserError, CommitError
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.state import leaf_of, part_of
from surefoot.ckpt.store import open_store

STEP = 20


class Net(nn.Module):
    """Shapes that no number of ranks divides, a first dimension of 1, a tie, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.single = nn.Parameter(torch.ones(1, 5, 3))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(torch.relu(self.up(self.emb(x))))
        return self.head(h).square().mean() + self.single.sum()


def build() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 1e-3, "weight_decay": 0.0}]
    return {"model": model, "optim": torch.optim.AdamW(groups), "epoch": 0}


def expected(k: int, shape: torch.Size, shift: float = 0.0) -> torch.Tensor:
    """Every element is its own global index, plus a thousand per tensor."""
    return torch.arange(shape.numel(), dtype=torch.float32).view(shape) + 1000 * k + shift


def live(state: dict[str, Any]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Every parameter and moment with what it must hold."""
    found: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for k, (name, p) in enumerate(state["model"].named_parameters()):
        found.append((name, p, expected(k, p.shape)))
        for j, key in enumerate(("exp_avg", "exp_avg_sq"), start=1):
            found.append((f"{name}.{key}", state["optim"].state[p][key], expected(k, p.shape, j / 4)))
    return found


def fill(state: dict[str, Any], sign: int = 1) -> None:
    with torch.no_grad():
        for _, t, value in live(state):
            value = value * sign
            t.copy_(
                distribute_tensor(value, t.device_mesh, t.placements) if isinstance(t, DTensor) else value
            )
        state["model"].seen.fill_(5 * sign)
    state["epoch"] = 3 * sign


def check(state: dict[str, Any]) -> None:
    for name, t, value in live(state):
        whole = t.full_tensor() if isinstance(t, DTensor) else t
        assert torch.equal(whole.detach(), value), name
    for p in state["model"].parameters():
        assert state["optim"].state[p]["step"].item() == 1
    assert state["model"].seen.tolist() == [5, 5, 5]
    assert state["epoch"] == 3
    assert [g["lr"] for g in state["optim"].param_groups] == [1e-2, 1e-3]
    assert state["model"].head.weight is state["model"].emb.weight


def exchange(data: bytes) -> list[bytes]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, data)
    return found


def train(state: dict[str, Any]) -> None:
    state["model"](torch.arange(6)).backward()
    state["optim"].step()
    state["optim"].zero_grad()


def save_as_agents_do(root: str) -> None:
    """Stage, upload, commit; then back from the slot."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state = build()
    train(state)
    fill(state)
    state["model"](torch.arange(6))  # without backward: the root module now holds whole parameters
    stager = tiers.Stager(state, rank=rank, world_size=world, exchange=exchange)
    slot = memoryview(bytearray(stager.nbytes()))
    stager.stage(slot, generation=1, step=STEP, cursor={"at": 9}, ledger=())
    store = open_store(root)
    if rank == 0:
        create_record(store, Record(generation=1, start=StartRef(), reason="test", created_by="test"))
    dist.barrier()
    tiers.upload_images(store, [slot], generation=1, step=STEP, attempt="a", writer=rank, deadline_s=60)
    if rank == 0:
        done = tiers.commit(
            store, generation=1, step=STEP, attempt="a", writers=world, deadline_s=60, facts={}
        )
        assert isinstance(done, tiers.Committed), done
        sizes = [o.data_nbytes for o in done.manifest.objects]
        unique = (
            sum(t.numel() * 4 for n, t, _ in live(state)) + 3 * 4 + len(list(state["model"].parameters())) * 4
        )
        assert sum(sizes) == unique, "not one byte twice"
    fill(state, -1)
    assert stager.restore(slot).step == STEP
    check(state)


def restore_as_agents_do(root: str) -> None:
    state = build()
    restored = tiers.restore_committed(
        root,
        state,
        generation=1,
        step=STEP,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        exchange=exchange,
    )
    assert restored.cursor == {"at": 9}
    check(state)
    train(state)


def check_placements() -> None:
    """Boxes against torch's own idea, for meshes of two dimensions and uneven sizes."""
    mesh = init_device_mesh("cpu", (2, 2))
    for shape in [(7, 3), (5, 10), (1, 4), (8, 8), (3, 2)]:
        whole = torch.arange(float(shape[0] * shape[1])).view(shape)
        for placements in [
            (Shard(0), Shard(0)),
            (Shard(0), Shard(1)),
            (Shard(1), Shard(0)),
            (Replicate(), Shard(0)),
            (Shard(1), Replicate()),
        ]:
            require_in_place(whole, distribute_tensor(whole, mesh, placements).detach())


def check_fsdp_over_tp() -> None:
    """Uneven rows, sharded by tensor parallelism first and by FSDP within that: strided shards."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    for rows in (5, 6, 7, 8, 9, 11, 12, 13):
        layer = nn.Linear(2, rows)
        whole = {name: torch.arange(float(p.numel())).view(p.shape) for name, p in layer.named_parameters()}
        with torch.no_grad():
            for name, p in layer.named_parameters():
                p.copy_(whole[name])
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        fully_shard(layer, mesh=mesh["dp"])
        for name, p in layer.named_parameters():
            require_in_place(whole[name], p.detach())


def require_in_place(whole: torch.Tensor, t: torch.Tensor) -> None:
    """Every box that we think this rank holds has the elements of that place, and there is nothing else."""
    leaf = leaf_of("t", t)
    for h in leaf.held:
        index = tuple(slice(o, o + e) for o, e in zip(*h.box, strict=True))
        assert torch.equal(part_of(leaf, h.box), whole[index]), (whole.shape, t)
    local = t.to_local() if isinstance(t, DTensor) else t
    assert sum(h.box.numel for h in leaf.held) == local.numel()


def checkpointer(root: str) -> None:
    """The plain way: everything over the checkpointer's own channel."""
    rank = dist.get_rank()
    state = build()
    train(state)
    fill(state)
    with ckpt.Checkpointer(root, keep=2) as c:
        assert c.load(build()) is None
        for step in (5, 10, STEP):
            c.save(step, state, extra={"rank": rank})
    dist.barrier()  # retention is rank 0's, and done when its close returns
    assert ckpt.steps(root) == [10, STEP]
    fill(state, -1)
    loaded = ckpt.load(root, state)
    assert loaded is not None
    assert (loaded.step, loaded.extra) == (STEP, {"rank": rank})
    check(state)


def fall_back_together(root: str) -> None:
    """A bit of what only the last rank reads is flipped: all load the step before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state = build()
    train(state)
    fill(state)
    with ckpt.Checkpointer(root) as c:
        c.save(10, state)
        c.save(STEP, state)
    if rank == 0:
        (path,) = Path(root.removeprefix("file://")).glob(
            f"*/step-{STEP:010d}/*/r{world - 1:05d}-0.safetensors"
        )
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    fill(state, -1)
    loaded = ckpt.load(root, state)
    assert loaded is not None
    assert loaded.step == 10
    assert loaded.passed_over[0][0] == STEP
    assert f"r{world - 1:05d}-0.safetensors" in loaded.passed_over[0][1]
    check(state)


def refused(
    c: ckpt.Checkpointer, step: int, state: dict[str, Any], kind: type[Exception], *words: str
) -> None:
    with pytest.raises(kind) as caught:
        c.save(step, state).wait()
    assert all(w in str(caught.value) for w in words), caught.value


def failures(root: str) -> None:
    """Whatever goes wrong on one rank is an error on all, nothing is committed, and the next save works."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with ckpt.Checkpointer(root, deadline_s=30) as c:
        c.save(1, {"w": torch.ones(3)}).wait()
        refused(
            c,
            2,
            {"w": torch.full((3,), float(rank == last))},
            CommitError,
            "replicas differ",
            "w[0:3]",
            f"rank {last}",
        )
        refused(c, 3, {"w": torch.ones(3), "n": rank}, CommitError, "n is 0 on ranks [0] and 1 on ranks [1]")
        refused(c, 4 + rank, {"w": torch.ones(3)}, CkptUserError, "all ranks save together")
        bad = {"w": torch.ones(3), "x": object() if rank == last else 1}
        refused(c, 8, bad, CkptError, "x: a value of type builtins.object")
        if rank == last:
            failpoint.arm(failpoint.parse("upload.after_object=error"))
        words = () if rank == last else (f"rank {last} failed",)
        refused(c, 9, {"w": torch.ones(3)}, CommitError, "FailpointError", *words)
        failpoint.arm(None)
        c.save(10, {"w": torch.ones(3)}).wait()
    assert ckpt.steps(root) == [1, 10]
