"""The local runner: a whole job on this machine, under one owner that leaves nothing behind.

`LocalRun` starts etcd, controllers and agents, each in a session of its own, with its own mark, state folder and
shared-memory folder, and ends all of them, whatever happens:

* on the way out of the ``with`` (also by exception, Ctrl-C, SIGTERM): SIGTERM and a grace, then SIGKILL by mark;
* where the runner itself is killed, the kernel sends its children SIGTERM (`surefoot.tether`), and the next start of any
  run sweeps what is left (`marks.sweep`);
* another run beside it is never touched: its lock is held.

Layout of the run folder (its lock, token and owner.json are `marks.RunOwner`'s)::

    job.toml                 the job file as it was when the run started
    etcd/                    data of the embedded etcd
    controllers/<name>/      state folder of a controller
    nodes/<uid>/             state folder of an agent
    logs/<component>.log     stdout and stderr of each

The runner does not start a lost node again: that is what standbys are for, and without one the controller ends the job after
``policy.wait_for_node_s``. The last controller, though, is started again when a signal ended it, a few times: without one
nobody answers faults.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from surefoot import marks, tether
from surefoot.ckpt.control import ensure_exclusive
from surefoot.ckpt.record import list_records
from surefoot.ckpt.store import (
    ObjectStore,
    ObjectStoreError,
    open_store,
)
from surefoot.controller import etcd, wire
from surefoot.controller.core.closing import resumes
from surefoot.controller.keys import Keys
from surefoot.controller.lastwords import first_error, how_ended
from surefoot.controller.reader import JobReader, facts_of, same_root
from surefoot.controller.spec.tables import JobSpec
from surefoot.controller.store import CoordError, CoordStore, connect
from surefoot.controller.view.types import JobView
from surefoot.controller.view.values import outcome_of
from surefoot.exitcodes import ExitCode

log = logging.getLogger(__name__)

POLL_S = 0.1
"""How often `wait` looks at the outcome and at the processes."""

PREFLIGHT_S = 15.0
"""Deadline for the one listing that tells whether the object store is there: s3fs retries for about 10 s by itself."""

GRACE_S_MAX = 10.0
"""SIGTERM to SIGKILL when a run is ended from outside; the agents' own, for their ranks, is ``policy.grace_s``."""

REVIVALS_MAX = 3
"""How often the last controller is started again. One that is killed more often is killed for a reason (memory)."""

HELD_PATIENCE_S = 15.0
"""How long a run on this machine waits for a contradiction (a damaged record …) to go away: nobody is there to mend it."""

KEPT_RUNS_MAX = 5
"""How many failed runs' logs are kept under the base folder."""


class RunFailedError(Exception):
    """A local run cannot start or cannot go on. The message is for the user; `exit_code` is what to exit with."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Component:
    """One process of the run: ``etcd``, ``controller-a``, ``agent-n0`` …"""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def how_ended(self) -> str:
        """In words, with the first error it logged."""
        return how_ended(self.name, self.process.returncode, first_error(_read(self.log)))


class LocalRun:
    """One job on this machine; use it in a ``with``, from the thread that stays (usually the main one).

    Attributes:
        folder: the run folder; None before `start` and after `stop`.
        store: a client of the run's etcd, after `start`.
        kept: where `stop` put the logs, if it kept them.
    """

    def __init__(
        self,
        spec: JobSpec,
        job_file: Path,
        *,
        controllers: int = 1,
        keep: Path | None = None,
        base: Path | None = None,
        etcd_endpoint: str | None = None,
        etcd_port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            spec: of `job_file`, which is copied into the run folder.
            controllers: how many; one leads.
            keep: a folder that gets a copy of logs and histories at the end.
            base: where run folders stand; default `marks.base_folder`.
            etcd_endpoint: an etcd that is there already (HOST:PORT); default: an embedded one.
            etcd_port: where the embedded etcd must listen; default: any free port.
            environment: added to the environment of controllers and agents.
        """
        self.spec = spec
        self.job_file = job_file
        self.folder: Path | None = None
        self.kept: Path | None = None
        self._controller_count = controllers
        self._keep = keep
        self._base = base
        self._endpoint = etcd_endpoint
        self._etcd_address = ""
        self._etcd_port = etcd_port
        self._environment = dict(environment or {})
        self._owner: marks.RunOwner | None = None
        self._etcd: etcd.EmbeddedEtcd | None = None
        self._store: CoordStore | None = None
        self._objects: ObjectStore | None = None
        self._reader: JobReader | None = None
        self._controllers: dict[str, Component] = {}
        self._agents: dict[str, Component] = {}
        self._revivals = 0
        self._told: set[str] = set()
        self._outcome: wire.Outcome | None = None
        self._interrupted = False

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """Sweep, then start everything; returns when all processes are started, not when they are ready.

        Raises:
            RunFailedError: what is missing or unreachable; whatever had started is ended again.
        """
        marks.sweep(self._base)
        self._objects = _reachable(self.spec.job.root)
        try:
            self._owner = marks.RunOwner.create(self.spec.job.name, self._base)
        except marks.RunFolderError as e:
            raise RunFailedError(str(e), ExitCode.ENVIRONMENT) from e
        try:
            self._start_all(self._owner)
        except BaseException:
            self.stop()
            raise

    def stop(self, grace_s: float | None = None) -> None:
        """End everything: SIGTERM, `grace_s`, SIGKILL by mark; remove shared memory and the run folder. May be called twice."""
        owner = self._owner
        if owner is None:
            return
        if grace_s is None:
            grace_s = min(self.spec.policy.grace_s, GRACE_S_MAX)
        with _no_interruptions():
            # Controllers first: one that is left would take the agents' leaving for the loss of their nodes.
            for group in (self._controllers, self._agents):
                _terminate(group.values(), grace_s)
            if self._store is not None:
                self._store.close()
                self._store = None
            if self._etcd is not None:
                self._etcd.stop()
            self._keep_logs(owner)
            owner.close()
            for component in (*self._controllers.values(), *self._agents.values()):
                component.process.wait()
            self._owner = self.folder = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._interrupted = kind is not None and not issubclass(kind, Exception)
        self.stop()

    # ---------------------------------------------------------------- looking

    @property
    def run_id(self) -> str:
        return self._running().run_id

    @property
    def store(self) -> CoordStore:
        """The coordination store of the run."""
        if self._store is None:
            raise RuntimeError("the run is not started, or was stopped")
        return self._store

    @property
    def controllers(self) -> dict[str, int]:
        """Pids of the controllers that live, by name (``a``, ``b`` …)."""
        return {name: c.pid for name, c in self._controllers.items() if not c.ended}

    @property
    def agents(self) -> dict[str, int]:
        """Pids of the agents that live, by node uid (``n0``, ``n1`` …)."""
        return {uid: c.pid for uid, c in self._agents.items() if not c.ended}

    def node_state(self, uid: str) -> Path:
        """The state folder of a node: its disk."""
        return self._running().folder / "nodes" / uid

    def node_shm(self, uid: str) -> Path:
        """The shared-memory folder of a node: its memory."""
        return self._running().shm_dir / uid

    def view(self) -> JobView:
        """A fresh snapshot of the job."""
        if self._reader is None:
            raise RuntimeError("the run is not started, or was stopped")
        return self._reader.read()

    def outcome(self) -> wire.Outcome | None:
        """How the job ended; None while it runs. Trouble with etcd counts as "not yet"."""
        if self._outcome is None and self._store is not None:
            try:
                found = self._store.get(Keys(self.spec.job.name).outcome)
            except CoordError:
                return None
            self._outcome = outcome_of(found.value if found else None, self.run_id)
        return self._outcome

    def check(self) -> None:
        """Look after the processes: start the last controller again, say which others have ended.

        Raises:
            RunFailedError: the run cannot come to an outcome any more: too much of it has ended.
        """
        self._tell_ended()
        self._revive()
        failure = self._failure()
        # Agents and controllers leave when the outcome is written: look for it once more before blaming them.
        if failure is not None and self.outcome() is None:
            raise failure

    def wait(self, timeout: float | None = None) -> wire.Outcome | None:
        """Wait for the outcome; None if `timeout` seconds passed without one.

        Raises: RunFailedError, as `check`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (outcome := self.outcome()) is None:
            self.check()
            if deadline is not None and time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)  # the outcome is a key in etcd, and the processes are looked at as well
        return outcome

    # ---------------------------------------------------------------- inside

    def _running(self) -> marks.RunOwner:
        if self._owner is None:
            raise RuntimeError("the run is not started, or was stopped")
        return self._owner

    def _start_all(self, owner: marks.RunOwner) -> None:
        folder = self.folder = owner.folder
        (folder / "logs").mkdir()
        self._claim_root(owner)
        shutil.copyfile(self.job_file, folder / "job.toml")
        endpoint = self._etcd_address = self._endpoint or self._start_etcd(owner)
        try:
            self._store = connect(endpoint)
        except CoordError as e:
            raise RunFailedError(str(e), ExitCode.ENVIRONMENT) from e
        self._reader = JobReader(
            facts_of(self.spec), store=self._store, objects=self._objects, run_id=owner.run_id
        )
        owner.describe(etcd=endpoint, **self._facts())
        for i in range(self._controller_count):
            self._start_controller(owner, endpoint, _letter(i))
        for i in range(self.spec.layout.nodes + self.spec.layout.standbys):
            self._start_agent(owner, endpoint, f"n{i}")

    def _facts(self) -> dict[str, str]:
        """What owner.json says of the job."""
        return {"root": self.spec.job.root, "job_file": str(self.job_file.absolute())}

    def _claim_root(self, owner: marks.RunOwner) -> None:
        """Refuse a root that another run on this machine trains into; two that start at once may both refuse.

        Nothing would be lost otherwise (records fence), but each would undo the other's work.
        """
        owner.describe(**self._facts())
        for other in marks.living_runs(self._base):
            if other.run_id != owner.run_id and same_root(other.facts.get("root"), self.spec.job.root):
                raise RunFailedError(
                    f"{self.spec.job.root} is in use by another run of job {other.facts.get('job')} "
                    f"(pid {other.facts.get('pid')}): end that one, or give this one another job.root",
                    ExitCode.ENVIRONMENT,
                )

    def _start_etcd(self, owner: marks.RunOwner) -> str:
        try:
            binary = etcd.find_etcd()
            if warning := etcd.check_version(binary):
                log.info("%s", warning)
            self._etcd = etcd.start_etcd(
                owner.folder / "etcd",
                owner.folder / "logs" / "etcd.log",
                client_port=self._etcd_port,
                environment=owner.mark("etcd", secrets.token_hex(4)).env(),
                binary=binary,
            )
        except etcd.EtcdError as e:
            raise RunFailedError(str(e), ExitCode.ENVIRONMENT) from e
        return self._etcd.endpoint

    def _start_controller(self, owner: marks.RunOwner, endpoint: str, name: str) -> None:
        state = owner.folder / "controllers" / name
        arguments = [
            *("--name", name, "--held-patience", f"{HELD_PATIENCE_S:g}"),
            *self._common(owner, endpoint, state),
        ]
        self._controllers[name] = self._start_component(owner, f"controller-{name}", "controller", arguments)

    def _start_agent(self, owner: marks.RunOwner, endpoint: str, uid: str) -> None:
        state, shm = self.node_state(uid), self.node_shm(uid)
        shm.mkdir(mode=0o700)
        arguments = ["--uid", uid, *self._common(owner, endpoint, state), "--shm-dir", str(shm)]
        self._agents[uid] = self._start_component(owner, uid, "agent", arguments)

    def _common(self, owner: marks.RunOwner, endpoint: str, state: Path) -> list[str]:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [
            *("--job", str(owner.folder / "job.toml")),
            *("--etcd", endpoint),
            *("--run-id", owner.run_id),
            *("--state-dir", str(state)),
            *("--token-file", str(owner.token_file)),
        ]

    def _start_component(
        self, owner: marks.RunOwner, node: str, module: str, arguments: list[str]
    ) -> Component:
        """Start ``python -m surefoot.<module>`` in its own session, marked, tethered to this process, into its log."""
        name = node if module == "controller" else f"agent-{node}"
        log_path = owner.folder / "logs" / f"{name}.log"
        mark = owner.mark(node, secrets.token_hex(4))
        argv = [sys.executable, "-m", f"surefoot.{module}", *arguments]
        with log_path.open("ab") as log_file:
            process = subprocess.Popen(
                tether.command(argv),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=self._child_environment() | mark.env(),
                start_new_session=True,
            )
        return Component(name, process, log_path)

    def _child_environment(self) -> dict[str, str]:
        # The job's modules stand where the user is (python -m puts that first) or beside the job file.
        path = [str(self.job_file.absolute().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | self._environment

    def _tell_ended(self) -> None:
        """Say once of each process that ended by itself with an error: a standby may hide it, but not from the operator."""
        for component in (*self._controllers.values(), *self._agents.values()):
            if component.ended and component.process.returncode > 0 and component.name not in self._told:
                self._told.add(component.name)
                if self.outcome() is None:
                    log.warning("%s", component.how_ended())

    def _revive(self) -> None:
        """Start a controller again where signals have ended all of them."""
        owner, store = self._owner, self._store
        gone = [c for c in self._controllers.values() if c.ended]
        all_killed = len(gone) == len(self._controllers) and all(c.process.returncode < 0 for c in gone)
        if not gone or not all_killed or owner is None or store is None or self.outcome() is not None:
            return
        if self._revivals < REVIVALS_MAX:
            self._revivals += 1
            log.warning(
                "%s; it is started again (%d of %d)", gone[0].how_ended(), self._revivals, REVIVALS_MAX
            )
            self._start_controller(owner, self._etcd_address, next(iter(self._controllers)))

    def _failure(self) -> RunFailedError | None:
        """Why there will be no outcome: no etcd, no controller or no agent is left. Anything less is the controller's to
        decide on."""
        if self._etcd is not None and not self._etcd.alive():
            return RunFailedError(f"{self._etcd.how_ended()}; {self._resumes()}", ExitCode.ENVIRONMENT)
        for group in (self._controllers, self._agents):
            if not group or not all(c.ended for c in group.values()):
                continue
            # The first that ended by itself knows why; those that were killed, or told to go, do not.
            told = next(
                (
                    c
                    for c in group.values()
                    if c.process.returncode > 0 and c.process.returncode != ExitCode.INTERRUPTED
                ),
                None,
            )
            if told is not None:
                return RunFailedError(told.how_ended(), _exit_code(told.process.returncode))
            killed = ", ".join(c.how_ended() for c in group.values())
            left = ""
            if group is self._agents:
                nodes = "node" if len(group) == 1 else "nodes"
                left = f"{nodes} {', '.join(group)} lost, and no standby is left (layout.standbys = {self.spec.layout.standbys}): "
            return RunFailedError(f"{left}{killed}; {self._resumes()}", ExitCode.FAILED)
        return None

    def _resumes(self) -> str:
        committed = self._reader.read(relist=True).committed if self._reader is not None else None
        return resumes(committed.step if committed is not None else 0)

    def _keep_logs(self, owner: marks.RunOwner) -> None:
        """Copy what tells the story to where the user wants it, or, of a failed run, to where he can find it."""
        done = self._outcome is not None and self._outcome.state == "done"
        failed = not done and not self._interrupted
        target = self._keep or (_kept_folder(owner.folder.parent) if failed else None)
        if target is None or not any((owner.folder / "logs").glob("*.log")):
            return
        target = target / owner.run_id
        try:
            for part in ("logs", "nodes", "controllers"):
                if (owner.folder / part).is_dir():
                    shutil.copytree(owner.folder / part, target / part, ignore=_no_sockets)
            shutil.copyfile(owner.folder / "job.toml", target / "job.toml")
        except (OSError, shutil.Error) as e:
            log.warning("cannot keep the logs in %s: %s", target, e)
            return
        self.kept = target


# ---------------------------------------------------------------- helpers


@contextmanager
def terminations_interrupt() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread as Ctrl-C does, so that every ``with`` is left in order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_interruptions() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM wait: cleaning up is bounded, and half of it helps nobody."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reachable(root: str) -> ObjectStore:
    """The object store, if it answers and lets a job create; one clear error instead of one from each component. Where it does not
    create conditionally, that is said."""
    if not root.startswith("s3://"):
        _make_root(Path(root.removeprefix("file://")))
    objects = open_store(root, deadline_s=PREFLIGHT_S)
    try:
        list_records(objects)
        ensure_exclusive(objects)
    except ObjectStoreError as e:
        raise RunFailedError(str(e), ExitCode.ENVIRONMENT) from e
    return objects


def _make_root(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "this user may not write there")
    except OSError as e:
        raise RunFailedError(
            f"{folder} cannot be the job's root: {e.strerror}; give another folder as job.root",
            ExitCode.ENVIRONMENT,
        ) from e


def _terminate(components: Iterable[Component], grace_s: float) -> None:
    """SIGTERM all, and wait until they have ended or the grace is over. What is left is ended by its mark."""
    deadline = time.monotonic() + grace_s
    living = [c for c in components if not c.ended]
    for component in living:
        component.process.terminate()
    for component in living:
        try:
            component.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.info("%s did not end within %.0f s of SIGTERM and is killed", component.name, grace_s)


def _exit_code(code: int) -> ExitCode:
    """What the runner exits with where a component that ended with `code` (negative: by a signal) ends the run."""
    return ExitCode(code) if code in (*ExitCode,) and code != ExitCode.DONE else ExitCode.FAILED


def _kept_folder(base: Path) -> Path:
    """Where logs of failed runs stay; makes room for one more."""
    folder = base / "failed"
    folder.mkdir(mode=0o700, exist_ok=True)
    for old in sorted(folder.iterdir())[: -KEPT_RUNS_MAX + 1]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _no_sockets(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if stat.S_ISSOCK((Path(folder) / name).lstat().st_mode)}


def _letter(index: int) -> str:
    """a, b, … z, a1, b1 …"""
    return chr(ord("a") + index % 26) + (str(index // 26) if index >= 26 else "")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
