"""How the ranks of a save or load talk: `Solo` for one process, `StoreChannel` over a TCPStore of its own. (torch)

The training group is used once, when the channel opens, to tell everybody where the TCPStore listens. Afterwards nothing
here is a collective of torch's, so a save in the background cannot get between two of the training's.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from surefoot.ckpt.errors import CkptWorldError

# Documented as torch.distributed.TCPStore, but not in its __all__; and the stubs say that values are str, they may be bytes.
TCPStore: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]

ADDRESS_NBYTES = 256
"""A host name has at most 253 characters (RFC 1035)."""


GOODBYE_S = 10.0
"""How long the host waits at the end for ranks that have died."""


class ChannelError(CkptWorldError):
    """Another rank did not say what it had to in time; the message names it."""


class Channel(Protocol):
    """All ranks of one save or load."""

    rank: int
    world_size: int

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather in rank order; blocks. Every rank makes the same calls in the same order. Raises ChannelError."""
        ...

    def tell(self, key: str, data: bytes) -> None:
        """Leave a word under a key of one's own choice; from any thread."""
        ...

    def hear(self, key: str, timeout_s: float) -> bytes:
        """The word under `key`, once somebody leaves it; from a background thread only. Raises ChannelError."""
        ...

    def close(self) -> None: ...


class Solo:
    """One process talks to itself."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._words: dict[str, bytes] = {}

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]

    def tell(self, key: str, data: bytes) -> None:
        self._words[key] = data

    def hear(self, key: str, timeout_s: float) -> bytes:
        return self._words.pop(key)

    def close(self) -> None:
        self._words.clear()


class StoreChannel:
    """Over a TCPStore that the group's first rank hosts. See `open_channel`."""

    def __init__(self, rank: int, world_size: int, host: str, port: int, own: Any, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._round = 0
        # A client's calls wait for each other, and `hear` blocks: the background has a connection of its own.
        self._hosts = own is not None
        self._fore = own or _client(host, port, timeout_s)
        self._back = _client(host, port, timeout_s)

    def exchange(self, data: bytes) -> list[bytes]:
        self._round += 1
        prefix = f"x/{self._round}/"
        self._fore.set(f"{prefix}{self.rank}", data)
        found = [
            self._get(self._fore, f"{prefix}{r}", self._timeout_s, f"rank {r}")
            for r in range(self.world_size)
        ]
        if self._fore.add(f"{prefix}read", 1) == self.world_size:
            for r in range(self.world_size):
                self._fore.delete_key(f"{prefix}{r}")
            self._fore.delete_key(f"{prefix}read")
        return found

    def tell(self, key: str, data: bytes) -> None:
        self._back.set(f"w/{key}", data)

    def hear(self, key: str, timeout_s: float) -> bytes:
        return self._get(self._back, f"w/{key}", timeout_s, key)

    def _get(self, store: Any, key: str, timeout_s: float, whose: str) -> bytes:
        try:
            store.wait([key], timedelta(seconds=timeout_s))
            return store.get(key)
        except (RuntimeError, dist.DistError) as e:
            raise ChannelError(
                f"rank {self.rank} waited {timeout_s:.0f} s for {whose} and heard nothing: {e}"
            ) from e

    def close(self) -> None:
        """The host stays until everybody has said goodbye, so that nobody's last word is lost; others leave at once."""
        try:
            self._fore.set(f"bye/{self.rank}", b"")
            if self._hosts:
                everybody = [f"bye/{r}" for r in range(self.world_size)]
                self._fore.wait(everybody, timedelta(seconds=GOODBYE_S))
        except (RuntimeError, dist.DistError):
            pass  # somebody died: there is nobody to wait for
        del self._back, self._fore


def open_channel(group: dist.ProcessGroup | None, timeout_s: float) -> Channel:
    """The channel of `group` (None: the default group, or this process alone where torch.distributed is not in use).

    Collective: one broadcast on the group.
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
    host = dist.get_global_rank(group, 0) if group is not None else 0
    own: Any = None
    address = ""
    if rank == 0:
        name = _own_name(host)
        own = TCPStore(name, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        address = f"{name} {own.port}"
    name, port = _broadcast(address, host, group).split()
    return StoreChannel(rank, world_size, name, int(port), own, timeout_s)


def _client(host: str, port: int, timeout_s: float) -> Any:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _own_name(global_rank: int) -> str:
    """The name under which the others reach this process: rank 0's is what everybody was given already."""
    master = os.environ.get("MASTER_ADDR")
    return master if master and global_rank == 0 else socket.gethostname()


def _broadcast(text: str, source: int, group: dist.ProcessGroup | None) -> str:
    device = torch.device("cuda") if "nccl" in str(dist.get_backend(group)) else torch.device("cpu")
    word = torch.zeros(ADDRESS_NBYTES, dtype=torch.uint8)
    encoded = text.encode()
    word[: len(encoded)] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[: len(encoded)]
    word = word.to(device)
    dist.broadcast(word, src=source, group=group)
    return bytes(word.cpu().tolist()).rstrip(b"\0").decode()
