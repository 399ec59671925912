"""Sharded model, optimizer and loader cursors in one commit. Knows nothing of controller or agent.

::

    with ckpt.Checkpointer(root) as c:
        loaded = c.load(state)
        handle = c.save(step, state)

`Checkpointer`, `save`, `load` and `read` import torch when they are first used; the rest is torch-free. What is raised stands here
too: `CkptError` and all below it, and `ObjectStoreError` for what storage does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.ckpt.errors import (
        CkptError,
        CkptUserError,
        CkptWorldError,
        CommitError,
        CoverageError,
        DamagedError,
        ElsewhereError,
        FencedError,
        FormatError,
        LineageError,
        ReplicasDifferError,
        StateError,
        StateMismatchError,
        StepMissingError,
    )
    from surefoot.ckpt.live.declared import Boxes, PerRank
    from surefoot.ckpt.loading.together import Loaded
    from surefoot.ckpt.manifest import Manifest
    from surefoot.ckpt.saving.checkpointer import Checkpointer, SaveHandle
    from surefoot.ckpt.saving.generation import StaleStartError
    from surefoot.ckpt.saving.oneshot import load, save
    from surefoot.ckpt.store import ObjectStoreDeniedError, ObjectStoreError, ObjectStoreUnavailableError
    from surefoot.ckpt.storeline import ChannelError
    from surefoot.ckpt.tools.exporting import export
    from surefoot.ckpt.tools.inspect import steps
    from surefoot.ckpt.tools.onetensor import read
    from surefoot.ckpt.tools.verifying import Report, verify

__all__ = [
    "Boxes",
    "ChannelError",
    "Checkpointer",
    "CkptError",
    "CkptUserError",
    "CkptWorldError",
    "CommitError",
    "CoverageError",
    "DamagedError",
    "ElsewhereError",
    "FencedError",
    "FormatError",
    "LineageError",
    "Loaded",
    "Manifest",
    "ObjectStoreDeniedError",
    "ObjectStoreError",
    "ObjectStoreUnavailableError",
    "PerRank",
    "ReplicasDifferError",
    "Report",
    "SaveHandle",
    "StaleStartError",
    "StateError",
    "StateMismatchError",
    "StepMissingError",
    "export",
    "load",
    "read",
    "save",
    "steps",
    "verify",
]

_HOMES = {
    "Boxes": "live.declared",
    "PerRank": "live.declared",
    "Checkpointer": "saving.checkpointer",
    "SaveHandle": "saving.checkpointer",
    "save": "saving.oneshot",
    "load": "saving.oneshot",
    "Loaded": "loading.together",
    "read": "tools.onetensor",
    "steps": "tools.inspect",
    "verify": "tools.verifying",
    "Report": "tools.verifying",
    "export": "tools.exporting",
    "Manifest": "manifest",
    "ChannelError": "storeline",
    "CkptError": "errors",
    "CkptUserError": "errors",
    "CkptWorldError": "errors",
    "CommitError": "errors",
    "CoverageError": "errors",
    "DamagedError": "errors",
    "ElsewhereError": "errors",
    "FencedError": "errors",
    "FormatError": "errors",
    "LineageError": "errors",
    "ReplicasDifferError": "errors",
    "StateError": "errors",
    "StateMismatchError": "errors",
    "StepMissingError": "errors",
    "StaleStartError": "saving.generation",
    "ObjectStoreError": "store",
    "ObjectStoreDeniedError": "store",
    "ObjectStoreUnavailableError": "store",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
