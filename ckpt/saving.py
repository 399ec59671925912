"""Saving on one's own: `Checkpointer`, in one process or under plain torch.distributed. (torch)

A save copies the state into the checkpointer's own memory and returns. A thread uploads it; rank 0's thread commits. The
threads of other ranks hear the outcome over the checkpointer's TCPStore. One save is in flight at most: the next one waits
for it, and raises what went wrong with it.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import torch.distributed as dist

from surefoot.ckpt.aside import RESUME_TRIES, Resume
from surefoot.ckpt.channel import Channel, open_channel
from surefoot.ckpt.cleaning import apply_retention
from surefoot.ckpt.commit import CommitOutcome, Committed, Fenced, GivenUp, Lost, commit
from surefoot.ckpt.errors import (
    CkptError,
    CkptUserError,
    CkptWorldError,
    CommitError,
    FencedError,
    MemoryBudgetError,
)
from surefoot.ckpt.generation import open_generation
from surefoot.ckpt.loading import Loaded, find_line, load_agreed, note_start
from surefoot.ckpt.manifest import Manifest, ManifestRef
from surefoot.ckpt.record import StartRef, list_manifests
from surefoot.ckpt.restore import read_manifest
from surefoot.ckpt.retention import Retention
from surefoot.ckpt.staging import Stager
from surefoot.ckpt.store import ObjectStore, ObjectStoreError, open_store
from surefoot.ckpt.upload import report_failure, upload_images

_log = logging.getLogger(__name__)

CHANNEL_TIMEOUT_S = 300.0
"""How long ranks wait for each other at a save or load: they may come to it at different times."""


class _Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What rank 0 tells the others of a commit."""

    committed: bool = False
    fenced_by: int = 0
    reason: str = ""


class _Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every rank tells the others before a save."""

    step: int
    nonce: str
    layout: str = ""
    failure: str = ""


class SaveHandle:
    """One save. `wait` gives its end; the next `save` and `close` call it as well, so no error is lost."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._done = threading.Event()
        self._manifest: Manifest | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """True once `wait` will not block."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> Manifest | None:
        """The manifest of the committed step; None where the step was not due (`every=`).

        Raises:
            TimeoutError: it is still under way.
            CommitError: it was not committed, and why; FencedError: another start of the job took over.
            ImageError, ObjectStore…Error: what went wrong on this rank.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the save of step {self.step} is still under way after {timeout_s} s")
        if self._error is not None:
            raise self._error
        return self._manifest

    def _finish(self, manifest: Manifest | None, error: Exception | None = None) -> None:
        self._manifest, self._error = manifest, error
        self._done.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One save in flight on this rank."""

    handle: SaveHandle
    generation: int
    step: int
    attempt: str
    image: memoryview


class Checkpointer:
    """Saves and loads one training state under one root. All calls are collective over the group, in the same order.

    Args:
        root: ``file:///path``, a path, or ``s3://bucket/prefix``.
        group: the ranks that hold the state; None: the default group, or this process alone.
        keep: how many of the newest checkpoints to keep (at least 2); None: all.
        keep_every: keep those of every so many steps as well.
        every: save only at steps divisible by this; at others `save` returns a handle that is done.
        memory_budget: bytes of host memory that a staged state of one rank may take; None: no limit.
        deadline_s: how long one save may take until it is given up.
        start_over: the first save may leave behind what the root holds, although nothing was loaded.
        resume_tries: how many starts may die after resuming from the newest step until a load takes the one before it (see
            ckpt/aside.py); None: any number.
    """

    def __init__(
        self,
        root: str,
        group: dist.ProcessGroup | None = None,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        every: int | None = None,
        memory_budget: int | None = None,
        deadline_s: float = 600.0,
        start_over: bool = False,
        resume_tries: int | None = RESUME_TRIES,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every = {every}: save every so many steps, at least 1, or leave it out")
        self._store: ObjectStore = open_store(root)
        self._group = group
        self._retention = None if keep is None else Retention(newest=keep, every_steps=keep_every)
        self._every = every
        self._memory_budget = memory_budget
        self._deadline_s = deadline_s
        self._start_over = start_over
        self._resume_tries = resume_tries
        self._resume: Resume | None = None
        self._channel: Channel | None = None
        self._stager: Stager | None = None
        self._memory: mmap.mmap | None = None
        self._layouts: list[str] = []
        self._start = StartRef()
        self._seen: frozenset[ManifestRef] = frozenset()
        self._generation: int | None = None
        self._in_flight: SaveHandle | None = None
        self._fenced: FencedError | None = None

    # ---- public

    def load(
        self, state: Mapping[str, Any], step: int | None = None, *, strict: bool = True, wait_s: float = 0.0
    ) -> Loaded | None:
        """Fill `state` in place from the newest readable step (or from `step`); None where the root holds nothing.

        The next save then continues from there: it opens a generation of its own, and steps beyond leave the lineage.

        Args:
            wait_s: how long to wait for `step`, where it is not committed yet.

        Raises: StepMissingError, DamagedError, StateMismatchError, ObjectStore…Error.
        """
        loaded = self._load(state, step, strict=strict, wait_s=wait_s)
        if loaded is not None and self._resume is None:
            self._resume = note_start(self._store, self._opened(), loaded)
        return loaded

    def _load(
        self, state: Mapping[str, Any], step: int | None, *, strict: bool, wait_s: float = 0.0
    ) -> Loaded | None:
        """`load` without a resume marker."""
        channel = self._opened()
        self._settle()
        self._seen = frozenset(list_manifests(self._store)) if channel.rank == 0 else frozenset()
        loaded = load_agreed(
            self._store,
            channel,
            state,
            step=step,
            strict=strict,
            group=self._group,
            resume_tries=self._resume_tries,
            wait_s=wait_s,
        )
        if loaded is not None:
            self._start = StartRef(generation=loaded.generation, step=loaded.step)
            self._generation = None
            if channel.rank == 0:
                for passed, why in loaded.passed_over:
                    _log.warning("step %d was passed over: %s", passed, why)
        return loaded

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        cursor: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> SaveHandle:
        """Stage `state` as the state after `step` steps and let it be uploaded and committed. Blocks while copying only, and
        while an earlier save is under way; `state` may change once it returns.

        Raises what went wrong with the earlier save; of this one: StateError, CoverageError, MemoryBudgetError,
        StaleStartError (the root has moved on since the load), ObjectStore…Error.
        """
        handle = SaveHandle(step)
        if self._every is not None and step % self._every != 0:
            handle._finish(None)
            return handle
        channel = self._opened()
        self._settle()
        if self._fenced is not None:
            raise self._fenced
        attempt = self._agree(step, state, channel)
        generation = self._generation_for(step, channel)
        image = self._stage(generation, step, cursor, extra)
        job = _Job(handle=handle, generation=generation, step=step, attempt=attempt, image=image)
        self._in_flight = handle
        threading.Thread(target=self._finish_job, args=(job, channel), name=f"ckpt-save-{step}").start()
        return handle

    def continue_from_newest(self) -> None:
        """Let the first save continue from the newest step in the root, as if that had been loaded. For a caller who knows that
        the state he holds came after it."""
        if self._opened().rank == 0:
            self._seen = frozenset(list_manifests(self._store))
            line = find_line(self._store)
            if line:
                self._start = StartRef(generation=line[-1].generation, step=line[-1].step)

    def close(self) -> None:
        """Wait for the save in flight and let go of everything. Collective. Raises what went wrong with that save.

        What retention lets go is deleted by rank 0, and gone when its `close` returns; others do not wait for it.
        """
        try:
            self._settle()
            self._settle_resume()
        finally:
            self._release()

    def _settle_resume(self) -> None:
        """This start has got further than what it resumed from, or ends in peace."""
        resume, self._resume = self._resume, None
        if resume is not None:
            resume.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, Exception):  # somebody who interrupts it has nothing against the checkpoint
            self._resume = None
        try:
            self.close()
        except Exception as e:
            _log.error("while another error was under way, closing failed as well: %s", e)

    # ---- before the copy

    def _opened(self) -> Channel:
        if self._channel is None:
            self._channel = open_channel(self._group, CHANNEL_TIMEOUT_S)
        return self._channel

    def _settle(self) -> None:
        """Wait for the save in flight, and raise its error once."""
        handle, self._in_flight = self._in_flight, None
        if handle is not None:
            try:
                handle.wait()
            except FencedError as e:
                self._fenced = e
                raise

    def _generation_for(self, step: int, channel: Channel) -> int:
        """The generation of this start; its first save opens it. Rank 0 acts, all hear of it."""
        if self._generation is not None:
            return self._generation
        error: Exception | None = None
        word = b"0"
        if channel.rank == 0:
            try:
                word = str(self._open_generation(step)).encode()
            except (CkptError, ObjectStoreError) as e:
                error, word = e, f"!{e}".encode()
        answer = channel.exchange(word)[0].decode()
        if answer.startswith("!"):
            raise error or CkptWorldError(f"rank 0 could not open a generation: {answer[1:]}")
        self._generation = int(answer)
        return self._generation

    def _open_generation(self, step: int) -> int:
        if step <= self._start.step:
            raise CkptUserError(
                f"step {step} is not newer than step {self._start.step}, which this start continues from: save under a higher number"
            )
        created_by = f"alone:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        seen = None if self._start_over else self._seen
        return open_generation(self._store, self._start, seen=seen, created_by=created_by)

    def _agree(self, step: int, state: Mapping[str, Any], channel: Channel) -> str:
        """One exchange per save: all save the same step, all can; who has a new layout. Returns rank 0's nonce."""
        error: Exception | None = None
        word = _Word(step=step, nonce=secrets.token_hex(8))
        try:
            word = msgspec.structs.replace(word, layout=self._survey(state, channel))
        except Exception as e:  # the others must hear of it before this rank raises
            error, word = e, msgspec.structs.replace(word, failure=f"{type(e).__name__}: {e}")
        words = [msgspec.json.decode(w, type=_Word) for w in channel.exchange(msgspec.json.encode(word))]
        if error is not None:
            raise error
        if failed := [f"rank {r}: {w.failure}" for r, w in enumerate(words) if w.failure]:
            raise CommitError(f"step {step} cannot be saved: {'; '.join(failed)}")
        if others := [f"rank {r}: {w.step}" for r, w in enumerate(words) if w.step != step]:
            raise CkptUserError(
                f"this rank saves step {step}, others do not ({', '.join(others)}): all ranks save together"
            )
        layouts = [w.layout for w in words]
        if layouts != self._layouts and self._stager is not None:
            self._stager.forget()
            self._layouts = layouts
        return words[0].nonce

    def _survey(self, state: Mapping[str, Any], channel: Channel) -> str:
        """Get memory for the state; returns its layout's hash."""
        if self._stager is None:
            self._stager = Stager(
                state, rank=channel.rank, world_size=channel.world_size, exchange=channel.exchange
            )
        self._stager.rebind(state)
        nbytes, layout = self._stager.survey()
        self._memory = self._memory_of(nbytes)
        return layout

    def _stage(
        self, generation: int, step: int, cursor: dict[str, Any] | None, extra: dict[str, Any] | None
    ) -> memoryview:
        assert self._stager is not None, "_agree made it"
        assert self._memory is not None, "_agree made it"
        view = memoryview(self._memory)
        self._stager.stage(
            view, generation=generation, step=step, cursor=cursor or {}, ledger=(), extra=extra
        )
        return view

    def _memory_of(self, nbytes: int) -> mmap.mmap:
        if self._memory_budget is not None and nbytes > self._memory_budget:
            raise MemoryBudgetError(
                f"staging the state takes {nbytes} bytes on this rank, and memory_budget is {self._memory_budget}: raise it, or use more "
                f"ranks"
            )
        if self._memory is None or len(self._memory) < nbytes:
            if self._memory is not None:
                self._memory.close()
            return mmap.mmap(-1, nbytes)
        return self._memory

    # ---- in the background

    def _finish_job(self, job: _Job, channel: Channel) -> None:
        manifest: Manifest | None = None
        error: Exception | None = None
        try:
            manifest = self._upload_and_commit(job, channel)
        except Exception as e:  # it surfaces at wait, at the next save, or at close
            error = e
        job.image.release()
        job.handle._finish(manifest, error)

    def _upload_and_commit(self, job: _Job, channel: Channel) -> Manifest:
        upload_error = self._upload(job, channel.rank)
        if channel.rank != 0:
            outcome = msgspec.json.decode(channel.hear(job.attempt, self._deadline_s + 60), type=_Outcome)
        else:
            outcome = self._commit(job, channel)
        if upload_error is not None:
            raise upload_error
        if outcome.fenced_by:
            raise FencedError(generation=job.generation, step=job.step, by=outcome.fenced_by)
        if not outcome.committed:
            raise CommitError(outcome.reason)
        return read_manifest(self._store, job.generation, job.step)

    def _upload(self, job: _Job, writer: int) -> Exception | None:
        try:
            upload_images(
                self._store,
                [job.image],
                generation=job.generation,
                step=job.step,
                attempt=job.attempt,
                writer=writer,
                deadline_s=self._deadline_s,
            )
        except Exception as e:  # the committer must hear of it, whatever it is
            try:
                report_failure(
                    self._store,
                    generation=job.generation,
                    step=job.step,
                    attempt=job.attempt,
                    writer=writer,
                    reason=f"{type(e).__name__}: {e}",
                )
            except ObjectStoreError:
                pass  # its deadline will tell the committer
            return e
        return None

    def _commit(self, job: _Job, channel: Channel) -> _Outcome:
        """Rank 0. Whatever happens, the others are told."""
        begun = time.monotonic()
        try:
            result = commit(
                self._store,
                generation=job.generation,
                step=job.step,
                attempt=job.attempt,
                writers=channel.world_size,
                deadline_s=self._deadline_s,
                facts={"host": socket.gethostname(), "pid": os.getpid()},
            )
            outcome = _outcome_of(result, job)
        except Exception as e:  # of unknown outcome, or denied
            outcome = _Outcome(reason=f"step {job.step}: {type(e).__name__}: {e}")
        if channel.world_size > 1:
            channel.tell(job.attempt, msgspec.json.encode(outcome))
        _log.debug("step %d: %s after %.3f s", job.step, outcome, time.monotonic() - begun)
        if outcome.committed:
            self._settle_resume()
        if outcome.committed and self._retention is not None:
            self._retain(self._retention, job.generation)
        return outcome

    def _retain(self, retention: Retention, generation: int) -> None:
        """The checkpoint stands; that an old one could not be deleted is no reason to fail."""
        try:
            apply_retention(self._store, retention, generation=generation)
        except (CkptError, ObjectStoreError) as e:
            _log.warning("old checkpoints could not be deleted: %s", e)

    def _release(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _outcome_of(result: CommitOutcome, job: _Job) -> _Outcome:
    match result:
        case Committed():
            return _Outcome(committed=True)
        case Fenced(by=by):
            return _Outcome(fenced_by=by)
        case Lost(winner_attempt=winner):
            return _Outcome(
                reason=f"step {job.step} of generation {job.generation} was committed by another attempt, {winner}"
            )
        case GivenUp(reason=reason):
            return _Outcome(reason=reason)


# ---------------------------------------------------------------- one-shot


def save(
    root: str, step: int, state: Mapping[str, Any], *, group: dist.ProcessGroup | None = None, **options: Any
) -> Manifest:
    """Save once and wait for the commit. Continues from the newest step in the root, which must be an older one. Collective.

    Options: those of `Checkpointer`, and `cursor` and `extra` of its `save`.
    """
    given = {k: options.pop(k) for k in ("cursor", "extra") if k in options}
    manifest: Manifest | None = None
    with Checkpointer(root, group, **options) as c:
        if not options.get("start_over"):
            c.continue_from_newest()
        manifest = c.save(step, state, **given).wait()
    assert manifest is not None, "a one-shot save is always due"
    return manifest


def load(
    root: str,
    state: Mapping[str, Any],
    step: int | None = None,
    *,
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Loaded | None:
    """Load once: see `Checkpointer.load`. Collective."""
    with Checkpointer(root, group) as c:
        return c._load(state, step, strict=strict)
