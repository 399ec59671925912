"""Snapshot slots: files in the node's shared memory, owned by the agent, written by ranks and by the snapshot server.

::

    <shm>/own/r<rank>/slot<k>        written by the rank (it maps them)
    <shm>/replica/r<rank>/slot<k>    written by the snapshot server, for ranks of other nodes
    <shm>/upload/r<rank>-<k>         pinned copies of what is being uploaded

Files are plain and mapped by whoever needs them (multiprocessing's shared memory would be unlinked by its tracker). Their
pages are claimed when a file is made (`posix_fallocate`), for two reasons: a full file system is then an error here and
not a SIGBUS in a rank, and first touch is slow (0.6 GB/s against 8 GB/s warm). Slots are kept and reused over
generations. What a slot holds is read from its image, never remembered beside it: so a new incarnation can adopt it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surefoot.agent.decide import HeldImage, SlotView
from surefoot.agent.errors import MemoryBudgetError, SharedMemoryFullError
from surefoot.ckpt import tiers

Area = Literal["own", "replica"]

REPLICA_SLOTS = 3
"""As many as a rank has of its own (pool.py): the newest complete pair, the one in the making, one to write into."""

UNSEALED_BYTES = 4096
"""Zeroing so much of a slot's head unseals whatever image it holds, before it is written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFolder:
    """The slots of one node. `budget_bytes` bounds all files of the folder together; None: only the memory there is."""

    root: Path
    budget_bytes: int | None = None

    def path(self, area: Area, rank: int, index: int) -> Path:
        return self.root / area / f"r{rank}" / f"slot{index}"

    def upload_path(self, rank: int, index: int) -> Path:
        return self.root / "upload" / f"r{rank}-{index}"

    def ranks(self, area: Area) -> list[int]:
        """Ranks that have slots in `area`."""
        names = [p.name for p in (self.root / area).glob("r*")]
        return sorted(int(n[1:]) for n in names if n[1:].isdigit())

    def indices(self, area: Area, rank: int) -> list[int]:
        names = [p.name for p in (self.root / area / f"r{rank}").glob("slot*")]
        return sorted(int(n[4:]) for n in names if n[4:].isdigit())

    def reserve(self, path: Path, size: int) -> None:
        """Make `path` exist with at least `size` bytes of claimed memory; what it holds stays. Blocks (0.6 GB/s).

        Raises:
            MemoryBudgetError, SharedMemoryFullError: nothing has changed.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            present = os.fstat(fd).st_size
            if present >= size:
                return
            self._check_budget(size - present, path)
            _claim(fd, present, size, path)
        finally:
            os.close(fd)

    def used_bytes(self) -> int:
        return sum(p.stat().st_size for p in self.root.rglob("*") if p.is_file())

    def images(self, area: Area, rank: int) -> Iterator[HeldImage]:
        """The sealed images in a rank's slots, by their heads; their data is not verified."""
        for index in self.indices(area, rank):
            path = self.path(area, rank, index)
            info = read_info(path)
            if info is not None and info.rank == rank:
                yield held_image(info, replica=area == "replica", path=path)

    def views(self, area: Area, rank: int, slots: int) -> list[SlotView]:
        """The first `slots` slots of a rank, existing or not, with what they hold."""
        holding = {i.path: i.point for i in self.images(area, rank)}
        return [SlotView(index=k, point=holding.get(str(self.path(area, rank, k)))) for k in range(slots)]

    def adopt(self, whose: str) -> list[HeldImage]:
        """Verify every image of a former incarnation; what is not whole is unsealed. Blocks: it reads all data.

        Args:
            whose: names job, run and node. A folder of anybody else's is emptied first.
        """
        self._own(whose)
        adopted: list[HeldImage] = []
        areas: tuple[Area, ...] = ("own", "replica")
        for area in areas:
            for rank in self.ranks(area):
                for image in self.images(area, rank):
                    if _is_whole(Path(image.path)):
                        adopted.append(image)
                    else:
                        unseal(Path(image.path))
        shutil.rmtree(self.root / "upload", ignore_errors=True)  # their uploads ended with the former agent
        return adopted

    def drop_ranks(self, area: Area, ranks: Iterable[int]) -> None:
        for rank in ranks:
            shutil.rmtree(self.root / area / f"r{rank}", ignore_errors=True)

    def clear(self) -> None:
        """Remove all of it: the job is over."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _own(self, whose: str) -> None:
        note = self.root / "owner"
        if not note.exists() or note.read_text() != whose:
            self.clear()
            self.root.mkdir(mode=0o700, parents=True)
            note.write_text(whose)

    def _check_budget(self, more: int, path: Path) -> None:
        if self.budget_bytes is None:
            return
        used = self.used_bytes()
        if used + more > self.budget_bytes:
            raise MemoryBudgetError(
                f"snapshots on this node would take {used + more:,} bytes with {path.parent.name}/{path.name}, and "
                f"checkpoint.memory_budget allows {self.budget_bytes:,}: raise it, or run fewer ranks per node"
            )


def _claim(fd: int, present: int, size: int, path: Path) -> None:
    try:
        os.posix_fallocate(fd, present, size - present)
    except OSError as e:
        os.ftruncate(fd, present)
        if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        free = os.statvfs(path.parent)
        raise SharedMemoryFullError(
            f"no room for {size - present:,} more bytes at {path}: {free.f_bavail * free.f_frsize:,} bytes are free in "
            "its file system. Free some, enlarge it (mount -o remount,size=…), or run fewer ranks per node"
        ) from e


@contextmanager
def mapped(path: Path, *, write: bool = False) -> Iterator[memoryview]:
    """The bytes of a slot file; they stay mapped as long as the view, or a slice of it, is referenced.

    Raises:
        OSError: no such file; ValueError: it is empty.
    """
    fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        # Not closed by hand: an exception on its way out still holds slices of the view in its traceback, and unmapping
        # under them is refused. The last reference unmaps.
        yield memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ))
    finally:
        os.close(fd)


def read_info(path: Path) -> tiers.ImageInfo | None:
    """What the sealed image in a slot file says of itself; None where there is none."""
    return _read(path, tiers.read_image)


def _is_whole(path: Path) -> bool:
    return _read(path, tiers.verify_image) is not None


def _read(path: Path, read: Callable[[memoryview], tiers.ImageInfo]) -> tiers.ImageInfo | None:
    try:
        with mapped(path) as view:
            return read(view)
    except (OSError, ValueError, tiers.ImageError):
        return None


def unseal(path: Path) -> None:
    """Make a slot hold nothing, whatever it held."""
    try:
        with mapped(path, write=True) as view:
            head = min(UNSEALED_BYTES, len(view))
            view[:head] = bytes(head)
    except (OSError, ValueError):
        pass  # it is gone, or empty


def held_image(info: tiers.ImageInfo, *, replica: bool, path: Path) -> HeldImage:
    return HeldImage(
        rank=info.rank, generation=info.generation, step=info.step, replica=replica, path=str(path)
    )
