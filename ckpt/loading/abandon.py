"""Ending what waits in a process group for a rank that will not come. (torch)

gloo has no call for that: its `abort` ends nothing that waits, and a wait with a timeout may break off a transfer that is merely
slow. But one receive that is not answered in time closes all connections of its group, here and so at all others, and everything
that waits on them raises. NCCL aborts its communicators. Either way the group is of no use any more; without the rank it was of none.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_NEVER_SENT = 2**30
"""A tag that no message bears."""


def abandon(group: dist.ProcessGroup | None) -> None:
    """End whatever this process waits for in `group` (None: the default group): it raises RuntimeError there. From any thread."""
    chosen: Any = group if group is not None else dist.group.WORLD
    ended: list[Any] = []
    for device in chosen._device_types:
        backend = chosen._get_backend(device)
        if any(backend is b for b in ended):
            continue
        ended.append(backend)
        if backend.name() == "gloo":
            _close_connections(backend)
        else:
            with suppress(RuntimeError):  # it was ended before
                backend.abort()


def _close_connections(backend: Any) -> None:
    """The first peer to whom the connection is open still closes all of them; of the others it is told at once."""
    word = torch.empty(1, dtype=torch.uint8, device="cpu")
    for peer in set(range(backend.size())) - {backend.rank()}:
        with suppress(RuntimeError):
            backend.recv([word], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
