"""The snapshot image: one rank's whole state at one step, as it stands in a shared-memory slot. Torch-free.

::

    0            the seal page: format, whose and which step it is, where the rest lies, checksums
    4096         data: first what this rank uploads (it becomes the data section of its object, byte for byte), then,
                 from the next multiple of 64, what it keeps for itself
    meta_at      meta: JSON (pieces, checksums per block of both parts, plain values, cursor, ledger)

The seal page is cleared before the first byte is overwritten and written last, its magic word after everything else: an
image is whole or has no seal, whatever moment its writer died. The image of a rank is written on the machine that reads it,
so the format is the machine's (little-endian; checked through the magic).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import ImageError, SlotTooSmallError
from surefoot.ckpt.manifest import BLOCK_NBYTES, PAGE_NBYTES, LedgerRow, Piece, TensorMeta
from surefoot.failpoint import failpoint

FORMAT = 1
ALIGN_NBYTES = 64
"""A cache line: the second part of the data begins on one."""

_MAGIC = struct.Struct("<8s")
_SEAL = struct.Struct("<IIIxxxxQQQQQQ")
_MAGIC_WORD = b"SFIMAGE\x01"
_UNSEALED = bytes(PAGE_NBYTES)


class SharedBox(msgspec.Struct, frozen=True, kw_only=True):
    """A box that other ranks hold as well."""

    name: str
    box: Box


class ImageStructure(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same from step to step. Bytes are counted from the beginning of the data."""

    tensors: dict[str, TensorMeta]
    aliases: dict[str, str]
    written: tuple[Piece, ...]
    kept: tuple[Piece, ...]
    shared: tuple[SharedBox, ...]
    written_nbytes: int
    kept_start: int
    data_nbytes: int
    block_nbytes: int = BLOCK_NBYTES


class ImageMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON at the end of an image."""

    structure: ImageStructure
    written_sums: tuple[str, ...]
    kept_sums: tuple[str, ...]
    values: dict[str, Any] = {}
    cursor: dict[str, Any] | None = None
    ledger: tuple[LedgerRow, ...] = ()
    extra: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """A sealed image. `nbytes` is how much of the slot it takes, from the slot's first byte."""

    generation: int
    step: int
    rank: int
    world_size: int
    nbytes: int
    meta: ImageMeta


class _EncodedMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`ImageMeta` with its structure encoded already: that part is large and never changes."""

    structure: msgspec.Raw
    written_sums: Sequence[str]
    kept_sums: Sequence[str]
    values: dict[str, Any] = {}
    cursor: dict[str, Any] | None = None
    ledger: Sequence[LedgerRow] = ()
    extra: dict[str, Any] | None = None


def aligned(nbytes: int, to: int = ALIGN_NBYTES) -> int:
    """The next multiple."""
    return -(-nbytes // to) * to


def block_sums(view: memoryview, block_nbytes: int) -> list[str]:
    """xxh3-64 of each block, in hex; the last block may be short."""
    return [
        xxhash.xxh3_64_hexdigest(view[at : at + block_nbytes]) for at in range(0, len(view), block_nbytes)
    ]


def data_view(buf: memoryview, structure: ImageStructure) -> memoryview:
    """All data of an image."""
    return buf[PAGE_NBYTES : PAGE_NBYTES + structure.data_nbytes]


class ImageWriter:
    """Writes one image into `buf`: `begin`, then the caller fills `data`, then `seal`."""

    def __init__(self, buf: memoryview, structure: ImageStructure, encoded_structure: bytes) -> None:
        self._buf = buf.cast("B")
        self._structure = structure
        self._encoded = encoded_structure

    def begin(self) -> memoryview:
        """Take the seal off; returns the data section to fill.

        Raises SlotTooSmallError, before anything is touched, where not even the data fits.
        """
        needed = PAGE_NBYTES + aligned(self._structure.data_nbytes) + len(self._encoded)
        if needed > len(self._buf):
            raise SlotTooSmallError(needed=needed, actual=len(self._buf))
        self._buf[:PAGE_NBYTES] = _UNSEALED
        return data_view(self._buf, self._structure)

    def seal(
        self,
        *,
        generation: int,
        step: int,
        rank: int,
        world_size: int,
        values: dict[str, Any],
        cursor: dict[str, Any] | None,
        ledger: Sequence[LedgerRow],
        extra: dict[str, Any] | None,
    ) -> int:
        """Take the checksums, write meta and seal; returns the image's size.

        Raises SlotTooSmallError: the slot stays without a seal.
        """
        s = self._structure
        data = data_view(self._buf, s)
        meta = _EncodedMeta(
            structure=msgspec.Raw(self._encoded),
            written_sums=block_sums(data[: s.written_nbytes], s.block_nbytes),
            kept_sums=block_sums(data[s.kept_start :], s.block_nbytes),
            values=values,
            cursor=cursor,
            ledger=ledger,
            extra=extra,
        )
        encoded = msgspec.json.encode(meta)
        meta_at = PAGE_NBYTES + aligned(s.data_nbytes)
        end = meta_at + len(encoded)
        if end > len(self._buf):
            raise SlotTooSmallError(needed=end, actual=len(self._buf))
        self._buf[meta_at:end] = encoded
        failpoint("snapshot.before_seal")
        self._write_seal(
            _SEAL.pack(
                FORMAT,
                rank,
                world_size,
                generation,
                step,
                s.data_nbytes,
                meta_at,
                len(encoded),
                xxhash.xxh3_64_intdigest(encoded),
            )
        )
        failpoint("snapshot.after_seal")
        return end

    def _write_seal(self, body: bytes) -> None:
        at = _MAGIC.size
        self._buf[at : at + len(body)] = body
        self._buf[at + len(body) : at + len(body) + 8] = xxhash.xxh3_64_digest(body)
        self._buf[:at] = _MAGIC_WORD


def unseal(buf: memoryview) -> None:
    """Make what stands in the slot nobody's snapshot."""
    buf.cast("B")[:PAGE_NBYTES] = _UNSEALED


def read_image(buf: memoryview) -> ImageInfo:
    """What a slot holds. Seal and meta are verified, the data is not. No reference to `buf` is kept.

    Raises ImageError: unsealed, foreign (not ours, or of a newer format), corrupt.
    """
    with buf.cast("B") as view:
        return _read_image(view)


def _read_image(view: memoryview) -> ImageInfo:
    at = _MAGIC.size
    if len(view) < PAGE_NBYTES:
        raise ImageError("foreign", f"{len(view)} bytes are less than one page")
    word, body = bytes(view[:at]), bytes(view[at : at + _SEAL.size])
    if word == bytes(at):
        raise ImageError("unsealed", "its writer has not finished it")
    if word != _MAGIC_WORD:
        raise ImageError("foreign", f"it begins with {word!r}")
    if xxhash.xxh3_64_digest(body) != bytes(view[at + _SEAL.size : at + _SEAL.size + 8]):
        raise ImageError("corrupt", "the checksum of the seal page differs")
    version, rank, world_size, generation, step, data_nbytes, meta_at, meta_nbytes, meta_sum = _SEAL.unpack(
        body
    )
    whose = f"generation {generation}, step {step}, rank {rank}"
    if version > FORMAT:
        raise ImageError(
            "foreign", f"format {version} is newer than {FORMAT}, the newest that this version reads"
        )
    encoded = bytes(view[meta_at : meta_at + meta_nbytes])
    if len(encoded) != meta_nbytes or xxhash.xxh3_64_intdigest(encoded) != meta_sum:
        raise ImageError("corrupt", f"the checksum of the meta data differs ({whose})")
    meta = msgspec.json.decode(encoded, type=ImageMeta)
    if meta.structure.data_nbytes != data_nbytes:
        raise ImageError("corrupt", f"seal and meta data disagree on the size ({whose})")
    return ImageInfo(
        generation=generation,
        step=step,
        rank=rank,
        world_size=world_size,
        nbytes=meta_at + meta_nbytes,
        meta=meta,
    )


def verify_image(buf: memoryview) -> ImageInfo:
    """`read_image`, and every block of the data against its checksum. No reference to `buf` is kept.

    Raises ImageError.
    """
    info = read_image(buf)
    s = info.meta.structure
    with (
        buf.cast("B") as view,
        data_view(view, s) as data,
        data[: s.written_nbytes] as written,
        data[s.kept_start :] as kept,
    ):
        check_blocks(written, info.meta.written_sums, info)
        check_blocks(kept, info.meta.kept_sums, info)
    return info


def check_blocks(view: memoryview, expected: Sequence[str], info: ImageInfo) -> None:
    """Compare the blocks of one part of an image's data, or of a copy of it, with their checksums.

    Raises ImageError naming the first bad one.
    """
    found = block_sums(view, info.meta.structure.block_nbytes)
    bad = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    if bad is not None or len(found) != len(expected):
        raise ImageError(
            "corrupt",
            f"block {bad} of {len(expected)} of rank {info.rank}'s snapshot (generation {info.generation}, step {info.step}) "
            f"is not what was sealed",
        )
