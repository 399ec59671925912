"""Reading plans, and telling why one cannot be followed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from surefoot.agent import decide
from surefoot.agent.errors import (
    ChannelClosedError,
    LaunchError,
    NodeError,
    RecordUnreadableError,
    TransferError,
)
from surefoot.ckpt.errors import CkptError
from surefoot.ckpt.record import Record, read_record
from surefoot.ckpt.store import ObjectMissingError, ObjectStore, ObjectStoreError
from surefoot.controller import wire

log = logging.getLogger(__name__)

RECORD_S = 15.0
"""An object store that is away for so long makes the record unreadable; the leader decides what then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReader:
    """Reads the plan that a pointer leads to."""

    open_store: Callable[[], Awaitable[ObjectStore]]
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
    """Run something that blocks."""
    note: Callable[[str, str], None]
    """A standing trouble by topic; empty text: over."""

    async def read(self, pointer: wire.PlanPointer) -> wire.Plan:
        """The plan, verified by the record's hash.

        Raises:
            RecordUnreadableError
        """
        record, data = await self._fetch(pointer)
        found = wire.digest(data)
        if found != pointer.hash:
            raise RecordUnreadableError(
                f"{pointer.location} has the hash {found}, the plan key says {pointer.hash}"
            )
        try:
            plan = msgspec.convert(record.plan, wire.Plan)
        except msgspec.ValidationError as e:
            raise RecordUnreadableError(f"{pointer.location} holds no plan: {e}") from e
        if plan.generation != pointer.generation:
            raise RecordUnreadableError(f"{pointer.location} holds the plan of generation {plan.generation}")
        return plan

    async def _fetch(self, pointer: wire.PlanPointer) -> tuple[Record, bytes]:
        deadline = time.monotonic() + RECORD_S
        tries = 0
        while True:
            tries += 1
            try:
                store = await self.open_store()
                found = await self.in_thread(partial(read_record, store, pointer.generation))
            except (ObjectStoreError, CkptError) as e:
                # A record is created before it is published: missing is as good as damaged, no wait mends it.
                if isinstance(e, (ObjectMissingError, CkptError)) or time.monotonic() >= deadline:
                    raise RecordUnreadableError(f"{pointer.location}: {e}") from e
                self.note("record", f"the record of generation {pointer.generation} is waited for: {e}")
                await asyncio.sleep(decide.retry_delay_s(tries, max_s=2.0))
            else:
                self.note("record", "")
                return found


def start_failure_of(generation: int, error: Exception) -> wire.StartFailure:
    """What the controller is told. Equal troubles get equal words: it counts by them."""
    told = {"generation": generation, "detail": str(error)}
    match error:
        case RecordUnreadableError():
            return wire.StartFailure(kind="record_unreadable", **told)
        case TransferError(kind="snapshot_missing" | "snapshot_corrupt" | "peer_unreachable" as kind):
            return wire.StartFailure(kind=kind, **told)
        case TransferError(kind="refused"):
            return wire.StartFailure(kind="peer_unreachable", **told)
        case LaunchError():
            return wire.StartFailure(kind="launch_failed", error=error.error, **told)
        case TransferError() | NodeError() | ChannelClosedError():
            return wire.StartFailure(kind="launch_failed", **told)
        case _:
            log.error("generation %d: %r", generation, error, exc_info=error)
            detail = f"unexpected, see the agent's log: {type(error).__name__}: {error}"
            return wire.StartFailure(generation=generation, kind="launch_failed", detail=detail)
