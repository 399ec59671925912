"""The object store on S3.

Conditional creation is a PUT, or the completion of a multipart upload, with ``If-None-Match: *``. A creation that was cut off
may have worked. Repeating it is harmless (the key is either free or taken, by us or by another, and a nonce in the object's
metadata tells which); only where the deadline ends it undecided is the outcome unknown.

s3session.py has the session and our patience, s3create.py conditional creation, s3upload.py large objects, s3read.py ranged
reads, s3errors.py what failures mean.
"""

from __future__ import annotations

import copy
import math
import os
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from surefoot.ckpt.objects.s3create import Target, put_once
from surefoot.ckpt.objects.s3errors import Call, UploadGoneError
from surefoot.ckpt.objects.s3read import Reading, Source, read_ranges
from surefoot.ckpt.objects.s3session import SLOWEST_BYTES_PER_S, Patience, Session, require_endpoint
from surefoot.ckpt.objects.s3upload import S3Upload, Sizing
from surefoot.ckpt.store import ObjectInfo, ObjectMissingError, Unfinished, check_key

PART_NBYTES = 16 * 2**20
"""One part of an upload, and one ranged read. S3 wants at least 5 MiB for all parts but the last."""
SINGLE_PUT_NBYTES = 64 * 2**20
"""What `create` is given goes up with one PUT up to this size: not every store that honours conditions on a PUT also does on the
completion of a multipart upload (Ceph RGW 16.2), and records and manifests are committed by `create`."""
FIRST_READ_NBYTES = 2**20
"""Asked for at first of an object whose size is not known: records and manifests are smaller."""
_LISTING = frozenset({"IsTruncated", "KeyCount", "Name", "Contents"})
"""One of these stands in every listing. What is none (a login page of a proxy) would be taken for that of an empty bucket."""
IN_FLIGHT = 8
"""Parts, or ranged reads, under way at a time."""


class S3ObjectStore:
    """See the module and `ObjectStore`. The session opens with the first call.

    Args:
        prefix: has no slash at its ends.
        deadline_s: how long one call may take, retries included; what its bytes need comes on top.
        try_s: how long one try of it may take, likewise; None: a third of `deadline_s`.
        part_nbytes: of one part of a large upload, and of one ranged read.
        in_flight: parts or ranged reads of one call under way at a time.
        session: its connections, where several stores share them; None: its own.

    Raises ValueError: the endpoint in the environment is none.
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
        session: Session | None = None,
    ) -> None:
        if session is None:
            require_endpoint(os.environ)
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._deadline_s = deadline_s
        self._sizing = Sizing(
            part_nbytes=part_nbytes,
            in_flight=in_flight,
            try_s=deadline_s / 3 if try_s is None else try_s,
        )
        self.conditional = True
        """Creations carry a condition."""
        self._begun, self._ends = 0.0, math.inf
        """When calls were said to end (`until`), and when that is, on the monotonic clock."""
        self._session = session or Session()

    @property
    def root(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def until(self, deadline: float) -> S3ObjectStore:
        """The same store, on the same connections, none of whose calls outlasts `deadline` (on the monotonic clock)."""
        bounded = copy.copy(self)
        bounded._begun, bounded._ends = time.monotonic(), min(deadline, self._ends)
        return bounded

    # ------------------------------------------------------------ creating

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        target = self._target(key)
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        if view.nbytes <= SINGLE_PUT_NBYTES:
            return put_once(self._session, target, [view], zlib.crc32(view), self._patience(view.nbytes))
        upload = self.upload(
            key, view.nbytes, deadline_s=self._deadline_s + view.nbytes / SLOWEST_BYTES_PER_S
        )
        try:
            upload.put(view)
            upload.finish()
        finally:
            upload.abort()

    def upload(self, key: str, size: int, *, deadline_s: float) -> S3Upload:
        return S3Upload(self._session, self._target(key), size, self._sizing, deadline_s, ends=self._ends)

    def do_without_conditions(self) -> None:
        """From now on create without ``If-None-Match``, for a store that does not know it: look, put, and read back whose object
        stands there (`s3create.create_once` says what that does not protect from). Chosen by `probe.ensure_exclusive`."""
        self.conditional = False

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
        """One request where it is not much; its answer tells how much there is beyond."""
        wanted = FIRST_READ_NBYTES if length is None else length
        first = bytearray(min(wanted, self._sizing.part_nbytes))
        if not first:
            return b""
        reading = Reading(self._source(key), start, [memoryview(first)])
        patience = self._patience(len(first))
        self._session.wait(reading.run(patience), self._source(key).call, patience)
        missing = max(reading.total - start - reading.done, 0)
        if length is not None:
            missing = min(missing, length - reading.done)
        if not missing:
            return bytes(memoryview(first)[: reading.done])
        rest = bytearray(missing)
        found = self.read_into(key, start + reading.done, [memoryview(rest)])
        return b"".join((first, memoryview(rest)[:found]))

    def read_into(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        source = self._source(key)
        flat = [view.cast("B") for view in views if view.nbytes]
        nbytes = sum(map(len, flat))
        if not nbytes:
            return 0
        patience = self._patience(nbytes, of_one_try=min(nbytes, self._sizing.part_nbytes))
        reading = read_ranges(
            source,
            start,
            flat,
            range_nbytes=self._sizing.part_nbytes,
            in_flight=self._sizing.in_flight,
            patience=patience,
        )
        return self._session.wait(reading, source.call, patience)

    def sight(self) -> str:
        return ""

    def look(self, key: str, start: int, nbytes: int) -> memoryview | None:
        return None

    def release(self) -> None:
        """Connections are the session's to keep; no object is."""

    def list(self, prefix: str) -> list[ObjectInfo]:
        async def pages() -> list[ObjectInfo]:
            found: list[ObjectInfo] = []
            more: dict[str, str] = {}
            while True:
                page = await self._session.call(
                    "list_objects_v2", Bucket=self._bucket, Prefix=self._prefix + prefix, **more
                )
                if not page.keys() & _LISTING:
                    raise ConnectionError(
                        "what came is no listing: is AWS_ENDPOINT_URL a store, or a proxy in front of it?"
                    )
                found += [
                    ObjectInfo(o["Key"][len(self._prefix) :], o["Size"], o["LastModified"].timestamp())
                    for o in page.get("Contents", ())
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
        return Target(
            root=self.root,
            bucket=self._bucket,
            prefix=self._prefix,
            key=check_key(key),
            conditional=self.conditional,
        )

    def _source(self, key: str) -> Source:
        call = Call(root=self.root, what="read", key=key)
        return Source(session=self._session, address=self._target(key).address(), call=call)

    def _patience(self, nbytes: int = 0, *, of_one_try: int | None = None) -> Patience:
        """For a call that moves so many bytes, and so many in one try."""
        one = nbytes if of_one_try is None else of_one_try
        now = time.monotonic()
        own = now + self._deadline_s + nbytes / SLOWEST_BYTES_PER_S
        return Patience(
            begun=now if own <= self._ends else self._begun,
            deadline=min(own, self._ends),
            try_s=self._sizing.try_s + one / SLOWEST_BYTES_PER_S,
        )

    def _run(self, attempt: Callable[[], Awaitable[Any]], what: str, key: str) -> Any:
        return self._session.run(attempt, Call(root=self.root, what=what, key=key), self._patience())
