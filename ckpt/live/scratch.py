"""Memory that cannot simply be written to (one element stands for many), and comparing bits. (torch)"""

from __future__ import annotations

import torch

from surefoot.ckpt.errors import StateMismatchError
from surefoot.ckpt.live.leaves import memory_of


def write_through(name: str, view: torch.Tensor, filled: torch.Tensor) -> None:
    """Raises StateMismatchError where the view cannot hold these values."""
    write_once(view, filled)
    if not equal_bits(view, filled):
        raise StateMismatchError(
            f"{name} is expanded here or overlaps itself (one element in memory stands for many), and the checkpoint has different values for them: "
            f"give it memory of its own (clone it) before the load"
        )


def write_once(view: torch.Tensor, filled: torch.Tensor) -> None:
    """Copy into an expanded view too, which torch refuses to write to."""
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in view.stride())
    view[once].copy_(filled[once])


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return memory_of(t.resolve_conj().resolve_neg().contiguous())
