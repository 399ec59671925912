"""What callers say of their tensors where the tensors cannot: `Boxes` and `PerRank`. (torch)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from surefoot.ckpt.boxes import Box, stretch, whole


class Boxes:
    """A tensor of which this rank holds some boxes, each in a tensor of its own, or none.

    For shards that no DTensor expresses: views into flat, padded buffers, several pieces per rank, cuts of unequal length::

        state["w"] = ckpt.Boxes((7, 3), [((0, 0), mine[:6].view(2, 3)), ((4, 0), other)])
        state["w"] = ckpt.Boxes.flat((7, 3), start=5, tensor=buffer[2:9])      # elements 5 .. 11 in row-major order

    Ranks may hold the same box (replicas), but boxes that overlap otherwise, or leave a hole, are refused when saving. A load
    fills the tensors in place. Where one of them is a parameter of an optimizer in the same state, the optimizer's state of
    its shape has the same boxes.
    """

    __slots__ = ("dtype", "parts", "shape")

    def __init__(
        self,
        shape: Sequence[int],
        parts: Iterable[tuple[Sequence[int], torch.Tensor]] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """Args:
            shape: of the whole tensor.
            parts: offset in elements of the whole, and the live tensor that lies there, of the box's extent.
            dtype: needed where this rank holds nothing.

        Raises ValueError: a box of another rank than the tensor, outside of it, given twice, or of another type.
        """
        self.shape = tuple(int(n) for n in shape)
        given = [(Box(tuple(int(o) for o in offset), tuple(t.shape)), t) for offset, t in parts]
        dtypes = {t.dtype for _, t in given} | ({dtype} if dtype is not None else set())
        if len(dtypes) != 1:
            raise ValueError(
                f"the parts of one tensor have one type, not {sorted(map(str, dtypes))}"
                if dtypes
                else "a rank that holds no part must give the dtype"
            )
        self.dtype: torch.dtype = dtypes.pop()
        for box, _ in given:
            _require_inside(self.shape, box)
        filled = [(box, t) for box, t in given if box.numel]
        if len({box for box, _ in filled}) != len(filled):
            raise ValueError(f"a box of the tensor of shape {list(self.shape)} is given twice")
        self.parts: tuple[tuple[Box, torch.Tensor], ...] = tuple(sorted(filled, key=lambda p: p[0]))

    @classmethod
    def flat(
        cls, shape: Sequence[int], start: int, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> Self:
        """Part of the row-major flattened tensor: `tensor` (1-D) holds its elements from `start` on.

        Raises ValueError: `tensor` is not 1-D, or reaches beyond the end.
        """
        all_of_it = whole(tuple(int(n) for n in shape))
        stop = start + tensor.numel()
        if tensor.dim() != 1 or start < 0 or stop > all_of_it.numel:
            raise ValueError(
                f"elements {start} .. {stop - 1} (a tensor of shape {list(tensor.shape)}) are no stretch of {all_of_it.numel} elements"
            )
        parts: list[tuple[Sequence[int], torch.Tensor]] = []
        at = 0
        for box in stretch(all_of_it, start, stop):
            parts.append((box.offset, tensor.detach()[at : at + box.numel].view(box.extent)))
            at += box.numel
        return cls(shape, parts, dtype if dtype is not None else tensor.dtype)

    def like(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Self:
        """Other tensors in the same boxes, in the order of `parts`."""
        return type(self)(
            self.shape, [(b.offset, t) for (b, _), t in zip(self.parts, tensors, strict=True)], dtype
        )

    def __repr__(self) -> str:
        held = ", ".join(str(b) for b, _ in self.parts[:4]) + (", ..." if len(self.parts) > 4 else "")
        return f"Boxes({self.dtype} of shape {list(self.shape)}, here: {held or 'nothing'})"


def _require_inside(shape: tuple[int, ...], box: Box) -> None:
    inside = len(box.offset) == len(box.extent) == len(shape) and all(
        o >= 0 and o + e <= n for o, e, n in zip(box.offset, box.extent, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"{Box(box.offset, box.extent)} is no box of a tensor of shape {list(shape)}")


@dataclass(eq=False, slots=True)
class PerRank:
    """A value that every rank has its own of: random generators, a rank's own statistics.

    `value` is anything that may stand in a state (a tensor, a plain value, an object with state_dict, a mapping of such). Rank r
    stores it under ``name@rank<r>``, and a load gives it back to rank r. At another world size rank r still gets what rank r
    had; a rank that did not exist then is refused, or with strict=False keeps its live value. What belonged to ranks beyond the
    world of the load stays in the checkpoint.
    """

    value: Any
