"""`save` and `load` without a `Checkpointer` of one's own. (torch)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from surefoot.ckpt.loading.together import Loaded
from surefoot.ckpt.manifest import Manifest
from surefoot.ckpt.saving.checkpointer import Checkpointer
from surefoot.ckpt.store import Root


def save(
    root: Root, step: int, state: Mapping[str, Any], *, group: dist.ProcessGroup | None = None, **options: Any
) -> Manifest:
    """Save once, straight from live memory, and return when it is committed. Continues from the newest step in the root, which
    must be an older one. Collective.

    Options: those of `Checkpointer`, and `cursor` and `extra` of its `save`.
    """
    given = {k: options.pop(k) for k in ("cursor", "extra") if k in options}
    manifest: Manifest | None = None
    with Checkpointer(root, group, **options) as c:
        if not options.get("start_over"):
            c.continue_from_newest()
        manifest = c.save(step, state, blocking=True, **given).wait()
    assert manifest is not None, "a one-shot save is always due"
    return manifest


def load(
    root: Root,
    state: Mapping[str, Any],
    step: int | None = None,
    *,
    strict: bool = True,
    skip: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
) -> Loaded | None:
    """Load once: see `Checkpointer.load`. Collective."""
    with Checkpointer(root, group) as c, c._calls.one():
        return c._load(state, step, strict=strict, skip=skip)
