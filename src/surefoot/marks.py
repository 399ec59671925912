"""Marks on processes, and the run folder: how everything a run started is found and ended, and nothing else.

Every process of a run carries ``SUREFOOT_MARK=<job>/<run id>/<node>/<incarnation>`` in its environment from exec on.
The kernel shows that environment in ``/proc/<pid>/environ`` whatever becomes of the process: a child keeps it through
fork, setsid, re-parenting and a changed command line, and a process that only looks like ours does not have it.

A run has one owner (`RunOwner`): the process that holds the lock of the run folder. The kernel drops the lock when the
owner ends, in whatever way, so a run whose lock is free has no owner, and `sweep` may end what bears its mark. Nobody
ends anything of a run whose lock is held.

Layout, with base = ``$SUREFOOT_HOME`` or ``<temporary folder>/surefoot-<uid>``::

    <base>/<run id>/lock          held by flock while the owner lives
    <base>/<run id>/token         the secret that every socket of the run asks for
    <base>/<run id>/owner.json    facts for `surefoot status`: job, pid, etcd's address
    /dev/shm/surefoot-<run id>/   shared memory of the run's nodes; its file `.run` names the run folder

A pid alone names nobody, for pids come back. A process is named by (pid, start time), and signalled through a pidfd
that was opened before the start time was compared once more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import select
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

log = logging.getLogger(__name__)

MARK_ENV = "SUREFOOT_MARK"
HOME_ENV = "SUREFOOT_HOME"
SHM_ROOT = Path("/dev/shm")
SHM_PREFIX = "surefoot-"

SOCKET_PATH_MAX = 107
"""Bytes of a Unix socket's path, the closing NUL not counted: sun_path has 108 (unix(7))."""

SOCKET_ROOM = 40
"""Bytes kept free behind the run folder for ``/nodes/<uid>/agent.sock`` and its like, uids of up to 20 bytes."""

ORPHAN_AGE_S = 60.0
"""How old a half-made run folder, or a shared-memory folder without its run folder, must be before it counts as left
behind: making one takes milliseconds."""

EMPTY_SCANS = 3
"""How many scans in a row must find nothing before `end` believes it; a scan takes a few milliseconds."""

_RUN_ID = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{6}")
_HALF_MADE = ".new-"


class MarkError(ValueError):
    """A text is no mark, or a part of a mark is empty or holds a slash."""


class RunFolderError(OSError):
    """The run folder cannot be made or used as it is; the message says what to do."""


# ---------------------------------------------------------------- marks


@dataclass(frozen=True, slots=True)
class Mark:
    """Whose a process is. `node` is a node's uid, ``etcd``, or ``controller-<name>``."""

    job: str
    run_id: str
    node: str
    incarnation: str

    def __post_init__(self) -> None:
        for part in (self.job, self.run_id, self.node, self.incarnation):
            if not part or "/" in part or "\0" in part:
                raise MarkError(
                    f"{part!r} cannot be part of a mark: it must be non-empty and free of slashes"
                )

    def __str__(self) -> str:
        return f"{self.job}/{self.run_id}/{self.node}/{self.incarnation}"

    def env(self) -> dict[str, str]:
        """What to put into the environment of a process that is to carry this mark."""
        return {MARK_ENV: str(self)}

    @classmethod
    def parse(cls, text: str) -> Mark:
        """Read a mark. Raises: MarkError."""
        parts = text.split("/")
        if len(parts) != 4:
            raise MarkError(f"{text!r} is no mark: expected <job>/<run id>/<node>/<incarnation>")
        return cls(*parts)


@dataclass(frozen=True, slots=True)
class MarkedProcess:
    """One living process and its mark. `start_time` is in clock ticks since boot (proc_pid_stat(5), field 22)."""

    pid: int
    start_time: int
    mark: Mark


def current() -> Mark | None:
    """The mark of this process, if it carries one."""
    text = os.environ.get(MARK_ENV)
    return Mark.parse(text) if text else None


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none with that pid, or only its zombie."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def find(
    *, run_id: str, node: str | None = None, other_than_incarnation: str | None = None
) -> list[MarkedProcess]:
    """Living processes of this user that bear the run's mark, by pid; zombies are dead.

    Args:
        run_id: the run.
        node: only this node's.
        other_than_incarnation: all incarnations but this one; an agent asks for its predecessors' that way.
    """
    return [
        p
        for p in sorted(_scan(), key=lambda p: p.pid)
        if p.mark.run_id == run_id
        and (node is None or p.mark.node == node)
        and (other_than_incarnation is None or p.mark.incarnation != other_than_incarnation)
    ]


def end(processes: Collection[MarkedProcess], *, timeout_s: float = 10.0) -> list[MarkedProcess]:
    """SIGKILL the given processes and whatever bears one of their marks, until none is left; blocks until they are gone.

    This process and its ancestors are never signalled, nor waited for, nor is anything that does not bear one of the marks.

    Returns:
        Those that still live after `timeout_s` (they hang in the kernel, or something keeps starting new ones).
    """
    condemned = {p.mark for p in processes}
    return _end_all(lambda mark: mark in condemned, timeout_s) if condemned else []


def end_run(run_id: str, *, timeout_s: float = 10.0) -> list[MarkedProcess]:
    """`end` everything that bears the run's mark. Only its owner, or who holds its lock, may call this."""
    return _end_all(lambda mark: mark.run_id == run_id, timeout_s)


def _end_all(condemned: Callable[[Mark], bool], timeout_s: float) -> list[MarkedProcess]:
    spared = _self_and_ancestors()
    deadline = time.monotonic() + timeout_s
    empty_scans = 0
    # A scan is no snapshot: a process may fork and leave between the listing of /proc and the look at its environment,
    # and one between fork and exec does not yet show its mark. So one empty scan proves nothing.
    while empty_scans < EMPTY_SCANS:
        left = [p for p in _scan() if condemned(p.mark) and p.pid not in spared]
        if left and time.monotonic() >= deadline:
            return left
        empty_scans = 0 if left else empty_scans + 1
        _kill_and_wait(left, deadline)
    return []


def _kill_and_wait(processes: Collection[MarkedProcess], deadline: float) -> None:
    """SIGKILL each, if it is still who it was, then wait for all to be gone or for the deadline."""
    with contextlib.ExitStack() as stack:
        waiting = select.poll()
        open_fds: set[int] = set()
        for process in processes:
            fd = _open_pidfd(process)
            if fd is None:
                continue
            stack.callback(os.close, fd)
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                log.warning("process %d bears the mark %s but may not be ended", process.pid, process.mark)
                continue
            waiting.register(fd, select.POLLIN)
            open_fds.add(fd)
        while open_fds and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in waiting.poll(left_s * 1000):
                waiting.unregister(fd)
                open_fds.discard(fd)


def _open_pidfd(process: MarkedProcess) -> int | None:
    """A pidfd of the very process, or None if it is gone or its pid went to another."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # The pidfd pins one process; if start time and mark are as noted after that, it is the noted one.
    if start_time(process.pid) == process.start_time and _mark_of(process.pid) == process.mark:
        return fd
    os.close(fd)
    return None


def _scan() -> Iterator[MarkedProcess]:
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        mark = _mark_of(pid)
        if mark is None:
            continue
        started = start_time(pid)
        if started is not None:
            yield MarkedProcess(pid, started, mark)


def _mark_of(pid: int) -> Mark | None:
    """The mark in a process's environment at exec; None without one, without the right to look, or without such a process."""
    prefix = MARK_ENV.encode() + b"="
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return None
        with open(f"/proc/{pid}/environ", "rb") as f:
            environ = f.read()
    except OSError:
        return None
    for entry in environ.split(b"\0"):
        if entry.startswith(prefix):
            try:
                return Mark.parse(entry[len(prefix) :].decode())
            except ValueError:
                return None  # somebody else's variable of that name
    return None


def _stat_fields(pid: int) -> list[str] | None:
    """Fields 3 and on of /proc/<pid>/stat (the name, field 2, may hold anything, so cut behind its last parenthesis)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].decode().split()
    except OSError:
        return None


def _self_and_ancestors() -> set[int]:
    pids: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        fields = _stat_fields(pid)
        pid = int(fields[1]) if fields else 0
    return pids


# ---------------------------------------------------------------- run folders


def base_folder() -> Path:
    """Where run folders stand: ``$SUREFOOT_HOME``, or ``surefoot-<uid>`` in the temporary folder."""
    home = os.environ.get(HOME_ENV)
    return Path(home).absolute() if home else Path(tempfile.gettempdir()) / f"surefoot-{os.geteuid()}"


@dataclass(slots=True)
class RunOwner:
    """The owner of one run: holds the lock of its folder for life. Make one with `create`; close it, or use it in a ``with``."""

    job: str
    run_id: str
    folder: Path
    shm_dir: Path
    _lock_fd: int

    @classmethod
    def create(cls, job: str, base: Path | None = None) -> RunOwner:
        """Make the run folder with its token, take its lock, and make the shared-memory folder.

        Raises:
            RunFolderError: the base belongs to another user, cannot be written, or makes socket paths too long.
        """
        base = _checked_base(base or base_folder())
        run_id = f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"
        _check_socket_room(base / run_id)
        try:
            # Complete and locked before it gets its name: no sweeper ever sees a run folder without its owner's lock.
            half_made = base / f"{_HALF_MADE}{run_id}"
            half_made.mkdir(mode=0o700)
            lock_fd = _take_lock(half_made / "lock", create=True)
            assert lock_fd is not None, "a fresh folder's lock was taken by somebody else"
            _write_private(half_made / "token", secrets.token_hex(32))
            half_made.rename(base / run_id)
        except OSError as e:
            raise RunFolderError(
                f"cannot make a run folder in {base}: {e.strerror or e}; free or mend it, or set {HOME_ENV} to another folder"
            ) from e
        owner = cls(job, run_id, base / run_id, SHM_ROOT / f"{SHM_PREFIX}{run_id}", lock_fd)
        try:
            owner.shm_dir.mkdir(mode=0o700)
            _write_private(owner.shm_dir / ".run", str(owner.folder))
            owner.describe()
        except OSError as e:
            owner.close()
            raise RunFolderError(f"cannot make {owner.shm_dir}: {e.strerror or e}") from e
        return owner

    @property
    def token_file(self) -> Path:
        return self.folder / "token"

    @property
    def token(self) -> str:
        return self.token_file.read_text()

    def mark(self, node: str, incarnation: str = "0") -> Mark:
        """The mark for a process of this run."""
        return Mark(self.job, self.run_id, node, incarnation)

    def describe(self, **facts: Any) -> None:
        """Write owner.json anew: job, run id, pid, and what is given (the address of etcd, the object store's URL …)."""
        text = json.dumps({"job": self.job, "run_id": self.run_id, "pid": os.getpid(), **facts}, indent=1)
        _write_private(self.folder / ".owner.json", text)
        (self.folder / ".owner.json").rename(self.folder / "owner.json")

    def close(self, *, remove: bool = True) -> list[MarkedProcess]:
        """End what bears the run's mark, remove its shared memory and (with `remove`) its folder, and give up the lock.

        Returns:
            Processes that could not be ended; the folder then stays for a later `sweep`. A second call does nothing.
        """
        if self._lock_fd < 0:
            return []
        try:
            return _clear(self.folder, self.run_id, remove=remove)
        finally:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class LivingRun:
    """A run whose owner lives. `facts` is its owner.json."""

    run_id: str
    folder: Path
    facts: Mapping[str, Any]


def living_runs(base: Path | None = None) -> list[LivingRun]:
    """The runs of this user whose locks are held, oldest first."""
    living: list[LivingRun] = []
    for folder in _run_folders(base or base_folder()):
        lock_fd = _take_lock(folder / "lock")
        if lock_fd is not None:
            os.close(lock_fd)
            continue
        try:
            facts = json.loads((folder / "owner.json").read_text())
        except (OSError, ValueError):
            continue  # just being made, or just being removed
        living.append(LivingRun(folder.name, folder, facts))
    return living


def sweep(base: Path | None = None) -> list[str]:
    """Clean up after runs whose owner is gone: end what bears their mark, remove their shared memory and their folders.

    A run whose lock is held is left alone, and so is whatever carries no mark. Several sweepers may work at once: each
    run is cleaned by the one that gets its lock.

    Returns:
        The run ids that were cleaned up. One whose processes cannot be ended is logged and left for the next sweep.
    """
    base = base or base_folder()
    swept = [folder.name for folder in _run_folders(base) if _sweep_folder(folder)]
    for half_made in base.glob(f"{_HALF_MADE}*"):
        if _older_than(half_made, ORPHAN_AGE_S):
            shutil.rmtree(half_made, ignore_errors=True)
    return swept + _sweep_orphaned_shm()


def _sweep_folder(folder: Path) -> bool:
    lock_fd = _take_lock(folder / "lock")
    if lock_fd is None:
        return False
    try:
        return not _clear(folder, folder.name, remove=True)
    finally:
        os.close(lock_fd)


def _clear(folder: Path, run_id: str, *, remove: bool) -> list[MarkedProcess]:
    """What `RunOwner.close` and `sweep` do while they hold the lock. Returns processes that would not end."""
    survivors = end_run(run_id)
    if survivors:
        pids = ", ".join(str(p.pid) for p in survivors)
        log.warning(
            "processes %s of run %s could not be ended; %s stays for a later start", pids, run_id, folder
        )
        return survivors
    shutil.rmtree(SHM_ROOT / f"{SHM_PREFIX}{run_id}", ignore_errors=True)
    if remove:
        _remove_folder(folder)
    return []


def _remove_folder(folder: Path) -> None:
    """Remove all but the lock first: killed half-way, the folder can still be swept."""
    for entry in list(folder.iterdir()):
        if entry.name == "lock":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    (folder / "lock").unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as e:
        log.warning("cannot remove %s: %s", folder, e.strerror)


def _sweep_orphaned_shm() -> list[str]:
    """Shared memory whose run folder somebody removed by hand, of runs that have no process left."""
    swept: list[str] = []
    for shm in SHM_ROOT.glob(f"{SHM_PREFIX}*"):
        run_id = shm.name.removeprefix(SHM_PREFIX)
        if not _RUN_ID.fullmatch(run_id) or not _is_own(shm) or not _older_than(shm, ORPHAN_AGE_S):
            continue
        # The run may live under another base: then its folder is there, and its own base's sweeps look after it.
        if not _run_folder_of(shm).exists() and not find(run_id=run_id):
            shutil.rmtree(shm, ignore_errors=True)
            swept.append(run_id)
    return swept


def _run_folder_of(shm: Path) -> Path:
    try:
        return Path((shm / ".run").read_text())
    except OSError:
        return shm / ".none"


def _run_folders(base: Path) -> list[Path]:
    try:
        return sorted(f for f in base.iterdir() if _RUN_ID.fullmatch(f.name) and _is_own(f))
    except OSError:
        return []


def _take_lock(path: Path, *, create: bool = False) -> int | None:
    """A descriptor that holds the file's lock until it is closed; None if another holds it, or the file is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it before may have removed the folder: then this is the lock of a file without a name.
        if os.fstat(fd).st_nlink > 0:
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _checked_base(base: Path) -> Path:
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise RunFolderError(
            f"cannot make {base} for run folders: {e.strerror or e}; set {HOME_ENV} to a folder of your own"
        ) from e
    if not _is_own(base):
        raise RunFolderError(
            f"{base} is not a folder of this user: it will not hold run folders; set {HOME_ENV} to another"
        )
    return base


def _check_socket_room(folder: Path) -> None:
    length = len(os.fsencode(folder)) + SOCKET_ROOM
    if length > SOCKET_PATH_MAX:
        raise RunFolderError(
            f"{folder} is too long: sockets in it need paths of {length} bytes and Linux takes {SOCKET_PATH_MAX}; "
            f"set {HOME_ENV} to a folder whose path is {length - SOCKET_PATH_MAX} bytes shorter"
        )


def _is_own(path: Path) -> bool:
    """A real folder (no link) of this user."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _older_than(path: Path, age_s: float) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > age_s
    except OSError:
        return False


def _write_private(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as f:
        f.write(text)
