"""Tensor subclasses that wrap other tensors (quantised weights): their inner tensors and what they are otherwise. (torch)

They are taken apart by ``__tensor_flatten__``, torch's own protocol for it. Each inner tensor is stored bit for bit under
``name.<attribute>``; class, outer type and shape, and the context (the non-tensor part) are a plain value under the name
itself. A load fills the inner tensors of a live tensor of the same class in place: nothing is dequantised, and no class is
looked up by a stored name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from surefoot.ckpt.boxes import Held
from surefoot.ckpt.errors import StateError
from surefoot.ckpt.format.values import class_name, encode_value
from surefoot.ckpt.live.declared import Boxes
from surefoot.ckpt.live.kinds import encode_torch
from surefoot.ckpt.live.leaves import PLAIN_TYPES, coordinate_in, dtype_name, placed, shardings_of


@dataclass(eq=False, slots=True)
class Wrapped:
    """One such tensor, live or decoded: `parts` are its inner tensors, by attribute (decoded: references to stored ones)."""

    cls: str
    dtype: str
    shape: tuple[int, ...]
    context: Any
    """Encoded: compared with what a checkpoint has, never turned back into objects."""
    parts: dict[str, Any]
    tensor: Any = None
    """Decoded: the live tensor that a load fills."""

    def encoded(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "wrapped": {
                "class": self.cls,
                "dtype": self.dtype,
                "shape": list(self.shape),
                "context": self.context,
                "parts": dict(parts),
            }
        }

    def kind(self) -> str:
        return f"{self.cls}({self.dtype}{list(self.shape)})"


def decode_wrapped(content: Any, part: Callable[[Any], Any]) -> Wrapped:
    """Raises TypeError, KeyError for what is none."""
    return Wrapped(
        cls=str(content["class"]),
        dtype=str(content["dtype"]),
        shape=tuple(content["shape"]),
        context=content["context"],
        parts={str(k): part(v) for k, v in content["parts"].items()},
    )


def is_wrapped(value: Any) -> bool:
    """Is it a tensor that wraps others, or a DTensor whose shards are such?"""
    if type(value) in PLAIN_TYPES:
        return False
    if isinstance(value, DTensor):
        return hasattr(type(value._local_tensor), "__tensor_flatten__") and not hasattr(
            value._local_tensor, "wait"
        )
    return isinstance(value, torch.Tensor) and hasattr(type(value), "__tensor_flatten__")


def unwrap(name: str, tensor: torch.Tensor) -> Wrapped:
    """Take a live tensor apart. Raises StateError."""
    if not all(isinstance(n, int) for n in tensor.shape):
        raise StateError(f"{name}: a nested tensor has no fixed shape; store its values and offsets")
    local, held = placed(name, tensor) if isinstance(tensor, DTensor) else (tensor, ())
    attributes, context = cast("Any", local).__tensor_flatten__()
    parts: dict[str, Any] = {a: getattr(local, a) for a in attributes}
    if isinstance(tensor, DTensor):
        parts = {a: _sharded_part(f"{name}.{a}", tensor, local, p, held) for a, p in parts.items()}
    return Wrapped(
        cls=class_name(type(local)),
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        context=encode_value(context, f"{name}.__tensor_flatten__", _encode_context),
        parts=parts,
    )


def _encode_context(path: str, value: Any) -> Any:
    """Devices do not count, and foreign settings only have to be the same."""
    if isinstance(value, torch.device):
        return {"device": "any"}
    if (encoded := encode_torch(value)) is not NotImplemented:
        return encoded
    if isinstance(value, bytes | bytearray):
        return NotImplemented
    if isinstance(value, torch.Tensor):
        raise StateError(
            f"{path}: a tensor in the context of __tensor_flatten__; it belongs to the attributes"
        )
    text = repr(value)
    return {"object": [class_name(type(value)), "" if " at 0x" in text else text]}


def _sharded_part(
    name: str, outer: DTensor, local: torch.Tensor, part: torch.Tensor, held: tuple[Held, ...]
) -> Boxes:
    """An inner tensor of a shard, as part of the inner tensor of the whole.

    Its dimensions that are as long as the shard's are cut like them; one that is not cut stays as it is.
    """
    coordinate = coordinate_in(outer.device_mesh)
    cut = (
        {s.dim for s in shardings_of(outer.dim(), outer.device_mesh, outer.placements, coordinate)}
        if coordinate is not None
        else set[int]()
    )
    if part.dim() == 0:
        return Boxes((), [((), part)])
    alike = [part.dim() == local.dim() and n == m for n, m in zip(part.shape, local.shape, strict=False)]
    if part.dim() != local.dim() or any(not alike[d] for d in cut):
        raise StateError(
            f"{name} of shape {list(part.shape)} does not follow the cut of its shard of shape {list(local.shape)}: how it belongs to "
            f"the whole cannot be known; store it as ckpt.Boxes"
        )
    shape = tuple(outer.shape[d] if d in cut else n for d, n in enumerate(part.shape))
    boxes: list[tuple[tuple[int, ...], torch.Tensor]] = []
    for h in held:
        offset = tuple(o if d in cut else 0 for d, o in enumerate(h.box.offset))
        extent = tuple(e if d in cut else part.shape[d] for d, e in enumerate(h.box.extent))
        index = tuple(slice(at, at + e) for at, e in zip(h.local, extent, strict=True))
        boxes.append((offset, part[index]))
    return Boxes(shape, boxes, part.dtype)
