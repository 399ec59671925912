"""A file's bytes where the page cache holds them: mapped, brought in before anybody looks, never copied.

A disk that fails under a mapping is a SIGBUS, which kills the process. `madvise(MADV_POPULATE_READ)` (Linux 5.14) brings the pages
in and reports what went wrong as an error instead; what was brought in a moment ago is not read from the disk again.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value


class Pages:
    """All of an open file, mapped; it stays so as long as this or any view of it lives, whatever becomes of the file's name."""

    def __init__(self, fd: int) -> None:
        """Raises OSError."""
        self.nbytes = os.fstat(fd).st_size
        self._address: int | None = None
        if self.nbytes:
            at = _LIBC.mmap(None, self.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            if at == _FAILED:
                raise _last_error()
            self._address = at

    def view(self, start: int, nbytes: int) -> memoryview:
        """Bytes start .. start + nbytes - 1, fewer where the file ends. Only to be looked at: writing to it is a fault.

        Raises OSError: the file system cannot bring them.
        """
        nbytes = min(nbytes, self.nbytes - start)
        if nbytes <= 0 or self._address is None:
            return memoryview(b"")
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if _LIBC.madvise(self._address + first, start + nbytes - first, _MADV_POPULATE_READ) != 0:
            raise _last_error()
        found: Any = (ctypes.c_ubyte * nbytes).from_address(self._address + start)
        found.pages = self  # the memory goes with its last view
        return memoryview(found).cast("B")

    def __del__(self) -> None:
        if self._address is not None:
            _LIBC.munmap(self._address, self.nbytes)


@cache
def can_view() -> bool:
    """Can this kernel bring pages in without a signal where that fails?"""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        return _LIBC.madvise(address, mmap.PAGESIZE, _MADV_POPULATE_READ) == 0


def _last_error() -> OSError:
    number = ctypes.get_errno()
    if number == errno.EFAULT:  # what would have been a SIGBUS
        number = errno.EIO
    return OSError(number, os.strerror(number))
