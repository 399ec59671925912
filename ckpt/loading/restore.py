"""Reading committed checkpoints: manifests, ledgers, and a whole state. Torch-free on import; `restore_committed` imports it.

How bytes are read is in readplan.py (who reads what), reading.py (verified blocks), sharing.py (passing on) and fetching.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from surefoot.ckpt.errors import DamagedError, StepMissingError
from surefoot.ckpt.format.piecetable import filled_from_table, require_table, require_table_key
from surefoot.ckpt.format.plain import decode_plain
from surefoot.ckpt.format.sound import require_listed, require_sound
from surefoot.ckpt.live.staging import Exchange, Restored
from surefoot.ckpt.loading.reading import read_blocks as read_blocks
from surefoot.ckpt.manifest import (
    Ledger,
    LedgerRow,
    Manifest,
    Previous,
    TableRef,
    attempt_prefix,
    decode,
    manifest_key,
)
from surefoot.ckpt.record import Record, lineage, list_manifests, on_lineage, read_again, read_records
from surefoot.ckpt.store import ObjectMissingError, ObjectStore, open_store


def read_manifest(store: ObjectStore, generation: int, step: int) -> Manifest:
    """Raises: StepMissingError, FormatError, DamagedError, ObjectStore…Error."""
    _, manifest = _read_own(store, generation, step)
    if manifest.table is not None:
        manifest = filled_from_table(manifest, _read_table(store, manifest.table))
    require_sound(manifest)
    return manifest


def read_manifest_bytes(store: ObjectStore, generation: int, step: int) -> bytes:
    """A manifest, with the table of its pieces behind it where it has one: what `decode_manifest` takes.

    Raises: StepMissingError, FormatError, DamagedError, ObjectStore…Error.
    """
    data, manifest = _read_own(store, generation, step)
    if manifest.table is None:
        return data
    return _TABLE_FOLLOWS + len(data).to_bytes(8, "little") + data + _read_table(store, manifest.table)


def _read_own(store: ObjectStore, generation: int, step: int) -> tuple[bytes, Manifest]:
    """The manifest as stored, and without what its table holds."""
    key = manifest_key(generation, step)

    def read() -> tuple[bytes, Manifest]:
        try:
            data = store.read(key)
        except ObjectMissingError as e:
            raise StepMissingError(
                f"{store.root} has no checkpoint of step {step}, generation {generation}; `ckpt ls` shows what it has"
            ) from e
        return data, _decode_own(data, generation, step)

    data, manifest = read_again(read)
    require_table_key(manifest, key)
    return data, manifest


def _read_table(store: ObjectStore, table: TableRef) -> bytes:
    def read() -> bytes:
        try:
            data = store.read(table.key)
        except ObjectMissingError as e:
            raise DamagedError(
                f"{store.root}/{table.key} is missing; load an older step", key=table.key
            ) from e
        require_table(data, table)
        return data

    return read_again(read)


_TABLE_FOLLOWS = b"T"
"""Begins what has a table, and a manifest does not begin with it. Then 8 bytes with the manifest's length, manifest, table."""


def decode_manifest(data: bytes, generation: int, step: int) -> Manifest:
    """The manifest that is to be of this generation and step. Raises: FormatError, DamagedError."""
    if data[:1] != _TABLE_FOLLOWS:
        manifest = _decode_own(data, generation, step)
    else:
        end = 9 + int.from_bytes(data[1:9], "little")
        manifest = filled_from_table(_decode_own(data[9:end], generation, step), data[end:])
    require_sound(manifest)
    return manifest


def _decode_own(data: bytes, generation: int, step: int) -> Manifest:
    """As stored: without what its table holds."""
    key = manifest_key(generation, step)
    manifest = decode(Manifest, data, key=key)
    if (manifest.generation, manifest.step) != (generation, step):
        raise DamagedError(
            f"{key} calls itself step {manifest.step} of generation {manifest.generation}", key=key
        )
    return manifest


def require_objects(store: ObjectStore, manifest: Manifest) -> None:
    """What the manifest claims is there in full: before anybody makes room for it by the manifest's word. One listing.

    Raises: DamagedError naming the object, ObjectStore…Error.
    """
    prefix = attempt_prefix(manifest.generation, manifest.step, manifest.attempt)
    require_listed(manifest, {o.key: o.size for o in store.list(prefix)})


def is_whole(store: ObjectStore, manifest: Manifest, key: str) -> bool:
    """Is this data object of a checkpoint there, with every block as its checksum says? Reads all of it. Raises ObjectStore…Error."""
    try:
        require_objects(store, manifest)
        source = next((o for o in manifest.objects if o.key == key), None)
        if source is None:
            return False
        for i in range(len(source.checksums)):
            read_blocks(store, source, i, i + 1)
    except DamagedError:
        return False
    finally:
        store.release()
    return True


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
    if newest.ledger is None:
        return []  # nothing was ever recorded
    at: Previous | None = Previous(generation=newest.generation, step=newest.step, ledger=newest.ledger)
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
    """Fill `state` from a committed checkpoint, whatever layout wrote it. Collective: all ranks restore the same one.

    Every byte that is needed is read once per job; where torch.distributed is initialised with these ranks, its default group
    passes on what several of them need.

    Args:
        exchange: all-gather of a few bytes over all ranks; not called for a world of one.

    Raises:
        StepMissingError, FormatError: there is no such checkpoint, or it is from a newer version.
        DamagedError: the same on all ranks, naming the object and the rank that found it.
        StateMismatchError: on all ranks; where it is about another, the message names that.
        ObjectStore…Error: on the rank that it is about; ElsewhereError on the others.
        Falls back to nothing by itself.
    """
    from surefoot.ckpt.loading.carrying import UnagreedError
    from surefoot.ckpt.loading.fetching import load_together, shared_manifest
    from surefoot.ckpt.loading.sharing import party_of

    store = open_store(url_or_store) if isinstance(url_or_store, str) else url_or_store
    party = party_of(rank, world_size, exchange)
    manifest = shared_manifest(store, party, generation, step)
    try:
        load_together(store, manifest, party, state)
    except UnagreedError as e:
        raise e.cause from None  # there is nobody left to agree with
    return restored_of(manifest, rank, world_size)


def restored_of(manifest: Manifest, rank: int, world_size: int) -> Restored:
    """What a manifest gives besides the state. At another world size every rank gets rank 0's extra."""
    whose = rank if world_size == manifest.world_size else 0
    return Restored(
        generation=manifest.generation,
        step=manifest.step,
        cursor=decode_plain("cursor", manifest.cursor) or {},
        ledger=(),
        extra=decode_plain("extra", manifest.extras.get(str(whose))),
    )
