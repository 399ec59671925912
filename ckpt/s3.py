"""The object store on S3.

Conditional creation is a PUT, or the completion of a multipart upload, with ``If-None-Match: *``. A creation that was cut off
may have worked. Repeating it is harmless (the key is either free or taken, by us or by another, and a nonce in the object's
metadata tells which); only where the deadline ends it undecided is the outcome unknown.

s3session.py has the session and our patience, s3upload.py large objects, s3errors.py what failures mean.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from typing import Any

from surefoot.ckpt.s3errors import Call, PastEndError, UploadGoneError
from surefoot.ckpt.s3session import SLOWEST_BYTES_PER_S, Patience, Session, patiently
from surefoot.ckpt.s3upload import S3Upload, Sizing, Target, put_conditionally
from surefoot.ckpt.store import ObjectInfo, ObjectMissingError, Unfinished, check_key

PART_NBYTES = 16 * 2**20
"""One part of an upload, and one ranged read. S3 wants at least 5 MiB for all parts but the last."""
IN_FLIGHT = 8
"""Parts, or ranged reads, under way at a time."""
CHUNK_NBYTES = 2**20
"""Most that is taken from a connection at once."""


class S3ObjectStore:
    """See the module and `ObjectStore`. The session opens with the first call.

    Args:
        prefix: has no slash at its ends.
        deadline_s: how long one call may take, retries included; what its bytes need comes on top.
        try_s: how long one try of it may take, likewise; None: a third of `deadline_s`.
        part_nbytes: of one part of a large upload, and of one ranged read.
        in_flight: parts or ranged reads of one call under way at a time.
    """

    nearby = False

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        deadline_s: float,
        try_s: float | None = None,
        part_nbytes: int = PART_NBYTES,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._deadline_s = deadline_s
        self._sizing = Sizing(
            part_nbytes=part_nbytes,
            parts_in_flight=in_flight,
            try_s=deadline_s / 3 if try_s is None else try_s,
        )
        self._session = Session()

    @property
    def root(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    # ------------------------------------------------------------ creating

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        if view.nbytes <= self._sizing.part_nbytes:
            return put_conditionally(
                self._session, self._target(key), [view], zlib.crc32(view), self._patience(view.nbytes)
            )
        upload = self.upload(
            key, view.nbytes, deadline_s=self._deadline_s + view.nbytes / SLOWEST_BYTES_PER_S
        )
        try:
            upload.put(view)
            upload.finish()
        finally:
            upload.abort()

    def upload(self, key: str, size: int, *, deadline_s: float) -> S3Upload:
        return S3Upload(self._session, self._target(key), size, self._sizing, deadline_s)

    def unfinished(self, prefix: str) -> list[Unfinished]:
        async def pages() -> list[Unfinished]:
            found: list[Unfinished] = []
            more: dict[str, str] = {}
            while True:
                page = await self._session.call(
                    "list_multipart_uploads", Bucket=self._bucket, Prefix=self._prefix + prefix, **more
                )
                found += [
                    Unfinished(
                        key=u["Key"][len(self._prefix) :],
                        token=u["UploadId"],
                        begun_at=u["Initiated"].timestamp(),
                    )
                    for u in page.get("Uploads", ())
                ]
                if not page.get("IsTruncated"):
                    return found
                more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

        found = self._run(pages, "list unfinished uploads below", prefix)
        return sorted((u for u in found if u.key.startswith(prefix)), key=lambda u: (u.key, u.token))

    def discard(self, unfinished: Unfinished) -> None:
        address = self._target(unfinished.key).address()
        try:
            self._run(
                lambda: self._session.call("abort_multipart_upload", **address, UploadId=unfinished.token),
                "discard the unfinished upload of",
                unfinished.key,
            )
        except (UploadGoneError, ObjectMissingError):
            pass  # gone is what was wanted

    # ------------------------------------------------------------ reading

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        address = self._target(key).address()
        if length == 0:
            return b""
        if start or length is not None:
            address["Range"] = f"bytes={start}-{'' if length is None else start + length - 1}"

        async def get() -> bytes:
            response = await self._session.call("get_object", **address)
            async with response["Body"] as body:
                return await body.read()

        try:
            return self._run(get, "read", key, nbytes=length or 0)
        except PastEndError:
            return b""

    def read_into(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        address = self._target(key).address()
        flat = [view.cast("B") for view in views if view.nbytes]
        nbytes = sum(map(len, flat))
        if not nbytes:
            return 0
        patience = self._patience(nbytes)

        async def read_all() -> list[int]:
            slots = asyncio.Semaphore(self._sizing.parts_in_flight)
            readings = []
            at = start
            for part in _cut(flat, self._sizing.part_nbytes):
                reading = _Reading(self._session, address, at, part)
                readings.append(self._reading(reading, key, patience, slots))
                at += reading.nbytes
            return await asyncio.gather(*readings)

        self._session.open(Call(root=self.root, what="read", key=key), patience)
        return sum(self._session.submit(read_all()).result())

    async def _reading(self, reading: Any, key: str, patience: Patience, slots: asyncio.Semaphore) -> int:
        async with slots:
            call = Call(root=self.root, what="read", key=key)
            try:
                await patiently(reading.attempt, call, patience)
            except PastEndError:
                pass
        return reading.done

    def list(self, prefix: str) -> list[ObjectInfo]:
        async def pages() -> list[ObjectInfo]:
            found: list[ObjectInfo] = []
            more: dict[str, str] = {}
            while True:
                page = await self._session.call(
                    "list_objects_v2", Bucket=self._bucket, Prefix=self._prefix + prefix, **more
                )
                found += [
                    ObjectInfo(o["Key"][len(self._prefix) :], o["Size"]) for o in page.get("Contents", ())
                ]
                if not page.get("IsTruncated"):
                    return found
                more = {"ContinuationToken": page["NextContinuationToken"]}

        # Not every store lists in order of bytes. A key with a slash at its end is a folder's marker, none of ours.
        found = self._run(pages, "list", prefix)
        return sorted((o for o in found if not o.key.endswith("/")), key=lambda o: o.key)

    def delete(self, key: str) -> None:
        address = self._target(key).address()
        try:
            self._run(lambda: self._session.call("delete_object", **address), "delete", key)
        except ObjectMissingError:
            pass  # gone is what was wanted

    # ------------------------------------------------------------ shared

    def _target(self, key: str) -> Target:
        return Target(root=self.root, bucket=self._bucket, prefix=self._prefix, key=check_key(key))

    def _patience(self, nbytes: int = 0) -> Patience:
        extra_s = nbytes / SLOWEST_BYTES_PER_S
        return Patience(
            deadline=time.monotonic() + self._deadline_s + extra_s, try_s=self._sizing.try_s + extra_s
        )

    def _run(self, attempt: Any, what: str, key: str, *, nbytes: int = 0) -> Any:
        return self._session.run(attempt, Call(root=self.root, what=what, key=key), self._patience(nbytes))


class _Reading:
    """One ranged read into views. What has come is kept: the next try asks for the rest."""

    def __init__(
        self, session: Session, address: dict[str, Any], start: int, views: list[memoryview]
    ) -> None:
        self._session = session
        self._address = address
        self._start = start
        self._views = views
        self.nbytes = sum(map(len, views))
        self.done = 0

    async def attempt(self) -> None:
        begin = self._start + self.done
        response = await self._session.call(
            "get_object", **self._address, Range=f"bytes={begin}-{self._start + self.nbytes - 1}"
        )
        async with response["Body"] as body:
            while chunk := await body.read(CHUNK_NBYTES):
                self._take(memoryview(chunk))

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


def _cut(views: list[memoryview], nbytes: int) -> list[list[memoryview]]:
    """The same memory in runs of `nbytes`; the last may be short."""
    runs: list[list[memoryview]] = [[]]
    room = nbytes
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
