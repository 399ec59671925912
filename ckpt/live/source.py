"""Where a load comes from, and what it is asked for: `Source` and `Want`. (torch)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from surefoot.ckpt.live.leaves import Leaf
from surefoot.ckpt.manifest import TensorMeta


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

    def where(self, name: str) -> str:
        """For messages: which objects hold the stored tensor or value of this name."""
        ...

    def agree(self, wants: Sequence[Want], unused: Sequence[str], refusal: Exception | None) -> Sequence[str]:
        """Tell the other ranks of this load what this one wants, does not use, and what it refuses with (None if it does not).

        Called once per load, before `fill`. Returns the names that no rank uses. Raises on a rank that does not refuse where another
        does: StateMismatchError where that is what it is, CkptWorldError otherwise.
        """
        ...

    def fill(self, wants: Sequence[Want]) -> None:
        """Read, verify and copy into the live tensors. Raises DamagedError, ImageError, StateMismatchError."""
        ...
