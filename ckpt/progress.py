"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Told how much is done (bytes, or things) and how much there is in all."""


def stepwise(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Give it how much has been done since the last time."""
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    return tell
