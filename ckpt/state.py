"""Live training state to named tensors and values, and back. (torch)

`collect` walks a nested mapping of tensors, DTensors, modules, optimizers, objects with `state_dict`/`load_state_dict` and
plain values. Names are paths joined by dots. Modules contribute parameters and persistent buffers under canonical names
(what wrappers put in between is left out), optimizers what they know of each parameter, by the parameter's name:

    model.layers.0.weight                              a tensor
    optim.params.model.layers.0.weight.exp_avg         a tensor
    optim.params.model.layers.0.weight                 a value: group number, and the parameter's state with references
    optim.param_groups                                 a value: the groups' settings
    sched                                              a value: what state_dict() gave

`load_into` goes the other way, in place: it matches names, creates optimizer state that is absent, asks a `Source` to fill
tensors (which verifies what it reads), and only then sets plain values and calls `load_state_dict`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from surefoot.ckpt.boxes import Box, Held, Sharding, held_boxes, intersect, local_shape, relative, whole
from surefoot.ckpt.errors import StateError, StateMismatchError
from surefoot.ckpt.manifest import TensorMeta
from surefoot.ckpt.plan import ITEMSIZES, HeldTensor
from surefoot.ckpt.values import decode_value, encode_value, tensor_ref

_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes under which torch.compile, FSDP1 and activation checkpointing keep the module they wrap."""
_LISTED_MAX = 8


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


# ---------------------------------------------------------------- one tensor


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One live tensor: the boxes this rank holds of it with the live view of each, and what it is as a whole."""

    name: str
    held: tuple[Held, ...]
    views: tuple[torch.Tensor, ...]
    """``views[i]`` is what lies in ``held[i].box``, of that box's extent."""
    meta: TensorMeta

    def layout(self) -> HeldTensor:
        boxes = tuple(h.box for h in self.held)
        return HeldTensor(name=self.name, dtype=self.meta.dtype, shape=self.meta.shape, boxes=boxes)

    @cached_property
    def _position(self) -> dict[Box, int]:
        return {h.box: i for i, h in enumerate(self.held)}

    def holding(self, box: Box) -> int:
        """Which of the held boxes `box` lies within. Raises ValueError where it lies within none."""
        if (known := self._position.get(box)) is not None:
            return known
        for i, h in enumerate(self.held):
            if intersect(h.box, box) == box:
                return i
        raise ValueError(f"{self.name}: {box} lies within none of the boxes held here")


def leaf_of(name: str, tensor: torch.Tensor) -> Leaf:
    """Raises StateError for what cannot be stored. Call under torch.no_grad: the views are written to on load."""
    if isinstance(tensor, DTensor):
        local, held = _local_of(name, tensor)
    else:
        _require_plain(name, tensor)
        local, held = tensor, _whole_held(tuple(tensor.shape))
    dtype = dtype_name(tensor.dtype)
    if dtype not in ITEMSIZES:
        raise StateError(f"{name}: tensors of {dtype} cannot be stored; convert it, or store its parts")
    views = tuple(_view(local, h) for h in held)
    return Leaf(name=name, held=held, views=views, meta=TensorMeta(dtype=dtype, shape=tuple(tensor.shape)))


def _view(local: torch.Tensor, held: Held) -> torch.Tensor:
    if tuple(local.shape) == held.box.extent:
        return local
    return local[tuple(slice(o, o + e) for o, e in zip(held.local, held.box.extent, strict=True))]


@lru_cache(maxsize=4096)
def _whole_held(shape: tuple[int, ...]) -> tuple[Held, ...]:
    return (Held(whole(shape), (0,) * len(shape)),) if 0 not in shape else ()


def _require_plain(name: str, t: torch.Tensor) -> None:
    if t.layout is not torch.strided or t.is_quantized or t.device.type == "meta":
        raise StateError(
            f"{name}: a {t.layout} tensor on {t.device} cannot be stored; make it dense and real first"
        )
    if hasattr(type(t), "__tensor_flatten__"):
        raise StateError(
            f"{name}: {type(t).__qualname__} wraps other tensors; store those, each under a name of its own"
        )


def _local_of(name: str, t: DTensor) -> tuple[torch.Tensor, tuple[Held, ...]]:
    local = t.to_local()
    if t.device_mesh.get_coordinate() is None:
        return local, ()
    if any(p.is_partial() for p in t.placements):
        raise StateError(f"{name}: a DTensor with partial sums has no values yet; redistribute it first")
    _require_plain(name, local)
    shardings = _shardings(t)
    held, expected = _sharded(tuple(t.shape), shardings)
    if tuple(local.shape) != expected:
        raise StateError(
            f"{name}: the local tensor has shape {list(local.shape)}, and placements {t.placements} of {list(t.shape)} call for "
            f"{list(expected)}: a shard of another form than torch's cannot be stored"
        )
    return local, held


def _shardings(t: DTensor) -> tuple[Sharding, ...]:
    """How the mesh dimensions cut the tensor, in the order in which they were applied.

    Which chunk is ours goes by our rank in the group of the mesh dimension. That is what torch's collectives go by, so it is
    what `full_tensor` shows, and where FSDP and `distribute_tensor` put things. The coordinate in the mesh is another
    number where the mesh does not list its ranks in ascending order.

    That is from left to right, except for what FSDP does to a tensor that is sharded on the same dimension already: its
    strided shard stands left of the others and says by its factor, the number of their shards, that it cuts each of those.
    Taken from left to right it would come out the same only where everything divides evenly.
    """
    order: list[Sharding] = []
    for i, p in reversed(list(enumerate(cast("Sequence[Any]", t.placements)))):
        if p.is_replicate():
            continue
        dim = p.dim % max(t.dim(), 1)
        factor: int = getattr(p, "split_factor", 1)
        right = math.prod(s.parts for s in order if s.dim == dim)
        parts, at = t.device_mesh.size(i), t.device_mesh.get_local_rank(i)
        if factor > 1 and factor == right:
            order.append(Sharding(dim, parts, at))
        else:
            order.insert(0, Sharding(dim, parts, at, factor))
    return tuple(order)


@lru_cache(maxsize=65536)
def _sharded(
    shape: tuple[int, ...], shardings: tuple[Sharding, ...]
) -> tuple[tuple[Held, ...], tuple[int, ...]]:
    return tuple(held_boxes(shape, shardings)), local_shape(shape, shardings)


def part_of(leaf: Leaf, box: Box) -> torch.Tensor:
    """The live view of `box` of the whole, which lies within one of the boxes held here."""
    at = leaf.holding(box)
    outer, view = leaf.held[at].box, leaf.views[at]
    if box == outer:
        return view
    inside = relative(box, outer)
    return view[tuple(slice(o, o + e) for o, e in zip(inside.offset, inside.extent, strict=True))]


def fill_part(leaf: Leaf, piece: Box, part: Box, raw: bytes | bytearray | memoryview) -> None:
    """Copy `part`, which lies within one held box, into the live tensor. `raw` is the `span` of `part` in the stored, row-major
    `piece`."""
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype_of(leaf.meta.dtype))
    strides = tuple(math.prod(piece.extent[i + 1 :]) for i in range(len(piece.extent)))
    part_of(leaf, part).copy_(flat.as_strided(part.extent, strides))


# ---------------------------------------------------------------- collecting


@dataclass(slots=True)
class Collected:
    """All of a state. `aliases` are second names of tied tensors."""

    leaves: dict[str, Leaf] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)


def collect(state: Mapping[str, Any]) -> Collected:
    """Everything in `state`, by name. Copies nothing; the tensors are live.

    Raises StateError naming the entry that cannot be stored, or two that have the same name.
    """
    with torch.no_grad():
        walk = _Walk()
        for entry in entries(state):
            walk.add(entry)
        for name, optimizer in walk.found.optimizers.items():
            walk.add_optimizer(name, optimizer)
    return walk.found


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in the nested mapping, and where it stands: ``container[key]``."""

    name: str
    value: Any
    container: Any
    key: Any


def entries(state: Any, prefix: str = "") -> Iterator[Entry]:
    """The leaves of nested mappings and of sequences that hold more than plain values."""
    items: Iterable[tuple[Any, Any]] = (
        cast("Mapping[Any, Any]", state).items() if isinstance(state, Mapping) else enumerate(state)
    )
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) or (
            isinstance(value, list | tuple) and _holds_objects(cast("Any", value))
        ):
            yield from entries(value, f"{name}.")
        else:
            yield Entry(name, value, state, key)


def _holds_objects(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_objects(v) for v in cast("Sequence[Any]", value))
    if isinstance(value, Mapping):
        return any(_holds_objects(v) for v in cast("Mapping[Any, Any]", value).values())
    return isinstance(value, torch.Tensor) or is_stateful(value)


def is_stateful(value: Any) -> bool:
    """Does it give and take its state as state_dict?"""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class _Walk:
    def __init__(self) -> None:
        self.found = Collected()
        self._names: dict[Any, str] = {}
        self._parameters: dict[int, str] = {}

    def add(self, entry: Entry) -> None:
        match entry.value:
            case nn.Module():
                for named in module_tensors(entry.value, entry.name):
                    self._add_shared(named.name, named.tensor)
                for name, module in extra_states(entry.value, entry.name):
                    self._add_value(name, module.get_extra_state())
            case torch.Tensor():
                self._add_shared(entry.name, entry.value)
            case Optimizer():
                self.found.optimizers[entry.name] = entry.value
            case value if is_stateful(value):
                self._add_value(entry.name, value.state_dict())
            case value:
                self._add_value(entry.name, value)

    def add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        groups: list[dict[str, Any]] = []
        for number, group in enumerate(optimizer.param_groups):
            groups.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
            for at, parameter in enumerate(group["params"]):
                owner = self.parameter_name(parameter, f"{name}.param_groups.{number}.params.{at}")
                known = {"group": number, **optimizer.state.get(parameter, {})}
                self._add_value(f"{name}.params.{owner}", known)
        self._add_value(f"{name}.param_groups", groups)

    def parameter_name(self, parameter: torch.Tensor, where: str) -> str:
        name = self._parameters.get(id(parameter))
        if name is None:
            raise StateError(
                f"{where} ({list(parameter.shape)}) belongs to no module of the state: put the module that owns it into the same "
                f"state, since optimizer state is stored by parameter name"
            )
        return name

    def _add_shared(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that may be known under another name already."""
        key = _identity(tensor)
        first = self._names.get(key)
        if first is not None:
            self._require_new(name)
            self.found.aliases[name] = first
            return
        self._names[key] = name
        self._parameters[id(tensor)] = name
        self._add_tensor(name, tensor)

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        self._require_new(name)
        self.found.leaves[name] = leaf_of(name, tensor)

    def _add_value(self, name: str, value: Any) -> None:
        self._require_new(name)
        self.found.values[name] = encode_value(value, name, self._encode_tensor)

    def _encode_tensor(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        self._add_tensor(name, value)
        return tensor_ref(name)

    def _require_new(self, name: str) -> None:
        if name in self.found.leaves or name in self.found.aliases or name in self.found.values:
            raise StateError(f"two entries of the state are called {name}: rename one of them")


def _identity(t: torch.Tensor) -> Any:
    """Equal for two tensors that are one: the same object, or the same view of the same memory."""
    if isinstance(t, DTensor) or t.numel() == 0 or t.device.type == "meta" or t.layout is not torch.strided:
        return id(t)
    return t.untyped_storage().data_ptr(), t.storage_offset(), tuple(t.shape), t.stride(), t.dtype


@dataclass(frozen=True, slots=True)
class Named:
    name: str
    tensor: torch.Tensor


def module_tensors(module: nn.Module, prefix: str) -> Iterator[Named]:
    """Parameters and persistent buffers under canonical names; tied ones under each of their names."""
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


def _modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The module and all below it, each under every name it has."""
    yield name, module
    wraps = isinstance(module, DistributedDataParallel | DataParallel)
    for key, child in module._modules.items():
        if child is not None:
            transparent = key in _WRAPPER_SEGMENTS or (wraps and key == "module")
            yield from _modules(child, name if transparent else f"{name}.{key}")


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
                if not optimizer.state.get(p):
                    local = cast("torch.Tensor", p.to_local()) if isinstance(p, DTensor) else p
                    # 4 bytes at least: optimizers keep their state in float32 for smaller types; 64: the step.
                    total += copies * local.numel() * max(local.element_size(), 4) + 64
    return total


# ---------------------------------------------------------------- loading


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Fill `leaf` with the stored tensor `stored`."""

    leaf: Leaf
    stored: str


class Source(Protocol):
    """Where a load comes from: a snapshot image, or a manifest."""

    @property
    def label(self) -> str:
        """For messages: ``step 20 of generation 3``."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorMeta]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    @property
    def values(self) -> Mapping[str, Any]: ...

    def fill(self, wants: Sequence[Want]) -> None:
        """Read, verify and copy into the local tensors. Raises DamagedError, ImageError, StateMismatchError."""
        ...


@dataclass(frozen=True, slots=True)
class _Ref:
    """Stands for a stored tensor inside a decoded value."""

    name: str


class _Load:
    """One load: gathers what to do (`wants` and `later`) and what does not fit (`problems`), then does it."""

    def __init__(self, source: Source, *, strict: bool) -> None:
        self.source = source
        self.strict = strict
        self.wants: list[Want] = []
        self.later: list[Any] = []
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.used: set[str] = set()
        self.parameters: dict[int, str] = {}

    # ---- what the checkpoint has

    def stored_tensor(self, name: str) -> str | None:
        for known in (name, self.source.aliases.get(name)):
            if known is not None and known in self.source.tensors:
                self.used.update({name, known})
                return known
        return None

    def value(self, name: str) -> Any:
        """The decoded value with `_Ref`s, or None where there is none (then it is noted as missing)."""
        if name not in self.source.values:
            self.missing.append(name)
            return None
        self.used.add(name)
        return decode_value(self.source.values[name], name, _Ref)

    # ---- gathering

    def want(self, names: Sequence[str], tensor: torch.Tensor) -> None:
        """Fill a live tensor that has these names."""
        stored = next((s for n in names if (s := self.stored_tensor(n)) is not None), None)
        for n in names:
            self.stored_tensor(n)  # tied here and not there: its other names are served as well
        if stored is None:
            self.missing.append(names[0])
            return
        leaf = leaf_of(names[0], tensor)
        meta = self.source.tensors[stored]
        if leaf.meta != meta:
            self.problems.append(f"{names[0]} is {_kind(leaf.meta)} here and {_kind(meta)} in the checkpoint")
            return
        self.wants.append(Want(leaf=leaf, stored=stored))

    def tensor_for(
        self,
        ref: _Ref,
        like: Any,
        *,
        owner: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """The live tensor to fill for a reference: `like` where it fits, otherwise a new one.

        A new one that has the shape of `owner` (a parameter) takes its layout; others are plain, on `device`, or where
        `like` was.
        """
        meta = self.source.tensors.get(ref.name)
        if meta is None:
            self.problems.append(
                f"{ref.name}: a value refers to this tensor, and the checkpoint does not have it"
            )
            return torch.empty(0)
        dtype = dtype_of(meta.dtype)
        if (
            isinstance(like, torch.Tensor)
            and TensorMeta(dtype=dtype_name(like.dtype), shape=tuple(like.shape)) == meta
        ):
            tensor = like
        elif owner is not None and tuple(owner.shape) == meta.shape:
            tensor = torch.zeros_like(owner, dtype=dtype, requires_grad=False)
        else:
            if isinstance(like, torch.Tensor) and not isinstance(like, DTensor):
                device = like.device
            tensor = torch.zeros(meta.shape, dtype=dtype, device=device)
        self.want([ref.name], tensor)
        return tensor

    def add(self, entry: Entry, ties: Mapping[str, list[str]]) -> None:
        match entry.value:
            case nn.Module():
                for named in module_tensors(entry.value, entry.name):
                    self.add_shared(named.name, named.tensor, ties)
                for name, module in extra_states(entry.value, entry.name):
                    self.add_stateful(name, module.get_extra_state, module.set_extra_state)
            case torch.Tensor():
                self.add_shared(entry.name, entry.value, ties)
            case Optimizer():
                pass  # after all modules: see load_into
            case value if is_stateful(value):
                self.add_stateful(entry.name, value.state_dict, value.load_state_dict)
            case _:
                self.add_value(entry)

    def add_shared(self, name: str, tensor: torch.Tensor, ties: Mapping[str, list[str]]) -> None:
        if name in ties:
            self.parameters[id(tensor)] = name
            self.want([name, *ties[name]], tensor)

    def add_stateful(self, name: str, get: Any, put: Any) -> None:
        value = self.value(name)
        if name not in self.source.values:
            return
        live = _tensors_in(get(), name)
        filled = _replace(value, lambda ref: self.tensor_for(ref, live.get(ref.name)))
        self.later.append(lambda: put(filled))

    def add_value(self, entry: Entry) -> None:
        value = self.value(entry.name)
        if entry.name not in self.source.values:
            return
        filled = _replace(value, lambda ref: self.tensor_for(ref, None))

        def put() -> None:
            if isinstance(entry.container, MutableMapping | MutableSequence):
                entry.container[entry.key] = filled
            elif entry.value != filled:
                raise StateMismatchError(
                    f"{entry.name} is {filled!r} in the checkpoint and {entry.value!r} here, in a {type(entry.container).__name__} "
                    f"that cannot be changed: use a dict or a list"
                )

        self.later.append(put)

    def add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        prefix = f"{name}.params."
        groups_name = f"{name}.param_groups"
        if groups_name not in self.source.values:
            self.missing.append(f"{name} (an optimizer, of which nothing was saved)")
            return
        groups: list[dict[str, Any]] = self.value(groups_name)
        origin: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                owner = self.parameters.get(id(parameter))
                if owner is None:
                    self.problems.append(
                        f"{name}: a parameter of group {number} belongs to no module of the state"
                    )
                    continue
                known: dict[str, Any] | None = self.value(prefix + owner)
                if known is None:
                    continue
                there = known.pop("group")
                if origin.setdefault(number, there) != there:
                    self.problems.append(
                        f"{name}: {owner} is in parameter group {there} of the checkpoint, other parameters of group {number} here "
                        f"are in {origin[number]}: build the groups as they were saved"
                    )
                on_device = bool(group.get("capturable") or group.get("fused"))
                self._add_parameter_state(optimizer, parameter, known, on_device=on_device)
        self._add_groups(name, optimizer, groups, origin)

    def _add_parameter_state(
        self, optimizer: Optimizer, parameter: Any, known: dict[str, Any], *, on_device: bool
    ) -> None:
        """`on_device`: the optimizer keeps its step counter beside the parameter, not in host memory."""
        live: dict[str, Any] = optimizer.state.get(parameter, {})
        device = parameter.device if on_device else None
        filled = {
            key: self.tensor_for(v, live.get(key), owner=parameter, device=device)
            if isinstance(v, _Ref)
            else _replace(v, lambda ref: self.tensor_for(ref, None, owner=parameter, device=device))
            for key, v in known.items()
        }

        def put() -> None:
            if not filled:
                optimizer.state.pop(parameter, None)  # what was absent stays absent
                return
            mine = optimizer.state[parameter]
            for key in [k for k in mine if k not in filled]:
                del mine[key]
            mine.update(filled)

        self.later.append(put)

    def _add_groups(
        self, name: str, optimizer: Optimizer, groups: list[dict[str, Any]], origin: Mapping[int, int]
    ) -> None:
        if len(groups) != len(optimizer.param_groups):
            self.problems.append(
                f"{name} has {len(optimizer.param_groups)} parameter groups here and {len(groups)} in the checkpoint"
            )
            return
        for number, group in enumerate(optimizer.param_groups):
            saved = groups[origin.get(number, number)]
            filled = {
                key: self.tensor_for(v, group.get(key)) if isinstance(v, _Ref) else v
                for key, v in saved.items()
            }
            self.later.append(lambda group=group, filled=filled: group.update(filled))

    # ---- the end

    def refuse_what_does_not_fit(self) -> None:
        """Raises StateMismatchError naming everything that does not fit."""
        problems = list(self.problems)
        if self.strict:
            stored = {*self.source.tensors, *self.source.aliases, *self.source.values}
            problems += [f"{n} is not in the checkpoint{_nearest(n, stored)}" for n in self.missing]
            problems += [f"{n} is in the checkpoint and not in the state" for n in sorted(stored - self.used)]
        if problems:
            more = len(problems) - _LISTED_MAX
            listed = "; ".join(problems[:_LISTED_MAX]) + (f"; and {more} more" if more > 0 else "")
            hint = "" if self.problems else " (strict=False loads what both have)"
            raise StateMismatchError(f"{self.source.label} does not fit the state: {listed}{hint}")


def load_into(state: Mapping[str, Any], source: Source, *, strict: bool = True) -> list[str]:
    """Fill `state` in place from `source`; returns the names that the checkpoint does not have (none if strict).

    Nothing of `state` is touched before all names, shapes and types are known to fit, and no plain value before all
    tensors are filled and verified. Where filling fails, tensors may hold a mixture: load something else, or give up.

    Raises:
        StateMismatchError: names, shapes, types or groups differ.
        DamagedError, ImageError: from the source.
    """
    with torch.no_grad():
        found = list(entries(state))
        ties = _ties(found)
        load = _Load(source, strict=strict)
        for entry in found:
            load.add(entry, ties)
        for entry in found:
            if isinstance(entry.value, Optimizer):
                load.add_optimizer(entry.name, entry.value)
        load.refuse_what_does_not_fit()
        source.fill(load.wants)
        for act in load.later:
            act()
    return load.missing


def _ties(found: Iterable[Entry]) -> dict[str, list[str]]:
    """First name of each live tensor of modules and of the state itself, to its other names."""
    first: dict[Any, str] = {}
    ties: dict[str, list[str]] = {}
    for entry in found:
        if isinstance(entry.value, nn.Module):
            named = module_tensors(entry.value, entry.name)
        elif isinstance(entry.value, torch.Tensor):
            named = iter([Named(entry.name, entry.value)])
        else:
            continue
        for n in named:
            known = first.setdefault(_identity(n.tensor), n.name)
            if known == n.name:
                ties[n.name] = []
            else:
                ties[known].append(n.name)
    return ties


def _kind(meta: TensorMeta) -> str:
    return f"{meta.dtype}{list(meta.shape)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (the nearest name there: {close[0]})" if close else ""


def _tensors_in(value: Any, name: str) -> dict[str, torch.Tensor]:
    """Tensors inside a plain value, by path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = cast("Mapping[Any, Any]", value).items()
    elif isinstance(value, list | tuple):
        items = enumerate(cast("Sequence[Any]", value))
    else:
        return {}
    return {n: t for k, v in items for n, t in _tensors_in(v, f"{name}.{k}").items()}


def _replace(value: Any, tensor: Any) -> Any:
    """A decoded value with every `_Ref` replaced by what `tensor` gives for it."""
    match value:
        case _Ref():
            return tensor(value)
        case list():
            return [_replace(v, tensor) for v in cast("list[Any]", value)]
        case tuple():
            return tuple(_replace(v, tensor) for v in cast("tuple[Any, ...]", value))
        case dict():
            return {k: _replace(v, tensor) for k, v in cast("dict[Any, Any]", value).items()}
        case _:
            return value
