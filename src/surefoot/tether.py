"""Runs a command that is asked to end (SIGTERM) as soon as its starter is dead: ``python tether.py <parent pid> <command …>``.

Started as a file, isolated and without site packages, so that it costs about 10 ms. It sets the parent-death signal of
prctl(2), makes sure the parent still lived then, and becomes the command. (Setting it between fork and exec of the
starter itself would run Python in a forked copy of a process that holds gRPC threads.)

The kernel sends the signal when the *thread* that started the command ends: start from a thread that stays.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def command(argv: list[str]) -> list[str]:
    """The command line that runs `argv` tethered to this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def main() -> None:
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        sys.exit(f"surefoot: prctl(PR_SET_PDEATHSIG) failed: {os.strerror(error)}")
    if os.getppid() != parent:
        sys.exit(f"surefoot: {argv[0]} is not started: its starter (pid {parent}) has ended")
    try:
        os.execvp(argv[0], argv)
    except OSError as e:
        sys.exit(f"surefoot: cannot run {argv[0]}: {e.strerror}")


if __name__ == "__main__":
    main()
