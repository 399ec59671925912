"""One supervisor per node, and what ranks import.

``from surefoot import agent`` gives training code `agent.Run`. It is imported when asked for: it needs torch, which the
agent itself must not import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.agent.session import Run

__all__ = ["Run"]


def __getattr__(name: str) -> object:
    if name == "Run":
        from surefoot.agent.session import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
