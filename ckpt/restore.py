"""Reading committed checkpoints: manifests, ledgers, and the bytes of any box of any tensor. (torch only in `fill`)

A load reads, of each object, the blocks that hold what this rank needs, in runs of neighbouring blocks, several at a
time; every block is checked before its bytes go anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from surefoot.ckpt.boxes import Box, intersect, span
from surefoot.ckpt.errors import DamagedError, StateMismatchError, StepMissingError
from surefoot.ckpt.image import block_sums
from surefoot.ckpt.manifest import (
    DataObject,
    Ledger,
    LedgerRow,
    Manifest,
    Piece,
    Previous,
    TensorMeta,
    decode,
    manifest_key,
)
from surefoot.ckpt.plan import ITEMSIZES, coalesce
from surefoot.ckpt.record import Record, lineage, list_manifests, on_lineage, read_records
from surefoot.ckpt.staging import Exchange, Restored
from surefoot.ckpt.store import ObjectMissingError, ObjectStore, open_store

if TYPE_CHECKING:
    from surefoot.ckpt.state import Leaf, Want

BATCH_NBYTES = 64 * 2**20
"""Bytes fetched before they are copied: bounds a load's own memory to READERS times this (or one larger piece)."""
READERS = 4
"""Batches in flight. One S3 connection gives 60 to 110 MB/s; four fill what two cores can check."""


def read_manifest(store: ObjectStore, generation: int, step: int) -> Manifest:
    """Raises: StepMissingError, FormatError, DamagedError, ObjectStore…Error."""
    key = manifest_key(generation, step)
    try:
        manifest = decode(Manifest, store.read(key), key=key)
    except ObjectMissingError as e:
        raise StepMissingError(
            f"{store.root} has no checkpoint of step {step}, generation {generation}; `ckpt ls` shows what it has"
        ) from e
    if (manifest.generation, manifest.step) != (generation, step):
        raise DamagedError(
            f"{key} calls itself step {manifest.step} of generation {manifest.generation}", key=key
        )
    return manifest


# ---------------------------------------------------------------- the committed ledger


def read_ledger(store: ObjectStore, manifest: Manifest) -> Ledger | None:
    """The ledger beside a manifest; None where it has none. Raises DamagedError."""
    if manifest.ledger is None:
        return None
    return _read_ledger(store, manifest.ledger.key, manifest.ledger.checksum)


def _read_ledger(store: ObjectStore, key: str, checksum: str) -> Ledger:
    data = store.read(key)
    if xxhash.xxh3_64_hexdigest(data) != checksum:
        raise DamagedError(f"{key} is not what its manifest committed", key=key)
    return decode(Ledger, data, key=key)


def committed_rows(store: ObjectStore, *, head: int | None = None) -> list[LedgerRow]:
    """The committed ledger, from the first step to the newest checkpoint on the lineage: per step and data-parallel rank the
    row of the execution that counts.

    Follows the chain of ledgers, which outlives the checkpoints that retention deletes.

    Args:
        head: the generation to look from; the newest where None.

    Raises:
        DamagedError: a ledger is damaged, or the chain has a gap.
    """
    records = read_records(store)
    line = lineage(records, list_manifests(store), head)
    if not line:
        return []
    rows: list[LedgerRow] = []
    newest = read_manifest(store, line[-1].generation, line[-1].step)
    at = Previous(generation=newest.generation, step=newest.step, ledger=newest.ledger)
    head = newest.generation
    while at is not None:
        if at.ledger is None:
            key = manifest_key(at.generation, at.step)
            raise DamagedError(
                f"the ledger of step {at.step}, generation {at.generation} is not known: the chain has a gap",
                key=key,
            )
        ledger = _read_ledger(store, at.ledger.key, at.ledger.checksum)
        rows += _counting(records, head, ledger.rows)
        at = ledger.previous
    return sorted(rows, key=lambda r: (r.step, r.dp_rank))


def _counting(records: Mapping[int, Record], head: int, rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    return [r for r in rows if on_lineage(records, head, r.generation, r.step)]


# ---------------------------------------------------------------- bytes of tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Copy `part` of a piece, bytes begin .. end - 1 of the data section, into `leaf`."""

    leaf: Leaf
    piece: Box
    part: Box
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Parts of one object that are fetched together."""

    source: DataObject
    parts: tuple[_Part, ...]


class ManifestSource:
    """A load's `Source` that reads a committed checkpoint."""

    def __init__(self, store: ObjectStore, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest

    @property
    def label(self) -> str:
        m = self._manifest
        return f"the checkpoint of step {m.step}, generation {m.generation}, in {self._store.root}"

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return self._manifest.tensors

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._manifest.aliases

    @property
    def values(self) -> Mapping[str, Any]:
        return self._manifest.values

    def fill(self, wants: Sequence[Want]) -> None:
        """Raises: DamagedError (naming the object), StateMismatchError (the manifest does not cover a tensor), ObjectStore…Error."""
        from surefoot.ckpt.state import fill_part

        batches = list(self._batches(wants))
        with ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="ckpt-read") as pool:
            for batch, blocks in zip(batches, _ahead(pool, self._fetch, batches), strict=True):
                for p in batch.parts:
                    raw = blocks.bytes(p.begin, p.end)
                    fill_part(p.leaf, p.piece, p.part, raw)

    def _batches(self, wants: Sequence[Want]) -> Iterator[_Batch]:
        wanted: dict[str, list[Want]] = {}
        for want in wants:
            wanted.setdefault(want.stored, []).append(want)
        filled: dict[int, int] = {}
        for source in self._manifest.objects:
            parts: list[_Part] = []
            for piece in source.pieces:
                for want in wanted.get(piece.name, ()):
                    for part in _parts(want.leaf, piece):
                        parts.append(part)
                        filled[id(want)] = filled.get(id(want), 0) + part.part.numel
            yield from _batched(source, sorted(parts, key=lambda p: p.begin))
        for want in wants:
            if filled.get(id(want), 0) != sum(h.box.numel for h in want.leaf.held):
                raise StateMismatchError(
                    f"{self.label} does not hold all of {want.stored}: its manifest is damaged"
                )

    def _fetch(self, batch: _Batch) -> _Blocks:
        source, size = batch.source, batch.source.block_nbytes
        needed = {b for p in batch.parts for b in range(p.begin // size, -(-p.end // size))}
        runs: list[tuple[int, bytes]] = []
        for first, stop in coalesce(needed, count_max=max(1, BATCH_NBYTES // size)):
            runs.append((first * size, read_blocks(self._store, source, first, stop)))
        return _Blocks(runs)


class _Blocks:
    """Verified runs of one data section."""

    def __init__(self, runs: list[tuple[int, bytes]]) -> None:
        self._runs = runs

    def bytes(self, begin: int, end: int) -> memoryview | bytes:
        """Bytes begin .. end - 1 of the section; they were fetched."""
        found: list[memoryview] = []
        for at, data in self._runs:
            a, b = max(begin, at), min(end, at + len(data))
            if a < b:
                found.append(memoryview(data)[a - at : b - at])
        return found[0] if len(found) == 1 else b"".join(found)


def read_blocks(store: ObjectStore, source: DataObject, first: int, stop: int) -> bytes:
    """Blocks first .. stop - 1 of an object's data section, verified.

    Raises DamagedError naming the object and the block.
    """
    size = source.block_nbytes
    begin, end = first * size, min(stop * size, source.data_nbytes)
    try:
        data = store.read(source.key, source.data_start + begin, end - begin)
    except ObjectMissingError as e:
        raise DamagedError(f"{store.root}/{source.key} is missing; load an older step", key=source.key) from e
    if len(data) != end - begin:
        raise DamagedError(
            f"{store.root}/{source.key} ends after {source.data_start + begin + len(data)} bytes of {source.size}; load an older step",
            key=source.key,
        )
    for i, found in enumerate(block_sums(memoryview(data), size), start=first):
        if i >= len(source.checksums) or found != source.checksums[i]:
            expected = source.checksums[i] if i < len(source.checksums) else "missing"
            raise DamagedError(
                f"{store.root}/{source.key}: block {i} (bytes {source.data_start + i * size} on) has checksum {found} instead of "
                f"{expected}; load an older step",
                key=source.key,
            )
    return data


def _parts(leaf: Leaf, piece: Piece) -> Iterator[_Part]:
    box = Box(piece.offset, piece.extent)
    for held in leaf.held:
        if (part := intersect(held.box, box)) is not None:
            a, b = span(box, part, ITEMSIZES[leaf.meta.dtype])
            yield _Part(leaf=leaf, piece=box, part=part, begin=piece.at + a, end=piece.at + b)


def _batched(source: DataObject, parts: Sequence[_Part]) -> Iterator[_Batch]:
    """Cut into batches of BATCH_NBYTES; a larger part is a batch of its own."""
    batch: list[_Part] = []
    for p in parts:
        if batch and p.end - batch[0].begin > BATCH_NBYTES:
            yield _Batch(source=source, parts=tuple(batch))
            batch = []
        batch.append(p)
    if batch:
        yield _Batch(source=source, parts=tuple(batch))


def _ahead(
    pool: ThreadPoolExecutor, fetch: Callable[[_Batch], _Blocks], batches: Iterable[_Batch]
) -> Iterator[_Blocks]:
    """`fetch` of each batch in order, READERS of them under way."""
    under_way: deque[Future[_Blocks]] = deque()
    try:
        for batch in batches:
            under_way.append(pool.submit(fetch, batch))
            if len(under_way) == READERS:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()


# ---------------------------------------------------------------- a whole state


def restore_committed(
    url_or_store: str | ObjectStore,
    state: Mapping[str, Any],
    *,
    generation: int,
    step: int,
    rank: int,
    world_size: int,
    exchange: Exchange,
) -> Restored:
    """Fill `state` from a committed checkpoint, whatever layout wrote it. Each rank reads what it needs; nothing is collective.

    Args:
        exchange: not called: reserved for ranks that share what they read.

    Raises:
        StepMissingError, FormatError, DamagedError, StateMismatchError, ObjectStore…Error. Falls back to nothing by itself.
    """
    from surefoot.ckpt.state import load_into

    store = open_store(url_or_store) if isinstance(url_or_store, str) else url_or_store
    manifest = read_manifest(store, generation, step)
    load_into(state, ManifestSource(store, manifest))
    return restored_of(manifest, rank, world_size)


def restored_of(manifest: Manifest, rank: int, world_size: int) -> Restored:
    """What a manifest gives besides the state. At another world size every rank gets rank 0's extra."""
    whose = rank if world_size == manifest.world_size else 0
    return Restored(
        generation=manifest.generation,
        step=manifest.step,
        cursor=manifest.cursor or {},
        ledger=(),
        extra=manifest.extras.get(str(whose)),
    )
