"""The process of an uploader (ckpt/saving/uploader.py), tied to its rank before anything large is imported. Torch-free.

``python -m surefoot.ckpt.saving.leash --fd N --parent PID --root URL``, started by ckpt/saving/writer.py; N is its end of a
socket pair. It lives as long as the rank: it ends when the other end of the pair closes or the rank's process ends, whichever
way, and on nothing else. (Ctrl-C and SIGTERM go to whole groups of processes; a script that catches them wants its last save.)

On a busy machine the imports take many seconds. A rank that dies meanwhile leaves nobody waiting for them.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence
from select import POLLIN, poll
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def watch(parent: int) -> None:
    """End this process with its parent. A worker that the rank forked may hold its end of the socket pair open."""
    fd = -1
    try:
        fd = os.pidfd_open(parent)
    except (OSError, AttributeError):
        pass  # it ended before we looked; or an old kernel, where the socket pair alone has to tell
    if os.getppid() != parent:
        os._exit(0)
    if fd < 0:
        return

    def wait() -> None:
        ended = poll()
        ended.register(fd, POLLIN)
        ended.poll()
        os._exit(0)

    threading.Thread(target=wait, name="watch", daemon=True).start()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Tie this process to the rank's, and work for it until it says goodbye or is gone."""
    parser = argparse.ArgumentParser(prog="python -m surefoot.ckpt.saving.leash")
    parser.add_argument("--fd", type=int, required=True, help="our end of the socket pair with the rank")
    parser.add_argument("--parent", type=int, required=True, help="the rank's pid: we end with it")
    parser.add_argument("--tethered", action="store_true", help="the thread that starts us stays")
    parser.add_argument("--root", required=True, help="the object store's URL")
    args = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if args.tethered:  # also when we are stopped, or hang in the kernel
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    watch(args.parent)

    from surefoot.ckpt.saving.uploader import serve

    serve(args.fd, args.root)
    # Threads may hang in an upload, and nobody waits for what they would say.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
