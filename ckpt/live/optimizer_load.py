"""Optimizer state from a load, in place: `OptimizerLoad`. (torch)

Nothing is invented: a parameter without state in the checkpoint has none afterwards, and no step is taken to make some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from surefoot.ckpt.boxes import local_shape
from surefoot.ckpt.live.declared import Boxes
from surefoot.ckpt.live.gathering import Load
from surefoot.ckpt.live.leaves import coordinate_in, dtype_name, dtype_of, shardings_of
from surefoot.ckpt.live.optimizers import (
    NO_GROUP,
    Held,
    by_owner,
    held_by,
    is_list_of_groups,
    settings_of,
)
from surefoot.ckpt.live.placing import Ref


class OptimizerLoad:
    """Gathers what one optimizer gets from a load."""

    def __init__(self, load: Load, name: str, optimizer: Optimizer) -> None:
        self._load = load
        self._name = name
        self._optimizer = optimizer
        self._what = f"{name}, {_a(type(optimizer).__name__)}"

    def add(self) -> None:
        groups_name = f"{self._name}.param_groups"
        if form := self._torchs_form(groups_name):
            self._refuse(f"{self._name} was saved as the mapping that {form}; {_THEN}")
            return
        if groups_name not in self._load.source.values:
            self._begin_anew("an optimizer, of which nothing was saved")
            return
        groups = self._load.decode(groups_name)
        if other := self._of_another_kind(groups):
            if self._load.strict:
                self._refuse(
                    f"{self._what}, is {other}. {_SAME_KIND}; the groups are in {self._load.source.where(groups_name)}"
                )
            else:
                self._begin_anew(f"{_a(type(self._optimizer).__name__)}, {other}")
            return
        groups = self._load.value(groups_name)
        self._pass_over_skipped()
        origin: dict[int, int] = {}
        for owner, held in by_owner(held_by(self._name, self._optimizer, self._load.owners)).items():
            if not self._skips(owner):
                self._add_parameter(owner, held, origin)
        self._add_those_without_group()
        self._add_general()
        self._add_groups(groups_name, groups, origin)

    def _torchs_form(self, groups_name: str) -> str:
        """Where groups list their parameters: which call gives such, and what takes it. (Groups that hold tensors were stored key by
        key.)"""
        values = self._load.source.values
        groups = self._load.decode(groups_name) if groups_name in values else None
        members = [g["params"] for g in groups if "params" in g] if is_list_of_groups(groups) else []
        if (first := f"{groups_name}.0.params") in values:
            members.append(self._load.decode(first))
        if not members:
            return ""
        return _BY_NAME if any(isinstance(p, str) for of in members for p in of) else _BY_NUMBER

    def _refuse(self, why: str) -> None:
        """Nothing else needs to be said of this optimizer."""
        self._load.problems.append(why)
        self._load.used.update(n for n in self._load.stored() if n.startswith(f"{self._name}."))

    def _begin_anew(self, what: str) -> None:
        """Nothing of this optimizer is taken: it keeps its settings, and its state, which is of other parameters than they are now,
        goes."""
        self._load.miss(self._name, what)
        self._load.later.append(self._reset)

    def _reset(self) -> None:
        """New state: what an optimizer has before its first step."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._optimizer.state.pop(parameter, None)

    # ---- parameters

    def _skips(self, owner: str) -> bool:
        """With the tensor itself, which is filled where one of its names is not skipped; or where its state is named."""
        names = self._load.ties.get(owner, (owner,))
        return all([self._load.skips(n) for n in names]) or any(
            [self._load.skips(f"{self._name}.params.{n}") for n in names]
        )

    def _pass_over_skipped(self) -> None:
        prefix = f"{self._name}.params."
        self._load.used.update(
            n
            for n in self._load.stored()
            if n.startswith(prefix) and self._load.skips(n.removeprefix(prefix))
        )

    def _add_parameter(self, owner: str, held: list[Held], origin: dict[int, int]) -> None:
        number = held[0].group
        stored = self._stored_name(owner)
        if stored is None:
            self._load.miss(
                f"{self._name}.params.{owner}", f"the state of a parameter of group {number} of {self._what}"
            )
            for h in held:
                self._load.later.append(lambda h=h: self._optimizer.state.pop(h.parameter, None))
            return
        for h in held:
            known = self._load.value(stored)
            there = known["group"]
            regrouped = there != NO_GROUP and origin.setdefault(number, there) != there
            if regrouped and not self._load.skips(f"{self._name}.param_groups"):
                self._load.problems.append(
                    f"{self._name}: {owner} is in parameter group {there} of the checkpoint, other parameters of group {number} here "
                    f"are in {origin[number]}: {_BUILD_ALIKE}"
                )
            if h.owner.boxes is None:
                self._add_state(h.parameter, known["state"], number)
            else:
                self._add_state_of_part(h, held, known["state"], number)

    def _stored_name(self, owner: str) -> str | None:
        """Under which of its names the parameter's state was stored: it may have been tied otherwise."""
        load, prefix = self._load, f"{self._name}.params."
        others = [n for n in load.ties.get(owner, ()) if n != owner]
        names = [n for n in (owner, *others) if not load.skips(n)]
        known = (m for n in names for m in (n, load.source.aliases.get(n)))
        found = next((n for n in known if f"{prefix}{n}" in load.source.values), None)
        for other in (
            others
        ):  # tied here and not there: their own state cannot be used, which matters only if they have any
            if (
                other != found
                and f"{prefix}{other}" in load.source.values
                and not load.decode(f"{prefix}{other}")["state"]
            ):
                load.used.add(f"{prefix}{other}")
        return None if found is None else f"{prefix}{found}"

    def _add_state(self, parameter: Any, state: Any, number: int) -> None:
        load = self._load
        live: Any = self._optimizer.state.get(parameter, {})
        group = self._optimizer.param_groups[number] if number != NO_GROUP else {}
        device = parameter.device if group.get("capturable") or group.get("fused") else None
        load.reserve(
            state,
            live,
            f"{self._name}.params",
            lambda shape, dtype: like_parameter(parameter, shape, dtype, device),
        )
        load.later.append(lambda: self._put(parameter, load.build(state)))

    def _add_state_of_part(self, h: Held, held: list[Held], state: dict[str, Any], number: int) -> None:
        """Tensors that follow the boxes are filled through them, all others per part."""
        boxes = h.owner.boxes
        assert boxes is not None, "the caller asked"
        load, live = self._load, self._optimizer.state.get(h.parameter, {})
        rest: dict[str, Any] = {}
        mine: dict[str, torch.Tensor] = {}
        for key, value in state.items():
            meta = load.meta_of(value)
            if meta is None or meta.shape != boxes.shape or not meta.shape:
                rest[key] = value
                continue
            fits = isinstance(t := live.get(key), torch.Tensor) and t.shape == h.parameter.shape
            tensor = (
                t
                if fits and dtype_name(t.dtype) == meta.dtype
                else torch.empty_like(h.parameter, dtype=dtype_of(meta.dtype), requires_grad=False)
            )
            mine[key] = tensor
            box, _ = boxes.parts[h.owner.at]
            load.want([cast("Ref", value).name], Boxes(boxes.shape, [(box.offset, tensor)], tensor.dtype))
        load.reserve(rest, live, f"{self._name}.params", None)
        load.later.append(lambda: self._put(h.parameter, load.build(rest) | mine))

    def _put(self, parameter: Any, filled: Any) -> None:
        states = self._optimizer.state
        if not isinstance(filled, dict):
            states[parameter] = filled
        elif not filled:
            states.pop(parameter, None)  # what was absent stays absent
        else:
            mine = states.setdefault(parameter, {})
            for key in [k for k in mine if k not in filled]:
                del mine[key]
            mine.update(filled)

    def _add_those_without_group(self) -> None:
        prefix = f"{self._name}.params."
        for name in self._load.source.values:
            if not name.startswith(prefix) or name in self._load.used:
                continue
            parameter = self._load.owners.called(name.removeprefix(prefix))
            if parameter is not None and self._load.decode(name)["group"] == NO_GROUP:
                self._add_state(parameter, self._load.value(name)["state"], NO_GROUP)

    def _add_general(self) -> None:
        name = f"{self._name}.state"
        if self._load.skips(name):
            return
        live = {k: v for k, v in self._optimizer.state.items() if not isinstance(k, torch.Tensor)}
        state: dict[Any, Any] = {}
        if name in self._load.source.values:
            state = self._load.value(name)
            self._load.reserve(state, live, name, None)
        elif live:
            self._load.miss(name, f"state of {self._what} as a whole")
            return

        def put() -> None:
            for key in live:
                if key not in state:
                    del self._optimizer.state[key]
            self._optimizer.state.update(self._load.build(state))

        self._load.later.append(put)

    # ---- groups

    def _add_groups(self, stored: str, groups: list[dict[str, Any]], origin: Mapping[int, int]) -> None:
        load = self._load
        if load.skips(stored):
            return
        if len(groups) != len(self._optimizer.param_groups):
            load.problems.append(
                f"{self._name} has {len(self._optimizer.param_groups)} parameter groups here and {len(groups)} in the checkpoint: "
                f"{_BUILD_ALIKE}"
            )
            return
        for number, group in enumerate(self._optimizer.param_groups):
            there = origin.get(number, number)
            # Which parameters it has is the live group's to say.
            saved = {
                k: v for k, v in settings_of(groups[there]).items() if not load.skips(f"{stored}.{there}.{k}")
            }
            for key in settings_of(group):
                if key not in saved and not load.skips(f"{stored}.{there}.{key}"):
                    load.miss(
                        f"{stored}.{there}.{key}",
                        f"a setting of parameter group {number} of {self._what}; the groups are in {load.source.where(stored)}",
                    )
            load.reserve(saved, group, f"{stored}.{there}", None)
            load.later.append(lambda group=group, saved=saved: group.update(load.build(saved)))

    def _of_another_kind(self, groups: list[dict[str, Any]]) -> str:
        """Both sides have settings that the other has not: said once, and not of every setting of every group. '' where it is not so."""
        here = {key for group in self._optimizer.param_groups for key in settings_of(group)}
        there = {key for group in groups for key in group}
        # What somebody added to a group says nothing of the kind.
        more, less = (
            sorted(there - here - _OF_SCHEDULERS),
            sorted((here & self._optimizer.defaults.keys()) - there),
        )
        if not more or not less:
            return ""
        return (
            f"of another kind than the optimizer that was saved: {self._states()}; settings there are {', '.join(more)} "
            f"and no {', '.join(less)}"
        )

    def _states(self) -> str:
        """What both keep of parameters. (Before its first step a live one keeps nothing.)"""
        prefix, load = f"{self._name}.params.", self._load
        saved = [load.decode(n)["state"] for n in load.source.values if n.startswith(prefix)]
        here, there = _keys(self._optimizer.state.values()), _keys(saved)
        words = f"the checkpoint's optimizer state has {there}"
        return f"{words}, and here it has {here}" if here != "{}" else words


_BY_NUMBER = (
    "optimizer.state_dict() gives: parameters are numbered there, and do not fit into an optimizer by name. Let a new optimizer take one "
    "step (so that it has the tensors to fill), load into the state_dict() of it beside the model, and call its load_state_dict"
)
_BY_NAME = "get_optimizer_state_dict gives: load into the mapping that it gives here, and hand that to set_optimizer_state_dict"
_THEN = "then save the optimizer itself"
_BUILD_ALIKE = "build the groups as they were saved, or leave the optimizer out of the state and load with strict=False: then it begins anew"
_SAME_KIND = "Build the same kind, or load with strict=False: then nothing of it is taken, and it begins anew"
_OF_SCHEDULERS = frozenset({"initial_lr", "swa_lr"})
"""Settings that torch's schedulers add to groups."""


def _keys(states: Iterable[Any]) -> str:
    """Of all these states of parameters: ``{exp_avg, step}``."""
    found = {
        str(key) for state in states if isinstance(state, Mapping) for key in cast("Mapping[Any, Any]", state)
    }
    return f"{{{', '.join(sorted(found))}}}"


def _a(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def like_parameter(
    parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None
) -> torch.Tensor:
    """New optimizer state of this shape, to be filled: with the parameter's layout where it has its shape, or for a sharded parameter where
    it has it but for dimensions of length 1 (factored moments); otherwise plain, on `device`."""
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    follows = len(shape) == parameter.dim() > 0 and all(
        n in (1, m) for n, m in zip(shape, parameter.shape, strict=True)
    )
    if not (follows and isinstance(parameter, DTensor)):
        return torch.empty(shape, dtype=dtype, device=device)
    mesh = parameter.device_mesh
    placements = [
        p
        if p.is_replicate() or shape[cast("Any", p).dim] == parameter.shape[cast("Any", p).dim]
        else Replicate()
        for p in parameter.placements
    ]
    whole = torch.empty(shape, dtype=dtype, device="meta")
    coordinate = coordinate_in(mesh)
    local = (
        local_shape(shape, shardings_of(len(shape), mesh, placements, coordinate))
        if coordinate is not None
        else (0,)
    )
    return DTensor.from_local(
        torch.empty(local, dtype=dtype, device=parameter.to_local().device),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
