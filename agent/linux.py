"""The few system calls Python has no name for. All of them concern the calling process only."""

from __future__ import annotations

import ctypes
import os
import signal

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


def become_subreaper(on: bool = True) -> None:
    """From now on orphans among our descendants become our children, and their exits reach us (`on` False: init's)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def die_with_parent(parent: int) -> None:
    """SIGKILL us when the process `parent`, our parent, ends; at once if it has ended. Lost on fork, kept on exec.

    The kernel watches the *thread* that started us: start helper processes from the main thread only.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def allow_tracing_by(pid: int) -> None:
    """Let `pid` (and its children, py-spy) look at our stacks without root where the Yama module restricts that."""
    try:
        _prctl(_PR_SET_PTRACER, pid)
    except OSError:
        pass  # EINVAL: a kernel without Yama restricts nothing


def set_process_name(name: str) -> None:
    """What `ps` and `top` show as the command's name; 15 bytes are kept."""
    _prctl(_PR_SET_NAME, name.encode()[:15] + b"\0")


def threads_running() -> int:
    """The number of threads of this process as the kernel counts them, native ones included."""
    return len(os.listdir("/proc/self/task"))


def close_inherited(keep: int = 2) -> None:
    """Close whatever a fresh program was handed beside its standard streams and `keep`: they are somebody else's, and an
    open pipe end of theirs would make them wait for us."""
    os.closerange(3, keep)
    os.closerange(max(keep + 1, 3), os.sysconf("SC_OPEN_MAX"))


def out_of_memory_kills() -> int:
    """How often the kernel of this machine has killed a process for want of memory, since boot."""
    try:
        with open("/proc/vmstat") as f:
            found = (line.split() for line in f if line.startswith("oom_kill "))
            return int(next(found, ("", "0"))[1])
    except OSError:
        return 0
