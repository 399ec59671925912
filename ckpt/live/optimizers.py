"""Optimizer state by parameter name, to values and back. (torch)

    optim.params.model.layers.0.weight                 a value: number of the group, and the parameter's state with references
    optim.params.model.layers.0.weight.exp_avg         a tensor of that state
    optim.param_groups                                 a value: the groups' settings
    optim.state                                        a value, where there is such: state that belongs to no parameter

Nothing is invented: a parameter without state has none after a load, and no step is taken to make some.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch.optim import Optimizer

from surefoot.ckpt.errors import StateError
from surefoot.ckpt.live.declared import Boxes
from surefoot.ckpt.live.walking import Entry, Owner, Owners

_log = logging.getLogger(__name__)

NO_GROUP = -1
"""Stands for the group of a parameter that was taken out of its group and still has state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One parameter of an optimizer."""

    parameter: torch.Tensor
    owner: Owner
    group: int


def held_by(name: str, optimizer: Optimizer, owners: Owners) -> Iterator[Held]:
    """The parameters, group by group. Raises StateError: one that is not in the state."""
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            owner = owners.of(parameter)
            if owner is None:
                raise StateError(
                    f"{name}.param_groups.{number}.params.{at} ({list(parameter.shape)}) belongs to no module of the state: put the "
                    f"module that owns it into the same state, since optimizer state is stored by parameter name"
                )
            yield Held(parameter=parameter, owner=owner, group=number)


def by_owner(held: Iterator[Held]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = {}
    for h in held:
        found.setdefault(h.owner.name, []).append(h)
    return found


# ---------------------------------------------------------------- to values


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A value to store: of a parameter in `group`, or (None) of the optimizer as a whole."""

    name: str
    state: Any
    group: int | None = None


def optimizer_values(name: str, optimizer: Optimizer, owners: Owners) -> Iterator[Stored]:
    """What an optimizer knows, under its names. Raises StateError."""
    members = by_owner(held_by(name, optimizer, owners))
    for owner, held in members.items():
        states = [_state_of(optimizer, h.parameter) for h in held]
        stored = f"{name}.params.{owner}"
        boxes = held[0].owner.boxes
        state = states[0] if boxes is None else _joined(stored, boxes, held, states)
        yield Stored(name=stored, group=held[0].group, state=state)
    for key, owner in _without_group(optimizer, owners, members):
        yield Stored(name=f"{name}.params.{owner}", group=NO_GROUP, state=_state_of(optimizer, key))
    general = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    if general:
        yield Stored(name=f"{name}.state", state=general)
    yield Stored(
        name=f"{name}.param_groups",
        state=[settings_of(group) for group in optimizer.param_groups],
    )


def is_list_of_groups(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and all(isinstance(group, Mapping) for group in cast("list[Any]", value))


def warn_of_numbers(found: Iterable[Entry]) -> None:
    """Say, once in a process, where a state holds what ``optimizer.state_dict()`` gives, and that this is of little use."""
    for entry in found:
        if entry.key not in ("param_groups", "params"):
            continue
        name, groups = entry.name.removesuffix(".param_groups"), entry.value
        if entry.key == "params":  # of groups that hold tensors, and so are stored key by key
            name, groups = re.sub(r"\.param_groups\.\d+\.params$", "", entry.name), [entry.container]
        elif entry.container.keys() != {"state", "param_groups"}:
            continue
        if (
            name != entry.name
            and is_list_of_groups(groups)
            and any(_numbers(g.get("params")) for g in groups)
        ):
            _warn_once(name)


def _numbers(params: Any) -> bool:
    return isinstance(params, list) and any(isinstance(p, int) for p in cast("list[Any]", params))


@functools.cache
def _warn_once(name: str) -> None:
    _log.warning(
        "%s is what optimizer.state_dict() gives: parameters are numbered in it, and a new optimizer's is empty, so that a later start "
        "cannot load it as it is. Put the optimizer itself into the state: {'%s': optimizer}",
        name,
        name,
    )


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _state_of(optimizer: Optimizer, parameter: Any) -> Any:
    state: Any = optimizer.state.get(parameter, {})
    return dict(cast("Mapping[Any, Any]", state)) if isinstance(state, Mapping) else state


def _without_group(
    optimizer: Optimizer, owners: Owners, members: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, str]]:
    """Parameters that have a name and state, and are in no group any more. State of what has no name can serve nobody."""
    for key in optimizer.state:
        owner = owners.of(key) if isinstance(key, torch.Tensor) else None
        if owner is not None and owner.name not in members and owner.boxes is None:
            yield key, owner.name


def _joined(name: str, boxes: Boxes, held: list[Held], states: list[Any]) -> dict[str, Any]:
    """The state of a parameter whose parts are parameters of their own."""
    if len(held) != len(boxes.parts) or len({h.group for h in held}) != 1:
        raise StateError(
            f"{name}: of {len(boxes.parts)} boxes {len(held)} are parameters, in groups {sorted({h.group for h in held})}: all parts "
            f"of one tensor belong into one group"
        )
    ordered = [s for _, s in sorted(zip(held, states, strict=True), key=lambda hs: hs[0].owner.at)]
    joined: dict[str, Any] = {}
    for key, first in ordered[0].items():
        of_parts = [s.get(key) for s in ordered]
        if _follows(boxes, of_parts):
            joined[key] = boxes.like(of_parts, first.dtype)
        elif all(_same(first, other) for other in of_parts[1:]):
            joined[key] = first
        else:
            raise StateError(
                f"{name}.{key} differs between the parts of one tensor: {_short(of_parts)}; give the parts names of their own"
            )
    return joined


def _follows(boxes: Boxes, tensors: list[Any]) -> bool:
    return all(
        isinstance(t, torch.Tensor) and tuple(t.shape) == box.extent and t.shape == part.shape and t.dim()
        for t, (box, part) in zip(tensors, boxes.parts, strict=True)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
