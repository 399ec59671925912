"""The uploader: the process beside a rank that moves its staged bytes to the object store. Torch-free.

``python -m surefoot.ckpt.saving.uploader --fd N --parent PID --root URL``, started by ckpt/saving/writer.py; N is its end of a socket pair.
It is started by exec, never by fork: a training process has threads, clients and devices that do not survive one. Rank 0's
also commits: merging the parts of many ranks would otherwise hold up the training thread.

It lives as long as the rank: it ends when the other end of the pair closes or the rank's process ends, whichever way, and on
nothing else. (Ctrl-C and SIGTERM go to whole groups of processes; a script that catches them wants its last save.)
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from select import POLLIN, poll
from typing import assert_never

from surefoot import failpoint as failpoints
from surefoot.ckpt.errors import CkptError, CommitError
from surefoot.ckpt.format.image import ImageStructure
from surefoot.ckpt.keeping.retention import Retention
from surefoot.ckpt.manifest import DataObject, RankPart
from surefoot.ckpt.saving.commit import CommitOutcome, Committed, Fenced, GivenUp, Lost, commit
from surefoot.ckpt.saving.jobs import (
    AbandonMsg,
    BufferMsg,
    ByeMsg,
    CommitMsg,
    CommittedMsg,
    LayoutMsg,
    Line,
    ReadyMsg,
    TidiedMsg,
    ToUploader,
    Trouble,
    UploadedMsg,
    UploadMsg,
)
from surefoot.ckpt.saving.troubles import trouble_of
from surefoot.ckpt.saving.upload import Attempt, hashes_of, report_failure, store_object, store_part
from surefoot.ckpt.store import ObjectStore, ObjectStoreError, open_store
from surefoot.failpoint import failpoint
from surefoot.history import operation

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class Uploader:
    """Reads jobs from the rank, runs them, answers. One upload and one commit at a time, side by side."""

    def __init__(self, sock: socket.socket, store: ObjectStore) -> None:
        self._line: Line[ToUploader] = Line(sock, ToUploader)
        self._store = store
        self._memory: memoryview | None = None
        self._structure: ImageStructure | None = None
        self._abandoned: set[str] = set()
        self._uploading = ThreadPoolExecutor(1, "upload")
        self._committing = ThreadPoolExecutor(1, "commit")
        self._last: list[Future[None]] = []
        self._failpoints = failpoints.armed_text()

    def serve(self) -> None:
        """Until the rank says goodbye. Raises EOFError or ConnectionError where it went without."""
        self._line.send(ReadyMsg(os.getpid()))
        while True:
            message = self._line.read()
            match message:
                case BufferMsg():
                    self._map(message.nbytes)
                case LayoutMsg():
                    self._structure = message.structure
                case UploadMsg():
                    self._arm(message.failpoints)
                    self._last = [self._uploading.submit(self._upload, message)]
                case CommitMsg():
                    self._last.append(self._committing.submit(self._commit, message))
                case AbandonMsg():
                    self._abandoned = {message.attempt}
                case ByeMsg():
                    for job in self._last:
                        job.result()
                    return
                case None:
                    raise AssertionError("read waits for ever")
                case _:
                    assert_never(message)

    def _map(self, nbytes: int) -> None:
        fd = self._line.fds.popleft()
        try:
            self._memory = memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def _arm(self, text: str) -> None:
        """Failpoints that were armed in the rank fire here as well. (Off outside of tests.)"""
        if text != self._failpoints:
            self._failpoints = text
            failpoints.arm(failpoints.parse(text) if text else None)

    # ---- uploading

    def _upload(self, job: UploadMsg) -> None:
        trouble: Trouble | None = None
        place = Attempt(generation=job.generation, step=job.step, attempt=job.attempt)
        try:
            self._upload_part(job, place)
        except Exception as e:  # the rank must hear of it, whatever it is
            trouble = trouble_of(e)
        self._answer(UploadedMsg(attempt=job.attempt, trouble=trouble))
        if trouble is not None:
            leave_failure(self._store, place, job.rank, f"{trouble.kind}: {trouble.message}")

    def _upload_part(self, job: UploadMsg, place: Attempt) -> None:
        assert self._structure is not None, "a layout comes first"
        s = self._structure
        section = (self._memory or memoryview(b""))[
            : s.written_nbytes if job.replicas is not None else s.data_nbytes
        ]
        give_up = time.monotonic() + job.deadline_s
        names = {"generation": job.generation, "step": job.step, "attempt": job.attempt, "writer": job.rank}

        def keep_going() -> None:
            if job.attempt in self._abandoned:
                raise CommitError(f"step {job.step}, attempt {job.attempt}: abandoned")
            if time.monotonic() > give_up:
                raise CommitError(f"step {job.step}: not uploaded within {job.deadline_s:g} s; given up")

        with operation("upload", nbytes=s.written_nbytes, **names):
            failpoint("upload.before_objects")
            data = store_object(
                self._store,
                place,
                s,
                lambda _: (section[: s.written_nbytes],),
                rank=job.rank,
                world_size=job.world_size,
                deadline_s=job.deadline_s,
                keep_going=keep_going,
            )
            failpoint("upload.after_object")
            replicas = hashes_of(section, s) if job.replicas is None else job.replicas
            keep_going()
            store_part(self._store, place, job.rank, [part_of_rank(job, s, data, replicas)])

    # ---- committing

    def _commit(self, job: CommitMsg) -> None:
        committed = False
        try:
            outcome = commit(
                self._store,
                generation=job.generation,
                step=job.step,
                attempt=job.attempt,
                writers=job.writers,
                deadline_s=job.deadline_s,
                facts=job.facts,
            )
            committed = isinstance(outcome, Committed)
            answer = answer_of(job, outcome)
        except Exception as e:  # of unknown outcome, or denied
            answer = CommittedMsg(attempt=job.attempt, trouble=trouble_of(e))
        self._answer(answer)
        if committed:
            tidy(self._store, job.retention, job.generation, sweep=job.sweep)
        self._answer(TidiedMsg(job.attempt))

    def _answer(self, message: UploadedMsg | CommittedMsg | TidiedMsg) -> None:
        try:
            self._line.send(message)
        except OSError:
            pass  # the rank has gone, and `watch` is about to end us too


def part_of_rank(
    job: UploadMsg, s: ImageStructure, data: DataObject | None, replicas: dict[str, str]
) -> RankPart:
    return RankPart(
        rank=job.rank,
        world_size=job.world_size,
        tensors=s.tensors,
        aliases=s.aliases,
        replicas=replicas,
        values=job.values,
        cursor=job.cursor,
        extra=job.extra,
        data=data,
    )


def answer_of(job: CommitMsg, outcome: CommitOutcome) -> CommittedMsg:
    """What a commit came to, in the words of the protocol."""
    match outcome:
        case Committed():
            return CommittedMsg(attempt=job.attempt)
        case Fenced(by=by):
            return CommittedMsg(attempt=job.attempt, fenced_by=by)
        case Lost(winner_attempt=winner):
            error: Exception = CommitError(
                f"step {job.step} of generation {job.generation} was committed by another attempt, {winner}"
            )
        case GivenUp(reason=reason, cause=cause):
            error = cause or CommitError(reason)
        case _:
            assert_never(outcome)
    return CommittedMsg(attempt=job.attempt, trouble=trouble_of(error))


def leave_failure(store: ObjectStore, place: Attempt, writer: int, reason: str) -> None:
    """For the record. The other ranks hear of it over the channel."""
    try:
        report_failure(
            store,
            generation=place.generation,
            step=place.step,
            attempt=place.attempt,
            writer=writer,
            reason=reason,
        )
    except ObjectStoreError as e:
        log.warning("that attempt %s of step %d failed could not be noted: %s", place.attempt, place.step, e)


def tidy(store: ObjectStore, retention: Retention | None, generation: int, *, sweep: bool) -> None:
    """The checkpoint stands; that something old could not be deleted is no reason to fail."""
    from surefoot.ckpt.keeping.cleaning import apply_retention, sweep_orphans

    try:
        if sweep:
            sweep_orphans(store)
        if retention is not None:
            apply_retention(store, retention, generation=generation)
    except (CkptError, ObjectStoreError) as e:
        log.warning("what is no longer needed could not be deleted this time: %s", e)


# ---------------------------------------------------------------- the process


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m surefoot.ckpt.saving.uploader")
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
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=args.fd) as sock:
        sock.set_inheritable(False)
        uploader = Uploader(sock, open_store(args.root))
        try:
            uploader.serve()
        except (EOFError, ConnectionError):
            pass  # the rank has gone
    # Threads may hang in an upload, and nobody waits for what they would say.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
