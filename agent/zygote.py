"""The zygote: a process with torch and the job's modules imported that forks the processes of a generation.

``python -m surefoot.agent.zygote --fd N --parent PID``, started by the agent; N is its end of a socket pair (messages.py).

It imports, then waits; it starts no thread, touches no CUDA and opens nothing else, so that a fork copies a process at
rest. Before every fork the kernel's count of threads must be one; where it is not (a preloaded module started some), the
request is refused and the agent starts ranks by exec (``--order``).

A rank must survive the zygote and its exit must reach the agent, so it is forked twice: the zygote forks one
intermediate per request, which forks all the processes ordered and exits; the agent is the nearest subreaper and becomes
their parent. (clone(2) with CLONE_PARENT would save the intermediate, but goes around glibc's and Python's fork handlers.)
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import BinaryIO

from surefoot import marks
from surefoot.agent import child, linux
from surefoot.agent.lines import BlockingLines
from surefoot.agent.messages import (
    ForkedMsg,
    ForkedProcess,
    ForkMsg,
    ForkRefusedMsg,
    Order,
    WarmMsg,
    WarmUpMsg,
    decode_order,
    decode_to_zygote,
)
from surefoot.controller import wire

MESSAGE_CHARS_MAX = 2_000
TRACEBACK_CHARS_MAX = 8_000
"""As in failures.py: a report must fit into a node's status."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m surefoot.agent.zygote")
    parser.add_argument("--fd", type=int, help="our end of the socket pair with the agent")
    parser.add_argument("--parent", type=int, help="the agent's pid: we die with it")
    parser.add_argument(
        "--order", action="store_true", help="be the one process ordered on stdin, without forking"
    )
    args = parser.parse_args(argv)
    linux.close_inherited(keep=args.fd or 2)
    if args.order:
        child.run_order(decode_order(sys.stdin.buffer.read()))
    linux.die_with_parent(args.parent)
    linux.set_process_name("sf-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
    with socket.socket(fileno=args.fd) as sock:
        sock.set_inheritable(False)
        serve(sock)
    return 0


def serve(sock: socket.socket) -> None:
    """Warm up as ordered, then fork as ordered, until the agent closes its end."""
    agent = BlockingLines(sock, decode_to_zygote)
    while (message := agent.read()) is not None:
        match message:
            case WarmUpMsg():
                agent.send(warm_up(message))
            case ForkMsg():
                agent.send(_fork(message, sock))


def warm_up(order: WarmUpMsg) -> WarmMsg:
    """Import our modules and the job's. A module of the job's that fails is reported; ours that fail are fatal."""
    began = time.monotonic()
    sys.path.extend(p for p in order.path if p not in sys.path)
    for module in order.modules:
        importlib.import_module(module)
    failure = _preload(order.preload)
    # What stands now is never garbage: keeping it out of collections keeps its pages shared with the ranks.
    gc.collect()
    gc.freeze()
    return WarmMsg(import_s=time.monotonic() - began, threads=linux.threads_running(), failure=failure)


def _preload(modules: Sequence[str]) -> wire.ErrorReport | None:
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as e:  # a module may well call sys.exit
            message = (
                f"program.preload names {module!r}, which cannot be imported: {type(e).__name__}: {e}. "
                f"Mend the module or the name; searched: {', '.join(dict.fromkeys(filter(None, sys.path[:3])))} …"
            )
            return wire.ErrorReport(
                kind="startup",
                type=type(e).__name__,
                message=message[:MESSAGE_CHARS_MAX],
                traceback="".join(traceback.format_exception(e))[-TRACEBACK_CHARS_MAX:],
                permanent=not isinstance(e, OSError),  # a disk or a mount may come back
            )
    return None


def _fork(order: ForkMsg, agent_end: socket.socket) -> ForkedMsg | ForkRefusedMsg:
    threads = linux.threads_running()
    if threads != 1:
        return ForkRefusedMsg(serial=order.serial, threads=threads)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as results:
        intermediate = os.fork()
        if intermediate == 0:
            _fork_each(order.orders, writer, (agent_end.fileno(), reader))
        os.close(writer)
        processes, failure = _read_results(results, len(order.orders))
        os.waitpid(intermediate, 0)
    return ForkedMsg(serial=order.serial, processes=tuple(processes), failure=failure)


def _fork_each(orders: Sequence[Order], writer: int, foreign: tuple[int, ...]) -> None:
    """In the intermediate process: fork each, tell the zygote, and end. Never returns."""
    try:
        for order in orders:
            pid = os.fork()
            if pid == 0:
                for fd in (writer, *foreign):
                    os.close(fd)
                child.run_order(order)
            _tell(writer, {"pid": pid, "start_time": marks.start_time(pid) or 0})
    except BaseException as e:
        _tell(writer, {"failure": f"fork failed: {type(e).__name__}: {e}"})
    finally:
        os._exit(0)


def _tell(writer: int, fact: dict[str, int | str]) -> None:
    os.write(writer, json.dumps(fact).encode() + b"\n")


def _read_results(results: BinaryIO, expected: int) -> tuple[list[ForkedProcess], str]:
    """What the intermediate told: `expected` processes, or those up to a failure."""
    processes: list[ForkedProcess] = []
    while len(processes) < expected:
        line = results.readline()
        if not line:
            return processes, "the intermediate process died while it forked"
        fact = json.loads(line)
        if "failure" in fact:
            return processes, fact["failure"]
        processes.append(ForkedProcess(**fact))
    return processes, ""


if __name__ == "__main__":
    raise SystemExit(main())
