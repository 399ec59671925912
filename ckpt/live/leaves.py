"""One live tensor: which boxes of the whole this rank holds of it, and where in memory they lie. (torch)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parameter import is_lazy

from surefoot.ckpt.boxes import Box, Held, Sharding, held_boxes, intersect, local_shape, whole
from surefoot.ckpt.errors import StateError
from surefoot.ckpt.live.declared import Boxes
from surefoot.ckpt.manifest import TensorMeta
from surefoot.ckpt.planning.plan import ITEMSIZES, HeldTensor

PLAIN_TYPES = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))
"""Torch's own, which are what they seem; most tensors are of these, and there are thousands to look at."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One live tensor: the boxes this rank holds of it with the live view of each, and what it is as a whole."""

    name: str
    held: tuple[Held, ...]
    views: tuple[torch.Tensor, ...]
    """``views[i]`` is what lies in ``held[i].box``, of that box's extent."""
    meta: TensorMeta

    def layout(self) -> HeldTensor:
        boxes = tuple([h.box for h in self.held])
        return HeldTensor(name=self.name, dtype=self.meta.dtype, shape=self.meta.shape, boxes=boxes)

    @cached_property
    def _position(self) -> dict[Box, int]:
        return {h.box: i for i, h in enumerate(self.held)}

    def holding(self, box: Box) -> int:
        """Which of the held boxes `box` lies within, if any. Raises ValueError where there are several, and it lies within none."""
        if len(self.held) == 1:
            return 0
        if (known := self._position.get(box)) is not None:
            return known
        for i, h in enumerate(self.held):
            if intersect(h.box, box) == box:
                return i
        raise ValueError(f"{self.name}: {box} lies within none of the boxes held here")


def leaf_of(name: str, tensor: torch.Tensor | Boxes) -> Leaf:
    """Raises StateError for what cannot be stored. Call under torch.no_grad: the views are written to on load."""
    if isinstance(tensor, Boxes):
        for _, part in tensor.parts:
            require_plain(name, part)
        held = tuple(Held(box, (0,) * len(box.offset)) for box, _ in tensor.parts)
        views = tuple(part for _, part in tensor.parts)
    elif isinstance(tensor, DTensor):
        local, held = placed(name, tensor)
        require_plain(name, local)
        views = tuple(view_of(local, h) for h in held)
    else:
        require_plain(name, tensor)
        held = _whole_held(tensor.shape)
        views = (tensor,) if held else ()
    dtype = dtype_name(tensor.dtype)
    if dtype not in ITEMSIZES:
        raise StateError(f"{name}: tensors of {dtype} cannot be stored; view it as integers of its size")
    return Leaf(
        name=name,
        held=held,
        views=tuple([_bare(v).resolve_conj().resolve_neg() for v in views]),
        meta=_meta(dtype, tensor.shape),
    )


@lru_cache(maxsize=4096)
def _meta(dtype: str, shape: tuple[int, ...]) -> TensorMeta:
    return TensorMeta(dtype=dtype, shape=tuple(shape))


def _bare(t: torch.Tensor) -> torch.Tensor:
    """Without what a caller's subclass of torch.Tensor does on every operation."""
    if type(t) in PLAIN_TYPES:
        return t
    with torch._C.DisableTorchFunctionSubclass():
        return t.detach().as_subclass(torch.Tensor)


def view_of(local: torch.Tensor, held: Held) -> torch.Tensor:
    """The view of a local tensor in which a held box lies."""
    if local.shape == held.box.extent:
        return local
    return local[tuple(slice(o, o + e) for o, e in zip(held.local, held.box.extent, strict=True))]


@lru_cache(maxsize=4096)
def _whole_held(shape: tuple[int, ...]) -> tuple[Held, ...]:
    return (Held(whole(tuple(shape)), (0,) * len(shape)),) if 0 not in shape else ()


def require_plain(name: str, t: torch.Tensor) -> None:
    """Raises StateError unless the tensor's elements lie in memory."""
    if type(t) not in PLAIN_TYPES and is_lazy(t):
        raise StateError(f"{name}: a lazy parameter has no shape yet; run the module once, then save or load")
    if t.is_quantized:
        raise StateError(
            f"{name}: tensors of torch.quantize_per_… cannot be stored; store t.int_repr() and its scales, or use a tensor subclass "
            f"such as torchao's"
        )
    if t.layout is not torch.strided or t.is_meta:
        raise StateError(
            f"{name}: a {t.layout} tensor on {t.device} cannot be stored; make it dense and real first"
        )
    if t.is_nested:
        raise StateError(f"{name}: a nested tensor has no fixed shape; store its values and offsets")
    if t.numel() and not _has_memory(t):
        kind = type(t).__qualname__
        raise StateError(
            f"{name}: this {kind} has no memory of its own (freed, or a wrapper without __tensor_flatten__): store what it wraps"
        )


def _has_memory(t: torch.Tensor) -> bool:
    try:
        return t.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a wrapper's storage, which torch does not let anybody look into
        return False


# ---------------------------------------------------------------- DTensors


def placed(name: str, t: DTensor) -> tuple[torch.Tensor, tuple[Held, ...]]:
    """The local tensor, and the boxes of the whole that lie in it. Raises StateError."""
    coordinate = coordinate_in(t.device_mesh)
    local: Any = t.to_local()
    if callable(getattr(local, "wait", None)):
        local = local.wait()  # what a collective is still bringing
    if coordinate is None:
        return local, ()
    if (found := _sharded(t.shape, t.device_mesh, t.placements, coordinate)) is None:
        raise StateError(f"{name}: a DTensor with partial sums has no values yet; redistribute it first")
    held, expected = found
    # FSDP gives the shard of an empty shard another shape, which makes no difference.
    if local.shape != expected and (local.numel() or math.prod(expected)):
        raise StateError(
            f"{name}: the local tensor has shape {list(local.shape)}, and placements {t.placements} of {list(t.shape)} call for "
            f"{list(expected)}: declare a shard of another form than torch's as ckpt.Boxes"
        )
    return local, held


def coordinate_in(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Which chunk this rank has in each dimension of a mesh; None where the mesh is without it.

    That is its rank in the dimension's process group: torch's collectives go by it, so it is what `full_tensor` shows, and
    where FSDP and `distribute_tensor` put things. `get_coordinate` is another number where the mesh lists its ranks out of order.
    """
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else _ranks_in_groups(mesh, tuple(coordinate))


@lru_cache(maxsize=1024)
def _ranks_in_groups(mesh: DeviceMesh, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """A group counts its members in the order of their global ranks."""
    found: list[int] = []
    for i, at in enumerate(coordinate):
        members: list[int] = mesh.mesh[(*coordinate[:i], slice(None), *coordinate[i + 1 :])].tolist()
        found.append(sum(rank < members[at] for rank in members))
    return tuple(found)


def shardings_of(
    dims: int, mesh: DeviceMesh, placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[Sharding, ...]:
    """How the mesh dimensions cut a tensor of so many dimensions, in the order in which they were applied.

    That is from left to right, except for what FSDP does to a tensor that is sharded on the same dimension already: its
    strided shard stands left of the others and says by its factor, the number of their shards, that it cuts each of those.
    Taken from left to right it would come out the same only where everything divides evenly.
    """
    order: list[Sharding] = []
    for i, p in reversed(list(enumerate(cast("Sequence[Any]", placements)))):
        if p.is_replicate():
            continue
        dim = p.dim % max(dims, 1)
        factor: int = getattr(p, "split_factor", 1)
        right = math.prod(s.parts for s in order if s.dim == dim)
        if factor > 1 and factor == right:
            order.append(Sharding(dim, mesh.size(i), coordinate[i]))
        else:
            order.insert(0, Sharding(dim, mesh.size(i), coordinate[i], factor))
    return tuple(order)


@lru_cache(maxsize=65536)
def _sharded(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[Held, ...], tuple[int, ...]] | None:
    """The boxes held here, and the shape of the local tensor; None for partial sums. Thousands of tensors have few layouts."""
    if any(p.is_partial() for p in placements):
        return None
    shardings = shardings_of(len(shape), mesh, placements, coordinate)
    return tuple(held_boxes(shape, shardings)), local_shape(shape, shardings)


# ---------------------------------------------------------------- parts


def part_of(leaf: Leaf, box: Box) -> torch.Tensor:
    """The live view of `box` of the whole, which lies within one of the boxes held here."""
    at = leaf.holding(box)
    outer, view = leaf.held[at].box, leaf.views[at]
    if box == outer:
        return view
    offset = view.storage_offset()
    strides = view.stride()
    for o, e, begin, n, stride in zip(*box, *outer, strides, strict=True):
        if o < begin or o + e > begin + n:
            raise ValueError(f"{leaf.name}: {box} does not lie within {outer}, which is held here")
        offset += (o - begin) * stride
    return view.as_strided(box.extent, strides, offset)  # one call, where slices are one per dimension


def memory_of(t: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: uint8, 1-D, live.

    torch says contiguous whatever the stride of a dimension of one element is, and then refuses to view it as another type.
    """
    return t.detach().as_strided((t.numel(),), (1,)).view(torch.uint8)


def fill_part(leaf: Leaf, piece: Box, part: Box, raw: bytes | bytearray | memoryview) -> None:
    """Copy `part`, which lies within one held box, into the live tensor. `raw` is the `span` of `part` in the stored, row-major
    `piece`."""
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype_of(leaf.meta.dtype))
    strides = tuple(math.prod(piece.extent[i + 1 :]) for i in range(len(piece.extent)))
    part_of(leaf, part).copy_(flat.as_strided(part.extent, strides))
