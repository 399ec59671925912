"""What a checkpoint is made of: keys, and the JSON of manifests, part records and ledgers. PURE.

An attempt to write one checkpoint puts *data objects* (safetensors) and *part records* under its nonce; the committer
merges the parts into one *manifest*, created last. The manifest alone makes the checkpoint exist, and is all a load needs
besides the data objects.

A tensor is stored as *pieces*: boxes (offset and extent per dimension, in elements) of the global tensor, each lying
row-major and contiguous in one data object. Data sections are cut into blocks of `block_nbytes`, each with its xxh3-64 as
taken at the staging buffer; a load verifies the blocks it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash

from surefoot.ckpt.errors import DamagedError, FormatError

FORMAT = 1
BLOCK_NBYTES = 4 * 2**20
"""Checksum granularity: a ranged read of one element fetches at most this much; at 8 bytes each the sums of a terabyte
stay below 2 MB."""
PAGE_NBYTES = 4096

COUNT_MAX = 2**62
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
"""No stored number is negative, or so large that sums of two leave 64 bits: refused when decoded."""


class _Stored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of a stored object. Unknown fields are ignored, so an older reader meets a newer writer of the same format."""


class ManifestRef(_Stored, frozen=True, kw_only=True, order=True):
    """Names one manifest. Sorts by step, then generation."""

    step: Count
    generation: Count
    key: str


class LedgerRow(_Stored, frozen=True, kw_only=True, order=True):
    """What one data-parallel rank consumed in one execution of one step."""

    step: Count
    generation: Count
    """The generation that executed it."""
    dp_rank: Count
    samples: tuple[str, ...] = ()
    loss: str | None = None
    """The global loss as float.hex(); None without a report."""


class Piece(_Stored, frozen=True, kw_only=True, gc=False):
    """A box of a tensor inside a data section: `extent` elements per dimension from `offset`, at byte `at` of the section."""

    name: str
    offset: tuple[Count, ...] = ()
    extent: tuple[Count, ...] = ()
    at: Count


class TensorMeta(_Stored, frozen=True, kw_only=True, gc=False):
    """A global tensor. `dtype` is torch's name without the prefix (``bfloat16``)."""

    dtype: str
    shape: tuple[Count, ...] = ()


class DataObject(_Stored, frozen=True, kw_only=True):
    """One data object. Its data section starts at byte `data_start` and has `data_nbytes` bytes."""

    key: str
    size: Count
    data_start: Count
    data_nbytes: Count
    block_nbytes: Count
    checksums: tuple[str, ...] = ()
    """xxh3-64 of each block of the data section, in hex."""
    header_checksum: str = ""
    """xxh3-64 of what stands before the data section. A load needs none of it; other readers of safetensors do."""
    pieces: tuple[Piece, ...] = ()


class RankPart(_Stored, frozen=True, kw_only=True):
    """What one rank's snapshot contributes to an attempt."""

    rank: Count
    world_size: Count
    tensors: dict[str, TensorMeta] = {}
    """Every tensor the rank holds any part of, or knows of."""
    aliases: dict[str, str] = {}
    """Second names of tied tensors, to the name stored."""
    replicas: dict[str, str] = {}
    """``name@box`` to the xxh3-64 of what this rank holds where other ranks hold the same."""
    values: dict[str, Any] = {}
    """Plain values by name, encoded by ckpt/format/values.py."""
    cursor: dict[str, Any] | None = None
    ledger: tuple[LedgerRow, ...] = ()
    extra: dict[str, Any] | None = None
    data: DataObject | None = None
    """None for a rank that writes nothing."""


class PartRecord(_Stored, frozen=True, kw_only=True, omit_defaults=False):
    """What one writer stored for an attempt, or (`failure`) why it could not."""

    format: int = FORMAT
    generation: Count
    step: Count
    attempt: str
    writer: Count
    failure: str = ""
    ranks: tuple[RankPart, ...] = ()


class LedgerRef(_Stored, frozen=True, kw_only=True):
    """Points to a ledger object and fixes its content."""

    key: str
    size: Count
    checksum: str


class TableRef(_Stored, frozen=True, kw_only=True):
    """Points to the table of pieces (piecetable.py) and fixes its content."""

    key: str
    size: Count
    checksum: str


class Previous(_Stored, frozen=True, kw_only=True):
    """The lineage's checkpoint before this one, which has a ledger; it is None where the manifest could not be read."""

    generation: Count
    step: Count
    ledger: LedgerRef | None = None


class Ledger(_Stored, frozen=True, kw_only=True, omit_defaults=False):
    """The rows that one checkpoint commits: those after the checkpoint before it, up to `step`. `previous` is None where nothing
    was recorded before: the chain begins there. It survives retention."""

    format: int = FORMAT
    generation: Count
    step: Count
    previous: Previous | None = None
    rows: tuple[LedgerRow, ...] = ()


class Manifest(_Stored, frozen=True, kw_only=True, omit_defaults=False):
    """One committed checkpoint."""

    format: int = FORMAT
    generation: Count
    step: Count
    attempt: str
    world_size: Count
    tensors: dict[str, TensorMeta] = {}
    aliases: dict[str, str] = {}
    objects: tuple[DataObject, ...] = ()
    values: dict[str, Any] = {}
    cursor: dict[str, Any] | None = None
    extras: dict[str, dict[str, Any]] = {}
    """A rank's extra by rank (as a decimal string), where it gave one."""
    ledger: LedgerRef | None = None
    """None where nothing was recorded up to here: nobody but the agent records."""
    table: TableRef | None = None
    """Where the objects' pieces are, in a checkpoint of very many: whoever reads the manifest gets them from there."""
    facts: dict[str, Any] = {}
    """What the committer wants known: who, when, how long. Never needed for a load."""

    def __repr__(self) -> str:
        return (
            f"Manifest(step={self.step}, generation={self.generation}, attempt={self.attempt!r}, world_size={self.world_size}, "
            f"{len(self.tensors)} tensors, {len(self.values)} values, {self.nbytes} bytes in {len(self.objects)} objects)"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all data sections."""
        return sum(o.data_nbytes for o in self.objects)


# ---------------------------------------------------------------- keys

_MANIFEST_KEY = re.compile(r"gen-(\d{4,})/step-(\d{10,})/manifest\.json")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")


def step_prefix(generation: int, step: int) -> str:
    return f"gen-{generation:04d}/step-{step:010d}/"


def attempt_prefix(generation: int, step: int, attempt: str) -> str:
    """Raises ValueError for an attempt that is no plain word: it becomes part of a path."""
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"attempt {attempt!r} must be 1 to 64 letters, digits, '-' or '_'")
    return f"{step_prefix(generation, step)}{attempt}/"


def manifest_key(generation: int, step: int) -> str:
    return step_prefix(generation, step) + "manifest.json"


def object_key(generation: int, step: int, attempt: str, rank: int) -> str:
    return f"{attempt_prefix(generation, step, attempt)}r{rank:05d}-0.safetensors"


def part_key(generation: int, step: int, attempt: str, writer: int) -> str:
    return f"{attempt_prefix(generation, step, attempt)}n{writer:05d}.part.json"


def ledger_key(generation: int, step: int, attempt: str) -> str:
    return attempt_prefix(generation, step, attempt) + "ledger.json"


def table_key(generation: int, step: int, attempt: str) -> str:
    return attempt_prefix(generation, step, attempt) + "pieces.parquet"


def manifest_refs(keys: Iterable[str]) -> list[ManifestRef]:
    """The manifests among `keys`, ascending; whatever else lies there is passed over."""
    found = ((key, _MANIFEST_KEY.fullmatch(key)) for key in keys)
    numbered = ((int(m.group(1)), int(m.group(2)), key) for key, m in found if m is not None)
    return sorted(
        ManifestRef(step=step, generation=generation, key=key)
        for generation, step, key in numbered
        if max(generation, step) <= COUNT_MAX and key == manifest_key(generation, step)
    )


# ---------------------------------------------------------------- bytes

_T = TypeVar("_T", bound=_Stored)


class _Header(msgspec.Struct):
    format: int


_SEAL = re.compile(rb',"checksum":"([0-9a-f]{16})"\}\Z')
"""The end of a manifest or a record: the xxh3-64 of all bytes before it."""
_SEAL_NBYTES = len(b',"checksum":""}') + 16


def encode(value: msgspec.Struct) -> bytes:
    """Canonical bytes: the same value always gives the same bytes. A manifest gets a checksum of its own as its last field, so
    that a bit flipped in a place or a plain value does not go unnoticed."""
    data = msgspec.json.encode(value, order="deterministic")
    return sealed(data) if isinstance(value, Manifest) else data


def sealed(data: bytes) -> bytes:
    """The JSON of an object (not an empty one), with the checksum of all of it as its last field."""
    body = data[:-1]
    return body + b',"checksum":"%s"}' % xxhash.xxh3_64_hexdigest(body).encode()


def seal_holds(data: bytes) -> bool | None:
    """Does it match the checksum that it ends with? None where it ends with none."""
    found = _SEAL.search(data, max(0, len(data) - _SEAL_NBYTES))
    return None if found is None else xxhash.xxh3_64_hexdigest(data[: found.start()]).encode() == found[1]


def decode(kind: type[_T], data: bytes, *, key: str) -> _T:
    """Read a stored object that carries a format number.

    Raises:
        FormatError: it was written by a newer format.
        DamagedError: it is not JSON, or not a `kind`; or a manifest whose checksum is missing or differs.
    """
    check_format(data, key=key)
    if kind is Manifest:
        _require_seal(data, key)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as e:
        raise DamagedError(f"{key} is no {kind.__name__}: {e}; load an older step", key=key) from e


def _require_seal(data: bytes, key: str) -> None:
    holds = seal_holds(data)
    if holds is None:
        raise DamagedError(
            f"{key} ({len(data)} bytes) does not end with its checksum; load an older step",
            key=key,
        )
    if not holds:
        raise DamagedError(
            f"{key} ({len(data)} bytes) does not match its checksum; load an older step",
            key=key,
        )


def check_format(data: bytes, *, key: str) -> None:
    """Raises FormatError (a newer format) or DamagedError (no JSON with a format number)."""
    try:
        header = msgspec.json.decode(data, type=_Header)
    except (msgspec.DecodeError, RecursionError) as e:
        raise DamagedError(
            f"{key} ({len(data)} bytes) is damaged or none of ours: {e}; load an older step",
            key=key,
        ) from e
    if header.format > FORMAT:
        raise FormatError(
            f"{key} has format {header.format}, and this version reads up to {FORMAT}: use the version of Surefoot that wrote it"
        )
