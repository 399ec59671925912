"""Through a nested state: what stands in it, under which names. (torch)

Names are paths joined by dots. Modules contribute parameters and persistent buffers under canonical names: what wrappers
(DDP, FSDP, compile, activation checkpointing) put in between is left out, however they are nested.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from surefoot.ckpt.errors import StateError
from surefoot.ckpt.format.names import refusal
from surefoot.ckpt.format.values import DEPTH_MAX
from surefoot.ckpt.live.declared import Boxes, PerRank
from surefoot.ckpt.live.leaves import PLAIN_TYPES
from surefoot.ckpt.planning.ties import precedence

_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes under which torch.compile, FSDP1 and activation checkpointing keep the module they wrap."""


# ---------------------------------------------------------------- the nested mapping


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in the nested mapping, and where it stands: ``container[key]``."""

    name: str
    value: Any
    container: Any
    key: Any

    @property
    def fixed(self) -> bool:
        """It stands in something (a tuple) that cannot be changed."""
        return not isinstance(self.container, PerRank | MutableMapping | MutableSequence)

    def put(self, value: Any) -> None:
        """Let `value` stand there from now on."""
        if isinstance(self.container, PerRank):
            self.container.value = value
        elif not self.fixed:
            self.container[self.key] = value


def entries(state: Any, rank: int, prefix: str = "", depth: int = DEPTH_MAX) -> Iterator[Entry]:
    """The leaves of nested mappings and of sequences that hold more than plain values.

    Raises StateError: a key that means something else to us, or a state that contains itself.
    """
    if depth == 0:
        raise StateError(
            f"{prefix[:80]}...: nested deeper than {DEPTH_MAX} levels, or a state that contains itself"
        )
    items: Iterable[tuple[Any, Any]] = (
        cast("Mapping[Any, Any]", state).items() if isinstance(state, Mapping) else enumerate(state)
    )
    for key, value in items:
        name = f"{prefix}{key}"
        if why := refusal(name, str(key)):
            raise StateError(why)
        if isinstance(value, PerRank):
            yield from _entry(f"{name}@rank{rank}", value.value, value, None, rank, depth)
        else:
            yield from _entry(name, value, state, key, rank, depth)


def _entry(name: str, value: Any, container: Any, key: Any, rank: int, depth: int) -> Iterator[Entry]:
    if isinstance(value, PerRank):
        raise StateError(f"{name}: ckpt.PerRank within ckpt.PerRank; one is enough")
    if type(value) in PLAIN_TYPES:  # what there are thousands of is told by one look
        yield Entry(name, value, container, key)
    elif not is_stateful(value) and (
        (
            isinstance(value, Mapping) and not isinstance(value, Counter)
        )  # what was counted is a value, its keys no names
        or (isinstance(value, list | tuple) and _holds_objects(cast("Any", value)))
    ):
        yield from entries(value, rank, f"{name}.", depth - 1)
    else:
        yield Entry(name, value, container, key)


def _holds_objects(value: Any, depth: int = DEPTH_MAX) -> bool:
    if isinstance(value, torch.Tensor | Boxes | PerRank) or is_stateful(value):
        return True
    if depth == 0:
        return False  # where it is stored it will be refused
    if isinstance(value, list | tuple):
        return any(_holds_objects(v, depth - 1) for v in cast("Sequence[Any]", value))
    if isinstance(value, Mapping):
        return any(_holds_objects(v, depth - 1) for v in cast("Mapping[Any, Any]", value).values())
    return False


def is_read_by_parameter(value: Any) -> TypeGuard[Optimizer]:
    """An optimizer that keeps its state where torch's own keep it. One with a ``state_dict`` of its own (ZeroRedundancyOptimizer, what
    wraps another optimizer) may keep it elsewhere: it is an object with a state like any other."""
    return (
        isinstance(value, Optimizer)
        and type(value).state_dict is Optimizer.state_dict
        and not value._optimizer_state_dict_post_hooks
    )


def is_stateful(value: Any) -> bool:
    """Does it keep a state that can be taken out and put back?"""
    return isinstance(value, torch.Generator | np.random.Generator | random.Random) or (
        hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not isinstance(value, type)
    )


def state_access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to take the state out of an object for which `is_stateful` holds, and how to put it back."""
    match value:
        case torch.Generator():
            return value.get_state, value.set_state
        case random.Random():
            return value.getstate, value.setstate
        case np.random.Generator():
            bits: Any = value.bit_generator
            return lambda: bits.state, lambda state: setattr(bits, "state", state)
        case _:
            return value.state_dict, value.load_state_dict


def in_order(found: Iterable[Entry]) -> list[Entry]:
    """The same on all ranks, in whatever order their mappings were filled: a tensor that several values refer to is stored with
    the first. What is one rank's own comes last, so that nothing that all have refers to it."""
    return sorted(found, key=lambda entry: ("@rank" in entry.name, entry.name))


# ---------------------------------------------------------------- modules


class Named(NamedTuple):
    name: str
    tensor: torch.Tensor


def module_tensors(module: nn.Module, prefix: str) -> Iterator[Named]:
    """Parameters and persistent buffers under canonical names; tied ones under each of their names. Raises StateError."""
    for name, m in _modules(module, prefix):
        if isinstance(m, FSDPModule):
            m.reshard()  # after a forward without backward the root still holds whole parameters; otherwise it costs nothing
        transient = m._non_persistent_buffers_set
        for key, tensor in (*m._parameters.items(), *m._buffers.items()):
            if tensor is not None and key not in transient:
                yield Named(f"{name}.{key}", tensor)


def extra_states(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that keep more than tensors (get_extra_state), by the name of that value."""
    for name, m in _modules(module, prefix):
        if type(m).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}._extra_state", m


def require_told(module: nn.Module, name: str) -> None:
    """Raises StateError where the ``state_dict()`` of a submodule tells more than parameters, buffers and extra state: what is read
    here would be stored without it, and nobody would know."""
    for at, m in _modules(module, name):
        if not _tells_more(m):
            continue
        tensors = {*map(id, m.parameters()), *map(id, m.buffers())}
        tensors |= {identity(t) for t in (*m.parameters(), *m.buffers())}
        for key, value in m.state_dict(keep_vars=True).items():
            known = isinstance(value, torch.Tensor) and (id(value) in tensors or identity(value) in tensors)
            if not known and value is not None and key.rpartition(".")[2] != "_extra_state":
                raise StateError(
                    f"{at}.{key}: the state_dict() of {type(m).__qualname__} tells this, and it is no parameter, buffer or extra state, "
                    f"which is what is stored of a module: register it as a buffer, or give it by get_extra_state() and take it by "
                    f"set_extra_state()"
                )


def _tells_more(m: nn.Module) -> bool:
    """Perhaps: it has a way of its own to tell its state. Hooks of torch's own change names alone."""
    return _has_own_state_dict(type(m)) or any(
        not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in m._state_dict_hooks.values()
    )


@cache
def _has_own_state_dict(kind: type[nn.Module]) -> bool:
    torchs = (nn.Module, LazyModuleMixin, FullyShardedDataParallel)
    return any(
        name in vars(c)
        for c in kind.__mro__
        for name in ("state_dict", "_save_to_state_dict")
        if c not in torchs
    )


def _modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The module and all below it, each under every name it has."""
    yield name, module
    if isinstance(module, FullyShardedDataParallel):
        _require_whole(module, name)
    wraps = isinstance(module, DistributedDataParallel | DataParallel)
    for key, child in module._modules.items():
        if child is not None:
            transparent = key in _WRAPPER_SEGMENTS or (wraps and key == "module")
            yield from _modules(child, name if transparent else f"{name}.{key}")


def _require_whole(module: FullyShardedDataParallel, name: str) -> None:
    handle: Any = module._handle
    if handle is not None and handle.uses_sharded_strategy:
        raise StateError(
            f"{name}: FullyShardedDataParallel (FSDP1) keeps flat shards that do not tell their place; use fully_shard (FSDP2), or put "
            f"the SHARDED_STATE_DICT of FSDP.state_dict_type into the state"
        )


# ---------------------------------------------------------------- ties


def identity(t: torch.Tensor) -> Any:
    """Equal for two tensors that are one: the same object, or the same view of the same memory. Valid while both live."""
    if type(t) not in PLAIN_TYPES:
        if isinstance(t, DTensor):
            return identity(t._local_tensor), id(t.device_mesh), t.placements, t.shape
        if hasattr(type(t), "__tensor_flatten__") or is_lazy(t):
            return id(t)
    if t.layout is not torch.strided or t.is_meta or t.is_nested:
        return id(t)
    # The storage itself, not its address: those without memory have none.
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


def shared_tensors(found: Iterable[Entry], owners: Owners) -> dict[Any, list[Named]]:
    """The live tensors of modules and of the state itself, by identity, each under all of its names: it is stored under the first.

    `owners` gets to know them. Nothing depends on the order of the entries.
    """
    groups: dict[Any, list[Named]] = {}
    for named in _named_tensors(found):
        groups.setdefault(identity(named.tensor), []).append(named)
        owners.add(named.tensor, Owner(named.name))
    for group in groups.values():
        if len(group) > 1:
            group.sort(key=lambda named: precedence(named.name))
    return groups


def _named_tensors(found: Iterable[Entry]) -> Iterator[Named]:
    for entry in found:
        if isinstance(entry.value, nn.Module):
            yield from module_tensors(entry.value, entry.name)
        elif isinstance(entry.value, torch.Tensor):
            yield Named(entry.name, entry.value)


# ---------------------------------------------------------------- whose an optimizer's parameters are


class Owner(NamedTuple):
    """What a parameter is called; or of which declared boxes it is part number `at`."""

    name: str
    boxes: Boxes | None = None
    at: int = 0


class Owners:
    """The tensors that an optimizer's parameters may be."""

    def __init__(self) -> None:
        self._by_id: dict[int, Owner] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Of several names the one that it would be stored under counts, whichever comes first."""
        known = self._by_id.setdefault(id(tensor), owner)
        if known is not owner and precedence(owner.name) < precedence(known.name):
            self._by_id[id(tensor)] = owner
        self._tensors.setdefault(owner.name, tensor)

    def add_boxes(self, name: str, boxes: Boxes) -> None:
        for i, (_, part) in enumerate(boxes.parts):
            self.add(part, Owner(name=name, boxes=boxes, at=i))

    def of(self, parameter: torch.Tensor) -> Owner | None:
        return self._by_id.get(id(parameter))

    def called(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(name)
