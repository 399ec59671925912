"""Diff: how two checkpoints differ, tensor by tensor, bit for bit. (torch)"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from surefoot.ckpt.manifest import Manifest, TensorMeta
from surefoot.ckpt.progress import Progress, stepwise
from surefoot.ckpt.state import dtype_of
from surefoot.ckpt.tools.boxreader import BoxReader, tensor_nbytes
from surefoot.ckpt.tools.tensorstats import as_numbers

CHUNK_NBYTES = 8 * 2**20


class TensorDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose bits differ. `max_abs` is over the elements that are finite in both; None where there are none."""

    name: str
    numel: int
    differ: int
    """Elements whose bits differ."""
    max_abs: float | None
    not_finite: int
    """Of those that differ, how many are not finite on one side at least."""


class MetaDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of another shape or type."""

    name: str
    a: str
    b: str


class CheckpointDiff(msgspec.Struct, frozen=True, kw_only=True):
    """From `a` to `b`. Names are those of the state; a tied name is compared as what it is tied to."""

    a: str
    b: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[MetaDiff, ...]
    differ: tuple[TensorDiff, ...]
    equal: int
    """Tensors whose bits are the same."""
    ties_changed: tuple[str, ...]
    values: tuple[str, ...]
    """Plain values that differ, or that only one has."""
    cursor_equal: bool

    @property
    def same_tensors(self) -> bool:
        return not (self.only_a or self.only_b or self.changed or self.differ)

    @property
    def same(self) -> bool:
        return self.same_tensors and not self.ties_changed and not self.values and self.cursor_equal


def compare(a: BoxReader, b: BoxReader, progress: Progress | None = None) -> CheckpointDiff:
    """Read both; memory: a few chunks. Raises: DamagedError, ObjectStore…Error."""
    ma, mb = a.manifest, b.manifest
    names_a, names_b = _names(ma), _names(mb)
    both = sorted(names_a.keys() & names_b.keys())
    changed = [n for n in both if ma.tensors[names_a[n]] != mb.tensors[names_b[n]]]
    alike = _once((n for n in both if n not in changed), names_a, names_b)
    total = sum(tensor_nbytes(ma.tensors[names_a[n]]) for n in alike)
    found: list[TensorDiff] = []
    tell = stepwise(progress, total)
    for n in alike:
        if (diff := _tensor_diff(n, a, names_a[n], b, names_b[n])) is not None:
            found.append(diff)
        tell(tensor_nbytes(ma.tensors[names_a[n]]))
    return CheckpointDiff(
        a=_label(ma),
        b=_label(mb),
        only_a=tuple(sorted(names_a.keys() - names_b.keys())),
        only_b=tuple(sorted(names_b.keys() - names_a.keys())),
        changed=tuple(
            MetaDiff(name=n, a=_kind(ma.tensors[names_a[n]]), b=_kind(mb.tensors[names_b[n]]))
            for n in changed
        ),
        differ=tuple(found),
        equal=len(alike) - len(found),
        ties_changed=tuple(_tied_otherwise(both, names_a, names_b)),
        values=tuple(_differing(ma.values, mb.values)),
        cursor_equal=_canonical(ma.cursor) == _canonical(mb.cursor),
    )


def _names(m: Manifest) -> dict[str, str]:
    """Every name to the one it is stored under."""
    return {name: name for name in m.tensors} | dict(m.aliases)


def _tied_otherwise(names: Sequence[str], a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Names that share their tensor with others of these names in one than in the other. Which of them it is stored under is
    all the same."""
    sharing_a, sharing_b = _sharing(names, a), _sharing(names, b)
    return [n for n in names if sharing_a[a[n]] != sharing_b[b[n]]]


def _sharing(names: Sequence[str], stored: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of each stored tensor."""
    found: dict[str, list[str]] = {}
    for n in names:
        found.setdefault(stored[n], []).append(n)
    return found


def _once(names: Any, a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """One name of each pair of stored tensors."""
    first: dict[tuple[str, str], str] = {}
    for n in sorted(names, key=lambda n: (n != a[n], n)):  # the name it is stored under comes first
        first.setdefault((a[n], b[n]), n)
    return sorted(first.values())


def _tensor_diff(name: str, a: BoxReader, in_a: str, b: BoxReader, in_b: str) -> TensorDiff | None:
    meta = a.meta(in_a)
    numel = differ = not_finite = 0
    max_abs: float | None = None
    for x, y in zip(a.chunks(in_a, CHUNK_NBYTES), b.chunks(in_b, CHUNK_NBYTES), strict=True):
        itemsize = dtype_of(meta.dtype).itemsize
        numel += len(x) // itemsize
        if np.array_equal(x, y):
            continue
        unlike = torch.from_numpy((x != y).reshape(-1, itemsize).any(axis=1))
        differ += int(unlike.sum())
        gaps = _gaps(x, y, dtype_of(meta.dtype))[unlike]
        finite = gaps[gaps.isfinite()]
        not_finite += gaps.numel() - finite.numel()
        if finite.numel():
            max_abs = max(max_abs or 0.0, float(finite.max()))
    if not differ:
        return None
    return TensorDiff(name=name, numel=numel, differ=differ, max_abs=max_abs, not_finite=not_finite)


def _gaps(x: np.ndarray, y: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Absolute differences, element by element, in float64."""
    if dtype.is_complex:
        a, b = (torch.from_numpy(r).view(dtype).to(torch.complex128) for r in (x, y))
        return (a - b).abs()
    return (as_numbers(x, dtype) - as_numbers(y, dtype)).abs()


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [
        n for n in sorted({*a, *b}) if (n in a) != (n in b) or _canonical(a.get(n)) != _canonical(b.get(n))
    ]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _label(m: Manifest) -> str:
    return f"step {m.step} of generation {m.generation}"


def _kind(meta: TensorMeta) -> str:
    return f"{meta.dtype}{list(meta.shape)}"
