"""Plain values keep their types and their bits."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ckpt.errors import DamagedError, StateError
from surefoot.ckpt.format.values import decode_value, encode_value, tensor_names, tensor_ref

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.booleans()), inner)
    ),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    """Through real JSON, as it is stored."""
    return decode_value(msgspec.json.decode(msgspec.json.encode(encode_value(value, "v"))), "v")


def typed(value: Any) -> Any:
    """A value with its types spelt out: 1, 1.0 and True are equal in Python."""
    if isinstance(value, dict):
        return [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [typed(v) for v in value]
    return type(value).__name__, repr(value)


@given(values)
def test_round_trip(value: Any) -> None:
    assert typed(there_and_back(value)) == typed(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 5e-324, 1e22, 0.1, 2**63 - 1, 2**63, -(2**80)])
def test_numbers_at_the_edges(value: float) -> None:
    assert typed(there_and_back(value)) == typed(value)


def test_nan() -> None:
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array(1.5),
        np.zeros((0, 3)),
        np.array([True]),
        np.arange(9)[::2],
    ],
)
def test_arrays(array: np.ndarray) -> None:
    back = there_and_back({"a": array})["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tolist() == array.tolist()
    assert back.flags.writeable


def test_array_scalars_keep_their_type() -> None:
    back = there_and_back(np.float32(0.1))
    assert type(back) is np.float32
    assert back == np.float32(0.1)


@pytest.mark.parametrize("value", [{1, object()}, object(), np.array(["text"]), print, np.array([None])])
def test_what_cannot_be_stored_is_named(value: Any) -> None:
    with pytest.raises(StateError, match=r"state\.sched\.3"):
        encode_value([0, 0, 0, value], "state.sched")


@pytest.mark.parametrize(
    "encoded",
    [
        {"pickle": "gASVAA=="},
        {"dict": 5},
        {"dict": [[1]]},
        {"int": "x"},
        {"bytes": "!"},
        {"complex": [1]},
        {"ndarray": ["|O", [1], "AAAAAAAAAAA="]},
        {"ndarray": ["<f4", [99], "AAAA"]},
        {"tensor": "w"},
        {"a": 1, "b": 2},
        {},
    ],
)
def test_malformed_values_are_damage(encoded: Any) -> None:
    with pytest.raises(DamagedError):
        decode_value(encoded, "v")


def test_tensors_are_references() -> None:
    class Tensor:
        pass

    def leaf(name: str, value: Any) -> Any:
        return tensor_ref(name) if isinstance(value, Tensor) else NotImplemented

    encoded = encode_value({"m": [Tensor(), (1, Tensor())], "n": 2}, "s", leaf)
    assert tensor_names(encoded) == ["s.m.0", "s.m.1.1"]
    assert decode_value(encoded, "s", str.upper) == {"m": ["S.M.0", (1, "S.M.1.1")], "n": 2}
