"""What is asked of Linux about files: room, order and durability. Torch-free."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

PREALLOCATE_NBYTES = 2**20
"""Smaller files are written at once: nothing to gain."""
_LIBC = ctypes.CDLL(None, use_errno=True)
SYNC_FILE_RANGE_WRITE = 2
TMPFS_MAGIC, STATFS_WORDS = 0x01021994, 32


# ---------------------------------------------------------------- bytes


def preallocate(fd: int, size: int) -> None:
    """Claim the space: a full disk is found before the first byte, and the blocks lie together. Where the file system cannot,
    nothing happens (posix_fallocate would write to every block instead). In memory no block lies better than another, and
    claiming costs an eighth of the time to write: there it is only looked whether there is room. Raises OSError: ENOSPC, EDQUOT."""
    if size < PREALLOCATE_NBYTES:
        return
    room = room_on_tmpfs(fd)
    if room is None:
        if _fallocate(fd, 0, size) == 0 or (code := ctypes.get_errno()) not in (errno.ENOSPC, errno.EDQUOT):
            return
        raise OSError(code, os.strerror(code))
    if room < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def room_on_tmpfs(fd: int) -> int | None:
    """How many bytes the tmpfs still takes in which the file lies; None where it lies in another file system."""
    words = (ctypes.c_long * STATFS_WORDS)()  # f_type, f_bsize, f_blocks, f_bfree, ...
    if _LIBC.fstatfs(ctypes.c_int(fd), words) != 0 or words[0] != TMPFS_MAGIC:
        return None
    return words[1] * words[3] if words[2] else sys.maxsize  # no blocks: it was mounted without a limit


def _fallocate(fd: int, begin: int, nbytes: int) -> int:
    call = getattr(_LIBC, "fallocate", None)
    if call is None:
        return -1
    return call(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(begin), ctypes.c_int64(nbytes))


def start_flushing(fd: int, begin: int, nbytes: int) -> None:
    """Let the kernel write these pages out while the next are being filled, so that fsync has little left to wait for: on ext4 on a
    disk 1.7 GB/s instead of 1.05, fsync included. It is a hint; what it says does not matter."""
    if (call := getattr(_LIBC, "sync_file_range", None)) is not None:
        call(
            ctypes.c_int(fd),
            ctypes.c_int64(begin),
            ctypes.c_int64(nbytes),
            ctypes.c_uint(SYNC_FILE_RANGE_WRITE),
        )


# ---------------------------------------------------------------- folders


def make_folder(folder: Path) -> None:
    """Like mkdir -p, and every new name is durable."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        return
    fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def walk(
    folder: str, prefix: str, begin: tuple[str, ...] = ("",), above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[tuple[str, str, os.stat_result]]:
    """Every file below, temporaries included: the key's folder with its slash, name, status. What vanishes while we look was
    being deleted, and is passed over; so are links that lead nowhere or back to one of the folders `above`.

    Args:
        begin: of `folder` itself, what begins with one of these: what others keep beside it (lost+found of a file system) may be
            large, or not ours to look into.
    """
    try:
        entries = list(os.scandir(folder))
        here = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    if (itself := (here.st_dev, here.st_ino)) in above:
        return
    for entry in entries:
        if not entry.name.startswith(begin):
            continue
        try:
            if entry.is_dir():
                yield from walk(entry.path, f"{prefix}{entry.name}/", above=above | {itself})
            elif entry.is_file():
                yield prefix, entry.name, entry.stat()
        except FileNotFoundError:
            continue
        except OSError as e:
            if e.errno != errno.ELOOP:
                raise
