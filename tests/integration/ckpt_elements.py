"""What the ranks of test_ckpt_elements.py do. Every element of every tensor is its own index in the whole."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ckpt_layouts import build, fill
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from surefoot import ckpt
from surefoot.ckpt.errors import CkptError, CommitError, CoverageError, StateError

STEP = 20


def indices(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


# ---------------------------------------------------------------- uneven shards over two mesh dimensions


def save_over_2_by_4() -> DTensor:
    mesh = init_device_mesh("cpu", (2, 4))
    return distribute_tensor(indices(7, 3), mesh, [Shard(0), Shard(0)])


def save_grid(root: str) -> int:
    """Returns the rows that this rank holds of the [7, 3] tensor."""
    t = save_over_2_by_4()
    ckpt.save(root, STEP, {"t": t})
    return t.to_local().shape[0]


def load_rows(root: str) -> None:
    """Sharded by rows over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    t = distribute_tensor(torch.full((7, 3), -7.0), mesh, [Shard(0)])
    assert ckpt.load(root, {"t": t}) is not None
    assert torch.equal(t.full_tensor(), indices(7, 3))


def save_wrong_boxes(root: str) -> None:
    """Two ranks whose boxes leave row 3 out, or both have it."""
    first = dist.get_rank() == 0
    whole = indices(7, 3)
    hole = (0, whole[:3]) if first else (4, whole[4:])
    overlap = (0, whole[:4]) if first else (3, whole[3:])
    for (row, part), times in ((hole, "covered 0 times"), (overlap, "covered 2 times")):
        t = ckpt.Boxes((7, 3), [((row, 0), part.clone())])
        with pytest.raises(
            CoverageError, match=r"w\.t of shape \[7, 3\]: element \[3, 0\] is " + times
        ) as caught:
            ckpt.save(root, STEP, {"w": {"t": t}})
        if times == "covered 2 times":
            assert "[0:4,0:3]" in str(caught.value), "the error names the boxes"
    assert ckpt.steps(root) == []


# ---------------------------------------------------------------- large replicas


ROWS = 34_000
"""Of 4 KiB: 133 MiB, so that a rank's half is cut at whole blocks; and 208 rows beyond the last of them."""


def large_replica() -> nn.Module:
    model = nn.Linear(1024, ROWS, bias=False)
    return DistributedDataParallel(model) if dist.get_world_size() > 1 else model


def save_large_replica(root: str) -> int:
    """Plain data parallel. Returns the rows that were committed, each with its number in it."""
    model = large_replica()
    with torch.no_grad():
        next(model.parameters()).copy_(torch.arange(float(ROWS))[:, None].expand(-1, 1024))
    return ckpt.save(root, STEP, {"model": model}).tensors["model.weight"].shape[0]


def load_large_replica(root: str) -> None:
    model = large_replica()
    assert ckpt.load(root, {"model": model}) is not None
    (weight,) = model.parameters()
    assert torch.equal(weight, torch.arange(float(ROWS))[:, None].expand(-1, 1024))


# ---------------------------------------------------------------- hops


def linear(layout: str) -> nn.Module:
    """A weight of [5, 10]: 4 chunks of its rows leave one rank without any."""
    layer = nn.Linear(10, 5, bias=False)
    with torch.no_grad():
        layer.weight.copy_(indices(5, 10))
    match layout:
        case "fsdp2tp2":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(layer, mesh["tp"], ColwiseParallel())
            fully_shard(layer, mesh=mesh["dp"])
        case "tp4":
            parallelize_module(layer, init_device_mesh("cpu", (4,)), ColwiseParallel())
        case "fsdp8":
            fully_shard(layer, mesh=init_device_mesh("cpu", (8,)))
    return layer


def hop(came_from: str, layout: str, to: str) -> int:
    """Load, compare, save. Returns the rows that this rank holds."""
    layer = linear(layout)
    weight: Any = layer.weight
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    expected = local.detach().clone()
    if came_from:
        with torch.no_grad():
            local.fill_(-7)
        assert ckpt.load(came_from, {"layer": layer}) is not None
        assert torch.equal(local, expected)
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        assert torch.equal(full.detach(), indices(5, 10))
    ckpt.save(to, STEP, {"layer": layer})
    return local.shape[0]


# ---------------------------------------------------------------- more ranks than rows


def one_row(fill: torch.Tensor) -> DTensor:
    return distribute_tensor(fill, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def save_one_row(root: str) -> int:
    """Returns the rows that this rank holds of the [1, 5, 3] tensor."""
    t = one_row(indices(1, 5, 3))
    ckpt.save(root, STEP, {"t": t})
    return t.to_local().shape[0]


def load_one_row(root: str) -> int:
    t = one_row(torch.full((1, 5, 3), -7.0))
    loaded = ckpt.load(root, {"t": t})
    assert loaded is not None
    assert (loaded.missing, loaded.left_over) == ((), ())
    assert torch.equal(t.full_tensor(), indices(1, 5, 3))
    return t.to_local().shape[0]


# ---------------------------------------------------------------- flat buffers with padding

SHAPES = {"w": (7, 3), "b": (5,), "v": (4, 2, 3)}
PADDING = 1e30


def flat_buffers() -> tuple[torch.Tensor, dict[str, Any], int]:
    """As a distributed optimizer keeps its shards: all tensors one after the other with 2 elements of padding behind each, cut
    into equal lengths for the ranks. Returns this rank's buffer, its state, and the elements of tensors in it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = sum(torch.Size(s).numel() + 2 for s in SHAPES.values())
    length = -(-total // world)
    begin, end = rank * length, (rank + 1) * length
    buffer = torch.full((length,), PADDING)
    state: dict[str, Any] = {}
    at = held = 0
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        a, b = max(begin, at), min(end, at + numel)
        part = buffer[a - begin : max(a, b) - begin]
        part.copy_(indices(numel)[a - at : max(a, b) - at])
        state[name] = ckpt.Boxes.flat(shape, max(a - at, 0) if b > a else 0, part)
        held += part.numel()
        at += numel + 2
    return buffer, state, held


def save_flat(root: str) -> tuple[int, int]:
    """Returns the bytes of data committed, and those of all distinct elements."""
    _, state, _ = flat_buffers()
    manifest = ckpt.save(root, STEP, state)
    return sum(o.data_nbytes for o in manifest.objects), sum(
        4 * torch.Size(s).numel() for s in SHAPES.values()
    )


def load_flat(root: str) -> int:
    """Returns the boxes that this rank holds."""
    buffer, state, held = flat_buffers()
    expected = buffer.clone()
    padding = buffer == PADDING
    assert int((~padding).sum()) == held
    buffer[~padding] = -7
    ckpt.load(root, state)
    assert torch.equal(buffer, expected), "and the padding was not touched"
    return sum(len(b.parts) for b in state.values())


# ---------------------------------------------------------------- plain tensors that are shards


def save_plain_shards(root: str) -> None:
    """DP 2 x TP 2. Rank r holds column block r % 2 of [6, 4] as a plain tensor, and its part of 5 rows as another."""
    tp = dist.get_rank() % 2
    columns = indices(6, 4)[:, 2 * tp : 2 * tp + 2].contiguous()
    with pytest.raises(CommitError, match=r"replicas differ: columns\[0:6,0:2\]") as caught:
        ckpt.save(root, STEP, {"columns": columns})
    assert "ranks 0, 2: " in str(caught.value), "the ranks are named"
    assert "ranks 1, 3: " in str(caught.value)
    rows = indices(5, 4)[:3] if tp == 0 else indices(5, 4)[3:]
    with pytest.raises(StateError, match=r"rows is float32\[2, 4\] on rank 1 and float32\[3, 4\] on rank 0"):
        ckpt.save(root, STEP, {"rows": rows.clone()})
    assert ckpt.steps(root) == []
    declared = {
        "columns": ckpt.Boxes((6, 4), [((0, 2 * tp), columns)]),
        "rows": ckpt.Boxes((5, 4), [((3 * tp, 0), rows.clone())]),
    }
    manifest = ckpt.save(root, STEP, declared)
    assert sum(o.data_nbytes for o in manifest.objects) == 4 * (6 * 4 + 5 * 4)
    dist.barrier()
    assert torch.equal(ckpt.read(root, STEP, "columns"), indices(6, 4))
    assert torch.equal(ckpt.read(root, STEP, "rows"), indices(5, 4))


# ---------------------------------------------------------------- one rank, or some, of many

FAILING = 5
FILE_NBYTES_MAX = 2000
"""More than the record of a failure, less than any rank's data object."""


def write_fails_on_one(root: str, by_limit: bool) -> str:
    """HSDP 2 x 2 with TP 2: returns what this rank is told of step 20. `by_limit`: rank 5 fails by a limit of its process."""
    state = build("hsdp2x2tp2")
    fill(state)
    ckpt.save(root, 10, state.live)
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if by_limit and dist.get_rank() == FAILING:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_NBYTES_MAX, limits[1]))
    told = ""
    try:
        ckpt.save(root, 20, state.live, deadline_s=30)
    except Exception as e:
        told = f"{type(e).__name__}: {e}"
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ckpt.steps(root) == [10]
    dist.barrier()
    ckpt.save(root, 30, state.live)
    assert ckpt.steps(root) == [10, 30], "and the next save works"
    return told


def some_of_them_save(root: str) -> str:
    """Half of the ranks of HSDP 2 x 2 with TP 2 save: a replica, which has everything, and a half that has not."""
    state = build("hsdp2x2tp2")
    fill(state)
    replica: Any = dist.new_group([0, 1, 2, 3])
    half: Any = dist.new_group([0, 2, 4, 6])
    told = ""
    if dist.get_rank() in (0, 2, 4, 6):
        try:
            ckpt.save(root, 10, state.live, group=half)
        except CkptError as e:
            told = f"{type(e).__name__}: {e}"
        assert ckpt.steps(root) == []
    dist.barrier()
    if dist.get_rank() < 4:
        ckpt.save(root, 20, state.live, group=replica)
    return told


# ---------------------------------------------------------------- meshes that list their ranks out of order


def by_coordinate(root: str) -> None:
    """A tensor whose uneven shards lie by coordinate, where torch's collectives look for them by rank: not what full_tensor
    would give, so it is refused."""
    mesh = DeviceMesh("cpu", [2, 0, 3, 1])
    t = distribute_tensor(indices(5, 2), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(CkptError, match="t: the local tensor has shape"):
        ckpt.save(root, STEP, {"t": t})
    assert ckpt.steps(root) == []
