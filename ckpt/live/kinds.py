"""Torch's own plain values (sizes, dtypes, devices) as JSON and back. (torch)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from surefoot.ckpt.errors import DamagedError


def encode_torch(value: Any) -> Any:
    """The encoded form, or NotImplemented."""
    match value:
        case torch.Size():
            return {"Size": list(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {type(value).__name__: str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
        case _:
            return NotImplemented


def decode_torch(kind: str, content: Any, path: str) -> Any:
    """The value, or NotImplemented. Raises DamagedError."""
    make = _MAKERS.get(kind)
    if make is None:
        return NotImplemented
    try:
        return make(content)
    except (TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise DamagedError(f"value {path}: {content!r} is no {kind}: {e}", key=path) from e


def _named(kind: type) -> Callable[[Any], Any]:
    """Looks up a constant of torch; what else has such a name there is refused."""

    def find(name: Any) -> Any:
        found = getattr(torch, name)
        if type(found) is not kind:
            raise TypeError(f"torch.{name} is something else")
        return found

    return find


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "Size": torch.Size,
    "dtype": _named(torch.dtype),
    "layout": _named(torch.layout),
    "memory_format": _named(torch.memory_format),
    "device": torch.device,
}
