"""Which live tensors share elements of memory: `clashes`. (torch)

Ranges of addresses are compared first, which is all there is to do for nearly every state. Where ranges meet, the elements decide:
column blocks of one buffer lie between each other and share nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from surefoot.ckpt.boxes import Box


@dataclass(eq=False, slots=True, kw_only=True)
class Claim:
    """Live memory that a load wants to fill with one stored tensor."""

    name: str
    stored: str
    boxes: tuple[Box, ...]
    views: tuple[torch.Tensor, ...]
    """``views[i]`` gets what is in ``boxes[i]`` of the stored tensor."""
    movable: bool
    """Other memory would do as well."""


class _Span(NamedTuple):
    begin: int
    end: int
    claim: int
    view: int


def clashes(claims: Sequence[Claim]) -> list[tuple[int, tuple[int, ...]]]:
    """Which claims cannot have their memory, each with those before it that share elements with it (it may be one of them).

    The movable come after all others. Two that want the same boxes of the same stored tensor at the same place agree. Numbers
    are places in `claims`. O(n log n); where ranges of addresses meet also in their length, in units of what lies together.
    """
    spans: dict[torch.device, list[_Span]] = {}
    for i, claim in enumerate(claims):
        for j, view in enumerate(claim.views):
            if nbytes := view.nbytes if view.is_contiguous() else _reach(view):
                begin = view.data_ptr()
                spans.setdefault(view.device, []).append(_Span(begin, begin + nbytes, i, j))
    found: dict[int, set[int]] = {}
    for of_device in spans.values():
        for touching in _clusters(sorted(of_device)):
            _paint(sorted(touching, key=lambda s: (claims[s.claim].movable, s.claim, s.view)), claims, found)
    return [(i, tuple(sorted(others))) for i, others in sorted(found.items())]


def shares_within(view: torch.Tensor) -> bool:
    """Does one element in memory stand for several of the view?"""
    if view.is_contiguous():
        return False
    reach = 1
    for stride, n in sorted(zip(view.stride(), view.shape, strict=True)):
        if n == 0:
            return False
        if n > 1 and stride < reach:
            break  # they may still pass each other by
        reach += (n - 1) * stride
    else:
        return False
    if 0 in (s for s, n in zip(view.stride(), view.shape, strict=True) if n > 1):
        return True
    cells = np.zeros(_reach(view) // view.itemsize, dtype=np.bool_)
    np.lib.stride_tricks.as_strided(cells, tuple(view.shape), view.stride())[...] = True
    return int(np.count_nonzero(cells)) < view.numel()


def _reach(view: torch.Tensor) -> int:
    """From the first to the last byte."""
    if not view.numel():
        return 0
    return (
        1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    ) * view.element_size()


def _clusters(spans: Sequence[_Span]) -> Iterator[list[_Span]]:
    """Those of more than one whose ranges meet, from spans in order."""
    cluster: list[_Span] = []
    end = 0
    for span in spans:
        if span.begin >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(span)
        end = max(end, span.end)
    if len(cluster) > 1:
        yield cluster


def _paint(spans: Sequence[_Span], claims: Sequence[Claim], found: dict[int, set[int]]) -> None:
    """Let each mark its elements in one row of cells, unless another has."""
    first: dict[Any, int] = {}
    painters: list[_Span] = []
    twins: list[tuple[int, int]] = []
    for s in spans:
        claim = claims[s.claim]
        view = claim.views[s.view]
        known = first.setdefault(
            (claim.stored, claim.boxes[s.view], s.begin, view.shape, view.stride()), s.claim
        )
        if known != s.claim:
            twins.append((s.claim, known))
        else:
            painters.append(s)
    if len(painters) > 1:
        _paint_apart(painters, claims, found)
    for one, other in twins:  # what one of them cannot have the other cannot either
        if other in found:
            found.setdefault(one, set()).update(found[other])


def _paint_apart(spans: Sequence[_Span], claims: Sequence[Claim], found: dict[int, set[int]]) -> None:
    low, high = min(s.begin for s in spans), max(s.end for s in spans)
    runs = [_runs(claims[s.claim].views[s.view]) for s in spans]
    unit = math.gcd(
        *(s.begin - low for s in spans), *(n for run, _, strides in runs for n in (run, *strides))
    )
    kind = np.dtype(np.uint8 if len(spans) < 2**8 else np.uint16 if len(spans) < 2**16 else np.uint32)
    row = np.zeros((high - low) // unit, dtype=kind)
    for number, (s, (run, sizes, strides)) in enumerate(zip(spans, runs, strict=True), 1):
        cells = np.lib.stride_tricks.as_strided(
            row[(s.begin - low) // unit :],
            (*sizes, run // unit),
            (*(n // unit * kind.itemsize for n in strides), kind.itemsize),
        )
        if cells.max():
            hit = {spans[int(n) - 1].claim for n in np.unique(cells) if n}
            found.setdefault(s.claim, set()).update(hit)
        elif s.claim not in found:
            cells[...] = number


def _runs(view: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """A view as runs of bytes: the length of one, how many there are in each dimension, and how far apart."""
    run, sizes, strides = view.element_size(), list[int](), list[int]()
    for stride, n in sorted(
        (s * view.element_size(), n) for s, n in zip(view.stride(), view.shape, strict=True)
    ):
        if n == 1 or stride == 0:
            continue
        if stride == run and not sizes:
            run *= n
        else:
            sizes.append(n)
            strides.append(stride)
    return run, tuple(sizes), tuple(strides)
