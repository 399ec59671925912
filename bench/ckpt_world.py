"""Processes of the checkpoint benchmark: ranks that do what they are told, an S3 server, a relay that counts bytes.

Everything started here ends with the `with` block that started it, or with this process, however it ends.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing as mp
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ANSWER_S = 300.0
"""The longest that ranks may take for one thing: a save of everything over a slow store."""


class BenchError(Exception):
    """Nothing could be measured; the message says why."""


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


@contextmanager
def scratch(where: Path) -> Iterator[Path]:
    """A folder on `where` that goes away with the block."""
    folder = Path(tempfile.mkdtemp(prefix="sf-bench-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def no_orphans() -> Iterator[None]:
    """All descendants of this process are ended with the block, also those whose parents have died."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        yield
    finally:
        for process in psutil.Process().children(recursive=True):
            try:
                process.kill()
                process.wait(10)
            except psutil.Error:
                continue  # it has ended by itself


def _interrupted(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


# ---------------------------------------------------------------- ranks


class World:
    """`ranks` processes in one gloo group. They do what `call` names, all at once: see ckpt_rank.py."""

    def __init__(self, ranks: int, env: dict[str, str] | None = None) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["ckpt_rank"])
        self._folder = tempfile.TemporaryDirectory(prefix="sf-bench-meet-")
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = self._context.Pipe()
            words = (rank, ranks, self._folder.name, env or {}, theirs)
            process = self._context.Process(target=_be_rank, args=words)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def call(self, name: str, **words: Any) -> list[Any]:
        """What each rank's `name(**words)` returned, in rank order. Raises BenchError where one failed, or died."""
        for end in self._ends:
            end.send((name, words))
        answers: dict[int, Any] = {}
        give_up = time.monotonic() + ANSWER_S
        while len(answers) < len(self._ends):
            open_ends = {end: r for r, end in enumerate(self._ends) if r not in answers}
            ready = wait(list(open_ends), timeout=max(0.0, give_up - time.monotonic()))
            if not ready:
                raise BenchError(f"{name}: no answer from ranks {sorted(open_ends.values())} in {ANSWER_S} s")
            for end, rank in open_ends.items():
                if end in ready:
                    answers[rank] = self._answer(end, rank, name)
        return [answers[r] for r in range(len(self._ends))]

    def _answer(self, end: Connection, rank: int, name: str) -> Any:
        try:
            ok, value = end.recv()
        except (EOFError, ConnectionError) as e:
            tail = _log(self._folder.name, rank).read_text(errors="replace")[-2000:]
            raise BenchError(f"rank {rank} died in {name}; the end of its stderr:\n{tail}") from e
        if not ok:
            raise BenchError(f"rank {rank} failed in {name}:\n{value}")
        return value

    def pids(self) -> list[int]:
        """The ranks and all that they started."""
        found = []
        for process in self._processes:
            try:
                own = psutil.Process(process.pid)
                found += [own.pid, *(p.pid for p in own.children(recursive=True))]
            except psutil.NoSuchProcess:
                continue
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        started = self.pids()
        if error is None:
            for end in self._ends:
                end.send(None)
            for process in self._processes:
                process.join(20)
        for end in self._ends:
            end.close()
        for pid in started:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._processes:
            process.join(10)
        self._folder.cleanup()


def _log(folder: str, rank: int) -> Path:
    """Where a rank's stderr goes, with that of all it starts: DCP's processes tell of every step they take."""
    return Path(folder) / f"rank-{rank}.log"


def _be_rank(rank: int, ranks: int, folder: str, env: dict[str, str], orders: Connection) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(_log(folder, rank), "wb") as log:
        os.dup2(log.fileno(), 2)
    os.environ.update(env)
    import ckpt_rank

    ckpt_rank.serve(rank, ranks, f"file://{folder}/meet", orders)


def pss(pids: list[int]) -> int:
    """Bytes of proportional set size of these processes together: shared pages are counted once."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        total += next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


class Watch:
    """Samples `pss` of a world while its block runs; `peak` is the highest."""

    def __init__(self, world: World, every_s: float = 0.1) -> None:
        self._world = world
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="pss")
        self.peak = 0

    def _sample(self) -> None:
        while not self._ended.wait(self._every_s):
            self.peak = max(self.peak, pss(self._world.pids()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


# ---------------------------------------------------------------- S3


@contextmanager
def s3_server(folder: Path, bucket: str) -> Iterator[Any]:
    """The S3 server of the test extra (an `S3Server` of tests/contract/s3server.py), state in `folder`."""
    module = _module(Path(__file__).parents[1] / "tests" / "contract" / "s3server.py")
    try:
        with module.run_s3(folder, bucket=bucket) as server:
            yield server
    except RuntimeError as e:
        raise BenchError(str(e)) from e


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BenchError(f"{path} is missing: the benchmark runs from a checkout")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Relay:
    """A TCP relay to a server on this machine that counts what comes back from it."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._wake, waker = socket.socketpair()
        self._selector.register(waker, selectors.EVENT_READ, None)
        self._waker = waker
        self._thread = threading.Thread(target=self._run, name="relay")
        self.back_nbytes = 0

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.close()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._waker:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._pass_on(key.fileobj, *key.data)  # type: ignore[arg-type]

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._to)
        self._selector.register(client, selectors.EVENT_READ, (server, False))
        self._selector.register(server, selectors.EVENT_READ, (client, True))

    def _pass_on(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        try:
            data = source.recv(2**18)
            if data:
                target.sendall(data)
                self.back_nbytes += len(data) if back else 0
                return
        except OSError:
            pass  # either side hung up: so does the other
        for end in (source, target):
            self._selector.unregister(end)
            end.close()
