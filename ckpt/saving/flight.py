"""One save in flight on one rank: its thread sees this rank's part stored, rank 0's sees the commit, all hear the outcome. (torch)

Nothing here is a collective, and no bytes of the state pass through here. Words lie on the channel under the attempt's nonce,
so a late word of an attempt that was given up means nothing to another.

::

    c/<attempt>        how many ranks have stored their part; the last one leaves
    w/<attempt>/end    "ok", or earlier, by a rank that failed, what went wrong (`Failure`): rank 0 waits for it
    w/<attempt>/out    the outcome, by rank 0: the others wait for it, so that all raise the same

Every rank beats meanwhile. A dead rank is named by rank 0 (`channel.SILENT_S`), a dead rank 0 by the end of its TCPStore, a
dead uploader by the end of its socket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from surefoot.ckpt.channel import Channel
from surefoot.ckpt.errors import CkptError, CommitError, FencedError
from surefoot.ckpt.keeping.retention import Retention
from surefoot.ckpt.loading.restore import read_manifest
from surefoot.ckpt.manifest import Manifest, object_key
from surefoot.ckpt.record import Record
from surefoot.ckpt.saving.commit import ANSWER_S, commit
from surefoot.ckpt.saving.handles import SaveHandle
from surefoot.ckpt.saving.jobs import AbandonMsg, CommitMsg, CommittedMsg, Trouble, UploadedMsg
from surefoot.ckpt.saving.troubles import error_of, failed, reason_of, trouble_of, words_of
from surefoot.ckpt.saving.upload import Attempt
from surefoot.ckpt.saving.uploader import answer_of, leave_failure, tidy
from surefoot.ckpt.saving.writer import KILL_AFTER_S, UploaderGoneError, UploaderProcess
from surefoot.ckpt.store import ObjectStore

_log = logging.getLogger(__name__)

BEAT_S = 1.0
"""How often a rank gives a sign of life, and how often it looks for those of others."""
START_S = 5.0
"""A thread that does not run by then was not started."""
LATE_S = KILL_AFTER_S
"""What a rank may take beyond the deadline to say why its part is not stored; who waits for it takes a moment more (`HEARD_S`)."""
HEARD_S = 2 * BEAT_S
PATIENCE_S = 15.0
"""What the others wait beyond rank 0's deadline, since it knows more about who is late: its own `LATE_S`, and the commit's."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank that failed tells rank 0."""

    rank: int
    trouble: Trouble


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What rank 0 tells the others of an attempt."""

    fenced_by: int = 0
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a flight goes by."""

    place: Attempt
    deadline_s: float
    facts: Mapping[str, Any]
    retention: Retention | None
    sweep: bool
    """After the commit, sweep what earlier generations left."""
    known: MutableMapping[int, Record]
    """Records that this process has read, kept from flight to flight."""
    committed: Callable[[], None]
    """Called on rank 0 once the step is committed."""
    stale_words: Sequence[str] = ()
    """On rank 0: keys of the channel that nobody needs any more, since all have begun this save."""


def words_of_attempt(attempt: str) -> tuple[str, ...]:
    """The keys that a flight leaves on the channel."""
    return attempt, f"{attempt}/end", f"{attempt}/out"


class Part:
    """This rank's part, as the training thread hands it over to the flight: for the uploader, or stored already."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._send: Callable[[], None] | None = None
        self._ended = False
        self._error: Exception | None = None
        self.abandoned = False

    def hand_over(self, send: Callable[[], None]) -> None:
        """It is staged: `send` gives it to the uploader, from the flight's thread."""
        with self._changed:
            self._send = send
            self._changed.notify_all()

    def end(self, error: Exception | None) -> None:
        """It is stored, or never will be."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def require_wanted(self) -> None:
        """Raises CommitError where the flight has given up."""
        if self.abandoned:
            raise CommitError("the save was given up meanwhile: another rank failed")

    def take(self, timeout_s: float) -> tuple[Callable[[], None] | None, bool, Exception | None]:
        """What was handed over, whether it has ended, and how; waits so long for a change."""
        with self._changed:
            if self._send is None and not self._ended:
                self._changed.wait(timeout_s)
            send, self._send = self._send, None
            return send, self._ended, self._error


class Flight:
    """See the module. Runs in a thread of its own from `start` on; `handle` tells its end."""

    def __init__(
        self,
        handle: SaveHandle,
        terms: Terms,
        channel: Channel,
        store: ObjectStore,
        uploader: UploaderProcess | None,
    ) -> None:
        self.part = Part()
        self._handle = handle
        self._terms = terms
        self._channel = channel
        self._store = store
        self._uploader = uploader
        self._begun = time.monotonic()
        self._give_up = self._begun + terms.deadline_s
        self._name = f"step {terms.place.step}"
        self._attempt = terms.place.attempt
        self._thread = threading.Thread(target=self._run, name=f"ckpt-save-{terms.place.step}", daemon=True)
        self._starting = threading.Lock()
        self._running = threading.Event()
        self._over = threading.Event()
        self._noted = False
        self._committed_here = False

    def start(self) -> None:
        self._handle.begin()
        # A daemon: the end of the interpreter waits by the handle, for as long as is worth it.
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has tidied up as well.

        Not by joining the thread: before CPython 3.13 a thread counts as ended once its join was interrupted (Ctrl-C), and the next
        save would be copied over what this one still uploads.
        """
        self._over.wait(timeout_s)

    def break_off(self, error: Exception) -> None:
        """The part will not come; and a thread that does not run, since its start was interrupted, never will."""
        self.part.end(error)
        if self._running.wait(START_S):
            return
        with self._starting:
            if not self._running.is_set():
                self._handle.finish(None, failed(f"{self._name} was not committed", error))
                self._over.set()

    def _run(self) -> None:
        with self._starting:
            if self._over.is_set():
                return
            self._running.set()
        try:
            self._fly()
        finally:
            self._over.set()

    def _fly(self) -> None:
        own: Exception | None = None
        error: Exception | None
        try:
            self._channel.drop(self._terms.stale_words)
            own = self._own_part()
            outcome = self._lead(own) if self._channel.rank == 0 else self._follow(own)
            error = self._error_of(outcome, own)
        except Exception as e:  # it surfaces at wait, at the next save, at close, or at exit
            error = failed(f"{self._name} was not committed", own or e)
        _log.debug("%s: %s after %.3f s", self._name, error or "committed", time.monotonic() - self._begun)
        self._handle.finish(None if error is not None else self._read_manifest, error)
        self._note(own)  # nobody waits for this and the next but `close` and the next save
        if self._committed_here and error is None:
            self._tidy()

    def _tidy(self) -> None:
        terms = self._terms
        tidy(self._store, terms.retention, terms.place.generation, sweep=terms.sweep, known=terms.known)

    def _read_manifest(self) -> Manifest:
        return read_manifest(self._store, self._terms.place.generation, self._terms.place.step)

    def _error_of(self, outcome: Outcome, own: Exception | None) -> Exception | None:
        """The same on all ranks; where this one's part failed, that is its cause."""
        place = self._terms.place
        if outcome.fenced_by:
            return FencedError(generation=place.generation, step=place.step, by=outcome.fenced_by)
        if outcome.trouble is None:
            return None
        error = error_of(outcome.trouble)
        if own is not None:
            error.__cause__ = reason_of(own)
        return error

    # ---- this rank's part

    def _own_part(self) -> Exception | None:
        """See it stored. Returns what went wrong on this rank; None also where it is abandoned because another failed."""
        sent = False
        try:
            while True:
                self._beat("going")
                if sent:
                    error = self._hear_uploader()
                else:
                    send, ended, error = self.part.take(BEAT_S)
                    if send is not None:
                        send()
                        sent = True
                        continue
                    error = (error or _STORED) if ended else None
                if error is not None:
                    return None if error is _STORED else error
                self._look_around()
        except _OtherFailed:
            self._abandon(sent=sent)
            return None
        except UploaderGoneError as e:
            return e
        except Exception as e:
            # An uploader that should have given up by itself is not asked to.
            self._abandon(sent=sent, wait_s=0.0 if isinstance(e, _LateError) else KILL_AFTER_S)
            return e

    def _hear_uploader(self) -> Exception | None:
        assert self._uploader is not None, "the part was handed over to it"
        answer = self._uploader.read(BEAT_S)
        if isinstance(answer, UploadedMsg) and answer.attempt == self._attempt:
            self._noted = answer.trouble is not None
            return _STORED if answer.trouble is None else error_of(answer.trouble)
        return None

    def _look_around(self) -> None:
        """Has this save failed already? Raises _OtherFailed; _LateError beyond the deadline."""
        if time.monotonic() > self._give_up + LATE_S:
            raise _LateError(self._words_late())
        if self._channel.world_size == 1:
            return
        word = self._channel.hear(f"{self._attempt}/{'end' if self._channel.rank == 0 else 'out'}", 0.0)
        if word is not None or (self._channel.rank == 0 and self._silent()):
            raise _OtherFailed

    def _words_late(self) -> str:
        place, rank = self._terms.place, self._channel.rank
        key = object_key(place.generation, place.step, place.attempt, rank)
        return (
            f"{self._name}: rank {rank} has not stored its part in time ({key} in {self._store.root}), and nothing has said why "
            f"{LATE_S:g} s after the deadline of {self._terms.deadline_s:g} s: the object store hangs, or a copy does; given up"
        )

    def _abandon(self, *, sent: bool, wait_s: float = KILL_AFTER_S) -> None:
        """Nobody uses the buffer, and nothing more is stored for this attempt, when it returns."""
        self.part.abandoned = True
        if not sent or self._uploader is None:
            return
        try:
            self._uploader.send(AbandonMsg(self._attempt))
            until = time.monotonic() + wait_s
            while time.monotonic() < until:
                answer = self._uploader.read(BEAT_S)
                if isinstance(answer, UploadedMsg) and answer.attempt == self._attempt:
                    return
            self._uploader.kill()
        except UploaderGoneError:
            pass  # likewise

    def _beat(self, state: str) -> None:
        self._channel.beat(f"{self._attempt} {state}")

    # ---- the others

    def _follow(self, error: Exception | None) -> Outcome:
        """Not rank 0: tell it how this part ended, and hear how all did. Raises ChannelError, CommitError."""
        self._tell_end(error)
        until = self._give_up + PATIENCE_S
        while (word := self._channel.hear(f"{self._attempt}/out", BEAT_S)) is None:
            if time.monotonic() > until:
                raise CommitError(
                    f"{self._name}: rank 0 tells no outcome; whether it was committed is for the next load to see"
                )
            self._beat("stored")
        return msgspec.json.decode(word, type=Outcome)

    def _tell_end(self, error: Exception | None) -> None:
        key = f"{self._attempt}/end"
        if self.part.abandoned:
            return  # the others know
        if error is not None:
            failure = Failure(rank=self._channel.rank, trouble=trouble_of(error))
            self._channel.tell(key, msgspec.json.encode(failure))
        elif self._channel.count(self._attempt) == self._channel.world_size:
            self._channel.tell(key, b"ok")

    def _lead(self, error: Exception | None) -> Outcome:
        """Rank 0: commit when all parts are stored. Whatever happens, the others are told."""
        outcome = Outcome()
        try:
            if error is not None:
                raise self._failed(0, error)
            self._await_parts()
            answer = self._commit()
            if answer.trouble is not None:
                raise failed(f"{self._name} is not known to be committed", error_of(answer.trouble))
            outcome = Outcome(fenced_by=answer.fenced_by)
        except Exception as e:
            outcome = Outcome(trouble=trouble_of(e))
        finally:
            if self._channel.world_size > 1:
                self._channel.tell(f"{self._attempt}/out", msgspec.json.encode(outcome))
        if outcome == Outcome():
            self._terms.committed()
        return outcome

    def _failed(self, rank: int, error: Exception) -> CkptError:
        """What all raise because of it."""
        alone = self._channel.world_size == 1
        return failed(f"{self._name} was not committed", error, "" if alone else f"rank {rank}")

    def _note(self, error: Exception | None) -> None:
        """Leave word of this rank's failure in the object store, unless its uploader has done so."""
        if error is not None and not self._noted:
            leave_failure(self._store, self._terms.place, self._channel.rank, words_of(error))

    def _await_parts(self) -> None:
        """Raises CommitError naming who failed, fell silent, or is late."""
        if self._channel.count(self._attempt) == self._channel.world_size:
            return
        while (word := self._channel.hear(f"{self._attempt}/end", BEAT_S)) is None:
            self._beat("stored")
            self._require_all_alive()
            if time.monotonic() > self._give_up + LATE_S + HEARD_S:
                raise CommitError(
                    f"{self._name} was not committed: not all ranks stored their part in time; given up"
                )
        if word != b"ok":
            told = msgspec.json.decode(word, type=Failure)
            raise self._failed(told.rank, error_of(told.trouble))

    def _require_all_alive(self) -> None:
        if silent := self._silent():
            named = ", ".join(f"rank {r}" for r in silent)
            raise CommitError(
                f"{self._name} was not committed: {named} fell silent while it was saved, so the process has died or hangs"
            )

    def _silent(self) -> list[int]:
        return self._channel.silent(f"{self._attempt} stored", self._begun)

    def _commit(self) -> CommittedMsg:
        """By the uploader; by this very thread where there is none or it dies: repeating a commit is harmless. Raises CommitError
        where the uploader does not come to an end."""
        place, terms = self._terms.place, self._terms
        job = CommitMsg(
            generation=place.generation,
            step=place.step,
            attempt=place.attempt,
            writers=self._channel.world_size,
            deadline_s=max(1.0, self._give_up - time.monotonic()),
            facts=dict(terms.facts),
            retention=terms.retention,
            sweep=terms.sweep,
        )
        if self._uploader is not None:
            try:
                self._uploader.send(job)
                until = time.monotonic() + job.deadline_s + ANSWER_S + LATE_S
                while time.monotonic() < until:
                    answer = self._uploader.read(BEAT_S)
                    if isinstance(answer, CommittedMsg) and answer.attempt == self._attempt:
                        return answer
                self._uploader.kill()
                raise CommitError(
                    f"{self._name}: its commit in {self._store.root} has not come to an end in time; whether it was committed is for the "
                    f"next load to see"
                )
            except UploaderGoneError as e:
                _log.warning("%s: %s while it committed; trying again without it", self._name, e)
        self._committed_here = True
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
        return answer_of(job, outcome)


class _LateError(CommitError):
    """The deadline is over, and nothing has said what is in the way."""


class _OtherFailed(Exception):
    """Another rank did, and all are told or will be."""


_STORED = Exception("the part is stored: no error")
