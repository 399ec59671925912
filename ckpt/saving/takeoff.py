"""How a save begins: ranks agree, a generation is open, and a flight sees through what is staged or written. (torch)"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from surefoot import failpoint as failpoints
from surefoot.ckpt.channel import Channel
from surefoot.ckpt.errors import CommitError
from surefoot.ckpt.keeping.retention import Retention
from surefoot.ckpt.record import Record
from surefoot.ckpt.saving.agreement import Agreement, Plain
from surefoot.ckpt.saving.cadence import Cadence
from surefoot.ckpt.saving.equipment import Equipment
from surefoot.ckpt.saving.flight import Flight, Terms, words_of_attempt
from surefoot.ckpt.saving.generation import Opened, OwnGeneration
from surefoot.ckpt.saving.handles import SaveHandle
from surefoot.ckpt.saving.jobs import UploadMsg
from surefoot.ckpt.saving.troubles import failed, reason_of
from surefoot.ckpt.saving.upload import Attempt
from surefoot.ckpt.saving.writer import KILL_AFTER_S
from surefoot.ckpt.store import ObjectStore


class Takeoff:
    """Of the saves of one `Checkpointer`, one after the other.

    Args:
        cadence: for what the manifest tells of it.
        committed: called on rank 0, by the flight, with the step that is committed.
    """

    def __init__(
        self,
        store: ObjectStore,
        own: OwnGeneration,
        agreement: Agreement,
        cadence: Cadence,
        *,
        deadline_s: float,
        retention: Retention | None,
        committed: Callable[[int], None],
    ) -> None:
        self.last_attempt = ""
        self._store = store
        self._own = own
        self._agreement = agreement
        self._cadence = cadence
        self._deadline_s = deadline_s
        self._retention = retention
        self._committed = committed
        self._flight: Flight | None = None
        self._swept = False
        self._records: dict[int, Record] = {}

    def begin(
        self,
        handle: SaveHandle,
        state: Mapping[str, Any],
        plain: Plain,
        equipment: Equipment,
        channel: Channel,
        *,
        blocking: bool,
    ) -> None:
        """Stage the state, or write it (if `blocking`, or where it cannot be staged). Collective; the save before has been heard of.

        Raises as `Agreement.to_save`, `OwnGeneration.open` and `SaveHandle.wait`; then the handle is dropped.
        """
        step = handle.step
        attempt = self._agreement.to_save(step, state, plain, equipment.live, channel)
        opened = self._own.open(step, channel, deadline_s=self._deadline_s)
        self.join()
        staged = not blocking and equipment.get_ready()
        terms = self._terms(Attempt(generation=opened.generation, step=step, attempt=attempt), channel.rank)
        flight = Flight(handle, terms, channel, self._store, equipment.uploader() if staged else None)
        self._flight = flight
        try:
            flight.start()  # before the copy: the others are to know at once if this process dies in it
            job = self._job(opened, terms.place, plain, equipment, channel, staged=staged)
            if staged:
                equipment.stage(job, flight.part, handle)
            else:
                equipment.write(job, flight.part)
                flight.part.end(None)
        except BaseException as e:
            flight.break_off(
                e if isinstance(e, Exception) else CommitError(f"interrupted: {type(e).__name__}")
            )
            handle.ended_within(KILL_AFTER_S)
            handle.drop()
            if not isinstance(e, Exception):
                raise
            # As on all other ranks, if what is raised there was told in time.
            told = handle.failure() or failed(f"step {step} was not committed", e)
            if told is e:
                raise
            raise told from reason_of(e)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the last flight has tidied up as well."""
        if self._flight is not None:
            self._flight.join(timeout_s)
            self._flight = None

    def _job(
        self,
        opened: Opened,
        place: Attempt,
        plain: Plain,
        equipment: Equipment,
        channel: Channel,
        *,
        staged: bool,
    ) -> UploadMsg:
        return UploadMsg(
            generation=place.generation,
            conditional=opened.conditional,
            step=place.step,
            attempt=place.attempt,
            rank=channel.rank,
            world_size=channel.world_size,
            deadline_s=self._deadline_s,
            values=equipment.live.values,
            cursor=plain["cursor"] or {},
            extra=plain["extra"],
            replicas=equipment.live.hashes() if staged else {},
            failpoints=failpoints.armed_text(),
        )

    def _terms(self, place: Attempt, rank: int) -> Terms:
        stale, self.last_attempt = self.last_attempt, place.attempt
        return Terms(
            place=place,
            deadline_s=self._deadline_s,
            facts={"host": socket.gethostname(), "pid": os.getpid(), **self._cadence.facts()},
            retention=self._retention,
            sweep=not self._swept,
            known=self._records,
            committed=lambda: self._note_commit(place.step),
            stale_words=words_of_attempt(stale) if stale and rank == 0 else (),
        )

    def _note_commit(self, step: int) -> None:
        self._swept = True
        self._committed(step)
