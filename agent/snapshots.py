"""The snapshot server: the process of a node that moves snapshots, so that neither a rank nor the agent waits for bytes.

``python -m surefoot.agent.snapshots --fd N …``, started by the agent; N is its end of a socket pair (messages.py). It
serves this node's snapshots to peers and takes copies from them (flight.py), copies own snapshots to the peer, fetches
from peers, uploads pinned snapshots to the object store and commits. No torch in here.

Jobs run in threads, each with a deadline, and each is answered exactly once. Kinds do not wait for each other: a slow
object store delays no replication, and a commit that waits for another node's part delays no upload.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import msgspec

from surefoot import history
from surefoot.agent import linux, slots
from surefoot.agent.decide import HeldImage
from surefoot.agent.errors import MemoryBudgetError, SharedMemoryFullError, TransferError
from surefoot.agent.flight import SnapshotClient, SnapshotFlightServer, SnapshotShelf
from surefoot.agent.lines import BlockingLines
from surefoot.agent.messages import (
    CommitAnswer,
    CommitMsg,
    FailedAnswer,
    FetchMsg,
    FinishedAnswer,
    GenerationMsg,
    GiveUpMsg,
    Image,
    ReplicasMsg,
    ReplicateMsg,
    ServingMsg,
    UploadMsg,
    decode_to_server,
)
from surefoot.agent.slots import SlotFolder
from surefoot.ckpt import tiers
from surefoot.ckpt.errors import CkptError
from surefoot.ckpt.record import Record, highest_record
from surefoot.ckpt.store import ObjectStore, ObjectStoreError, open_store
from surefoot.failpoint import failpoint

log = logging.getLogger(__name__)

REPLICATIONS_AT_ONCE = 4
"""Ranks of a node replicate side by side; more threads than that only share the same memory bus and link."""

ServerJob = ReplicateMsg | FetchMsg | UploadMsg | GiveUpMsg | CommitMsg
ServerAnswer = FinishedAnswer | FailedAnswer | CommitAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the server is started with; the fields of its command line."""

    root: str
    """The object store's URL."""
    shm_dir: Path
    budget_bytes: int | None
    host: str
    token: str
    retention: tiers.Retention | None
    """What is kept after each commit; None: everything."""


class SnapshotJobs:
    """The jobs, each a method that blocks and returns its answer."""

    def __init__(self, config: ServerConfig, shelf: SnapshotShelf, folder: SlotFolder) -> None:
        self._config = config
        self._shelf = shelf
        self._folder = folder
        self._client = SnapshotClient(config.token)
        self._in_force = 0
        self._start = (0, 0)
        self._swept = 0
        """The generation after whose first commit the leftovers of those before it were swept."""
        self._records: dict[int, Record] = {}
        self._conditional = True
        self._store: ObjectStore | None = None
        self._store_lock = threading.Lock()

    def set_generation(self, message: GenerationMsg) -> None:
        self._in_force = message.generation
        self._start = (message.start_generation, message.start_step)
        with self._store_lock:
            self._conditional = message.conditional
            if self._store is not None and not message.conditional:
                tiers.do_without_conditions(self._store)
        self._shelf.set_generation(message.generation)
        self._shelf.drop_ranks(message.drop_replicas)

    def run(self, job: ServerJob) -> ServerAnswer:
        """Carry out one job; whatever goes wrong is an answer too."""
        pinned = False
        try:
            match job:
                case ReplicateMsg():
                    if job.pin_path is not None:
                        self._pin(job.image, Path(job.pin_path))
                        pinned = True
                    return self._replicate(job)
                case FetchMsg():
                    return self._fetch(job)
                case UploadMsg():
                    return self._upload(job)
                case GiveUpMsg():
                    return self._give_up(job)
                case CommitMsg():
                    return self._commit(job)
                case _:
                    assert_never(job)
        except TransferError as e:
            return FailedAnswer(serial=job.serial, kind=e.kind, detail=str(e), pinned=pinned)
        except (MemoryBudgetError, SharedMemoryFullError) as e:
            return FailedAnswer(serial=job.serial, kind="memory", detail=str(e), pinned=pinned)
        except tiers.ImageError as e:
            return FailedAnswer(serial=job.serial, kind="snapshot_missing", detail=str(e), pinned=pinned)
        except (ObjectStoreError, CkptError, TimeoutError) as e:
            return _failed(job, e)
        except Exception as e:  # a bug of ours must not leave the agent waiting
            log.exception("job %s", type(job).__name__)
            return _failed(job, e)

    def _pin(self, image: Image, path: Path) -> None:
        """Copy a snapshot out of its slot, to be uploaded in peace."""
        with slots.mapped(Path(image.path)) as source:
            info = tiers.read_image(source)
            if (info.generation, info.step) != (image.generation, image.step):
                raise TransferError(
                    "snapshot_missing", f"{image.path} was overwritten before it was put aside"
                )
            self._folder.reserve(path, info.nbytes)
            with slots.mapped(path, write=True) as target:
                target[: info.nbytes] = source[: info.nbytes]

    def _replicate(self, job: ReplicateMsg) -> ServerAnswer:
        began = time.monotonic()
        if job.peer is not None:
            failpoint("replicate.before_put")
            with history.operation("replicate", peer=job.peer.uid, **_names(job.image)) as result:
                result["nbytes"] = self._client.push(
                    job.peer,
                    job.image,
                    in_force=self._in_force,
                    start=self._start,
                    deadline_s=job.deadline_s,
                )
        return FinishedAnswer(serial=job.serial, seconds=time.monotonic() - began)

    def _fetch(self, job: FetchMsg) -> ServerAnswer:
        began = time.monotonic()
        failpoint("fetch.before_get")
        with history.operation("fetch", peer=job.peer.uid, **_names(job.image)) as result:
            result["nbytes"] = self._client.pull(
                job.peer,
                job.image,
                self._folder,
                wanted=lambda: self._in_force == job.in_force,
                deadline_s=job.deadline_s,
            )
        return FinishedAnswer(serial=job.serial, seconds=time.monotonic() - began)

    def _upload(self, job: UploadMsg) -> ServerAnswer:
        began = time.monotonic()
        failpoint("upload.before_objects")
        try:
            tiers.upload_images(
                self.store(),
                [_image_of(Path(p)) for p in job.paths],
                generation=job.generation,
                step=job.step,
                attempt=job.attempt,
                writer=job.writer,
                deadline_s=job.deadline_s,
            )
        except Exception as e:
            self._leave_failure(job, str(e))
            raise
        return FinishedAnswer(serial=job.serial, seconds=time.monotonic() - began)

    def _give_up(self, job: GiveUpMsg) -> ServerAnswer:
        began = time.monotonic()
        names = {"generation": job.generation, "step": job.step, "attempt": job.attempt}
        with history.operation("give_up", reason=job.reason, **names):
            tiers.report_failure(
                self.store(),
                generation=job.generation,
                step=job.step,
                attempt=job.attempt,
                writer=job.writer,
                reason=job.reason,
            )
        return FinishedAnswer(serial=job.serial, seconds=time.monotonic() - began)

    def _leave_failure(self, job: UploadMsg, reason: str) -> None:
        """Tell the committer by way of the object store; if that is away too, its own deadline tells it."""
        try:
            tiers.report_failure(
                self.store(),
                generation=job.generation,
                step=job.step,
                attempt=job.attempt,
                writer=job.writer,
                reason=reason,
            )
        except Exception as e:
            log.warning(
                "could not leave word that attempt %s of step %d failed: %s", job.attempt, job.step, e
            )

    def _commit(self, job: CommitMsg) -> ServerAnswer:
        outcome = tiers.commit(
            self.store(),
            generation=job.generation,
            step=job.step,
            attempt=job.attempt,
            writers=job.writers,
            deadline_s=job.deadline_s,
            facts=job.facts,
        )
        match outcome:
            case tiers.Committed():
                return CommitAnswer(serial=job.serial)
            case tiers.Fenced(by=by):
                return CommitAnswer(serial=job.serial, fenced_by=by, failure=f"fenced by generation {by}")
            case tiers.Lost(winner_attempt=winner):
                failure = f"attempt {winner} of the same step was committed instead"
                return CommitAnswer(serial=job.serial, failure=failure)
            case tiers.GivenUp(reason=reason):
                return CommitAnswer(serial=job.serial, failure=reason)
            case _:
                assert_never(outcome)

    def tidy(self, generation: int) -> None:
        """After a commit of `generation`: delete the checkpoints that retention lets go, and after the first one what earlier
        generations left unfinished. What goes wrong waits for the next.

        Nothing is deleted once a higher record exists: its generation may start from what this one would let go.
        """
        try:
            store = self.store()
            if highest_record(store) > generation:
                return
            if self._config.retention is not None:
                tiers.apply_retention(
                    store, self._config.retention, generation=generation, known=self._records
                )
            if self._swept != generation:
                tiers.sweep_orphans(store)
                self._swept = generation
        except Exception as e:
            log.warning("old checkpoints could not be deleted this time: %s", e)

    def store(self) -> ObjectStore:
        """The object store, opened at the first use; not across a fork, and this process never forks."""
        with self._store_lock:
            if self._store is None:
                self._store = open_store(self._config.root)
                if not self._conditional:
                    tiers.do_without_conditions(self._store)
            return self._store


def _failed(job: ServerJob, error: Exception) -> ServerAnswer:
    detail = f"{type(error).__name__}: {error}"
    if isinstance(job, CommitMsg):
        return CommitAnswer(serial=job.serial, failure=detail)
    return FailedAnswer(serial=job.serial, kind="object_store", detail=detail)


def _names(image: Image) -> dict[str, int]:
    return {"rank": image.rank, "generation": image.generation, "step": image.step}


def _image_of(path: Path) -> memoryview:
    with slots.mapped(path) as view:
        return view[: tiers.read_image(view).nbytes]


def _images(held: Sequence[HeldImage]) -> tuple[Image, ...]:
    return tuple(Image(rank=h.rank, generation=h.generation, step=h.step, path=h.path) for h in held)


# ---------------------------------------------------------------- the process


class SnapshotService:
    """Reads jobs from the agent, runs them, answers. `serve` returns when the agent closes its end."""

    def __init__(self, sock: socket.socket, config: ServerConfig) -> None:
        self._agent = BlockingLines(sock, decode_to_server)
        folder = SlotFolder(root=config.shm_dir, budget_bytes=config.budget_bytes)
        self._shelf = SnapshotShelf(folder, self._tell_replicas)
        self._jobs = SnapshotJobs(config, self._shelf, folder)
        self._flight = SnapshotFlightServer(config.host, config.token, self._shelf)
        self._moving = ThreadPoolExecutor(REPLICATIONS_AT_ONCE, "move")
        self._uploading = ThreadPoolExecutor(1, "upload")
        self._committing = ThreadPoolExecutor(1, "commit")

    def serve(self) -> None:
        threading.Thread(target=self._flight.serve, name="flight", daemon=True).start()
        self._send(ServingMsg(port=self._flight.port, replicas=_images(self._shelf.replicas())))
        self._uploading.submit(self._open_store_early)
        while (message := self._agent.read()) is not None:
            match message:
                case GenerationMsg():
                    self._jobs.set_generation(message)
                case ReplicateMsg() | FetchMsg():
                    self._start(self._moving, message)
                case UploadMsg() | GiveUpMsg():
                    self._start(self._uploading, message)
                case CommitMsg():
                    self._committing.submit(self._commit, message)

    def _commit(self, job: CommitMsg) -> None:
        answer = self._jobs.run(job)
        self._send(answer)
        if isinstance(answer, CommitAnswer) and not answer.failure:
            self._jobs.tidy(job.generation)

    def _start(self, pool: ThreadPoolExecutor, job: ServerJob) -> None:
        pool.submit(lambda: self._send(self._jobs.run(job)))

    def _open_store_early(self) -> None:
        """So that the first checkpoint does not pay for imports and the first connection."""
        try:
            self._jobs.store()
        except Exception as e:
            log.warning("the object store does not open yet: %s", e)

    def _tell_replicas(self, held: list[HeldImage]) -> None:
        self._send(ReplicasMsg(replicas=_images(held)))

    def _send(self, message: msgspec.Struct) -> None:
        try:
            self._agent.send(message)
        except OSError:
            pass  # the agent has gone, and the kernel is about to end us too


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m surefoot.agent.snapshots")
    parser.add_argument("--fd", type=int, required=True, help="our end of the socket pair with the agent")
    parser.add_argument("--parent", type=int, required=True, help="the agent's pid: we die with it")
    parser.add_argument("--root", required=True, help="the object store's URL")
    parser.add_argument("--shm-dir", type=Path, required=True)
    parser.add_argument("--budget-bytes", type=int)
    parser.add_argument("--keep", type=int, help="how many checkpoints to keep")
    parser.add_argument("--keep-every-steps", type=int, help="keep also those of every N-th step")
    parser.add_argument("--host", required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--history", type=Path)
    args = parser.parse_args(argv)
    linux.close_inherited(keep=args.fd)
    linux.die_with_parent(args.parent)
    linux.set_process_name("sf-snapshots")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if args.history is not None:
        history.open_history(args.history, "snapshots")
    config = ServerConfig(
        root=args.root,
        shm_dir=args.shm_dir,
        budget_bytes=args.budget_bytes,
        host=args.host,
        token=args.token_file.read_text().strip(),
        retention=None
        if args.keep is None
        else tiers.Retention(newest=args.keep, every_steps=args.keep_every_steps),
    )
    with socket.socket(fileno=args.fd) as sock:
        sock.set_inheritable(False)
        SnapshotService(sock, config).serve()
    # Threads may hang in an upload, and nobody waits for what they would say.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
