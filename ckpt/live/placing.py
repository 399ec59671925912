"""Decoded values and the live state: finding the tensors and classes for them, and putting them together. (torch)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from surefoot.ckpt.errors import DamagedError
from surefoot.ckpt.format.values import Member, Record, class_name, decode_value
from surefoot.ckpt.live.declared import Boxes
from surefoot.ckpt.live.kinds import decode_torch
from surefoot.ckpt.live.leaves import dtype_name, dtype_of
from surefoot.ckpt.live.source import Source
from surefoot.ckpt.live.wrapped import Wrapped, decode_wrapped, is_wrapped

Make = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes a new tensor for what has no live one that fits."""


@dataclass(eq=False, slots=True)
class Ref:
    """Stands for a stored tensor inside a decoded value; `tensor` is the live one that a load fills."""

    name: str
    tensor: Any = None


@dataclass(eq=False, slots=True)
class Packed:
    """Stands for an array (``array``) or bytes (``blob``) that were stored as a tensor."""

    kind: str
    type: str
    ref: Ref
    live: Any = None
    """The live array that is filled in place, where it fits."""


class Placing(ABC):
    """Gathers what a decoded value needs of the live state (`reserve`), and makes it what it was (`build`)."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[str] = []
        self.live: dict[str, torch.Tensor] = {}
        """The live tensor for a stored one, to restore what is shared."""
        self._holders: dict[int, list[Ref | Packed]] = {}
        """What stands for a tensor in decoded values, by the tensor's id."""

    @abstractmethod
    def want(self, names: Sequence[str], tensor: torch.Tensor | Boxes, *, movable: bool = False) -> None:
        """Let the load fill a live tensor that has these names. `movable`: it stands in a decoded value alone; see `move`."""

    @abstractmethod
    def fill_wrapped(self, name: str, there: Any, tensor: torch.Tensor) -> None:
        """Let the load fill the inner tensors of a live tensor subclass from a decoded one."""

    def move(self, stored: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Let the values have `other` for this stored tensor instead of `tensor`."""
        for holder in self._holders.get(id(tensor), ()):
            ref = holder.ref if isinstance(holder, Packed) else holder
            if self.source.aliases.get(ref.name, ref.name) == stored:
                ref.tensor = other
                if isinstance(holder, Packed):
                    holder.live = None
        if self.live.get(stored) is tensor:
            self.live[stored] = other

    def decode(self, name: str) -> Any:
        return decode_value(self.source.values[name], name, Ref, _decode_leaf)

    def reserve(self, value: Any, live: Any, path: str, make: Make | None) -> None:
        """Find the live tensors, members and classes for what stands in a decoded value, and want the tensors.

        Args:
            live: the value there is now: tensors that fit are filled in place.
            make: see `Make`; plain tensors beside the live one otherwise.
        """
        match value:
            case Ref():
                value.tensor = self._tensor_for(value, live, make)
                self._holders.setdefault(id(value.tensor), []).append(value)
            case Packed():
                value.ref.tensor = self._array_for(value, live)
                self._holders.setdefault(id(value.ref.tensor), []).append(value)
            case Wrapped():
                if not isinstance(live, torch.Tensor) or not is_wrapped(live):
                    self.problems.append(
                        f"{path} is {value.kind()} in the checkpoint, and there is no live tensor of that class to fill: its class is "
                        f"taken from the state alone, so create it first"
                    )
                    return
                self.fill_wrapped(path, value, live)
            case Member():
                self._find_member(value, live, path)
            case Record():
                self._find_record(value, live, path, make)
            case dict():
                for k, v in cast("dict[Any, Any]", value).items():
                    self.reserve(v, _item(live, k), f"{path}.{k}", make)
            case list() | tuple() | deque():
                for i, v in enumerate(cast("Sequence[Any]", value)):
                    self.reserve(v, _item(live, i), f"{path}.{i}", make)
            case _:
                pass

    def _tensor_for(self, ref: Ref, live: Any, make: Make | None) -> torch.Tensor:
        stored = self.source.aliases.get(ref.name, ref.name)
        meta = self.source.tensors.get(stored)
        if meta is None:
            self.problems.append(
                f"{ref.name}: a value refers to this tensor, and the checkpoint does not have it"
            )
            return torch.empty(0, device="cpu")
        dtype = dtype_of(meta.dtype)
        if (
            isinstance(live, torch.Tensor)
            and not is_wrapped(live)
            and not live.is_nested
            and (dtype_name(live.dtype), tuple(live.shape)) == (meta.dtype, meta.shape)
        ):
            tensor = live
        elif (shared := self.live.get(stored)) is not None:
            return shared
        elif make is not None:
            tensor = make(meta.shape, dtype)
        else:
            plain = isinstance(live, torch.Tensor) and not isinstance(live, DTensor)
            tensor = torch.empty(meta.shape, dtype=dtype, device=live.device if plain else None)
        self.want([ref.name], tensor, movable=True)
        return tensor

    def _array_for(self, packed: Packed, live: Any) -> torch.Tensor:
        """In place where a live array fits."""
        meta = self.source.tensors.get(packed.ref.name)
        if packed.kind == "array" and isinstance(live, np.ndarray) and meta is not None:
            fits = live.dtype.str == packed.type and live.shape == meta.shape
            if fits and live.flags.writeable and all(s >= 0 for s in live.strides):
                packed.live = live
                tensor = torch.from_numpy(live)
                self.want([packed.ref.name], tensor, movable=True)
                return tensor
        return self._tensor_for(packed.ref, None, None)

    def _find_member(self, value: Member, live: Any, path: str) -> None:
        if class_name(type(live)) != value.cls:
            self._no_class(path, value.cls, live)
            return
        cls: Any = type(live)
        try:
            value.member = cls[value.name] if value.name is not None else cls(value.value)
        except (KeyError, ValueError):
            self.problems.append(
                f"{path} is {value.name or value.value} in the checkpoint, which {value.cls} does not have here"
            )

    def _find_record(self, value: Record, live: Any, path: str, make: Make | None) -> None:
        if class_name(type(live)) != value.cls:
            self._no_class(path, value.cls, live)
            return
        if type(live)._fields != value.fields:
            self.problems.append(
                f"{path} has the fields {', '.join(value.fields)} in the checkpoint and {', '.join(type(live)._fields)} here"
            )
            return
        value.live = type(live)
        for field, item in zip(value.fields, value.items, strict=True):
            self.reserve(item, getattr(live, field), f"{path}.{field}", make)

    def _no_class(self, path: str, cls: str, live: Any) -> None:
        self.problems.append(
            f"{path} is a {cls} in the checkpoint and a {class_name(type(live))} here: classes are taken from the live state alone, so "
            f"put a value of that class there first"
        )

    def build(self, value: Any) -> Any:
        """The value with everything in its place, after its tensors are filled."""
        match value:
            case Ref():
                return value.tensor
            case Packed():
                return _unpack(value)
            case Wrapped():
                return value.tensor
            case Member():
                return value.member
            case Record():
                return value.live(*(self.build(v) for v in value.items))
            case list():
                return [self.build(v) for v in cast("list[Any]", value)]
            case tuple() if type(value) is tuple:
                return tuple(self.build(v) for v in cast("tuple[Any, ...]", value))
            case deque():
                return deque((self.build(v) for v in cast("deque[Any]", value)), value.maxlen)
            case dict():
                return self._build_mapping(cast("dict[Any, Any]", value))
            case _:
                return value

    def _build_mapping(self, value: dict[Any, Any]) -> Any:
        pairs = [(k, self.build(v)) for k, v in value.items()]
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, pairs)
        return type(value)(pairs) if isinstance(value, OrderedDict) else type(value)(dict(pairs))


def _decode_leaf(kind: str, content: Any, path: str) -> Any:
    if kind in ("array", "blob"):
        type_name, name = content
        return Packed(kind, str(type_name), Ref(str(name)))
    if kind == "wrapped":
        try:
            return decode_wrapped(content, lambda v: decode_value(v, path, Ref, _decode_leaf))
        except (KeyError, AttributeError) as e:
            raise DamagedError(f"value {path}: a malformed tensor subclass: {e}", key=path) from e
    return decode_torch(kind, content, path)


def _unpack(packed: Packed) -> Any:
    if packed.live is not None:
        return packed.live
    data = packed.ref.tensor.numpy()
    if packed.kind == "array":
        return data
    return bytearray(data.tobytes()) if packed.type == "bytearray" else data.tobytes()


def _item(live: Any, key: Any) -> Any:
    """What stands there in a live value, or None."""
    if isinstance(live, Mapping):
        return cast("Mapping[Any, Any]", live).get(key)
    if isinstance(live, list | tuple | deque) and key < len(cast("Sequence[Any]", live)):
        return live[key]
    return None
