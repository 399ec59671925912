"""The safetensors format: eight bytes with the length of a JSON header, the header, the data. PURE.

https://github.com/huggingface/safetensors. The data section has no holes, and each tensor lies row-major in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from surefoot.ckpt.errors import DamagedError
from surefoot.ckpt.manifest import PAGE_NBYTES
from surefoot.ckpt.planning.plan import ITEMSIZES

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""Torch's name of a type to the format's, as of version 0.8 of the library (0.5 lacks the fnuz types, E8M0 and C64)."""
_TORCH_NAMES = {word: name for name, word in DTYPES.items()}

HEADER_NBYTES_MAX = 100_000_000
"""The library's own limit."""
DIMS_MAX = 64
"""As torch's own."""
NUMEL_MAX = 2**62
ALIGN_NBYTES = PAGE_NBYTES
"""Data that begins on a page is copied to and from files by whole pages, which is up to half as fast again."""


class StTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a file: bytes begin .. end - 1 of the data section. `dtype` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_header(tensors: Iterable[StTensor], about: Mapping[str, str]) -> bytes:
    """The beginning of a file up to its data, padded to whole pages."""
    entries: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    for t in tensors:
        entries[t.name] = {"dtype": DTYPES[t.dtype], "shape": t.shape, "data_offsets": (t.begin, t.end)}
    encoded = msgspec.json.encode(entries)
    encoded += b" " * (-(8 + len(encoded)) % ALIGN_NBYTES)
    return len(encoded).to_bytes(8, "little") + encoded


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def header_nbytes(first: bytes, size: int, *, key: str) -> int:
    """The length of the JSON, from a file's first eight bytes and its size. Raises DamagedError."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(HEADER_NBYTES_MAX, size - 8):
        raise DamagedError(f"{key} is no safetensors file: its header would have {length} bytes", key=key)
    return length


def decode_header(encoded: bytes, data_nbytes: int, *, key: str) -> tuple[list[StTensor], dict[str, str]]:
    """The tensors in order of their place, and the metadata. Nothing of it is believed.

    Raises DamagedError: no such JSON, an unknown type, a size that does not fit its shape, an overlap, a hole.
    """
    try:
        raw = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
        about = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(r, type=_Entry) for name, r in raw.items()}
    except (msgspec.DecodeError, RecursionError) as e:
        raise DamagedError(f"{key} is no safetensors file: {e}", key=key) from e
    found = [_checked(name, e, key) for name, e in entries.items()]
    found.sort(key=lambda t: (t.begin, t.end))
    at = 0
    for t in found:
        if t.begin != at:
            raise DamagedError(
                f"{key}: {t.name} begins at byte {t.begin} of the data instead of {at}", key=key
            )
        at = t.end
    if at != data_nbytes:
        raise DamagedError(f"{key} has {data_nbytes} bytes of data, and its header describes {at}", key=key)
    return found, about


def _checked(name: str, e: _Entry, key: str) -> StTensor:
    dtype = _TORCH_NAMES.get(e.dtype)
    if dtype is None:
        raise DamagedError(f"{key}: {name} is of the type {e.dtype}, which cannot be stored", key=key)
    begin, end = e.data_offsets
    if len(e.shape) > DIMS_MAX or any(not 0 <= n <= NUMEL_MAX for n in e.shape):
        raise DamagedError(
            f"{key}: {name} has a shape of {len(e.shape)} dimensions that no tensor has", key=key
        )
    nbytes = math.prod(e.shape) * ITEMSIZES[dtype]
    if begin < 0 or end - begin != nbytes:
        raise DamagedError(
            f"{key}: {name} of {e.dtype}{list(e.shape)} takes {nbytes} bytes, and {end - begin} are given",
            key=key,
        )
    return StTensor(name=name, dtype=dtype, shape=e.shape, begin=begin, end=end)
