"""Which boxes of the whole a DTensor's shard is, against what torch itself puts there, on random meshes.

Every rank is played in turn in one process, with torch's fake process group: sharding moves no data between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.live.leaves import leaf_of
from surefoot.ckpt.planning.plan import HeldTensor, assign

pytestmark = pytest.mark.slow

NO_CHECKS: list[HealthCheck] = [*HealthCheck]  # pyright: ignore[reportAssignmentType]
QUICK = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=NO_CHECKS)
LONG = settings(max_examples=1000, deadline=None, suppress_health_check=NO_CHECKS)


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    _clear_sharding_prop_cache()  # torch keeps what it found for an operation, with a mesh that knows it is another rank's
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def boxes_in_place(t: Any, whole: torch.Tensor) -> HeldTensor:
    """What the rank holds of `whole`, in which every element is its own index; each element is found where its box says."""
    leaf = leaf_of("t", t.detach())
    for h, view in zip(leaf.held, leaf.views, strict=True):
        index = tuple(slice(o, o + e) for o, e in zip(*h.box, strict=True))
        assert torch.equal(view, whole[index]), (h.box, t)
    assert sum(h.box.numel for h in leaf.held) == t.to_local().numel()
    return leaf.layout()


def indices(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


mesh_shapes = st.sampled_from([(2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2)])
tensor_shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


def require_placements(mesh_shape: tuple[int, ...], shape: tuple[int, ...], dims: list[int | None]) -> None:
    whole, layouts = indices(shape), list[list[HeldTensor]]()
    placements = [Replicate() if d is None else Shard(d % len(shape)) for d in dims[: len(mesh_shape)]]
    world = torch.Size(mesh_shape).numel()
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", mesh_shape)
            t = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            layouts.append([boxes_in_place(t, whole)])
    written = sum(box.numel for share in assign(layouts) for _, box in share.written)
    assert written == whole.numel(), "and together they are the whole"


any_dims = st.lists(st.none() | st.integers(0, 2), min_size=3, max_size=3)


@QUICK
@given(mesh_shapes, tensor_shapes, any_dims)
def test_any_placements(mesh_shape: tuple[int, ...], shape: tuple[int, ...], dims: list[int | None]) -> None:
    require_placements(mesh_shape, shape, dims)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@LONG
@given(mesh_shapes, tensor_shapes, any_dims)
def test_any_placements_at_length(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], dims: list[int | None]
) -> None:
    require_placements(mesh_shape, shape, dims)


class One(nn.Module):
    def __init__(self, w: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def require_fsdp(dp: int, tp: int, shape: tuple[int, ...], tp_dim: int, replicas: int) -> None:
    """FSDP, or HSDP with `replicas`, over tensor parallelism along any dimension: strided shards where that is the first one."""
    whole, layouts = indices(shape), list[list[HeldTensor]]()
    world = replicas * dp * tp
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", (replicas, dp, tp), mesh_dim_names=("replicate", "dp", "tp"))
            model = One(
                distribute_tensor(whole, mesh["tp"], [Shard(tp_dim % len(shape))], src_data_rank=None)
            )
            fully_shard(model, mesh=mesh["replicate", "dp"] if replicas > 1 else mesh["dp"])
            layouts.append([boxes_in_place(model.w, whole)])
    written: list[Box] = [box for share in assign(layouts) for _, box in share.written]
    assert sum(b.numel for b in written) == whole.numel()


fsdp_worlds = st.sampled_from([(2, 2, 1), (3, 2, 1), (2, 3, 1), (4, 2, 1), (2, 4, 1), (2, 2, 2)])
matrices = st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple)


@QUICK
@given(fsdp_worlds, matrices, st.integers(0, 2))
def test_fsdp_over_tensor_parallelism(
    world: tuple[int, int, int], shape: tuple[int, ...], tp_dim: int
) -> None:
    dp, tp, replicas = world
    require_fsdp(dp, tp, shape, tp_dim, replicas)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@LONG
@given(fsdp_worlds, matrices, st.integers(0, 2))
def test_fsdp_over_tensor_parallelism_at_length(
    world: tuple[int, int, int], shape: tuple[int, ...], tp_dim: int
) -> None:
    dp, tp, replicas = world
    require_fsdp(dp, tp, shape, tp_dim, replicas)
