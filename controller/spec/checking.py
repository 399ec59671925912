"""Reading a parsed TOML file by table and key: every problem is noted, and something usable returned all the same. PURE."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from surefoot.controller.spec.problems import Problem
from surefoot.controller.spec.tables import TABLES

Wrong = tuple[str, str | None] | None
"""What is wrong with a string, and the nearest valid one; None: nothing is."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to `name`, if one is close enough to have been meant."""
    return next(iter(difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)), None)


class Check:
    """Collects problems, and knows the lines."""

    def __init__(self, lines: Mapping[str, int]) -> None:
        self.lines = lines
        self.problems: list[Problem] = []

    def add(self, place: str, reason: str, near: str | None = None) -> None:
        """Note a problem. `place`: ``table`` or ``table.key``; `near`: a valid name close to the one that was found."""
        line = self.lines.get(place)
        if line is None:  # of an inline table, or a key that is missing: the line of what it belongs to
            line = self.lines.get(place.rpartition(".")[0])
        self.problems.append(Problem(place=place, reason=reason, line=line, nearest=near))

    def unknown_tables(self, raw: Mapping[str, object]) -> None:
        """Note what stands in the file beside the tables that there are."""
        for name, value in raw.items():
            if name in TABLES:
                continue
            if isinstance(value, dict):
                self.add(name, f"unknown table; there are {', '.join(TABLES)}", nearest(name, TABLES))
            else:
                self.add(name, "stands outside of any table; put it under its [table]")

    def table(
        self, raw: Mapping[str, object], name: str, kind: type[Any], extra: tuple[str, ...] = ()
    ) -> RawTable:
        """The table `name`, empty if there is none. Keys that are neither fields of `kind` nor `extra` are noted."""
        keys = (*(f.name for f in dataclasses.fields(kind)), *extra)
        value = raw.get(name, {})
        if not isinstance(value, dict):
            self.add(name, f"must be a table [{name}], is {_kind(value)}")
            return RawTable(self, name, {}, broken=True)
        values = cast("dict[str, object]", value)
        for key in values:
            if key not in keys:
                reason = f"unknown key; [{name}] has {', '.join(keys)}"
                self.add(f"{name}.{key}", reason, nearest(key, keys))
        return RawTable(self, name, values)


def _kind(value: object) -> str:
    names: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a table",
    }
    return names.get(type(value), "a date or time")


class RawTable:
    """One table of the file. Its methods return a value of the right type even for a wrong one: the problem is noted."""

    def __init__(
        self, check: Check, name: str, values: Mapping[str, object], *, broken: bool = False
    ) -> None:
        self.check, self.name, self.values, self.broken = check, name, values, broken

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def problem(self, key: str, reason: str, near: str | None = None) -> None:
        self.check.add(f"{self.name}.{key}", reason, near)

    def sub(self, key: str) -> RawTable:
        """The table that stands under `key`, empty if there is none."""
        value = self.values.get(key, {})
        if isinstance(value, dict):
            return RawTable(self.check, f"{self.name}.{key}", cast("dict[str, object]", value))
        self.problem(key, f"must be a table, is {_kind(value)}")
        return RawTable(self.check, f"{self.name}.{key}", {}, broken=True)

    def integer(self, key: str, default: int | None, low: int, high: int | None = None, why: str = "") -> int:
        """An integer in low..high (inclusive); required where `default` is None. `why`: the reason for the bounds."""
        value = self._value(key, default)
        if value is None:
            return low
        if not isinstance(value, int) or isinstance(value, bool):
            self.problem(key, f"must be an integer, is {_kind(value)}")
            return default if default is not None else low
        if value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            self.problem(key, f"must be {limits}, is {value}" + (f": {why}" if why else ""))
            return default if default is not None else low
        return value

    def number(self, key: str, default: float, low: float, *, above: bool = False, why: str = "") -> float:
        """A finite number, at least `low` (`above`: greater than it)."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.problem(key, f"must be a number, is {_kind(value)}")
            return default
        if not math.isfinite(value) or value < low or (above and value == low):
            limit = f"greater than {low:g}" if above else f"at least {low:g}"
            self.problem(key, f"must be finite and {limit}, is {value}" + (f": {why}" if why else ""))
            return default
        return float(value)

    def text(self, key: str, check: Callable[[str], Wrong]) -> str:
        """A required string."""
        value = self._value(key, None)
        if value is None:
            return ""
        if not isinstance(value, str):
            self.problem(key, f"must be a string, is {_kind(value)}")
            return ""
        if wrong := check(value):
            self.problem(key, *wrong)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.problem(key, f"must be true or false, is {_kind(value)}")
            return default
        return value

    def texts(self, key: str, check: Callable[[str], Wrong]) -> tuple[str, ...]:
        """A list of strings, empty by default, without repetitions."""
        value = self._value(key, [])
        items = cast("list[object]", value) if isinstance(value, list) else [None]
        texts = [item for item in items if isinstance(item, str)]
        if len(texts) != len(items):
            self.problem(key, "must be a list of strings")
            return ()
        for text in texts:
            if wrong := check(text):
                self.problem(key, *wrong)
        for text in sorted({t for t in texts if texts.count(t) > 1}):
            self.problem(key, f"names {text!r} more than once")
        return tuple(texts)

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key, default)
        if value is None and not self.broken:
            self.problem(key, "is missing, and has no default")
        return value
