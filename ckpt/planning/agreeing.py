"""What ranks agree on before a save, in one round: the step, that all can, whether a layout is new. PURE.

Every rank sends a `Word`; rank 0 judges all of them and answers a `Verdict`. In the steady state that is one small message
per rank; only a new layout makes all of them tell what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

NAMED_MAX = 8
"""Ranks that a message lists."""


class Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank says. `root`: where it saves. `fresh`: its layout is not the one agreed on last. `failure`: it cannot save, and
    why; `kind`: the class of that error."""

    step: int
    root: str = ""
    fresh: bool = False
    failure: str = ""
    kind: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What holds for all: the attempt's nonce, and whether layouts are exchanged now. Or why nothing is saved."""

    attempt: str
    fresh: bool = False
    failure: str = ""
    kind: str = ""
    """The class of the first rank's error: all raise the same."""
    others: str = ""
    """Ranks that save another step than rank 0."""
    roots: str = ""
    """Ranks that save under another root than rank 0."""


def differing(values: Sequence[object]) -> str:
    """What ranks (in rank order) hold that should be the same: rank 0's, and those that differ from it; '' where all agree."""
    others = [f"rank {r}: {v}" for r, v in enumerate(values) if v != values[0]]
    return f"rank 0: {values[0]}, {', '.join(others[:NAMED_MAX])}" if others else ""


def judge(words: Sequence[Word], attempt: str) -> Verdict:
    """`words` in rank order."""
    failed = [f"rank {r}: {w.failure}" for r, w in enumerate(words) if w.failure]
    kinds = [w.kind for w in words if w.failure]
    return Verdict(
        attempt=attempt,
        fresh=any(w.fresh for w in words),
        failure="; ".join(failed[:NAMED_MAX]),
        kind=kinds[0] if kinds else "",
        others=differing([w.step for w in words]),
        roots=differing([w.root for w in words]),
    )


def decode_word(data: bytes) -> Word:
    return msgspec.json.decode(data, type=Word)


def decode_verdict(data: bytes) -> Verdict:
    return msgspec.json.decode(data, type=Verdict)
