"""`cursor` and `extra` as JSON, which come back equal or are refused. PURE.

What JSON can say stands as it is, so that other tools can read a cursor. What it cannot say, but we can (nan and the infinities,
tuples, ints beyond 64 bits, text that is no Unicode), makes the whole of it an object with the one key `TYPED`, whose value is of
ckpt/format/values.py. All else is refused by name: it belongs into the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from surefoot.ckpt.errors import StateError
from surefoot.ckpt.format.values import DEPTH_MAX, decode_value, encode_value

TYPED = "surefoot.typed"


def encode_plain(name: str, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What is stored of a `cursor` or an `extra`; None of None. Raises StateError naming the entry (``cursor['t'][0]``)."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise StateError(
            f"{name} is a {type(given).__name__}: give a mapping of names to numbers, text, lists"
        )
    if TYPED not in given and _comes_back(given):
        return dict(given)
    return {TYPED: encode_value(_plain(given, name, DEPTH_MAX), name)}


def decode_plain(name: str, stored: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What was given to `encode_plain`. Raises DamagedError where it is not of that form."""
    if stored is None:
        return None
    if set(stored) == {TYPED}:
        return decode_value(stored[TYPED], name)
    return dict(stored)


def _comes_back(given: Mapping[str, Any]) -> bool:
    """JSON gives an equal value: no tuple is a list, no bytes are text. By C code, since a cursor may be long."""
    try:
        return bool(msgspec.json.decode(msgspec.json.encode(given)) == given)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False


def _plain(value: Any, at: str, depth: int) -> Any:
    """The same of Python's own types: an equal subclass (a number of numpy's, an IntEnum) as what it is a kind of."""
    if depth == 0:
        raise StateError(f"{at}: nested deeper than {DEPTH_MAX} levels, or a value that contains itself")
    if value is None or isinstance(value, bool):
        return value
    for kind, bare in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, kind):
            return cast("Any", bare)(value)
    if isinstance(value, list | tuple):
        items = [_plain(v, f"{at}[{i}]", depth - 1) for i, v in enumerate(cast("list[Any]", value))]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        named = cast("Mapping[Any, Any]", value)
        if (other := next((k for k in named if not isinstance(k, str)), None)) is not None:
            raise StateError(f"{at} has the key {other!r}: keys have to be text, such as {str(other)!r}")
        # In one order: ranks give the same cursor, in whatever order they made it.
        return {str.__str__(k): _plain(named[k], f"{at}[{k!r}]", depth - 1) for k in sorted(named)}
    raise StateError(
        f"{at} is a {type(value).__name__}, which would not come back as it is: give numbers, text, lists, tuples and mappings, or put "
        f"it into the state"
    )
