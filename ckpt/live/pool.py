"""The staging buffer: shared memory of a process's own, touched once and used for every save. Torch-free.

It is an anonymous memory file, so that the uploader reads it where it lies, it has no name that could be left behind, and it
goes with the last process that maps it. Touching new memory costs several times what copying into it does (here 0.6 GB/s
against 4), so that is done once, by a thread, as soon as the size is known.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading

_log = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None, use_errno=True)
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23
"""madvise(2); the second is known since Linux 5.14."""
PAGE_NBYTES = mmap.PAGESIZE
TOUCH_NBYTES = 64 * 2**20
"""Touched at a time: another thread that needs a page waits no longer than for this."""


class StagingBuffer:
    """`nbytes` of memory. `view` is all of it; `fd` is for passing on."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError: there is not that much."""
        self.nbytes = -(-max(nbytes, 1) // PAGE_NBYTES) * PAGE_NBYTES
        self.fd = os.memfd_create("surefoot-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self._map = mmap.mmap(self.fd, self.nbytes)
        except OSError:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._closing = False
        self._touched = threading.Event()
        threading.Thread(target=self._touch, name="ckpt-touch", daemon=True).start()

    def ready(self) -> None:
        """Wait until all of it is touched. (Not by joining the thread: see `Flight.join`.)"""
        self._touched.wait()

    def close(self) -> None:
        """The memory goes now; where somebody still has a view into it, with the last such view."""
        self._closing = True
        self._touched.wait()
        os.close(self.fd)
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            return

    def _touch(self) -> None:
        try:
            self._touch_all()
        finally:
            self._touched.set()

    def _touch_all(self) -> None:
        _madvise(self._address, self.nbytes, MADV_HUGEPAGE)  # where shared memory may have large pages
        for at in range(0, self.nbytes, TOUCH_NBYTES):
            if self._closing:
                return
            nbytes = min(TOUCH_NBYTES, self.nbytes - at)
            if _madvise(self._address + at, nbytes, MADV_POPULATE_WRITE) != 0:
                # An older kernel: writing is the same. Nothing is staged before `ready`.
                ctypes.memset(self._address + at, 0, nbytes)


def _madvise(address: int, nbytes: int, advice: int) -> int:
    return _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
