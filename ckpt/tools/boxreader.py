"""Any box of any tensor of a committed checkpoint as raw bytes, verified, with bounded memory. Torch-free.

What the tools read with: they walk over tensors that need not fit into memory, in chunks that follow each other row-major,
from however many pieces a tensor was stored in. Blocks that several reads share are kept for a while, so that a thousand
small tensors in one block cost one read.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from surefoot.ckpt.boxes import Box, intersect, span, whole
from surefoot.ckpt.loading.reading import read_blocks
from surefoot.ckpt.manifest import DataObject, Manifest, Piece, TensorMeta
from surefoot.ckpt.planning.plan import ITEMSIZES, coalesce, nbytes_of
from surefoot.ckpt.store import ObjectStore

CHUNK_NBYTES = 32 * 2**20
"""What is handed out at once."""
CACHE_NBYTES = 64 * 2**20
"""Blocks kept for the next read."""
RUN_NBYTES = 32 * 2**20
"""The longest single read."""


class BoxReader:
    """Reads one checkpoint, whose manifest is sound (`read_manifest` sees to it). Not for several threads at once."""

    def __init__(self, store: ObjectStore, manifest: Manifest) -> None:
        self.manifest = manifest
        self._store = store
        self._pieces: dict[str, list[tuple[DataObject, Piece]]] = {name: [] for name in manifest.tensors}
        for source in manifest.objects:
            for piece in source.pieces:
                self._pieces[piece.name].append((source, piece))
        self._blocks: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._cached_nbytes = 0
        self.read_nbytes = 0
        """Bytes fetched so far."""

    def meta(self, name: str) -> TensorMeta:
        return self.manifest.tensors[name]

    def pieces(self, name: str) -> list[tuple[DataObject, Piece]]:
        """Where a tensor lies."""
        return self._pieces[name]

    def chunks(self, name: str, nbytes: int = CHUNK_NBYTES) -> Iterator[np.ndarray]:
        """All of a tensor's bytes, row-major, in arrays (bytes,) of about `nbytes` at most. Raises as `box`."""
        meta = self.meta(name)
        for box in slabs(meta.shape, ITEMSIZES[meta.dtype], nbytes):
            yield self.box(name, box)

    def box(self, name: str, box: Box) -> np.ndarray:
        """The bytes (bytes,) of a box, row-major. Raises: DamagedError (naming the object), ObjectStore…Error."""
        meta = self.meta(name)
        itemsize = ITEMSIZES[meta.dtype]
        found = np.empty((*box.extent, itemsize), np.uint8)
        for source, piece in self._pieces[name]:
            stored = Box(piece.offset, piece.extent)
            part = intersect(stored, box)
            if part is None:
                continue
            begin, end = span(stored, part, itemsize)
            raw = np.frombuffer(self._bytes(source, piece.at + begin, piece.at + end), np.uint8)
            strides = tuple(itemsize * math.prod(piece.extent[i + 1 :]) for i in range(len(piece.extent)))
            index = tuple(
                slice(p - o, p - o + e) for p, o, e in zip(part.offset, box.offset, part.extent, strict=True)
            )
            found[index] = as_strided(raw, (*part.extent, itemsize), (*strides, 1), writeable=False)
        return found.reshape(-1)

    def _bytes(self, source: DataObject, begin: int, end: int) -> bytes | memoryview:
        """Bytes begin .. end - 1 of an object's data section."""
        size = source.block_nbytes
        first, stop = begin // size, -(-end // size)
        self._fetch(source, first, stop)
        parts: list[memoryview] = []
        for b in range(first, stop):
            block = self._blocks[source.key, b]
            parts.append(block[max(begin - b * size, 0) : end - b * size])
        self._forget()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fetch(self, source: DataObject, first: int, stop: int) -> None:
        size = source.block_nbytes
        missing = [b for b in range(first, stop) if (source.key, b) not in self._blocks]
        for a, z in coalesce(missing, count_max=max(1, RUN_NBYTES // size)):
            data = memoryview(read_blocks(self._store, source, a, z))
            self.read_nbytes += len(data)
            for b in range(a, z):
                self._blocks[source.key, b] = data[(b - a) * size : (b - a + 1) * size]
                self._cached_nbytes += len(self._blocks[source.key, b])
        for b in range(first, stop):
            self._blocks.move_to_end((source.key, b))

    def _forget(self) -> None:
        while self._cached_nbytes > CACHE_NBYTES and len(self._blocks) > 1:
            _, block = self._blocks.popitem(last=False)
            self._cached_nbytes -= len(block)


def slabs(shape: Sequence[int], itemsize: int, nbytes: int) -> Iterator[Box]:
    """A tensor cut into boxes that follow each other row-major, none above `nbytes` unless one element is. PURE."""
    if 0 in shape:
        return
    if not shape or math.prod(shape) * itemsize <= nbytes:
        yield whole(shape)
        return
    row_nbytes = math.prod(shape[1:]) * itemsize
    if row_nbytes > nbytes:
        for i in range(shape[0]):
            for inner in slabs(shape[1:], itemsize, nbytes):
                yield Box((i, *inner.offset), (1, *inner.extent))
        return
    rows = nbytes // row_nbytes
    rest = tuple(shape[1:])
    for i in range(0, shape[0], rows):
        yield Box((i, *(0,) * len(rest)), (min(rows, shape[0] - i), *rest))


def tensor_nbytes(meta: TensorMeta) -> int:
    return nbytes_of(meta, whole(meta.shape))
