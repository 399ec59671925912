"""Live training state to named tensors and values: `collect`. (torch)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from surefoot.ckpt.errors import StateError
from surefoot.ckpt.format.names import refusal
from surefoot.ckpt.format.values import encode_value, tensor_names, tensor_ref
from surefoot.ckpt.live.declared import Boxes, PerRank
from surefoot.ckpt.live.kinds import encode_torch
from surefoot.ckpt.live.leaves import Leaf, leaf_of
from surefoot.ckpt.live.optimizers import optimizer_values, warn_of_numbers
from surefoot.ckpt.live.walking import (
    Entry,
    Named,
    Owners,
    entries,
    extra_states,
    identity,
    in_order,
    is_read_by_parameter,
    is_stateful,
    require_told,
    shared_tensors,
    state_access,
)
from surefoot.ckpt.live.wrapped import is_wrapped, unwrap

INLINE_NBYTES = 1024
"""Arrays and bytes above this are stored as tensors: manifests stay small."""


@dataclass(slots=True)
class Collected:
    """All of a state. `aliases` are second names of tied tensors."""

    leaves: dict[str, Leaf] = field(default_factory=dict[str, Leaf])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    optimizers: dict[str, Optimizer] = field(default_factory=dict[str, Optimizer])


def collect(state: Mapping[str, Any], rank: int = 0) -> Collected:
    """Everything in `state`, by name. Copies no tensor; they are live.

    Args:
        rank: under which `PerRank` values are stored.

    Raises StateError naming the entry that cannot be stored, or two that have the same name.
    """
    with torch.no_grad():
        found = in_order(entries(state, rank))
        if rank == 0:
            warn_of_numbers(found)
        walk = _Walk(found)
        for entry in found:
            walk.add(entry)
        for name, optimizer in walk.found.optimizers.items():
            walk.add_optimizer(name, optimizer)
    _require_text((*walk.found.leaves, *walk.found.aliases, *walk.found.values))
    return walk.found


def _require_text(names: Sequence[str]) -> None:
    """Also of what modules and values call theirs."""
    try:
        "".join(names).encode()
    except UnicodeEncodeError as e:
        raise StateError(next(filter(None, (refusal(n, "") for n in names)))) from e


class _Walk:
    def __init__(self, entries: Sequence[Entry]) -> None:
        """Add the tensors of modules and of the state itself: what else refers to one of them does so by its name there."""
        self.found = Collected()
        self._owners = Owners()
        shared = shared_tensors(entries, self._owners)
        self._names: dict[Any, str] = {key: group[0].name for key, group in shared.items()}
        self._alive: list[Any] = [shared]
        """Identities are valid only as long as their tensors live."""
        for group in shared.values():
            self._add_shared(group)

    def add(self, entry: Entry) -> None:
        match entry.value:
            case nn.Module():
                require_told(entry.value, entry.name)
                for name, module in extra_states(entry.value, entry.name):
                    self._add_value(name, module.get_extra_state())
            case torch.Tensor():
                pass  # added already
            case Boxes():
                self._owners.add_boxes(entry.name, entry.value)
                self._add_leaf(entry.name, entry.value)
            case value if is_read_by_parameter(value):
                self.found.optimizers[entry.name] = value
            case value if is_stateful(value):
                get, _ = state_access(value)
                self._add_value(entry.name, get())
            case value:
                self._add_value(entry.name, value)

    def add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        for stored in optimizer_values(name, optimizer, self._owners):
            state = encode_value(stored.state, stored.name, self._encode_leaf)
            if stored.group is not None:
                state = {"dict": [["group", stored.group], ["state", state]]}
            self._put_value(stored.name, state)

    def _add_shared(self, group: Sequence[Named]) -> None:
        stored, tensor = group[0]
        if is_wrapped(tensor):
            encoded = self._encode_wrapped(stored, tensor)
            for named in group:
                self._put_value(named.name, encoded)  # all refer to the same inner tensors
            return
        self._add_leaf(stored, tensor)
        for named in group[1:]:
            self._require_new(named.name)
            self.found.aliases[named.name] = stored

    def _add_leaf(self, name: str, tensor: torch.Tensor | Boxes) -> None:
        self._require_new(name)
        self.found.leaves[name] = leaf_of(name, tensor)

    def _add_value(self, name: str, value: Any) -> None:
        self._put_value(name, encode_value(value, name, self._encode_leaf))

    def _put_value(self, name: str, encoded: Any) -> None:
        """A value that is but one tensor shares its name with it."""
        if name not in self.found.leaves or name in self.found.values or tensor_names(encoded) != [name]:
            self._require_new(name)
        self.found.values[name] = encoded

    def _encode_leaf(self, name: str, value: Any) -> Any:
        match value:
            case torch.Tensor():
                return self._encode_tensor(name, value)
            case Boxes():
                self._add_leaf(name, value)
                return tensor_ref(name)
            case np.ndarray() if (
                type(value) is np.ndarray
                and value.nbytes > INLINE_NBYTES
                and (t := _tensor_of(value)) is not None
            ):
                self._add_leaf(name, t)
                return {"array": [value.dtype.str, name]}
            case bytes() | bytearray() if len(value) > INLINE_NBYTES and type(value) in (bytes, bytearray):
                self._add_leaf(name, torch.frombuffer(bytearray(value), dtype=torch.uint8))
                return {"blob": [type(value).__name__, name]}
            case PerRank():
                raise StateError(
                    f"{name}: ckpt.PerRank cannot stand inside of a plain value or of what state_dict() gives; put it into the mapping "
                    f"of the state, around the whole entry"
                )
            case _:
                return encode_torch(value)

    def _encode_tensor(self, name: str, tensor: torch.Tensor) -> Any:
        """A tensor inside a value: a reference, to a tensor that is known already where it is the same one."""
        first = self._names.setdefault(identity(tensor), name)
        self._alive.append(tensor)
        if first != name and first in self.found.leaves:
            return tensor_ref(first)
        if is_wrapped(tensor):
            return self._encode_wrapped(name, tensor)
        self._add_leaf(name, tensor)
        return tensor_ref(name)

    def _encode_wrapped(self, name: str, tensor: torch.Tensor) -> Any:
        wrapped = unwrap(name, tensor)
        self._alive.append(wrapped)
        return wrapped.encoded({a: self._encode_leaf(f"{name}.{a}", p) for a, p in wrapped.parts.items()})

    def _require_new(self, name: str) -> None:
        if name in self.found.leaves or name in self.found.aliases or name in self.found.values:
            raise StateError(f"two entries of the state are called {name}: rename one of them")


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """The same elements as a tensor, or None for what torch has no type for."""
    if array.dtype.kind not in "biufc" or not array.dtype.isnative:
        return None
    try:
        return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())
    except TypeError:
        return None


def missing_optimizer_nbytes(found: Collected) -> int:
    """How many bytes of state the optimizers will probably add at their first step, for parameters that have none yet.

    Twice the parameters for the Adam family (three times with amsgrad), once for momentum; an optimizer we do not know is
    taken for Adam.
    """
    total = 0
    for optimizer in found.optimizers.values():
        for group in optimizer.param_groups:
            copies = 1 if "momentum" in group and "betas" not in group else 3 if group.get("amsgrad") else 2
            for p in group["params"]:
                state: Any = optimizer.state.get(p)
                if state is None or (isinstance(state, Mapping) and not state):
                    local = cast("torch.Tensor", p.to_local()) if isinstance(p, DTensor) else p
                    # 4 bytes at least: optimizers keep their state in float32 for smaller types; 64: the step.
                    total += copies * local.numel() * max(local.element_size(), 4) + 64
    return total
