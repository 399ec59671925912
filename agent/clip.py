"""Gradient clipping by the global norm, over whatever mix of plain and sharded gradients a model has.

torch's own raises on gradients of different meshes (FSDP2 over TP with a norm layer that TP leaves whole), knows nothing of
pipeline stages, and leaves the order of its reduction to the backend. Here squares are summed in float64, per set of shards
in parameter order, then over ranks in rank order by an all-gather: the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_CPU = torch.device("cpu")


def clip_grad_norm_(
    parameters: Iterable[torch.nn.Parameter],
    max_norm: float,
    *,
    stages: dist.ProcessGroup | None = None,
    device: torch.device = _CPU,
) -> torch.Tensor:
    """Scale all gradients, in place, so that their total 2-norm is at most `max_norm`.

    Collective where gradients are sharded, or with `stages`. Plain gradients are taken to be the same on all ranks (of a
    stage), and so are sharded ones along axes that are not in their mesh.

    Args:
        stages: the ranks that hold the other parts of a model cut into pipeline stages, each with parameters of its own: the
            norm is that of all of them. What two stages hold in common (tied weights) counts in each.
        device: where gradients are; what is summed lies there even if this rank has none.

    Returns:
        The total norm before clipping, a float64 scalar, the same on all ranks. NaN and inf go through, as in torch.

    Raises:
        ValueError: a gradient is a pending sum (Partial) and has no norm yet.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    square = _total_square(grads, device)
    if stages is not None:
        square = _sum_in_rank_order(square, stages)
    total = square.sqrt()
    # 1e-6 as in torch.nn.utils.clip_grad_norm_: no division by zero, and coefficients comparable with its.
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        _local(grad).mul_(scale.to(grad.dtype))
    return total


def _total_square(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares over all elements of all gradients; one all-gather for each (mesh, sharded axes) among them."""
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[torch.Tensor]] = {}
    for grad in grads:
        groups.setdefault(_sharding(grad), []).append(_local(grad))
    total = torch.zeros((), dtype=torch.float64, device=_local(grads[0]).device if grads else device)
    for sharding, locals_ in groups.items():
        norms = torch._foreach_norm(locals_, 2.0, dtype=torch.float64)  # pyright: ignore[reportPrivateImportUsage]  (as torch.nn.utils does)
        square = torch.stack(norms).square().sum()
        if sharding is not None:
            mesh, axes = sharding
            for axis in axes:
                square = _sum_in_rank_order(square, mesh.get_group(axis))
        total = total + square
    return total


def _sharding(grad: torch.Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and its axes over which the gradient is cut up; None if every rank has all of it."""
    if not isinstance(grad, DTensor):
        return None
    if any(p.is_partial() for p in grad.placements):
        raise ValueError(
            f"a gradient with placements {grad.placements} is a pending sum: redistribute it first"
        )
    axes = tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate())
    return (grad.device_mesh, axes) if axes else None


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _sum_in_rank_order(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value, group=group)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
