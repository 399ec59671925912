"""What is given as `cursor` and `extra` comes back equal, or is refused by name."""

from __future__ import annotations

import datetime
import enum
import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ckpt.errors import DamagedError, StateError
from surefoot.ckpt.format.plain import TYPED, decode_plain, encode_plain

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.just(TYPED), inner)
    ),
    max_leaves=20,
)


def there_and_back(given: dict[str, Any]) -> Any:
    stored = msgspec.json.decode(msgspec.json.encode(encode_plain("cursor", given)))
    return decode_plain("cursor", stored)


def kinds(value: Any) -> Any:
    """Its types, all the way down: True == 1 == 1.0."""
    if isinstance(value, list | tuple):
        return type(value), [kinds(v) for v in value]
    return (dict, {k: kinds(v) for k, v in value.items()}) if isinstance(value, dict) else type(value)


@given(st.dictionaries(st.text() | st.just(TYPED), plain))
def test_it_comes_back(value: dict[str, Any]) -> None:
    back = there_and_back(value)
    assert back == value
    assert kinds(back) == kinds(value)


def test_nan_and_lone_surrogates_come_back() -> None:
    back = there_and_back({"last": [float("nan")], "name": "\udc80"})
    assert math.isnan(back["last"][0])
    assert back["name"] == "\udc80"


def test_what_json_can_say_stands_as_it_is() -> None:
    """Written by older versions, and read by other tools."""
    cursor = {"step": 3, "at": [1, 2.5, None], "of": {"a": "b"}}
    assert encode_plain("cursor", cursor) == cursor
    assert decode_plain("cursor", cursor) == cursor
    assert encode_plain("extra", None) is None
    assert decode_plain("extra", None) is None


def test_ranks_that_made_it_in_another_order_store_the_same() -> None:
    a, b = {"x": (1,), "y": {"p": 1, "q": 2}}, {"y": {"q": 2, "p": 1}, "x": (1,)}
    assert encode_plain("cursor", a) == encode_plain("cursor", b)


def test_an_equal_number_of_another_library_comes_back_as_pythons_own() -> None:
    class Phase(enum.IntEnum):
        LATE = 2

    back = there_and_back({"best": np.float64("inf"), "phase": Phase.LATE})
    assert back == {"best": math.inf, "phase": 2}
    assert type(back["best"]) is float


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"t": b"ab"}, "cursor['t'] is a bytes, which would not come back"),
        ({"t": datetime.datetime(2026, 1, 1)}, "cursor['t'] is a datetime"),
        ({"t": [0, {"s": {1, 2}}]}, "cursor['t'][1]['s'] is a set"),
        ({"t": np.ones(2)}, "cursor['t'] is a ndarray"),
        ({"t": object()}, "put it into the state"),
        ({1: 2}, "cursor has the key 1: keys have to be text, such as '1'"),
        ({"t": {(1, 2): 3}}, "cursor['t'] has the key (1, 2)"),
        ([1], "cursor is a list: give a mapping"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(StateError, match=re.escape(said)):
        encode_plain("cursor", value)


def test_what_contains_itself_is_refused() -> None:
    ring: dict[str, Any] = {"inf": math.inf}
    ring["ring"] = ring
    with pytest.raises(StateError, match="contains itself"):
        encode_plain("cursor", ring)


def test_a_form_that_nobody_writes_is_damage() -> None:
    with pytest.raises(DamagedError, match="cursor"):
        decode_plain("cursor", {TYPED: {"unheard-of": 1}})
