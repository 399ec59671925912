"""Memory that cannot simply be written to (expanded views), and comparing bits. (torch)"""

from __future__ import annotations

import torch

from surefoot.ckpt.errors import StateMismatchError
from surefoot.ckpt.live.leaves import memory_of


def is_expanded(view: torch.Tensor) -> bool:
    """One element in memory stands for many."""
    return any(s == 0 and n > 1 for s, n in zip(view.stride(), view.shape, strict=True))


def write_through(name: str, view: torch.Tensor, filled: torch.Tensor) -> None:
    """Raises StateMismatchError where the view cannot hold these values."""
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in view.stride())
    view[once].copy_(filled[once])
    if not equal_bits(view, filled):
        raise StateMismatchError(
            f"{name} is expanded here (one element in memory stands for many), and the checkpoint has different values for them: "
            f"give it memory of its own (clone it) before the load"
        )


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return memory_of(t.resolve_conj().resolve_neg().contiguous())
