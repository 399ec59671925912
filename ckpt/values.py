"""Plain values as JSON, with their types: what was a tuple comes back a tuple, a float to the last bit. PURE.

None, bool, str, ints of 64 bits and finite floats stand for themselves, a list for a list; everything else is an object
with one key that names its type: ``tuple``, ``dict`` (pairs, so keys keep their types), ``int`` (of any size), ``float``
(nan, inf), ``complex``, ``bytes``, ``ndarray``, ``tensor`` (a reference to a stored tensor by name). No pickle, no code.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from surefoot.ckpt.errors import DamagedError, StateError

INT_BITS = 63
"""JSON readers keep integers of 64 bits with a sign; larger ones go as text."""

EncodeLeaf = Callable[[str, Any], Any]
"""Given the path and a value of no plain type: its encoded form, or NotImplemented."""


def tensor_ref(name: str) -> dict[str, Any]:
    """The encoded form of a tensor that is stored under `name`."""
    return {"tensor": name}


def encode_value(value: Any, path: str, leaf: EncodeLeaf | None = None) -> Any:
    """The JSON form of a plain value.

    Args:
        path: its name, for the error, and for `leaf`: items are ``path.key`` and ``path.0``.
        leaf: asked first for what is no plain type (tensors).

    Raises StateError naming the path.
    """
    match value:
        case None | bool() | str():
            return value
        case int() if type(value) is int:
            return value if value.bit_length() <= INT_BITS else {"int": str(value)}
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        case complex():
            return {"complex": [encode_value(value.real, path), encode_value(value.imag, path)]}
        case bytes() | bytearray():
            return {"bytes": base64.b64encode(value).decode()}
        case list():
            return [encode_value(v, f"{path}.{i}", leaf) for i, v in enumerate(cast("list[Any]", value))]
        case tuple():
            items = enumerate(cast("tuple[Any, ...]", value))
            return {"tuple": [encode_value(v, f"{path}.{i}", leaf) for i, v in items]}
        case Mapping():
            items = cast("Mapping[Any, Any]", value).items()
            return {"dict": [[encode_value(k, path), encode_value(v, f"{path}.{k}", leaf)] for k, v in items]}
        case _:
            return _encode_other(value, path, leaf)


def _encode_other(value: Any, path: str, leaf: EncodeLeaf | None) -> Any:
    if leaf is not None and (encoded := leaf(path, value)) is not NotImplemented:
        return encoded
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        data = base64.b64encode(array.tobytes()).decode()
        scalar = isinstance(value, np.generic)
        return {"ndarray": [array.dtype.str, None if scalar else list(value.shape), data]}
    raise StateError(
        f"{path}: a value of type {type(value).__module__}.{type(value).__qualname__} cannot be stored: use tensors, numbers, "
        f"text, bytes, lists, tuples and mappings, or an object with state_dict and load_state_dict"
    )


def decode_value(encoded: Any, path: str, tensor: Callable[[str], Any] | None = None) -> Any:
    """The value that `encode_value` wrote; `tensor` gives the tensor of a name.

    Raises DamagedError where it is not of that form.
    """
    match encoded:
        case None | bool() | str() | int() | float():
            return encoded
        case list():
            return [decode_value(v, f"{path}.{i}", tensor) for i, v in enumerate(cast("list[Any]", encoded))]
        case {**one} if len(one) == 1:
            ((kind, content),) = one.items()
            try:
                return _decode_tagged(kind, content, path, tensor)
            except (TypeError, ValueError, binascii.Error, RecursionError) as e:
                raise DamagedError(f"value {path}: {kind!r} is malformed: {e}", key=path) from e
        case _:
            raise DamagedError(f"value {path} has no known form: {str(encoded)[:80]}", key=path)


def _decode_tagged(kind: Any, content: Any, path: str, tensor: Callable[[str], Any] | None) -> Any:
    match kind:
        case "tuple":
            return tuple(decode_value(content, path, tensor))
        case "dict":
            return {decode_value(k, path): decode_value(v, f"{path}.{k}", tensor) for k, v in content}
        case "int":
            return int(content)
        case "float":
            return float(content)
        case "complex":
            real, imag = content
            return complex(decode_value(real, path), decode_value(imag, path))
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "ndarray":
            dtype, shape, data = content
            array = np.frombuffer(base64.b64decode(data, validate=True), dtype=np.dtype(dtype))
            return array[0] if shape is None else array.reshape(shape).copy()
        case "tensor" if tensor is not None:
            return tensor(content)
        case _:
            raise DamagedError(f"value {path} is of the unknown type {kind!r}", key=path)


def tensor_names(encoded: Any) -> list[str]:
    """The tensors that an encoded value refers to."""
    match encoded:
        case list():
            return [n for v in cast("list[Any]", encoded) for n in tensor_names(v)]
        case {"tensor": str(name)}:
            return [name]
        case {"tuple": list(items)}:
            return tensor_names(items)
        case {"dict": list(pairs)}:
            return [n for _, v in cast("list[list[Any]]", pairs) for n in tensor_names(v)]
        case _:
            return []
