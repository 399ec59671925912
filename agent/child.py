"""What a process started for a generation does first: become its own session, take its environment and its log, and run.

It comes from the zygote by two forks, or by exec where the zygote must not fork; from `begin` on both are the same.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from surefoot import failpoint
from surefoot.agent import linux
from surefoot.agent.messages import Order, RankOrder, StoreOrder, StoreUpMsg
from surefoot.controller import wire

STORE_TIMEOUT_S = 60
"""How long one request to the TCPStore may take. Only a default of the host's own client; ranks set theirs."""


def run_order(order: Order) -> NoReturn:
    """Be the ordered process, to its end. Never returns into the caller's frames: they are the zygote's."""
    code = 1
    try:
        _become(order)
        code = _call(_host_store if isinstance(order, StoreOrder) else _run_rank, order)
    except BaseException:  # not even KeyboardInterrupt may unwind into the zygote's loop
        traceback.print_exc()
    _leave(code)


def _become(order: Order) -> None:
    _own_session()
    _default_signals()
    _redirect(Path(order.log_path))
    os.environ.update(order.env)
    os.chdir(order.cwd)
    # Failpoints and their counts are this process's own, under its own environment.
    failpoint.arm(failpoint.from_environment(os.environ))
    linux.allow_tracing_by(order.agent_pid)
    if isinstance(order, StoreOrder):
        linux.set_process_name("sf-store")
    else:
        linux.set_process_name(f"sf-rank-{order.rank}")


def _own_session() -> None:
    """A session of its own: a Ctrl-C at the launcher's terminal is no signal to ranks, and one kill reaches the group."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def _default_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(sig, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _redirect(log_path: Path) -> None:
    """stdin from nowhere, stdout and stderr into a log that must not exist yet: logs are never overwritten."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    # A file is block-buffered by default, and what stands in the buffer when SIGKILL comes was never said.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]  (TextIO is too wide a type)


def _call(function: Callable[[Order], int], order: Order) -> int:
    try:
        return function(order)
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
            return 1
        return int(e.code or 0)


def _run_rank(order: Order) -> int:
    assert isinstance(order, RankOrder)
    module, _, function = order.entry.partition(":")
    return int(getattr(importlib.import_module(module), function)() or 0)


def _leave(code: int) -> NoReturn:
    """What the interpreter does at its end, without unwinding the zygote's frames and without waiting for threads."""
    gc.disable()
    try:
        atexit._run_exitfuncs()  # pyright: ignore[reportAttributeAccessIssue]  (multiprocessing calls it like this too)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or the disk is full: nobody to tell any more
    os._exit(code)


def _host_store(order: Order) -> int:
    """Host a TCPStore until the agent closes the connection, kills us, or dies."""
    assert isinstance(order, StoreOrder)
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (documented as torch.distributed.TCPStore)

    store = TCPStore(
        order.host,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
    )
    token = Path(order.env["SUREFOOT_TOKEN_FILE"]).read_text().strip()
    with socket.socket(socket.AF_UNIX) as agent:
        agent.connect(order.env["SUREFOOT_AGENT_SOCKET"])
        up = StoreUpMsg(token=token, pid=os.getpid(), port=store.port)
        agent.sendall(wire.encode(up) + b"\n")
        try:
            while agent.recv(4096):
                pass
        except ConnectionError:
            pass
    return 0
