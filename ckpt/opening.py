"""How a channel of several ranks is opened: rank 0 hosts a TCPStore, and says where over the store of the process group. (torch)"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from surefoot.ckpt.channel import GOODBYE_S, Channel, Solo, StoreChannel
from surefoot.ckpt.late import never_came, waiting_for_rank_0
from surefoot.ckpt.lives import card
from surefoot.ckpt.storeline import ChannelError, Line

# Documented as torch.distributed.TCPStore, but not in its __all__; and the stubs say that values are str, they may be bytes.
TCPStore: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
_T = TypeVar("_T")

_opened: dict[str, int] = {}
"""How many channels each group has had, by its name: opening is collective, so all ranks count the same."""
_opening = threading.Lock()


def open_channel(
    group: dist.ProcessGroup | None, timeout_s: float, call: str = "opening the Checkpointer"
) -> Channel:
    """The channel of `group` (None: the default group, or this process alone where torch.distributed is not in use).

    Every rank of the group calls it, in the same order as others do; no collective is used. `call`: which one it is the first round of,
    for who waits for rank 0 in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        return Solo()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ChannelError(
            "this process is no member of the group it was given: pass a group that it belongs to"
        )
    if world_size == 1:
        return Solo()
    meeting, key = _meeting_place(group)
    own: Any = None
    if rank == 0:
        name = _own_name(dist.get_global_rank(group, 0) if group is not None else 0)
        own = TCPStore(name, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        for kind, value in (("b", "0"), ("l", ""), ("x", "")):
            own.multi_set([f"{kind}/{r}" for r in range(world_size)], [value] * world_size)
        meeting.set(key, f"{name} {own.port} {card()}")
    try:
        with waiting_for_rank_0(call, timeout_s):
            word = _within(lambda: _told(meeting, key, timeout_s), timeout_s + GOODBYE_S).decode()
    except (RuntimeError, dist.DistError) as e:
        raise ChannelError(f"rank {rank} {never_came(call, timeout_s, [0])}") from e
    name, port, first = word.split(" ", 2)
    fore = own or _reached(name, int(port), timeout_s)
    fore.set(f"p/{rank}", card())
    back = _reached(name, int(port), timeout_s)
    return StoreChannel(
        rank, world_size, fore=fore, back=back, hosts=own is not None, timeout_s=timeout_s, first=first
    )


def _meeting_place(group: dist.ProcessGroup | None) -> tuple[Any, str]:
    """The store that torch.distributed was initialised with, and a key in it that names this opening."""
    chosen: Any = group if group is not None else dist.group.WORLD
    name = str(chosen.group_name)
    with _opening:
        number = _opened[name] = _opened.get(name, 0) + 1
    store: Any = distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return store, f"surefoot/ckpt/{name}/{number}"


def _told(meeting: Any, key: str, timeout_s: float) -> bytes:
    meeting.wait([key], timedelta(seconds=timeout_s))
    return meeting.get(key)


def _within(ask: Callable[[], _T], seconds: float) -> _T:
    """Raises as `Line.call`."""
    line = Line(None)
    try:
        return line.call(lambda _: ask(), seconds)
    finally:
        line.end()


def _reached(host: str, port: int, timeout_s: float) -> Any:
    """A connection; what is stopped takes it, and never says so."""
    return _within(lambda: _client(host, port, timeout_s), timeout_s + GOODBYE_S)


def _client(host: str, port: int, timeout_s: float) -> Any:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _own_name(global_rank: int) -> str:
    """The name under which the others reach this process: rank 0's is what everybody was given already."""
    master = os.environ.get("MASTER_ADDR")
    return master if master and global_rank == 0 else socket.gethostname()
