"""What is wrong with a job file, and where. PURE."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a job file. `nearest` is a valid name close to the one that was found."""

    place: str
    reason: str
    line: int | None = None
    nearest: str | None = None

    def __str__(self) -> str:
        at = f"line {self.line}: " if self.line is not None else ""
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest is not None else ""
        return f"{at}{self.place}: {self.reason}{hint}"


class SpecError(ValueError):
    """The job file cannot be used; `problems` lists everything that is wrong with it."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        head = f"{source}: {len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        super().__init__("\n  ".join([head, *map(str, self.problems)]))
