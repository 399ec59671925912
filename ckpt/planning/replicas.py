"""Replicas that should be the same and are not: who is the odd one. PURE.

Every rank hashes what it holds together with others, whole boxes, whichever of them writes which part. Where the hashes of a box
differ and more than half of its holders agree, the others are odd. With two holders, or an even split, nobody can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import CommitError, ReplicasDifferError

NAMED_MAX = 8
"""Ranks that a message lists of each kind."""
NAMED_CHARACTERS_MAX = 200
_OWN = "(a random generator, say) wrap it in ckpt.PerRank, or give it another name on each rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dissent:
    """One box of a tensor, and which ranks hold what: ranks, ascending, by checksum."""

    name: str
    box: Box
    ranks_by_checksum: Mapping[str, tuple[int, ...]]

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks outside a majority; empty where there is none."""
        return odd_of(self.ranks_by_checksum.values())


def odd_of(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Of ranks, grouped by what they hold: those outside a majority, ascending; empty where there is none."""
    *fewer, most = sorted(groups, key=len)
    if 2 * len(most) <= len(most) + sum(map(len, fewer)):
        return ()
    return tuple(sorted(r for g in fewer for r in g))


def label(name: str, box: Box) -> str:
    """How a part record names a box."""
    return f"{name}{box}"


def parse_label(text: str) -> tuple[str, Box]:
    """The other way. Raises CommitError: it names no box."""
    name, bracket, inside = text.rpartition("[")
    try:
        spans = [tuple(map(int, side.split(":"))) for side in inside.removesuffix("]").split(",") if side]
        box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    except ValueError:
        box = None
    if not bracket or not inside.endswith("]") or box is None:
        raise CommitError(f"a part record has a hash of {text[:NAMED_CHARACTERS_MAX]!r}, which names no box")
    return name, box


def dissents(checksums: Mapping[int, Mapping[str, str]]) -> list[Dissent]:
    """The boxes whose holders do not agree, in order of their labels.

    Args:
        checksums: by rank, then by the box's label.

    Raises CommitError for a label that is none.
    """
    first: dict[str, str] = {}
    differ: set[str] = set()
    for mine in checksums.values():
        for box, checksum in mine.items():
            if first.setdefault(box, checksum) != checksum:
                differ.add(box)
    found: list[Dissent] = []
    for text in sorted(differ):
        ranks: dict[str, list[int]] = {}
        for rank, mine in sorted(checksums.items()):
            if text in mine:
                ranks.setdefault(mine[text], []).append(rank)
        name, box = parse_label(text)
        found.append(Dissent(name=name, box=box, ranks_by_checksum={c: tuple(r) for c, r in ranks.items()}))
    return found


def require_equal(checksums: Mapping[int, Mapping[str, str]], where: str) -> None:
    """Raises ReplicasDifferError where replicas are not the same; it names the odd ranks, as far as anybody can tell."""
    found = dissents(checksums)
    if not found:
        return
    # The box that says most comes first.
    worst = max(found, key=lambda d: (len(d.odd) > 0, -len(d.odd)))
    odd = tuple(sorted({r for d in found for r in d.odd}))
    raise ReplicasDifferError(
        f"{where}: replicas differ: {label(worst.name, worst.box)} has other content on some ranks ({_told(worst)})"
        f"{_also(len(found) - 1)}; {_advice(worst, odd)}",
        name=worst.name,
        box=worst.box,
        ranks_by_checksum=worst.ranks_by_checksum,
        odd=odd,
    )


def _told(d: Dissent) -> str:
    groups = sorted(d.ranks_by_checksum.items(), key=lambda g: (-len(g[1]), g[1]))
    more = f"; and {len(groups) - NAMED_MAX} more" if len(groups) > NAMED_MAX else ""
    return "; ".join(f"{_ranks(ranks)}: {checksum}" for checksum, ranks in groups[:NAMED_MAX]) + more


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:NAMED_MAX]))
    more = f" and {len(ranks) - NAMED_MAX} more" if len(ranks) > NAMED_MAX else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _also(others: int) -> str:
    return f", and so do {others} more" if others else ""


def _advice(worst: Dissent, odd: tuple[int, ...]) -> str:
    if odd:
        return (
            f"{_ranks(odd)} against the majority: suspect its memory or its devices, and load an older step on all ranks. If this is meant "
            f"to differ {_OWN}"
        )
    ask = (
        "with two copies nobody can tell which is right"
        if len(worst.ranks_by_checksum) == 2
        else "no majority agrees"
    )
    return (
        f"{ask}: if these are shards of one tensor make it a DTensor, if they are meant to differ {_OWN}; "
        f"otherwise suspect the memory of one of them and load an older step"
    )
