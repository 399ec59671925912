"""Ranged reads from S3: several at a time, straight into the caller's memory, going on where an answer broke off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.ckpt.objects.s3errors import Call, PastEndError
from surefoot.ckpt.objects.s3session import Patience, Session, patiently
from surefoot.ckpt.store import ObjectStoreError

CHUNK_NBYTES = 2**20
"""Most that is taken from a connection at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One object, and how to ask for it."""

    session: Session
    address: dict[str, Any]
    call: Call


class Reading:
    """One range, into views. What has come is kept: the next try asks for the rest. All on s3fs' loop."""

    def __init__(self, source: Source, start: int, views: Sequence[memoryview]) -> None:
        self._source = source
        self._start = start
        self._views = list(views)
        self._turn = 0
        self.nbytes = sum(map(len, views))
        self.done = 0
        self.total = 0
        """Of the whole object, as far as it was told."""

    async def run(self, patience: Patience) -> int:
        """Returns how many bytes there were. Raises: the typed error of the call."""
        try:
            await patiently(self._attempt, self._source.call, patience)
        except PastEndError:
            pass
        finally:
            self._turn += 1
        return self.done

    async def _attempt(self) -> None:
        self._turn += 1
        turn = self._turn
        if self.done == self.nbytes:
            return
        begin = self._start + self.done
        response = await self._source.session.call(
            "get_object", **self._source.address, Range=f"bytes={begin}-{self._start + self.nbytes - 1}"
        )
        async with response["Body"] as body:
            self._require_range(response, begin)
            while chunk := await body.read(CHUNK_NBYTES):
                if turn != self._turn:
                    return  # this try was given up: another one fills the views, or they are the caller's again
                self._take(memoryview(chunk))

    def _require_range(self, response: dict[str, Any], begin: int) -> None:
        """Raises ObjectStoreError: the answer is another range than was asked for."""
        found = str(response.get("ContentRange", ""))
        length = int(response["ContentLength"])
        self.total = int(found.rpartition("/")[2]) if found else length
        right = found.startswith(f"bytes {begin}-") if found else begin == 0
        if not right or length > self.nbytes - self.done:
            raise ObjectStoreError(
                f"{self._source.call.root}: {self._source.call.key}: bytes from {begin} on were asked for, and "
                f"{length} came as {found or 'the whole object'}: this store has no ranged reads"
            )

    def _take(self, chunk: memoryview) -> None:
        self.done += len(chunk)
        while chunk:
            room = self._views[0]
            n = min(len(room), len(chunk))
            room[:n] = chunk[:n]
            chunk = chunk[n:]
            if n == len(room):
                self._views.pop(0)
            else:
                self._views[0] = room[n:]


async def read_ranges(
    source: Source,
    start: int,
    views: Sequence[memoryview],
    *,
    range_nbytes: int,
    in_flight: int,
    patience: Patience,
) -> int:
    """Fill the views in order with the bytes from `start` on, by ranges, some at a time; returns how many there were.

    Args:
        patience: its `try_s` is for one range, its deadline for all.

    Raises: the typed error of the first range that fails; nothing is written to the views after that.
    """
    slots = asyncio.Semaphore(in_flight)

    async def run(reading: Reading) -> int:
        async with slots:
            return await reading.run(patience)

    readings: list[Reading] = []
    at = start
    for part in cut(views, range_nbytes):
        readings.append(Reading(source, at, part))
        at += readings[-1].nbytes
    tasks = [asyncio.ensure_future(run(reading)) for reading in readings]
    try:
        return sum(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def cut(views: Sequence[memoryview], nbytes: int) -> list[list[memoryview]]:
    """The same memory in runs of `nbytes`; the last may be short. PURE."""
    runs: list[list[memoryview]] = []
    room = 0
    for whole in views:
        view = whole
        while len(view):
            if not room:
                runs.append([])
                room = nbytes
            runs[-1].append(view[:room])
            taken = len(runs[-1][-1])
            view, room = view[taken:], room - taken
    return runs
