"""The uploader: the process beside a rank that moves its staged bytes to the object store. Torch-free.

Started by ckpt/saving/writer.py by way of ckpt/saving/leash.py, by exec, never by fork: a training process has threads, clients
and devices that do not survive one. Rank 0's also commits: merging the parts of many ranks would otherwise hold up the
training thread.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
from collections.abc import MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import assert_never

from surefoot import failpoint as failpoints
from surefoot.ckpt.errors import CkptError, CommitError
from surefoot.ckpt.format.image import ImageStructure
from surefoot.ckpt.keeping.retention import Retention
from surefoot.ckpt.objects.probe import do_without_conditions
from surefoot.ckpt.record import Record
from surefoot.ckpt.saving.commit import (
    CommitOutcome,
    Committed,
    Fenced,
    GivenUp,
    Lost,
    commit,
    error_of_outcome,
)
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
from surefoot.ckpt.saving.upload import Attempt, hashes_of, report_failure, store_job
from surefoot.ckpt.store import ObjectStore, ObjectStoreError, open_store, until
from surefoot.history import operation

log = logging.getLogger(__name__)

NOTE_S = 3.0
"""How long it is tried to leave word of a failure in an object store that may be the reason for it."""


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
        self._records: dict[int, Record] = {}
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
            self._upload_part(job)
        except Exception as e:  # the rank must hear of it, whatever it is
            trouble = trouble_of(e)
        self._answer(UploadedMsg(attempt=job.attempt, trouble=trouble))
        if trouble is not None:
            leave_failure(self._store, place, job.rank, f"{trouble.kind}: {trouble.message}")

    def _upload_part(self, job: UploadMsg) -> None:
        assert self._structure is not None, "a layout comes first"
        if not job.conditional:
            do_without_conditions(self._store)
        s = self._structure
        section = (self._memory or memoryview(b""))[
            : s.written_nbytes if job.replicas is not None else s.data_nbytes
        ]
        names = {"generation": job.generation, "step": job.step, "attempt": job.attempt, "writer": job.rank}

        def require_wanted() -> None:
            if job.attempt in self._abandoned:
                raise CommitError(f"step {job.step}, attempt {job.attempt}: abandoned")

        with operation("upload", nbytes=s.written_nbytes, **names):
            store_job(
                self._store,
                job,
                s,
                lambda _: (section[: s.written_nbytes],),
                hashes=lambda: hashes_of(section, s) if job.replicas is None else job.replicas,
                require_wanted=require_wanted,
            )

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
                stored=True,
            )
            committed = isinstance(outcome, Committed)
            answer = answer_of(job, outcome)
        except Exception as e:  # of unknown outcome, or denied
            answer = CommittedMsg(attempt=job.attempt, trouble=trouble_of(e))
        self._answer(answer)
        if committed:
            tidy(self._store, job.retention, job.generation, sweep=job.sweep, known=self._records)
        self._answer(TidiedMsg(job.attempt))

    def _answer(self, message: UploadedMsg | CommittedMsg | TidiedMsg) -> None:
        try:
            self._line.send(message)
        except OSError:
            pass  # the rank has gone, and `watch` is about to end us too


def answer_of(job: CommitMsg, outcome: CommitOutcome) -> CommittedMsg:
    """What a commit came to, in the words of the protocol."""
    match outcome:
        case Committed():
            return CommittedMsg(attempt=job.attempt)
        case Fenced(by=by):
            return CommittedMsg(attempt=job.attempt, fenced_by=by)
        case Lost() | GivenUp():
            error = error_of_outcome(outcome, generation=job.generation, step=job.step)
            return CommittedMsg(attempt=job.attempt, trouble=trouble_of(error))
        case _:
            assert_never(outcome)


def leave_failure(store: ObjectStore, place: Attempt, writer: int, reason: str) -> None:
    """For the record, and no longer than `NOTE_S`: the other ranks hear of it over the channel."""
    try:
        report_failure(
            until(store, time.monotonic() + NOTE_S),
            generation=place.generation,
            step=place.step,
            attempt=place.attempt,
            writer=writer,
            reason=reason,
        )
    except ObjectStoreError as e:
        log.warning("that attempt %s of step %d failed could not be noted: %s", place.attempt, place.step, e)


def tidy(
    store: ObjectStore,
    retention: Retention | None,
    generation: int,
    *,
    sweep: bool,
    known: MutableMapping[int, Record],
) -> None:
    """The checkpoint stands; that something old could not be deleted is no reason to fail. `known`: see `read_records`."""
    from surefoot.ckpt.keeping.cleaning import apply_retention, sweep_orphans

    try:
        if sweep:
            sweep_orphans(store)
        if retention is not None:
            apply_retention(store, retention, generation=generation, known=known)
    except (CkptError, ObjectStoreError) as e:
        log.warning("what is no longer needed could not be deleted this time: %s", e)


def serve(fd: int, root: str) -> None:
    """Work for the rank at the other end of this socket until it says goodbye or is gone."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=fd) as sock:
        sock.set_inheritable(False)
        uploader = Uploader(sock, open_store(root))
        try:
            uploader.serve()
        except (EOFError, ConnectionError):
            pass  # the rank has gone
