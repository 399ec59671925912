"""What an entry of a state may be called. PURE.

A save refuses a key by this, and an import a name: what could not have been saved, no live state could ever load.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

OF_RANK = re.compile(r"(.*?)@rank(\d+)(?:\..*)?", re.DOTALL)
"""A name of something that belongs to one rank."""
_RANK = re.compile(r"@rank\d+(?=\.|\Z)")


def refusal(name: str, key: str) -> str:
    """Why nothing can be stored as `name`, in words that begin with it; '' where it can.

    Args:
        key: what of the name its owner chose. (Our own part of it may say that something is one rank's.)
    """
    if not _is_text(name):
        return f"{name!a}: this name is no Unicode text (it has half of a surrogate pair), and names are stored as UTF-8; rename it"
    if "@rank" in key and OF_RANK.fullmatch(key):
        return f"{name}: keys with '@rank' and a number are what ckpt.PerRank is stored under; rename it"
    if name == "__metadata__":
        return "__metadata__ is a word of the safetensors format; rename that entry"
    return ""


def _is_text(name: str) -> bool:
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def stands_in(name: str, places: Iterable[str]) -> bool:
    """Is it one of these names, or below one (``model.head`` or ``model.head.``: ``model.head.weight``)? What belongs to one rank is
    called as it is stored or as it is called in the state (``rng@rank0`` or ``rng``)."""
    called = {f"{name}.", f"{_RANK.sub('', name)}."}
    return any(c.startswith(f"{place.removesuffix('.')}.") for place in places for c in called)
