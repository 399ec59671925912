"""Plain values as JSON, with their types: what was a tuple comes back a tuple, a float to the last bit. PURE.

None, bool, str, ints of 64 bits and finite floats stand for themselves, a list for a list; everything else is an object
with one key that names its type:

    tuple set frozenset deque                items (of sets in a fixed order: replicas must agree, whatever their hash seed)
    dict OrderedDict defaultdict Counter     pairs, so keys keep their types
    int float complex str bytes bytearray BytesIO     what JSON has no form for
    ndarray                                  numpy arrays and scalars, as bytes
    tensor                                   a reference to a stored tensor, by name
    array blob                               a large array, large bytes: [type, name of the tensor that holds them]
    wrapped                                  a tensor subclass: its inner tensors, and what it is otherwise
    enum namedtuple                          by the name of the class; a load takes the class from the live state
    Size dtype device layout memory_format   torch's (ckpt/live/kinds.py)

No pickle, no code: a class is never looked up by a name that stands in stored data.
"""

from __future__ import annotations

import base64
import binascii
import enum
import io
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from surefoot.ckpt.errors import DamagedError, StateError

INT_BITS = 63
"""JSON readers keep integers of 64 bits with a sign; larger ones go as text."""
DEPTH_MAX = 64
"""How deep values may nest: JSON decoders stop at some hundred brackets, and each level may take three."""

EncodeLeaf = Callable[[str, Any], Any]
"""Given the path and a value of no plain type: its encoded form, or NotImplemented."""
DecodeLeaf = Callable[[str, Any, str], Any]
"""Given the kind, the content and the path of an encoded value of a kind not known here: the value, or NotImplemented."""

_MAPPINGS: dict[type, Callable[[list[tuple[Any, Any]]], Any]] = {
    dict: dict,
    OrderedDict: OrderedDict,
    defaultdict: lambda pairs: defaultdict(None, pairs),
    Counter: lambda pairs: Counter(dict(pairs)),
}
_MAPPING_KINDS = {kind.__name__: make for kind, make in _MAPPINGS.items()}


@dataclass(eq=False, slots=True)
class Member:
    """A decoded enum member: of which class, its name (None: several flags) and its value. A load puts the live `member` in."""

    cls: str
    name: str | None
    value: Any
    member: Any = None


@dataclass(eq=False, slots=True)
class Record:
    """A decoded namedtuple. A load puts the live class in (`live`)."""

    cls: str
    fields: tuple[str, ...]
    items: list[Any] = field(default_factory=list[Any])
    live: Any = None


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def tensor_ref(name: str) -> dict[str, Any]:
    """The encoded form of a tensor that is stored under `name`."""
    return {"tensor": name}


# ---------------------------------------------------------------- to JSON


def encode_value(value: Any, path: str, leaf: EncodeLeaf | None = None) -> Any:
    """The JSON form of a plain value.

    Args:
        path: its name, for the error, and for `leaf`: items are ``path.key`` and ``path.0``.
        leaf: asked first for what is no plain type (tensors), and for arrays and bytes.

    Raises StateError naming the path.
    """
    return _encode(value, path, leaf, DEPTH_MAX)


def _encode(value: Any, path: str, leaf: EncodeLeaf | None, depth: int) -> Any:
    if depth == 0:
        raise StateError(f"{path}: nested deeper than {DEPTH_MAX} levels, or a value that contains itself")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is list:
        return _encode_items(value, path, leaf, depth)
    if kind is tuple or kind is deque:
        items = _encode_items(value, path, leaf, depth)
        return {"tuple": items} if kind is tuple else {"deque": [value.maxlen, items]}
    if kind in _MAPPINGS:
        pairs = cast("Mapping[Any, Any]", value).items()
        return {
            kind.__name__: [
                [_encode_key(k, path), _encode(v, f"{path}.{k}", leaf, depth - 1)] for k, v in pairs
            ]
        }
    if kind is set or kind is frozenset:
        return {kind.__name__: sorted((_encode_key(v, path) for v in value), key=json.dumps)}
    if (scalar := _encode_scalar(kind, value)) is not NotImplemented:
        return scalar
    if leaf is not None and (encoded := leaf(path, value)) is not NotImplemented:
        return encoded
    return _encode_other(value, path, leaf, depth)


def _encode_items(items: Iterable[Any], path: str, leaf: EncodeLeaf | None, depth: int) -> list[Any]:
    return [_encode(v, f"{path}.{i}", leaf, depth - 1) for i, v in enumerate(items)]


def _encode_scalar(kind: type, value: Any) -> Any:
    """Numbers and text, of exactly these types: subclasses would come back as something else."""
    if kind is str:
        return value if value.isascii() or _is_unicode(value) else {"str": _base64(_surrogates(value))}
    if kind is int:
        return value if value.bit_length() <= INT_BITS else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [_encode_scalar(float, value.real), _encode_scalar(float, value.imag)]}
    return NotImplemented


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _surrogates(text: str) -> bytes:
    """Names of files that are no UTF-8 arrive in Python as lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def _encode_key(key: Any, path: str) -> Any:
    """Keys and members of sets: what is hashable and plain."""
    kind = type(key)
    if key is None or kind is bool:
        return key
    if kind is bytes:
        return {"bytes": _base64(key)}
    if kind is tuple:
        return {"tuple": [_encode_key(k, path) for k in key]}
    if kind is frozenset:
        return {"frozenset": sorted((_encode_key(k, path) for k in key), key=json.dumps)}
    encoded = _encode_scalar(kind, key)
    if encoded is NotImplemented:
        raise StateError(
            f"{path}: {str(key)[:80]!r}, a {class_name(kind)}, cannot be stored as a key or in a set: use numbers, text, bytes or "
            f"tuples of them"
        )
    return encoded


def _encode_other(value: Any, path: str, leaf: EncodeLeaf | None, depth: int) -> Any:
    if isinstance(value, bytes | bytearray) and type(value) in (bytes, bytearray):
        return {type(value).__name__: _base64(value)}
    if type(value) is io.BytesIO:
        return {"BytesIO": _base64(value.getvalue())}
    if (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        scalar = isinstance(value, np.generic)
        return {"ndarray": [array.dtype.str, None if scalar else list(value.shape), _base64(array.tobytes())]}
    if isinstance(value, enum.Enum):
        name = value.name if value.name in type(value).__members__ else None
        plain = _encode_scalar(type(value.value), value.value)
        return {"enum": [class_name(type(value)), name, None if plain is NotImplemented else plain]}
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        fields: tuple[str, ...] = type(value)._fields  # pyright: ignore[reportAttributeAccessIssue]
        items = [
            _encode(v, f"{path}.{f}", leaf, depth - 1)
            for f, v in zip(fields, cast("tuple[Any, ...]", value), strict=True)
        ]
        return {"namedtuple": [class_name(type(value)), list(fields), items]}
    raise StateError(
        f"{path}: a value of type {class_name(type(value))} cannot be stored: use tensors, numbers, text, bytes, lists, tuples, sets "
        f"and mappings of Python's own types, or an object with state_dict and load_state_dict"
    )


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


# ---------------------------------------------------------------- and back


def decode_value(
    encoded: Any,
    path: str,
    tensor: Callable[[str], Any] | None = None,
    leaf: DecodeLeaf | None = None,
) -> Any:
    """The value that `encode_value` wrote; `tensor` gives the tensor of a name, `leaf` what else is not known here.

    Enum members and namedtuples come as `Member` and `Record`. Raises DamagedError where it is not of that form.
    """
    return _Decoder(tensor, leaf).decode(encoded, path)


class _Decoder:
    def __init__(self, tensor: Callable[[str], Any] | None, leaf: DecodeLeaf | None) -> None:
        self._tensor = tensor
        self._leaf = leaf

    def decode(self, encoded: Any, path: str) -> Any:
        match encoded:
            case None | bool() | str() | int() | float():
                return encoded
            case list():
                return self._items(encoded, path)
            case {**one} if len(one) == 1:
                ((kind, content),) = one.items()
                try:
                    return self._tagged(kind, content, path)
                except (
                    TypeError,
                    ValueError,
                    LookupError,
                    binascii.Error,
                    RecursionError,
                    OverflowError,
                ) as e:
                    raise DamagedError(f"value {path}: {kind!r} is malformed: {e}", key=path) from e
            case _:
                raise DamagedError(f"value {path} has no known form: {str(encoded)[:80]}", key=path)

    def _items(self, items: Any, path: str) -> list[Any]:
        return [self.decode(v, f"{path}.{i}") for i, v in enumerate(items)]

    def _tagged(self, kind: Any, content: Any, path: str) -> Any:
        if kind in _MAPPING_KINDS:
            pairs = [(self.decode(k, path), self.decode(v, f"{path}.{k}")) for k, v in content]
            return _MAPPING_KINDS[kind](pairs)
        match kind:
            case "tuple":
                return tuple(self._items(content, path))
            case "set":
                return set(self._items(content, path))
            case "frozenset":
                return frozenset(self._items(content, path))
            case "deque":
                length_max, items = content
                return deque(self._items(items, path), length_max)
            case "complex":
                real, imag = content
                return complex(self.decode(real, path), self.decode(imag, path))
            case "enum":
                cls, name, value = content
                return Member(str(cls), name, self.decode(value, path))
            case "namedtuple":
                cls, fields, items = content
                if len(fields) != len(items):
                    raise ValueError(f"{len(fields)} fields and {len(items)} items")
                return Record(str(cls), tuple(fields), self._items(items, path))
            case "tensor" if self._tensor is not None and isinstance(content, str):
                return self._tensor(content)
            case _:
                return self._other(kind, content, path)

    def _other(self, kind: Any, content: Any, path: str) -> Any:
        if kind in _SIMPLE:
            return _SIMPLE[kind](content)
        if self._leaf is not None and (value := self._leaf(kind, content, path)) is not NotImplemented:
            return value
        raise DamagedError(f"value {path} is of the unknown type {kind!r}", key=path)


def _bytes(content: Any) -> bytes:
    return base64.b64decode(content, validate=True)


def _array(content: Any) -> Any:
    name, shape, data = content
    dtype = np.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"an array of {dtype}")
    array = np.frombuffer(_bytes(data), dtype=dtype)
    return array[0] if shape is None else array.reshape(shape).copy()


_SIMPLE: dict[str, Callable[[Any], Any]] = {
    "int": lambda c: int(c, 0),
    "float": float,
    "str": lambda c: _bytes(c).decode("utf-8", "surrogatepass"),
    "bytes": _bytes,
    "bytearray": lambda c: bytearray(_bytes(c)),
    "BytesIO": lambda c: io.BytesIO(_bytes(c)),
    "ndarray": _array,
}


def tensor_names(encoded: Any) -> list[str]:
    """The tensors that an encoded value refers to."""
    match encoded:
        case list():
            return [n for v in cast("list[Any]", encoded) for n in tensor_names(v)]
        case {"tensor": str(name)} | {"array": [_, str(name)]} | {"blob": [_, str(name)]}:
            return [name]
        case {"wrapped": {"parts": {**parts}}}:
            return [n for v in parts.values() for n in tensor_names(v)]
        case {**one} if len(one) == 1:
            ((kind, content),) = one.items()
            if kind in _MAPPING_KINDS:
                return [n for pair in cast("list[list[Any]]", content) for n in tensor_names(pair[1])]
            if kind in ("tuple", "namedtuple", "deque"):
                return tensor_names(content)
            return []
        case _:
            return []


def first_difference(a: Any, b: Any, path: str) -> tuple[str, Any, Any]:
    """Where two encoded values begin to differ, which they do, and what is there. 1 is not True, and 0.0 not -0.0."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        items = zip(cast("list[Any]", a), cast("list[Any]", b), strict=True)
        i, x, y = next((i, x, y) for i, (x, y) in enumerate(items) if _unlike(x, y))
        return first_difference(x, y, f"{path}.{i}")
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        kind, x, y = next((k, a[k], b[k]) for k in cast("dict[str, Any]", a) if _unlike(a[k], b[k]))
        pairs = kind in _MAPPING_KINDS and not _unlike([k for k, _ in x], [k for k, _ in y])
        if not pairs:
            return first_difference(x, y, path) if kind == "tuple" else (path, x, y)
        key, x, y = next((k, v, w) for (k, v), (_, w) in zip(x, y, strict=True) if _unlike(v, w))
        return first_difference(x, y, f"{path}.{key}")
    return path, a, b


def _unlike(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True)
