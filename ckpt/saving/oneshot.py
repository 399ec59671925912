"""`save` and `load` without a `Checkpointer` of one's own. (torch)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from surefoot.ckpt.loading.aside import RESUME_TRIES
from surefoot.ckpt.loading.together import Loaded
from surefoot.ckpt.manifest import Manifest
from surefoot.ckpt.saving.calls import name_of
from surefoot.ckpt.saving.checkpointer import Checkpointer
from surefoot.ckpt.store import Root


def save(
    root: Root,
    step: int,
    state: Mapping[str, Any],
    *,
    cursor: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    blocking: bool = True,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Manifest:
    """Save once, straight from live memory, and return when it is committed. Continues from the newest step in the root, which
    must be an older one. It is always due. Collective.

    Args:
        cursor, extra: as of `Checkpointer.save`.
        blocking: False: write from a copy; it is waited for all the same.
        options: those of `Checkpointer`.

    Raises as `Checkpointer.save` and `SaveHandle.wait`.
    """
    manifest: Manifest | None = None
    with Checkpointer(root, group, **options) as c:
        if not options.get("start_over"):
            c.continue_from_newest()
        manifest = c.save(step, state, cursor=cursor, extra=extra, blocking=blocking, force=True).wait()
    assert manifest is not None, "a one-shot save is always due"
    return manifest


def load(
    root: Root,
    state: Mapping[str, Any],
    step: int | None = None,
    *,
    strict: bool = True,
    skip: Sequence[str] = (),
    wait_s: float = 0.0,
    group: dist.ProcessGroup | None = None,
    resume_tries: int | None = RESUME_TRIES,
) -> Loaded | None:
    """Load once: see `Checkpointer.load`; `resume_tries` as of `Checkpointer`. Collective."""
    with Checkpointer(root, group, resume_tries=resume_tries) as c, c._calls.one(name_of("load", step)):
        return c._load(state, step, strict=strict, skip=skip, wait_s=wait_s)
