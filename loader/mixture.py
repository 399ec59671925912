"""Sources, the mixture of them, and the draw: which source gives the next sample.

Theory. Source i has the share p_i = w_i / T of the mix, w_i integers and T their sum. After n draws it should have given
n * p_i samples. The draw gives the next sample to a source that is *owed* one (it has given less than its share of n, this
draw included) and, among those, to the one whose sample is due first, (c_i + 1) / p_i. This is Balinski's and Young's quota
method (The quota method of apportionment, 1975): at every n each count is its share rounded down or up, so the mix is
within one sample of the schedule at every prefix. Taking simply the largest deficit is not: with twelve sources of uneven
weights it strays by 1.4 samples. All of it is integer arithmetic; nothing drifts.

PURE. The state is two small integers per source, see `MixState`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Literal

from surefoot.loader.errors import MixtureError

NAME_LENGTH_MAX = 200
"""Characters in a source's name: it stands in every sample id."""


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of Parquet files under one name.

    Attributes:
        name: stands in every sample id; no colon, no space.
        url: a file, a folder (its ``*.parquet``), or a pattern; a plain path or any fsspec URL, such as ``s3://bucket/a/*.parquet``.
        weight: its share of the mix, relative to the other weights; 0 switches it off.
        column: the column of text or bytes.
        when_used_up: ``repeat`` begins another pass, in another order; ``stop`` takes the source out of the mix, and the data
            ends when no source is left.
        block_rows: rows of a block; a larger row group is read in slices of so many rows, one after the other.
        window_blocks: blocks that are open at a time, within which rows are shuffled; None: as many as `window_bytes` holds.
        window_bytes: memory for the open blocks, by the sizes the footers give (before decoding of dictionaries).
    """

    name: str
    url: str
    weight: float | Fraction = 1.0
    column: str = "text"
    when_used_up: Literal["repeat", "stop"] = "repeat"
    block_rows: int = 4096
    window_blocks: int | None = None
    window_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        _check_name(self.name)
        where = f"source {self.name!r}"
        for what, value in (("url", self.url), ("column", self.column)):
            if not isinstance(value, str) or not value:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
                raise MixtureError(f"{where}: {what} must be a non-empty string, not {value!r}")
        exact_weight(self.weight, where)
        if self.when_used_up not in ("repeat", "stop"):
            raise MixtureError(f"{where}: when_used_up must be 'repeat' or 'stop', not {self.when_used_up!r}")
        for what, number in (
            ("block_rows", self.block_rows),
            ("window_blocks", self.window_blocks),
            ("window_bytes", self.window_bytes),
        ):
            if number is not None and (not _is_int(number) or number < 1):
                raise MixtureError(f"{where}: {what} must be a whole number above 0, not {number!r}")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several sources, drawn from by weight, in an order that the seed decides.

    The order in which sources are listed has no meaning; a sample's place in the order depends on the seed and on the source's
    name, not on the other sources.
    """

    sources: Sequence[Source]
    seed: int = field(kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        if not self.sources:
            raise MixtureError("a mixture needs at least one source")
        seen: set[str] = set()
        for source in self.sources:
            if not isinstance(source, Source):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
                raise MixtureError(f"a mixture is made of Source objects, not {source!r}")
            if source.name in seen:
                raise MixtureError(
                    f"two sources are named {source.name!r}: ids of samples could not tell them apart"
                )
            seen.add(source.name)
        if not any(source.weight for source in self.sources):
            raise MixtureError("every source has weight 0: give at least one of them a weight above 0")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**64:
            raise MixtureError(f"the seed must be a whole number from 0 to 2**64 - 1, not {self.seed!r}")


def exact_weight(weight: float | Fraction, where: str = "a source") -> Fraction:
    """The weight as a fraction; a float counts as the decimal it prints as, so 0.7 is 7/10.

    Raises:
        MixtureError: not a number, not finite, or below zero.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float | Fraction):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MixtureError(f"{where}: the weight must be a number, not {weight!r}")
    if isinstance(weight, float) and not math.isfinite(weight):
        raise MixtureError(f"{where}: the weight must be finite, not {weight!r}")
    if weight < 0:
        raise MixtureError(f"{where}: the weight must not be below 0, and is {weight!r}")
    return Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight)


def whole_shares(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """The weights as the smallest whole numbers in the same ratios, sorted by name; weights of 0 are left out."""
    used = {name: weight for name, weight in sorted(weights.items()) if weight}
    scale = math.lcm(*(weight.denominator for weight in used.values())) if used else 1
    whole = {name: int(weight * scale) for name, weight in used.items()}
    divisor = reduce(math.gcd, whole.values(), 0) or 1
    return {name: weight // divisor for name, weight in whole.items()}


def next_source(shares: Mapping[str, int], given: Mapping[str, int]) -> str:
    """Whose turn it is (see the module), ties to the smaller name.

    Args:
        shares: whole weights above 0, of the sources in the mix.
        given: how many samples each of them has given since these shares came into force.
    """
    total = sum(shares.values())
    turn = 1 + sum(given[name] for name in shares)
    best = ""
    for name, share in shares.items():
        if given[name] * total >= turn * share:
            continue  # is ahead of its share even with this draw counted
        if not best or _due_before(share, given[name], name, shares[best], given[best], best):
            best = name
    return best


def _due_before(share: int, given: int, name: str, other_share: int, other_given: int, other: str) -> bool:
    """Whether (given + 1) / share < (other_given + 1) / other_share, ties by name."""
    mine, theirs = (given + 1) * other_share, (other_given + 1) * share
    return mine < theirs or (mine == theirs and name < other)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixState:
    """Where the draw stands. Whole numbers only; the same state gives the same continuation.

    Attributes:
        drawn: samples drawn from each source since the beginning. Sample number k of a source (from 0) is row k % rows of pass
            k // rows in that source's own order.
        segment: the same since the set of sources in the mix last changed: the shares hold within a segment.
    """

    drawn: Mapping[str, int]
    segment: Mapping[str, int]


class Draw:
    """The running draw over one mixture: `peek` who is next, `take` it. Mutable; `state` is the value to keep."""

    def __init__(self, mixture: Mixture, rows: Mapping[str, int], state: MixState | None = None) -> None:
        """
        Args:
            rows: rows of each source in one pass. A source without any is never in the mix.
            state: where to go on from; None: the beginning.
        """
        self._rows = rows
        self._weights = {source.name: exact_weight(source.weight) for source in mixture.sources}
        self._stops = {source.name for source in mixture.sources if source.when_used_up == "stop"}
        names = sorted(self._weights)
        self._drawn = {name: state.drawn[name] if state else 0 for name in names}
        self._segment = {name: state.segment[name] if state else 0 for name in names}
        self._shares = self._shares_now()
        self._next: str | None = None

    @property
    def state(self) -> MixState:
        """A value, unaffected by later draws."""
        return MixState(drawn=dict(self._drawn), segment=dict(self._segment))

    @property
    def shares(self) -> Mapping[str, int]:
        """Whole weights of the sources in the mix now; empty when the data has ended."""
        return self._shares

    def peek(self) -> tuple[str, int] | None:
        """The source of the next sample, and that sample's number in it; None when the data has ended. Changes nothing."""
        if not self._shares:
            return None
        if self._next is None:
            self._next = next_source(self._shares, self._segment)
        return self._next, self._drawn[self._next]

    def take(self) -> None:
        """Draw what `peek` shows."""
        turn = self.peek()
        if turn is None:
            raise RuntimeError("the data has ended: there is nothing to take")
        name, number = turn
        self._drawn[name] = number + 1
        self._segment[name] += 1
        self._next = None
        if self._used_up(name):
            self._segment = dict.fromkeys(self._segment, 0)
            self._shares = self._shares_now()

    def _used_up(self, name: str) -> bool:
        return name in self._stops and self._drawn[name] >= self._rows[name]

    def _shares_now(self) -> dict[str, int]:
        return whole_shares(
            {
                name: weight
                for name, weight in self._weights.items()
                if self._rows[name] and not self._used_up(name)
            }
        )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise MixtureError(f"a source needs a name, a non-empty string, not {name!r}")
    if len(name) > NAME_LENGTH_MAX:
        raise MixtureError(
            f"the source name {name[:40]!r}… has {len(name)} characters; {NAME_LENGTH_MAX} is the limit"
        )
    if ":" in name or any(c.isspace() or not c.isprintable() for c in name):
        raise MixtureError(
            f"the source name {name!r} may hold no colon, space or control character: it stands in sample ids"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
