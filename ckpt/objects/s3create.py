"""Creating an object on S3 once, also where answers are lost: every creation writes a nonce into the object's metadata.

A creation whose answer was lost is repeated; where the key is then found taken, the nonce tells whether by ourselves.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.ckpt.objects.s3errors import Call, UploadGoneError
from surefoot.ckpt.objects.s3session import Patience, Session
from surefoot.ckpt.store import (
    ObjectExistsError,
    ObjectMissingError,
    ObjectStoreError,
    ObjectStoreUnavailableError,
    ObjectUnknownError,
)

NONCE = "surefoot-nonce"
"""Name in an object's metadata of the word that tells whose creation it was."""
SEND_NBYTES = 256 * 2**10
"""Given to a connection at once, between looks at whether it keeps up."""
SETTLE_S = 0.5
"""Without conditions: how long after a PUT one looks who won. Longer than two writers who looked at once usually are apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where an upload goes, and with what patience."""

    root: str
    bucket: str
    prefix: str
    key: str
    conditional: bool = True
    """Create with ``If-None-Match: *``; else see `create_once`."""

    def address(self) -> dict[str, Any]:
        return {"Bucket": self.bucket, "Key": self.prefix + self.key}

    def condition(self) -> dict[str, str]:
        return {"IfNoneMatch": "*"} if self.conditional else {}

    def call(self, what: str, within: str = "", *, creates: bool = False) -> Call:
        return Call(root=self.root, what=what, key=self.key, within=within, creates=creates)


class Body:
    """Bytes in several views, for botocore and aiohttp: sent piece by piece, never joined.

    A try that was given up may be stuck in the middle and come back to life. It must not see what the caller does to the buffers
    by then: each try iterates over its own `again()`, and ends in an error once the next has begun or all are closed."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._size = sum(map(len, views))
        self._turn: Body | None = None
        self._closed = False

    def again(self) -> Body:
        """For one more try; the tries before are over."""
        self.close()
        self._turn = Body(self._views)
        return self._turn

    def close(self) -> None:
        """No try reads a byte any more."""
        self._closed = True
        if self._turn is not None:
            self._turn.close()

    def __len__(self) -> int:
        return self._size

    def read(self, n: int = -1) -> bytes:
        """Here because botocore takes only what can be read; bodies that are not signed are iterated over instead."""
        raise OSError("the body of an upload is iterated over")

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for view in self._views:
            for at in range(0, len(view), SEND_NBYTES):
                if self._closed:
                    raise ConnectionAbortedError("this try was given up")
                yield view[at : at + SEND_NBYTES]


def crc_header(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def put_once(
    session: Session, target: Target, views: Sequence[memoryview], crc: int, patience: Patience
) -> None:
    """Create an object with one PUT. Raises as `ObjectStore.create`."""
    nonce = secrets.token_hex(8)
    body = Body(views)
    small = b"".join(views) if len(body) <= SEND_NBYTES else None  # in one packet with its head

    def attempt() -> Awaitable[Any]:
        return session.call(
            "put_object",
            **target.address(),
            **target.condition(),
            Body=body.again() if small is None else small,
            ChecksumCRC32=crc_header(crc),
            Metadata={NONCE: nonce},
        )

    try:
        create_once(session, target, attempt, nonce, "", patience)
    finally:
        body.close()


def create_once(
    session: Session,
    target: Target,
    attempt: Callable[[], Awaitable[Any]],
    nonce: str,
    within: str,
    patience: Patience,
) -> None:
    """Carry out a creation that writes `nonce`; on return the object is ours.

    Where the store knows no conditions (`target.conditional` is false): look whether the key is free, put, and look whose object
    stands there a moment later. Writers one after another are told apart as ever, and of two at the same moment usually just one
    hears that it won. What it does not protect from: a writer that looked before ours was there and is held up for longer than
    `SETTLE_S` (a stopped process, a retried packet) overwrites it when we have been told that it is ours. A job that is cut off
    and lives on can do just that; so let only one job at a time write to a root on such a store, or take another store.

    Raises: as `ObjectStore.create`.
    """
    if not target.conditional and nonce_of(session, target, patience) is not None:
        raise ObjectExistsError(f"{target.root}: {target.key} exists")
    try:
        session.run(attempt, target.call("create", within, creates=True), patience)
    except (ObjectExistsError, UploadGoneError) as e:
        # Asked for even where no answer of ours was lost: something on the way may repeat a PUT by itself.
        if _whose(session, target, patience, e) != nonce:
            raise e if isinstance(e, ObjectExistsError) else ObjectStoreError(str(e)) from e
    if not target.conditional:
        time.sleep(SETTLE_S)  # not to wait for anything in particular: see above
        if nonce_of(session, target, patience) != nonce:
            raise ObjectExistsError(
                f"{target.root}: {target.key} exists: another writer was there at the same moment"
            )


def _whose(session: Session, target: Target, patience: Patience, taken: ObjectStoreError) -> str | None:
    try:
        return nonce_of(session, target, patience)
    except ObjectStoreUnavailableError as e:
        raise ObjectUnknownError(f"{taken}; whether by this writer could not be found out: {e}") from e


def nonce_of(session: Session, target: Target, patience: Patience) -> str | None:
    """The nonce in the metadata of the object, "" where it has none; None where there is no object."""
    try:
        answer = session.run(
            lambda: session.call("head_object", **target.address()), target.call("look at"), patience
        )
    except ObjectMissingError:
        return None
    return answer.get("Metadata", {}).get(NONCE, "")
