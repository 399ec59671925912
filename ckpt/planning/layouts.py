"""What all ranks hold, said in few words. PURE.

Ranks that hold the same kind of shard of the same tensors differ in a few numbers: where each of them stands in the mesh. So a
layout is told as a *template*, in which an offset is ``scale * value[k]``, and the rank's *values*. The 1,024 ranks of an FSDP
job share one template (or three, where a dimension does not divide evenly) and have one number each. Ranks exchange a hash and
their values; then the first rank of each template sends it, compressed, once for all.

An offset is told as a multiple of the box's extent where it is one (torch's chunks are: then one value serves all tensors), and
as it is otherwise. Where shards follow no rule that costs values and templates, and is never wrong.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import CkptWorldError, CoverageError

Ints = NDArray[np.int64]

_HASH_NBYTES = 16


class HeldTensor(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of a tensor; no boxes where its shard is empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor in a template: a `HeldTensor` for all ranks of the template, which have `count` boxes of it.

    `terms` are three numbers for each box and dimension, one after the other: scale, extent, k. The box begins at
    ``scale * value[k]``, or at 0 where k is -1.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    terms: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The same rows for `ranks` (ascending), whose values are the rows of `values` [ranks, values]."""

    rows: tuple[Row, ...]
    ranks: Ints
    values: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """What all ranks hold."""

    world_size: int
    templates: tuple[Template, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A layout as bytes: `word` is the rank's own (hash of the template, values), `template` is shared."""

    word: bytes
    template: bytes


def describe(tensors: Sequence[HeldTensor]) -> Description:
    """Say one rank's layout. The order of the tensors and of their boxes does not matter.

    Raises CoverageError for what is no box of its tensor.
    """
    values: dict[_Value, int] = {}
    rows: list[Row] = []
    for t in sorted(tensors, key=lambda t: t.name):
        boxes = [box for box in sorted(t.boxes) if 0 not in box.extent]
        terms = [n for box in boxes for n in _terms(t, box, values)]
        rows.append(Row(t.name, t.dtype, t.shape, len(boxes), tuple(terms)))
    template = zlib.compress(msgspec.json.encode(rows), 1)
    told = np.array([v[0] for v in values], "<i8")
    return Description(word=_hash(template) + told.tobytes(), template=template)


_Value = tuple[int, int, int]
"""A value, and what makes it another than an equal one: 0, 0 for a multiple; the dimension's length and the box's extent there
for an offset as it is. (Two that are equal by chance on one rank and not on the next would make two templates.)"""


def _terms(t: HeldTensor, box: Box, values: dict[_Value, int]) -> list[int]:
    if (
        not len(box.offset) == len(box.extent) == len(t.shape)
        or min((*box.offset, *box.extent), default=0) < 0
    ):
        raise CoverageError(f"{t.name}: {box} is no box of a tensor of shape {list(t.shape)}")
    terms: list[int] = []
    for o, e, n in zip(box.offset, box.extent, t.shape, strict=True):
        if (o, e) == (0, n):
            terms += (0, e, -1)
        elif o % e == 0:
            terms += (e, e, values.setdefault((o // e, 0, 0), len(values)))
        else:
            terms += (1, e, values.setdefault((o, n, e), len(values)))
    return terms


def _hash(template: bytes) -> bytes:
    return hashlib.blake2b(template, digest_size=_HASH_NBYTES).digest()


def exchange_layouts(
    tensors: Sequence[HeldTensor], rank: int, exchange: Callable[[bytes], list[bytes]]
) -> Layouts:
    """Tell the other ranks what this one holds, and hear what they do. Collective.

    Args:
        exchange: all-gather of bytes in rank order. Called once where all ranks have one template, otherwise twice.

    Raises:
        CoverageError: see `describe`.
        CkptWorldError: a rank sent something else than it announced.
    """
    mine = describe(tensors)
    words = exchange(mine.word)
    first: dict[bytes, int] = {}
    for r, word in enumerate(words):
        first.setdefault(word[:_HASH_NBYTES], r)
    templates = {_hash(mine.template): mine.template}
    if len(first) > 1:
        heard = exchange(mine.template if first[_hash(mine.template)] == rank else b"")
        templates = {key: heard[r] for key, r in first.items()}
    for key, r in first.items():
        if _hash(templates[key]) != key:
            raise CkptWorldError(
                f"rank {r} sent another layout than it had announced; try again, and report it if it stays"
            )
    return _layouts(words, templates)


def layouts_of(everyone: Sequence[Sequence[HeldTensor]]) -> Layouts:
    """The layouts of ranks 0, 1, … where one process knows them all. Raises CoverageError: see `describe`."""
    described = [describe(tensors) for tensors in everyone]
    return _layouts([d.word for d in described], {_hash(d.template): d.template for d in described})


def _layouts(words: Sequence[bytes], templates: dict[bytes, bytes]) -> Layouts:
    ranks: dict[bytes, list[int]] = {}
    for r, word in enumerate(words):
        ranks.setdefault(word[:_HASH_NBYTES], []).append(r)
    return Layouts(
        world_size=len(words),
        templates=tuple(
            Template(
                rows=msgspec.json.decode(zlib.decompress(templates[key]), type=tuple[Row, ...]),
                ranks=np.array(who, np.int64),
                values=np.frombuffer(b"".join(words[r][_HASH_NBYTES:] for r in who), "<i8")
                .astype(np.int64)
                .reshape(len(who), -1),
            )
            for key, who in ranks.items()
        ),
    )
