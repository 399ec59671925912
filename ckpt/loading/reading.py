"""Reading blocks of data objects into memory that is there already, and checking them. Torch-free.

A block's checksum covers all of it, and is known only when all of it has been read: what was read straight into its place
is then there, right or wrong. From a store close by (`nearby`) a block is read in steps that are hashed while they are in
the processor's cache; from one far away all of a segment is fetched with one request. A block that differs from its checksum
is read once more before it counts as damaged: it may have been the way, and not the store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import xxhash

from surefoot.ckpt.errors import DamagedError
from surefoot.ckpt.manifest import DataObject
from surefoot.ckpt.store import ObjectMissingError, ObjectStore

_log = logging.getLogger(__name__)

ADVICE = "; load an older step"
"""How what is said of damage ends, where it is not the load itself that goes on to an older step."""

STEP_NBYTES = 256 * 2**10
"""Read, then hashed out of the second-level cache (2 MiB here): hashing then costs next to nothing. Larger steps leave the cache
(512 KiB: 12 % slower, 4 MiB: 30 %), smaller ones cost more in Python than they save."""


def read_blocks(store: ObjectStore, source: DataObject, first: int, stop: int) -> bytearray:
    """Blocks first .. stop - 1 of an object's data section, verified. Raises as `read_into`."""
    size = source.block_nbytes
    data = bytearray(min(stop * size, source.data_nbytes) - first * size)
    read_into(store, source, first, stop, [memoryview(data)])
    return data


def read_into(
    store: ObjectStore, source: DataObject, first: int, stop: int, views: Sequence[memoryview]
) -> None:
    """Fill `views` in order with blocks first .. stop - 1 of an object's data section (the last may be short), and verify them.

    Raises:
        DamagedError: naming the object, and the block or what is missing. The views then hold anything.
        ObjectStore…Error.
    """
    size = source.block_nbytes
    begin, end = first * size, min(stop * size, source.data_nbytes)
    nearby = getattr(store, "nearby", False)
    if not nearby:
        _fetch(store, source, begin, end - begin, views)
    for i, block in enumerate(_cut(views, size), start=first):
        found = _stepwise(store, source, i * size, block) if nearby else _hash(block)
        _require_sum(store, source, i, block, found)


def _require_sum(
    store: ObjectStore, source: DataObject, i: int, block: Sequence[memoryview], found: str
) -> None:
    at = i * source.block_nbytes
    expected = source.checksums[i] if i < len(source.checksums) else ""
    if found != expected and expected:
        _log.warning("%s/%s: block %d differs from its checksum; reading it again", store.root, source.key, i)
        _fetch(store, source, at, sum(map(len, block)), block)
        found = _hash(block)
    if found != expected:
        raise DamagedError(
            f"{store.root}/{source.key}: block {i} (bytes {source.data_start + at} on) has checksum {found} instead of "
            f"{expected or 'one that is missing'}; load an older step",
            key=source.key,
        )


def _stepwise(store: ObjectStore, source: DataObject, at: int, block: Sequence[memoryview]) -> str:
    """A block in steps. Thousands of these make up a load, so the usual ones (all of a step in one view) are short."""
    running = xxhash.xxh3_64()
    if (there := store.look(source.key, source.data_start + at, sum(map(len, block)))) is not None:
        at = 0
        for view in _steps(block):
            view[:] = there[at : at + len(view)]
            running.update(view)
            at += len(view)
        return running.hexdigest()
    if len(block) == 1:
        (whole,) = block
        for begin in range(0, len(whole), STEP_NBYTES):
            view = whole[begin : begin + STEP_NBYTES]
            _fetch(store, source, at + begin, len(view), (view,))
            running.update(view)
        return running.hexdigest()
    for step in _cut(block, STEP_NBYTES):
        nbytes = sum(map(len, step))
        _fetch(store, source, at, nbytes, step)
        for view in step:
            running.update(view)
        at += nbytes
    return running.hexdigest()


def _steps(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """The same memory in pieces of at most STEP_NBYTES."""
    for view in views:
        for begin in range(0, len(view), STEP_NBYTES):
            yield view[begin : begin + STEP_NBYTES]


def look_at(store: ObjectStore, source: DataObject, block: int, *, checked: bool) -> memoryview | None:
    """A block of an object's data section where it lies. None where it cannot be seen, or (`checked`) differs from its checksum:
    `read_into` then judges."""
    begin = block * source.block_nbytes
    nbytes = min(source.block_nbytes, source.data_nbytes - begin)
    there = store.look(source.key, source.data_start + begin, nbytes)
    if there is None or (checked and source.checksums[block : block + 1] != (_hash([there]),)):
        return None
    return there


def _hash(block: Sequence[memoryview]) -> str:
    running = xxhash.xxh3_64()
    for view in block:
        running.update(view)
    return running.hexdigest()


def _fetch(
    store: ObjectStore, source: DataObject, begin: int, nbytes: int, views: Sequence[memoryview]
) -> None:
    """Whole, or after a second look not: no checkpoint is condemned by one answer, which something on the way may have spoilt."""
    try:
        found = store.read_into(source.key, source.data_start + begin, views)
    except ObjectMissingError:
        found = -1
    if found == nbytes:
        return
    _log.info("%s/%s did not come whole; reading it again", store.root, source.key)
    try:
        found = store.read_into(source.key, source.data_start + begin, views)
    except ObjectMissingError as e:
        raise _missing(store, source) from e
    if found != nbytes:
        raise _short(store, source, begin + found)


def _missing(store: ObjectStore, source: DataObject) -> DamagedError:
    return DamagedError(f"{store.root}/{source.key} is missing; load an older step", key=source.key)


def _short(store: ObjectStore, source: DataObject, upto: int) -> DamagedError:
    return DamagedError(
        f"{store.root}/{source.key} ends after {source.data_start + upto} bytes of {source.size}; load an older step",
        key=source.key,
    )


def _cut(views: Sequence[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """The same memory as runs of `nbytes`; the last may be short."""
    run: list[memoryview] = []
    room = nbytes
    for view in views:
        while len(view) >= room:
            run.append(view[:room])
            view = view[room:]
            yield run
            run, room = [], nbytes
        if len(view):
            run.append(view)
            room -= len(view)
    if run:
        yield run
