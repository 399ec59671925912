"""Memory that the ranks of one machine read from each other while they load together. (torch)

A rank that reads what others need reads it into memory of its own that has a file descriptor (memfd), and tells the others
its process id and the descriptor. Ranks on the same machine open it through /proc and copy from it straight into their
tensors: one copy, where loopback takes four and as many context switches. There is no name that could be left behind: the memory
goes with the last process that has it.

Whether a rank is on the same machine (and in the same process namespace, and permitted) is found by trying: the memory begins
with a nonce that was told beside the process id. Where it cannot be opened, or is another's, the group passes the bytes on.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence

import msgspec
import torch

from surefoot.ckpt.loading.sharing import Party

_HEAD_NBYTES = 4096
_NONCE_NBYTES = 16
ENABLED = True
"""Tests switch it off, to try the group on one machine."""


class _Word(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's memory is; `nbytes` is 0 for none."""

    pid: int
    fd: int
    nbytes: int
    nonce: str


class NodeMemory:
    """Every rank's memory, as far as this one can see it. Made by `meet`."""

    def __init__(self, own: torch.Tensor, others: dict[int, torch.Tensor], reach: Sequence[int]) -> None:
        self.own = own
        """uint8; what this rank reads goes here."""
        self.reach = tuple(reach)
        """By rank, the ranks (bits) whose memory it can read."""
        self._others = others

    def of(self, rank: int) -> torch.Tensor:
        """Another rank's memory; only to be read."""
        return self._others[rank]


def meet(party: Party, sizes: Sequence[int], readers: int, *, pinned: bool) -> NodeMemory:
    """Get memory, and open the others'. Collective: two exchanges.

    Args:
        sizes: how much each rank needs, in bytes.
        readers: the ranks (bits) from whom this one needs anything.
        pinned: page-locked memory of one's own, which no other rank sees.
    """
    shared = _create(sizes[party.rank]) if ENABLED and not pinned else None
    if shared is None:
        own = torch.empty(sizes[party.rank], dtype=torch.uint8, device="cpu", pin_memory=pinned)
        word = _Word(pid=0, fd=-1, nbytes=0, nonce="")
    else:
        fd, mapped, nonce = shared
        own = _tensor(mapped)
        word = _Word(pid=os.getpid(), fd=fd, nbytes=sizes[party.rank], nonce=nonce.hex())
    told = [msgspec.json.decode(w, type=_Word) for w in party.exchange(msgspec.json.encode(word))]
    others: dict[int, torch.Tensor] = {}
    for rank, theirs in enumerate(told):
        if rank != party.rank and readers >> rank & 1 and theirs.nbytes:
            found = _open(theirs)
            if found is not None:
                others[rank] = found
    reach = sum(1 << r for r in others)
    masks = [int(m, 16) for m in party.exchange(f"{reach:x}".encode())]
    if shared is not None:
        os.close(shared[0])  # everybody has opened it by now
    return NodeMemory(own, others, masks)


def _create(nbytes: int) -> tuple[int, mmap.mmap, bytes] | None:
    if not nbytes:
        return None
    try:
        fd = os.memfd_create("surefoot-load", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(fd, _HEAD_NBYTES + nbytes)
        mapped = mmap.mmap(fd, _HEAD_NBYTES + nbytes)
    except OSError:
        os.close(fd)
        return None
    nonce = secrets.token_bytes(_NONCE_NBYTES)
    mapped[:_NONCE_NBYTES] = nonce
    return fd, mapped, nonce


def _open(word: _Word) -> torch.Tensor | None:
    """Another rank's memory, if it is that."""
    try:
        fd = os.open(f"/proc/{word.pid}/fd/{word.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size != _HEAD_NBYTES + word.nbytes:
            return None
        mapped = mmap.mmap(fd, _HEAD_NBYTES + word.nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return _tensor(mapped) if mapped[:_NONCE_NBYTES].hex() == word.nonce else None


def _tensor(mapped: mmap.mmap) -> torch.Tensor:
    """What follows the head. Holds on to the mapping."""
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=_HEAD_NBYTES)
