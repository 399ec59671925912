"""Statistics of one stored tensor, chunk by chunk, and its histogram. (torch)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import torch

from surefoot.ckpt.progress import Progress, stepwise
from surefoot.ckpt.state import dtype_of
from surefoot.ckpt.tools.boxreader import BoxReader, tensor_nbytes
from surefoot.ckpt.tools.inspect import stored_name

BINS = 20


class PiecePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a piece of it lies: bytes `at` .. `at` + `nbytes` - 1 of the object (the header included)."""

    key: str
    box: str
    at: int
    nbytes: int


class TensorStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor. Complex numbers are taken by their absolute value; min to std are those of the finite elements, None where
    there are none."""

    name: str
    stored_as: str
    step: int
    generation: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    numel: int
    finite: int
    nan: int
    inf: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    """Of the population."""
    histogram: tuple[int, ...]
    """Finite elements in equal spans from min to max; empty where there is but one value."""
    pieces: tuple[PiecePlace, ...]


class _Sums:
    """Count, mean and squared deviations, merged chunk by chunk (Chan, Golub, LeVeque 1979)."""

    def __init__(self) -> None:
        self.count = self.numel = self.nan = self.inf = self.zeros = 0
        self.mean = self.squares = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, t: torch.Tensor) -> None:
        self.numel += t.numel()
        self.nan += int(t.isnan().sum())
        self.inf += int(t.isinf().sum())
        self.zeros += int((t == 0).sum())
        t = t[t.isfinite()]
        if not (n := t.numel()):
            return
        mean = float(t.mean())
        squares = float(((t - mean) ** 2).sum())
        shift, total = mean - self.mean, self.count + n
        self.mean += shift * n / total
        self.squares += squares + shift * shift * self.count * n / total
        self.count = total
        self.low, self.high = min(self.low, float(t.min())), max(self.high, float(t.max()))


def tensor_stats(reader: BoxReader, name: str, progress: Progress | None = None) -> TensorStats:
    """Read the tensor twice (the histogram needs the range first). Memory: a few chunks.

    Raises: CkptUserError (no such tensor), DamagedError, ObjectStore…Error.
    """
    stored = stored_name(reader.manifest, name)
    meta = reader.meta(stored)
    tell = stepwise(progress, 2 * tensor_nbytes(meta))
    sums = _Sums()
    for chunk in _numbers(reader, stored, tell):
        sums.add(chunk)
    bins = torch.zeros(BINS, dtype=torch.float64, device="cpu")
    if spread := sums.count > 0 and sums.high > sums.low:
        for chunk in _numbers(reader, stored, tell):
            bins += torch.histc(chunk[chunk.isfinite()], BINS, sums.low, sums.high)
    found = sums.count > 0
    return TensorStats(
        name=name,
        stored_as=stored,
        step=reader.manifest.step,
        generation=reader.manifest.generation,
        dtype=meta.dtype,
        shape=meta.shape,
        nbytes=tensor_nbytes(meta),
        numel=sums.numel,
        finite=sums.count,
        nan=sums.nan,
        inf=sums.inf,
        zeros=sums.zeros,
        min=sums.low if found else None,
        max=sums.high if found else None,
        mean=sums.mean if found else None,
        std=math.sqrt(sums.squares / sums.count) if found else None,
        histogram=tuple(int(n) for n in bins) if spread else (),
        pieces=tuple(_places(reader, stored)),
    )


def _numbers(reader: BoxReader, name: str, tell: Callable[[int], None]) -> Iterator[torch.Tensor]:
    dtype = dtype_of(reader.meta(name).dtype)
    for chunk in reader.chunks(name, 8 * 2**20):  # eight times as large in float64
        yield as_numbers(chunk, dtype)
        tell(len(chunk))


def as_numbers(raw: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Raw bytes (bytes,) as float64 (elements,); complex numbers by their absolute value."""
    t = torch.from_numpy(raw).view(dtype)
    if dtype.is_complex:
        t = t.to(torch.complex128).abs()
    return t.to(torch.float64)


def _places(reader: BoxReader, name: str) -> Iterator[PiecePlace]:
    from surefoot.ckpt.boxes import Box
    from surefoot.ckpt.planning.plan import nbytes_of

    meta = reader.meta(name)
    for source, p in sorted(reader.pieces(name), key=lambda sp: sp[1].offset):
        box = Box(p.offset, p.extent)
        yield PiecePlace(
            key=source.key, box=str(box), at=source.data_start + p.at, nbytes=nbytes_of(meta, box)
        )
