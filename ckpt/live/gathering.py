"""What a load has to do, gathered before anything of the live state is touched: `Load`. (torch)"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from surefoot.ckpt.errors import StateMismatchError
from surefoot.ckpt.format.names import OF_RANK, stands_in
from surefoot.ckpt.format.values import tensor_names
from surefoot.ckpt.live.declared import Boxes
from surefoot.ckpt.live.leaves import PLAIN_TYPES, Leaf, dtype_name, leaf_of
from surefoot.ckpt.live.overlaps import Claim, clashes, shares_within
from surefoot.ckpt.live.placing import Placing, Ref
from surefoot.ckpt.live.scratch import equal_bits, write_once, write_through
from surefoot.ckpt.live.source import Source, Want
from surefoot.ckpt.live.walking import (
    Entry,
    Owners,
    extra_states,
    identity,
    is_read_by_parameter,
    is_stateful,
    shared_tensors,
    state_access,
)
from surefoot.ckpt.live.wrapped import Wrapped, is_wrapped, unwrap
from surefoot.ckpt.manifest import TensorMeta


@dataclass(eq=False, slots=True)
class _Filled:
    """A live tensor that a load fills: what it claims of memory, and where its want stands."""

    claim: Claim
    tensor: torch.Tensor | Boxes
    at: int
    scratch: bool
    """It is filled through other memory."""


NAMED_MAX = 8
"""Names that one sentence lists."""
FIRST_MAX = 3
NOTHING = ""
"""Stands among the names that a rank has no use for where it has use for none. No stored name is empty."""


class Load(Placing):
    """One load: gathers what to do (`wants`, then `checks` and `later`) and what does not fit (`problems`, `missing`)."""

    def __init__(self, source: Source, *, strict: bool, skip: Sequence[str] = ()) -> None:
        super().__init__(source)
        self.strict = strict
        self._skip = tuple(skip)
        self._tensors = source.tensors
        self.wants: list[Want] = []
        self.checks: list[Callable[[], Any]] = []
        self.later: list[Callable[[], Any]] = []
        self.used: set[str] = set()
        self.owners = Owners()
        self.unlike = ""
        """The first stored tensor that is of another shape or type than the live one."""
        self.ties: dict[str, tuple[str, ...]] = {}
        """All names of the tensor that has this one."""
        self._missing: dict[str, str] = {}
        self._sought: dict[str, bool] = {}
        """The tensors of modules and of the state itself; True for those that were found."""
        self._filled: list[_Filled] = []

    def add_all(self, found: Sequence[Entry]) -> None:
        """Everything but optimizers, which need the names of all parameters."""
        for group in shared_tensors(found, self.owners).values():
            names = tuple(named.name for named in group)
            self.ties.update(dict.fromkeys(names, names))
            self._seek(names, group[0].tensor)
        for entry in found:
            self._add(entry)
        self._pass_over_other_ranks(found)
        if self._skip:
            self.used.update(n for n in self.stored() if self.skips(n))

    def skips(self, name: str) -> bool:
        """Does the caller want what has this name left as it is, on both sides?"""
        return stands_in(name, self._skip)

    def _seek(self, names: Sequence[str], tensor: torch.Tensor | Boxes) -> None:
        wanted = [n for n in names if not self.skips(n)]
        if wanted:
            missing = len(self._missing)
            self.want(wanted, tensor)
            self._sought[wanted[0]] = len(self._missing) == missing

    def close(self) -> None:
        """Let go of the state: what is to be done refers to this object, which would live, with all tensors, until Python collects
        garbage."""
        self.checks.clear()
        self.later.clear()

    # ---- what the checkpoint has

    def value(self, name: str) -> Any:
        """The decoded value, which is there."""
        self.used.add(name)
        return self.decode(name)

    def meta_of(self, value: Any) -> TensorMeta | None:
        """Of the stored tensor that this stands for, if it stands for one."""
        return self.source.tensors.get(value.name) if isinstance(value, Ref) else None

    def miss(self, name: str, what: str = "") -> None:
        """Note that the checkpoint lacks this; `what` it is, where the name does not say it."""
        if not what and (whose := OF_RANK.fullmatch(name)):
            what = f"rank {whose[2]}'s own; the checkpoint is of fewer ranks, or had none"
        self._missing[name.encode(errors="backslashreplace").decode()] = what

    def stored(self) -> set[str]:
        """All names."""
        return {*self.source.tensors, *self.source.aliases, *self.source.values}

    def _stored_tensor(self, name: str) -> str | None:
        if name in self._tensors:
            self.used.add(name)
            return name
        known = self.source.aliases.get(name)
        if known is not None and known in self._tensors:
            self.used.update((name, known))
            return known
        return None

    # ---- the end of gathering

    def refusals(self) -> list[str]:
        """Why this rank cannot go on."""
        missing = self._missing if self.strict else {}
        return [
            *self.problems,
            *of_several({n: self._about(n, w) for n, w in missing.items()}, "not in the checkpoint"),
        ]

    def missing_names(self) -> tuple[str, ...]:
        return tuple(f"{n} ({w})" if w else n for n, w in self._missing.items())

    def _about(self, name: str, what: str) -> str:
        if what:
            return f" ({what})"
        if name in self.stored():
            there = "a value" if name in self.source.values else "a tensor"
            return f" as what it is here; there it is {there}"
        return _nearest(name, self.stored())

    def unused(self) -> list[str]:
        """Stored names, and `NOTHING` where this rank has tensors and finds none of them."""
        nothing = bool(self._sought and self.source.tensors) and not any(self._sought.values())
        return [*([NOTHING] if nothing else []), *sorted(self.stored() - self.used)]

    def nothing_in_common(self) -> str:
        return (
            f"none of the state's tensors is there: it has {_first_of(self._sought)}, and the checkpoint "
            f"{_first_of(self.source.tensors)}; call them in the state as they were called (a mapping in the place of a module will do)"
        )

    def described(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        """What these stored names are, and where they lie; tensors that belong to a value among them go without saying."""
        values = {n: self.source.values[n] for n in names if n in self.source.values}
        parts = {t for n, v in values.items() for t in tensor_names(v) if t != n}
        found: dict[str, tuple[str, str]] = {}
        for n in names:
            tied, meta = self.source.aliases.get(n), self.source.tensors.get(n)
            what = f"tied to {tied}" if tied else "a value" if meta is None else _kind(meta)
            if n not in parts:
                found[n] = what, self.source.where(tied or n)
        return found

    def _pass_over_other_ranks(self, found: Iterable[Entry]) -> None:
        """What was kept per rank, for other ranks than this: it is nobody's in a smaller world, and no rank's fault."""
        mine = {m[1] for e in found if (m := OF_RANK.fullmatch(e.name))}
        if mine:
            self.used |= {n for n in self.stored() if (m := OF_RANK.fullmatch(n)) and m[1] in mine}

    # ---- entries

    def _add(self, entry: Entry) -> None:
        match entry.value:
            case nn.Module():
                for name, module in extra_states(entry.value, entry.name):
                    if not self.skips(name):
                        self._add_stateful(name, module.get_extra_state, module.set_extra_state)
            case torch.Tensor():
                pass  # wanted already
            case Boxes():
                self.owners.add_boxes(entry.name, entry.value)
                self._seek([entry.name], entry.value)
            case value if is_read_by_parameter(value):
                pass  # after all modules
            case _ if self.skips(entry.name):
                pass
            case value if is_stateful(value):
                self._add_stateful(entry.name, *state_access(value))
            case _:
                self._add_value(entry)

    def _add_stateful(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        if name not in self.source.values:
            self.miss(name)
            return
        value = self.value(name)
        self.reserve(value, get(), name, None)
        self.later.append(lambda: put(self.build(value)))

    def _add_value(self, entry: Entry) -> None:
        if entry.name not in self.source.values:
            self.miss(entry.name)
            return
        value = self.value(entry.name)
        self.reserve(value, entry.value, entry.name, None)
        if entry.fixed and not tensor_names(self.source.values[entry.name]) and not self.problems:
            self._require_same(entry, self.build(value))
        self.later.append(lambda: entry.put(self.build(value)))

    def _require_same(self, entry: Entry, there: Any) -> None:
        if there != entry.value:
            self.problems.append(
                f"{entry.name} is {there!r} in the checkpoint and {entry.value!r} here, in a {type(entry.container).__name__} that cannot "
                f"be changed: use a dict or a list"
            )

    # ---- tensors

    def want(self, names: Sequence[str], tensor: torch.Tensor | Boxes, *, movable: bool = False) -> None:
        """Fill a live tensor that has these names."""
        if type(tensor) not in PLAIN_TYPES and isinstance(tensor, torch.Tensor) and is_wrapped(tensor):
            self._want_wrapped(names, tensor)
            return
        found = list(dict.fromkeys([s for n in names if (s := self._stored_tensor(n)) is not None]))
        if not found:
            self._refuse_wrapped_or_miss(names, tensor)
            return
        leaf = leaf_of(names[0], tensor)
        for stored in found:
            meta = self._tensors[stored]
            if leaf.meta != meta:
                self.unlike = self.unlike or stored
                self.problems.append(
                    f"{names[0]} is {_kind(leaf.meta)} here and {_kind(meta)} in the checkpoint"
                )
                return
        if isinstance(tensor, torch.Tensor):
            self.live.setdefault(found[0], tensor)
        self._claim(leaf, tensor, found[0], movable=movable)
        if self.strict and isinstance(tensor, torch.Tensor):
            for other in found[1:]:
                self._require_alike(names[0], tensor, leaf, found[0], other)

    def _refuse_wrapped_or_miss(self, names: Sequence[str], tensor: torch.Tensor | Boxes) -> None:
        stored = next((n for n in names if n in self.source.values), None)
        value = self.value(stored) if stored is not None else None
        if not isinstance(value, Wrapped):
            self.miss(names[0])
            return
        self.used.update(tensor_names(self.source.values[stored]) if stored else ())
        self.problems.append(
            f"{names[0]} is a plain {dtype_name(tensor.dtype)}{list(tensor.shape)} here and {value.kind()} in the checkpoint: quantised "
            f"tensors are stored as they are; quantise the live one alike before the load"
        )

    def _claim(self, leaf: Leaf, tensor: torch.Tensor | Boxes, stored: str, *, movable: bool) -> None:
        """With scratch memory instead of views that cannot simply be written to."""
        views, lazy = leaf.views, False
        if not isinstance(tensor, DTensor):
            given = [t for _, t in tensor.parts] if isinstance(tensor, Boxes) else [tensor]
            if lazy := any([t.is_conj() or t.is_neg() for t in given]):
                views = tuple(given[: len(leaf.views)])
        boxes = tuple([h.box for h in leaf.held])
        claim = Claim(name=leaf.name, stored=stored, boxes=boxes, views=views, movable=movable)
        scratch = lazy or any([shares_within(v) for v in views])
        self._filled.append(_Filled(claim, tensor, len(self.wants), scratch))
        self.wants.append(Want(leaf=leaf, stored=stored))

    def settle(self) -> None:
        """Give what would be filled over something else memory of its own. To be called when all is gathered."""
        moved: dict[Any, torch.Tensor] = {}
        contested: dict[int, int] = {}
        for one, others in clashes([f.claim for f in self._filled]):
            filled = self._filled[one]
            if filled.claim.movable and isinstance(filled.tensor, torch.Tensor):
                self._move(filled, moved)
            else:
                contested.update(dict.fromkeys(others, one))
                contested[one] = others[0]
        for filled in self._filled:
            if filled.scratch:
                for view, memory in zip(filled.claim.views, self._through_scratch(filled), strict=True):
                    self.checks.append(lambda n=filled.claim.name, v=view, m=memory: write_through(n, v, m))
        if contested:
            self._write_contested(contested)

    def _move(self, filled: _Filled, moved: dict[Any, torch.Tensor]) -> None:
        """What stands in a value alone gets new memory, which its owner is given."""
        tensor, claim = filled.tensor, filled.claim
        assert isinstance(tensor, torch.Tensor), "declared boxes are no part of a value"
        key = claim.stored, identity(tensor)
        if (new := moved.get(key)) is None:
            new = moved[key] = torch.empty_like(tensor, requires_grad=False)
        self.move(claim.stored, tensor, new)
        self.wants[filled.at] = Want(leaf=leaf_of(claim.name, new), stored=claim.stored)
        filled.scratch = False

    def _through_scratch(self, filled: _Filled) -> tuple[torch.Tensor, ...]:
        want = self.wants[filled.at]
        memory = tuple(torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in filled.claim.views)
        self.wants[filled.at] = replace(want, leaf=replace(want.leaf, views=memory))
        return memory

    def _write_contested(self, contested: dict[int, int]) -> None:
        """What has to be filled where it lies, and shares elements: all of them are written, and then hold what they should, or they are no
        views of one thing in the checkpoint."""
        parts: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for i in sorted(contested):
            filled = self._filled[i]
            scratch = filled.scratch or self._through_scratch(filled)
            memory = self.wants[filled.at].leaf.views if scratch is True else scratch
            parts += [(i, v, m) for v, m in zip(filled.claim.views, memory, strict=True)]

        def write() -> None:
            for _, view, memory in parts:
                write_once(view, memory)
            for i, view, memory in parts:
                if not equal_bits(view, memory):
                    raise StateMismatchError(self._of_one_memory(i, contested[i]))

        self.checks.append(write)

    def _of_one_memory(self, i: int, j: int) -> str:
        one, other = sorted((self._filled[i].claim, self._filled[j].claim), key=lambda c: c.name)
        both = f"parts of {one.name}" if i == j else f"{one.name} and {other.name}"
        return (
            f"{both} share memory here, and have different values for it in {self.source.label}: untie them (clone one), or leave one of "
            f"them out of the state and load with strict=False (tensors are overwritten already)"
        )

    def _require_alike(self, name: str, tensor: torch.Tensor, leaf: Leaf, stored: str, other: str) -> None:
        """Tied here and not there: both must hold the same, or one of them would be lost."""
        scratch = tuple(torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in leaf.views)
        self.wants.append(Want(leaf=replace(leaf, name=other, views=scratch), stored=other))

        def check() -> None:
            if not all(equal_bits(a, b) for a, b in zip(leaf.views, scratch, strict=True)):
                raise StateMismatchError(
                    f"{name}: {stored} and {other} are one tensor here, and two with different values in {self.source.label}: untie "
                    f"them, or load with strict=False to take {stored} (tensors are overwritten already)"
                )

        self.checks.append(check)

    def _want_wrapped(self, names: Sequence[str], tensor: torch.Tensor) -> None:
        stored = next((n for n in names if n in self.source.values), None)
        if stored is None and any(self._stored_tensor(n) for n in names):
            live = unwrap(names[0], tensor)
            self.problems.append(
                f"{names[0]} is {live.kind()} here and a plain tensor in the checkpoint: nothing is quantised on the way; load it into "
                f"a plain one and quantise afterwards"
            )
            return
        if stored is None:
            self.miss(names[0])
            return
        self.used.update(n for n in names if n in self.source.values)
        self.fill_wrapped(names[0], self.value(stored), tensor)

    def fill_wrapped(self, name: str, there: Any, tensor: torch.Tensor) -> None:
        live = unwrap(name, tensor)
        if not isinstance(there, Wrapped):
            self.problems.append(f"{name} is {live.kind()} here and no such tensor in the checkpoint")
            return
        there.tensor = tensor
        here = (live.cls, live.dtype, live.shape, live.context, live.parts.keys())
        if here != (there.cls, there.dtype, there.shape, there.context, there.parts.keys()):
            self.problems.append(
                f"{name} is {live.kind()} with {live.context} of {', '.join(live.parts)} here and {there.kind()} with {there.context} of "
                f"{', '.join(there.parts)} in the checkpoint"
            )
            return
        for attribute, part in live.parts.items():
            ref = there.parts[attribute]
            if isinstance(ref, Wrapped):
                self.fill_wrapped(f"{name}.{attribute}", ref, part)
            else:
                self.want([ref.name], part)


def of_several(abouts: Mapping[str, str], what: str) -> Iterator[str]:
    """``a, b and 3 more are <what> (…)``: of names of which there is the same to say it is said once. PURE."""
    names: dict[str, list[str]] = {}
    for name, about in abouts.items():
        names.setdefault(about, []).append(name)
    for about, mine in names.items():
        more = len(mine) - NAMED_MAX
        listed = ", ".join(mine[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        yield f"{listed} {'is' if len(mine) == 1 else 'are'} {what}{about}"


def _first_of(names: Iterable[str]) -> str:
    known = sorted(names)
    more = len(known) - FIRST_MAX
    return ", ".join(known[:FIRST_MAX]) + (f" and {more} more" if more > 0 else "")


def _kind(meta: TensorMeta) -> str:
    return f"{meta.dtype}{list(meta.shape)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (the nearest name there: {close[0]})" if close else ""
