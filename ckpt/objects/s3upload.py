"""One large object on its way to S3: parts in parallel, each with a checksum that the store compares with what arrived.

* `put` cuts the caller's bytes into parts without copying them and starts each part as soon as it is full; it waits while
  `in_flight` are under way, so that memory and connections are bounded.
* A part carries its CRC32 in a signed header. A store that knows it refuses a part that arrived damaged and answers with the
  sum it found, which is compared; of one that does not, the ETag must be the part's MD5.
* A part that was answered is not sent again. A part without an answer is, on another connection, until the deadline.
* Before the completion the store lists the parts it holds, which must be those that were sent: a part lost behind a "200" is
  found here and not by a load months later.
* The completion is conditional (``If-None-Match: *``). Where its answer is lost, the object's metadata says whose it is: a
  nonce of this upload stands in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.ckpt.objects.s3create import NONCE, Body, Target, crc_header, create_once, put_once
from surefoot.ckpt.objects.s3errors import DamagedPartError
from surefoot.ckpt.objects.s3session import (
    SLOWEST_BYTES_PER_S,
    UNREACHABLE_S,
    Patience,
    Session,
    over,
    patiently,
)
from surefoot.ckpt.store import (
    ObjectStoreError,
    ObjectStoreUnavailableError,
    require_size,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

MOST_PARTS = 10_000
"""S3's limit for one upload."""
RESTART_S = 60.0
"""An upload under way outlives a store that restarts. (One that begins hears within `UNREACHABLE_S` that nobody is there.)"""
ABORT_S = 1.0
"""How long an abort waits for parts under way to end, and for the store where the deadline of the upload has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How an upload is cut, and how long one try may take beyond what its bytes need."""

    part_nbytes: int
    in_flight: int
    try_s: float


class _Part:
    """The part that is being filled."""

    def __init__(self) -> None:
        self.views: list[memoryview] = []
        self.nbytes = 0
        self.crc = 0

    def add(self, view: memoryview) -> None:
        self.views.append(view)
        self.nbytes += len(view)
        self.crc = zlib.crc32(view, self.crc)

    def own(self) -> None:
        """Copy the bytes, so that the caller's may change."""
        self.views = [memoryview(b"".join(self.views))]


class S3Upload:
    """See the module and `Upload`. An object of one part goes up with a single conditional PUT, when it is finished."""

    def __init__(
        self,
        session: Session,
        target: Target,
        size: int,
        sizing: Sizing,
        deadline_s: float,
        *,
        ends: float = math.inf,
    ) -> None:
        self._session = session
        self._target = target
        self._size = size
        self._part_nbytes = max(sizing.part_nbytes, -(-size // MOST_PARTS))
        self._sizing = sizing
        now = time.monotonic()
        self._deadline = min(now + deadline_s, ends)
        self._begun = min(now, self._deadline)
        self._nonce = secrets.token_hex(8)
        self._part = _Part()
        self._taken = 0
        self._sent = 0
        self._done: dict[int, dict[str, Any]] = {}
        self._going: dict[int, Future[None]] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._id = self._begin() if size > self._part_nbytes else ""

    # ------------------------------------------------------------ the caller's thread

    def put(self, data: memoryview) -> None:
        view = data.cast("B") if data.nbytes else data
        self._taken += view.nbytes
        if self._taken > self._size:
            require_size(self._target.root, self._target.key, self._taken, self._size)
        while view.nbytes:
            piece = view[: self._part_nbytes - self._part.nbytes]
            self._part.add(piece)
            view = view[len(piece) :]
            if self._id and self._part.nbytes == self._part_nbytes:
                self._send_part()

    def drain(self) -> None:
        if self._part.nbytes:
            self._part.own()
        self._wait(0)

    def finish(self) -> None:
        require_size(self._target.root, self._target.key, self._taken, self._size)
        if not self._id:
            put_once(
                self._session, self._target, self._part.views, self._part.crc, self._patience(self._size)
            )
        else:
            if self._part.nbytes:
                self._send_part()
            self._wait(0)
            self._require_parts()
            self._complete()
        self._closed = True

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._changed:
            going = list(self._going.values())
        for part in going:
            part.cancel()
        with self._changed:  # a part that arrives after the abort would stay behind
            self._changed.wait_for(lambda: not self._going, ABORT_S)
        if self._id:
            left_s = max(self._deadline - time.monotonic(), ABORT_S)
            abort_upload(self._session, self._target, self._id, min(self._sizing.try_s, left_s))

    # ------------------------------------------------------------ parts

    def _begin(self) -> str:
        answer = self._session.run(
            lambda: self._session.call(
                "create_multipart_upload",
                **self._target.address(),
                ChecksumAlgorithm="CRC32",
                Metadata={NONCE: self._nonce},
            ),
            self._target.call("begin the upload of"),
            self._patience(),
        )
        return answer["UploadId"]

    def _send_part(self) -> None:
        """Start the part that is full, as soon as fewer than `in_flight` are under way."""
        part, self._part = self._part, _Part()
        self._wait(self._sizing.in_flight - 1)
        self._sent += 1
        number = self._sent
        with self._changed:
            self._going[number] = self._session.submit(self._sending(number, part))

    def _wait(self, going: int) -> None:
        """Until no more than `going` parts are under way. Raises the first error of any part."""
        with self._changed:
            while self._error is None and len(self._going) > going:
                left = self._deadline - time.monotonic()
                if left <= -1.0:
                    raise ObjectStoreUnavailableError(
                        f"{self._target.root}: cannot create {self._target.key} ({self._words()}): parts "
                        f"{sorted(self._going)} are not stored, and {over(self._deadline - self._begun, -left)}"
                    )
                self._changed.wait(max(left, 0.0) + 1.0)
            if self._error is not None:
                raise self._error

    async def _sending(self, number: int, part: _Part) -> None:
        """On the loop: one part, to its end."""
        try:
            stored = await self._store_part(number, part)
            with self._changed:
                self._done[number] = stored
        except Exception as e:
            with self._changed:
                self._error = self._error or e
        finally:
            with self._changed:
                self._going.pop(number, None)
                self._changed.notify_all()

    async def _store_part(self, number: int, part: _Part) -> dict[str, Any]:
        crc = crc_header(part.crc)
        body = Body(part.views)

        async def attempt() -> dict[str, Any]:
            answer = await self._session.call(
                "upload_part",
                **self._target.address(),
                UploadId=self._id,
                PartNumber=number,
                Body=body.again(),
                ChecksumCRC32=crc,
            )
            await _require_stored(answer, part.views, crc)
            return answer

        call = self._target.call("create", f"part {number} of {self._words()}")
        try:
            answer = await patiently(attempt, call, self._patience(part.nbytes))
        finally:
            body.close()
        return {"ETag": answer["ETag"], "ChecksumCRC32": crc, "Size": part.nbytes}

    # ------------------------------------------------------------ completion

    def _require_parts(self) -> None:
        """Raises ObjectStoreUnavailableError: the store does not hold the parts that it answered for."""
        held = self._session.run(
            self._list_parts, self._target.call("list the parts of", self._words()), self._patience()
        )
        for number, sent in sorted(self._done.items()):
            found = held.get(number)
            if found is None or any(
                found.get(k, sent[k]) != sent[k] for k in ("Size", "ETag", "ChecksumCRC32")
            ):
                raise ObjectStoreUnavailableError(
                    f"{self._target.root}: cannot create {self._target.key} ({self._words()}): part {number} was answered and is "
                    f"{'not there' if found is None else f'another: {found}'}; the store loses data, nothing was committed"
                )

    async def _list_parts(self) -> dict[int, dict[str, Any]]:
        held: dict[int, dict[str, Any]] = {}
        more: dict[str, int] = {}
        while True:
            page = await self._session.call("list_parts", **self._target.address(), UploadId=self._id, **more)
            held |= {part["PartNumber"]: part for part in page.get("Parts", ())}
            if not page.get("IsTruncated"):
                return held
            more = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def _complete(self) -> None:
        parts = [
            {"PartNumber": n, "ETag": p["ETag"], "ChecksumCRC32": p["ChecksumCRC32"]}
            for n, p in sorted(self._done.items())
        ]
        create_once(
            self._session,
            self._target,
            lambda: self._session.call(
                "complete_multipart_upload",
                **self._target.address(),
                UploadId=self._id,
                MultipartUpload={"Parts": parts},
                **self._target.condition(),
            ),
            self._nonce,
            self._words(),
            self._patience(self._size),
        )

    def _words(self) -> str:
        return f"upload {self._id}"

    def _patience(self, nbytes: int = 0) -> Patience:
        return Patience(
            begun=self._begun,
            deadline=self._deadline,
            try_s=self._sizing.try_s + nbytes / SLOWEST_BYTES_PER_S,
            unreachable_s=RESTART_S if self._sent else UNREACHABLE_S,
        )


async def _require_stored(answer: dict[str, Any], views: Sequence[memoryview], crc: str) -> None:
    """Raises DamagedPartError: what the store says it holds is not what was sent."""
    if found := answer.get("ChecksumCRC32"):
        if found != crc:
            raise DamagedPartError(
                f"the store found checksum {found} of what it received, and {crc} was sent"
            )
        return
    md5 = await asyncio.to_thread(_md5, views)
    if answer.get("ETag", "").strip('"') != md5:
        raise DamagedPartError(
            f"the store gives neither the CRC32 of what it received nor its MD5 ({md5}): {answer.get('ETag')}"
        )


def _md5(views: Sequence[memoryview]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for view in views:
        digest.update(view)
    return digest.hexdigest()


def abort_upload(session: Session, target: Target, upload_id: str, try_s: float) -> None:
    """End a multipart upload, as well as that can be done within `try_s`: what stays is found by `unfinished`."""
    patience = Patience(deadline=time.monotonic() + try_s, try_s=try_s)
    try:
        session.run(
            lambda: session.call("abort_multipart_upload", **target.address(), UploadId=upload_id),
            target.call("abort", f"upload {upload_id}"),
            patience,
        )
    except ObjectStoreError:
        return
