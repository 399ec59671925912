"""From stored tensors and values back into live training state, in place: `load_into`. (torch)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.ckpt.errors import StateMismatchError
from surefoot.ckpt.live.gathering import NOTHING, Load, of_several
from surefoot.ckpt.live.optimizer_load import OptimizerLoad
from surefoot.ckpt.live.source import Source
from surefoot.ckpt.live.walking import entries, is_read_by_parameter

_LISTED_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What only one side of a lenient load has, for people: names, and in parentheses what they are and where they are stored."""

    missing: tuple[str, ...] = ()
    """In the state and not in the checkpoint."""
    left_over: tuple[str, ...] = ()
    """In the checkpoint and in no rank's state."""


def load_into(
    state: Mapping[str, Any], source: Source, *, strict: bool = True, skip: Sequence[str] = (), rank: int = 0
) -> Fit:
    """Fill `state` in place from `source`; returns what only one of them has (nothing if strict).

    Nothing of `state` is touched before all names, shapes and types are known to fit, and no plain value before all
    tensors are filled and verified. Where filling fails, tensors may hold a mixture: load something else, or give up.

    Args:
        strict: refuse names that only one side has. Otherwise what only the state has keeps its values (optimizer state that was not
            saved goes), and what only the source has stays there. Shapes, types and the number of groups must fit either way.
        skip: names that are left as they are, with all below them and with the optimizers' state of such parameters: here nothing is
            changed, and of the source nothing is read. A tied tensor is left where all of its names are; settings of optimizers are
            ``optim.param_groups``, or ``optim.param_groups.0.lr``.
        rank: whose `PerRank` values to take.

    Raises:
        StateMismatchError: names, shapes, types or groups differ, here or on another rank; or without `strict`, no rank finds any of
            its tensors.
        StateError: the live state is none that can be stored.
        DamagedError, ImageError: from the source.
        CkptWorldError: another rank refused for another reason.
    """
    with torch.no_grad(), closing(Load(source, strict=strict, skip=skip)) as load:
        try:
            _gather(load, state, rank)
        except Exception as e:  # the other ranks must hear of it before this one raises
            source.agree((), (), e)
            raise
        problems = load.refusals()
        refusal = StateMismatchError(_refusal(source, problems, load)) if problems else None
        of_all = source.agree(load.wants, load.unused(), refusal)
        unused = load.described([n for n in of_all if n != NOTHING])
        if not strict and not problems and NOTHING in of_all:
            problems.append(load.nothing_in_common())
        if strict:
            problems += of_several(_abouts(unused), "in the checkpoint and not in the state")
        if problems:
            raise StateMismatchError(_refusal(source, problems, load))
        source.fill(load.wants)
        for act in (*load.checks, *load.later):
            act()
    return Fit(
        missing=load.missing_names(),
        left_over=tuple([f"{n} ({what}, in {where})" for n, (what, where) in unused.items()]),
    )


def _abouts(described: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """What is said of each; of all that lie in one place the same, without what they are where that differs."""
    kinds: dict[str, set[str]] = {}
    for what, where in described.values():
        kinds.setdefault(where, set()).add(what)
    return {
        n: f" ({what}, in {where})" if len(kinds[where]) == 1 else f" (in {where})"
        for n, (what, where) in described.items()
    }


@torch.inference_mode(False)
@torch.no_grad()
def _gather(load: Load, state: Mapping[str, Any], rank: int) -> None:
    """What is made for the state is there to be trained, also where it is loaded in inference mode."""
    found = list(entries(state, rank))
    load.add_all(found)
    for entry in found:
        if is_read_by_parameter(entry.value) and not load.skips(entry.name):
            OptimizerLoad(load, entry.name, entry.value).add()
    if not load.problems:
        load.settle()


def _refusal(source: Source, problems: Sequence[str], load: Load) -> str:
    more = len(problems) - _LISTED_MAX
    listed = "; ".join(problems[:_LISTED_MAX]) + (f"; and {more} more" if more > 0 else "")
    return f"{source.label} does not fit the state: {listed}{_advice(load)}"


def _advice(load: Load) -> str:
    if load.unlike:
        return (
            f" (nothing is cut, padded or converted, with strict=False neither: give the live tensor that shape and type, or leave it as "
            f"it is with skip=['{load.unlike}']; ckpt.read gives {load.unlike} whole)"
        )
    return "" if load.problems or not load.strict else " (strict=False loads what both have)"
