"""The cursor: where the loader stands, for a checkpoint. Small, versioned, free of ranks and of payload.

It says how far each source was drawn, which samples are drawn and wait for a sequence, and what all this refers to: the
fingerprint of sources, files, seed and packing. Everything else (pass, window, row) follows from these by computation. A cursor
that was taken at one number of ranks is good at any other.

PURE: values in, values out; what is refused is refused with the difference named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from surefoot.loader.errors import CursorFormatError, CursorMismatchError

CURSOR_FORMAT = 1
FILES_LISTED_MAX = 256
"""Files of all sources together up to which a fingerprint lists each; above, only a digest stands for them."""


class SourcePrint(msgspec.Struct, frozen=True, kw_only=True):
    """What a source was.

    Attributes:
        weight: its exact weight, as a fraction.
        files: digest over names, row groups and sizes of all files.
        listing: rows and digest of each file, by name; None where there are too many.
    """

    weight: str
    column: str
    when_used_up: str
    block_rows: int
    window_blocks: int
    rows: int
    file_count: int
    files: str
    listing: dict[str, str] | None


class PackPrint(msgspec.Struct, frozen=True, kw_only=True):
    """What decides which samples make up a step, and their tokens."""

    tokens: str
    seq_len: int
    step_tokens: int
    window: int
    pad_token: int


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a cursor refers to. `order` is `ORDER_VERSION`."""

    order: int
    seed: int
    pack: PackPrint
    sources: dict[str, SourcePrint]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The position after `step` steps.

    Attributes:
        drawn, segment: see `mixture.MixState`.
        waiting: [source, number in the source] of samples that are drawn and not delivered, in their order.
    """

    format: int = CURSOR_FORMAT
    step: int
    drawn: dict[str, int]
    segment: dict[str, int]
    waiting: list[tuple[str, int]]
    fingerprint: Fingerprint


def encode_cursor(cursor: Cursor) -> dict[str, Any]:
    """As plain JSON values: equal to itself after a round trip through JSON."""
    plain = msgspec.to_builtins(cursor)
    plain["waiting"] = [list(pair) for pair in plain["waiting"]]
    return plain


def decode_cursor(plain: Mapping[str, Any]) -> Cursor:
    """Read `encode_cursor`'s form.

    Raises:
        CursorFormatError: not a cursor, damaged, or of a later version.
    """
    version = plain.get("format") if isinstance(plain, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if isinstance(version, int) and version > CURSOR_FORMAT:
        raise CursorFormatError(
            f"the cursor has format {version}, and this version of Surefoot reads up to {CURSOR_FORMAT}: use a newer one"
        )
    try:
        cursor = msgspec.convert(plain, Cursor)
    except msgspec.ValidationError as e:
        raise CursorFormatError(f"this is no loader cursor, or a damaged one: {e}") from e
    _check(cursor)
    return cursor


def _check(cursor: Cursor) -> None:
    names = set(cursor.fingerprint.sources)
    wrong: list[str] = []
    if cursor.format < 1 or cursor.step < 0:
        wrong.append("format or step is below its first value")
    if set(cursor.drawn) != names or set(cursor.segment) != names:
        wrong.append("its positions and its fingerprint name different sources")
    elif any(not 0 <= cursor.segment[name] <= cursor.drawn[name] for name in names):
        wrong.append("a source's position is negative, or its segment longer than the whole")
    elif any(name not in names or not 0 <= number < cursor.drawn[name] for name, number in cursor.waiting):
        wrong.append("a sample waits that was never drawn")
    if wrong:
        raise CursorFormatError(f"the cursor is damaged: {wrong[0]}")


def check_fingerprint(known: Fingerprint, now: Fingerprint) -> None:
    """Refuse a cursor whose fingerprint is not that of the data and settings at hand.

    Raises:
        CursorMismatchError: with every difference named.
    """
    found = differences(known, now)
    if found:
        raise CursorMismatchError(tuple(found))


def differences(known: Fingerprint, now: Fingerprint) -> list[str]:
    """What differs, one line each; empty if nothing does."""
    lines = [
        *_fields("", known, now, ("order", "seed")),
        *_fields("pack: ", known.pack, now.pack, known.pack.__struct_fields__),
    ]
    lines += [f"source {name!r} is gone" for name in sorted(known.sources.keys() - now.sources.keys())]
    lines += [f"source {name!r} is new" for name in sorted(now.sources.keys() - known.sources.keys())]
    for name in sorted(known.sources.keys() & now.sources.keys()):
        lines += _source_differences(name, known.sources[name], now.sources[name])
    return lines


def _source_differences(name: str, known: SourcePrint, now: SourcePrint) -> list[str]:
    where = f"source {name!r}: "
    lines = _fields(where, known, now, ("weight", "column", "when_used_up", "block_rows", "window_blocks"))
    if known.files == now.files:
        return lines
    if known.listing is None or now.listing is None:
        counts = _fields(where, known, now, ("file_count", "rows"))
        return [
            *lines,
            *(counts or [where + "as many files and rows, but names, row groups or sizes are others"]),
        ]
    lines += [f"{where}file {file} is gone" for file in sorted(known.listing.keys() - now.listing.keys())]
    lines += [f"{where}file {file} is new" for file in sorted(now.listing.keys() - known.listing.keys())]
    for file in sorted(known.listing.keys() & now.listing.keys()):
        was, is_now = known.listing[file].split(":")[0], now.listing[file].split(":")[0]
        if was != is_now:
            lines.append(f"{where}file {file} had {was} rows and has {is_now}")
        elif known.listing[file] != now.listing[file]:
            lines.append(f"{where}file {file} has as many rows, but other row groups or content")
    return lines


def _fields(where: str, known: msgspec.Struct, now: msgspec.Struct, names: tuple[str, ...]) -> list[str]:
    pairs = [(name, getattr(known, name), getattr(now, name)) for name in names]
    return [f"{where}{name} was {was} and is {is_now}" for name, was, is_now in pairs if was != is_now]
