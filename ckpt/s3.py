"""The object store on S3, through the session that s3fs holds. The one door to s3fs.

Conditional creation is a PUT (or the completion of a multipart upload) with ``If-None-Match: *``. What we do ourselves,
and why:

* A deadline around every call, retries included: an aiobotocore PUT to a hung server outlives its ``read_timeout``, and
  s3fs' own retries made a ranged read with a 2 s timeout fail after 123 s. So s3fs and botocore try once, and we repeat.
* A 412 arrives as FileExistsError or as OSError(EINVAL), by store; AWS answers 409 while another conditional write to the
  key is under way. Errors are judged by the server's own code and status, not by the exception's type (`judge`).
* A creation that was cut off may have worked. Repeating it is harmless (the key is either free or, with our bytes or
  another's, taken); only where the deadline ends it undecided is the outcome unknown.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, TypeVar

import botocore.exceptions as boto
from botocore.parsers import ResponseParserError
from s3fs import S3FileSystem

from surefoot.ckpt.store import (
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    ObjectStoreDeniedError,
    ObjectStoreError,
    ObjectStoreUnavailableError,
    ObjectUnknownError,
    check_key,
)

CONNECT_TIMEOUT_S = 3.0
"""A server that does not accept a connection within this is treated as away; a TCP SYN is repeated after 1 s."""
UNREACHABLE_S = 5.0
"""How long connections are tried before the caller hears that nobody is there: seconds, not the whole deadline."""
SLOWEST_BYTES_PER_S = 4 * 2**20
"""Large objects get time by their size on top of the deadline; the slowest link a checkpoint makes sense on."""
MULTIPART_NBYTES = 64 * 2**20
"""Objects above this go up in parts of half of it, several at a time (s3fs' default part is 50 MiB)."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0

_T = TypeVar("_T")


class _PastEndError(ObjectStoreError):
    """A read began past the end: there are no such bytes. Never leaves this module."""


class Verdict(Enum):
    """What an exception of one try means."""

    EXISTS = "the key is taken"
    MISSING = "no such object"
    NO_BUCKET = "no such bucket"
    DENIED = "wrong keys or no permission"
    CONFLICT = "another conditional write is under way; nothing was done"
    AWAY = "nobody answers; nothing was done"
    BUSY = "the store asks for patience; nothing was done"
    CUT_OFF = "the answer is missing; it may have been done"
    PAST_END = "the range lies past the end"
    OTHER = "refused"


_BY_CODE = {
    "PreconditionFailed": Verdict.EXISTS,
    "ConditionalRequestConflict": Verdict.CONFLICT,
    "OperationAborted": Verdict.CONFLICT,
    "NoSuchKey": Verdict.MISSING,
    "NoSuchBucket": Verdict.NO_BUCKET,
    "SlowDown": Verdict.BUSY,
    "ServiceUnavailable": Verdict.BUSY,
    "RequestTimeout": Verdict.CUT_OFF,
    "InvalidRange": Verdict.PAST_END,
    "PermanentRedirect": Verdict.DENIED,
    "ExpiredToken": Verdict.DENIED,
    "InvalidToken": Verdict.DENIED,
    "AuthorizationHeaderMalformed": Verdict.DENIED,
    "InvalidBucketName": Verdict.NO_BUCKET,
}
_BY_STATUS = {
    301: Verdict.DENIED,
    401: Verdict.DENIED,
    403: Verdict.DENIED,
    404: Verdict.MISSING,
    408: Verdict.CUT_OFF,
    409: Verdict.CONFLICT,
    412: Verdict.EXISTS,
    416: Verdict.PAST_END,
    429: Verdict.BUSY,
    503: Verdict.BUSY,
}
_WORTH_A_RETRY = frozenset({Verdict.AWAY, Verdict.BUSY, Verdict.CUT_OFF, Verdict.CONFLICT})
_AWAY = (
    boto.EndpointConnectionError,
    boto.ConnectTimeoutError,
    boto.ProxyConnectionError,
    ConnectionRefusedError,
)
_NO_KEYS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
)
_CUT_OFF = (
    boto.HTTPClientError,
    boto.IncompleteReadError,
    ResponseParserError,
    TimeoutError,
    ConnectionError,
)


def answered(e: BaseException) -> tuple[str, int]:
    """The server's error code and HTTP status behind an exception of s3fs or botocore; ("", 0) where it gave none."""
    for link in (e, e.__cause__):
        response: Any = getattr(link, "response", None)
        if isinstance(response, Mapping):
            error, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
            return str(error.get("Code", "")), int(meta.get("HTTPStatusCode", 0))
    return "", 0


def judge(e: BaseException) -> Verdict:
    """What the exception of one try means. PURE."""
    code, status = answered(e)
    if code.isdigit() and not status:
        status = int(code)
    if verdict := _BY_CODE.get(code) or _BY_STATUS.get(status):
        return verdict
    if status >= 500 or code == "InternalError":
        return Verdict.CUT_OFF
    if isinstance(e, (PermissionError, *_NO_KEYS)):
        return Verdict.DENIED
    if isinstance(e, FileExistsError):
        return Verdict.EXISTS
    if isinstance(e, FileNotFoundError):
        return Verdict.MISSING
    if isinstance(e, _AWAY):
        return Verdict.AWAY
    # aiohttp's payload and disconnection errors arrive bare; all of them mean a broken answer.
    if isinstance(e, _CUT_OFF) or type(e).__module__.startswith("aiohttp"):
        return Verdict.CUT_OFF
    return Verdict.OTHER


@dataclass(frozen=True, slots=True)
class _Call:
    """One operation in words, for messages."""

    what: str
    key: str
    creates: bool = False
    nbytes: int = 0


class S3ObjectStore:
    """See the module and `ObjectStore`. `prefix` has no slash at its ends. The session opens with the first call."""

    def __init__(self, bucket: str, prefix: str, *, deadline_s: float) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._deadline_s = deadline_s
        self._opened: S3FileSystem | None = None
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        address = self._address(key)
        body = data if isinstance(data, bytes | bytearray) else bytes(data)  # botocore takes no memoryview
        fs = self._fs()

        def put() -> Awaitable[Any]:
            if len(body) <= MULTIPART_NBYTES:
                return fs._call_s3("put_object", **address, Body=body, IfNoneMatch="*")
            path = f"{address['Bucket']}/{address['Key']}"
            return fs._pipe_file(path, body, chunksize=MULTIPART_NBYTES // 2, mode="create")

        self._call(put, _Call("create", key, creates=True, nbytes=len(body)))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        address = self._address(key)
        if length == 0:
            return b""
        if start or length is not None:
            address["Range"] = f"bytes={start}-{'' if length is None else start + length - 1}"
        fs = self._fs()

        async def get() -> bytes:
            response = await fs._call_s3("get_object", **address)
            async with response["Body"] as body:
                return await body.read()

        try:
            return self._call(get, _Call("read", key, nbytes=length or 0))
        except _PastEndError:
            return b""

    def list(self, prefix: str) -> list[ObjectInfo]:
        fs = self._fs()

        async def pages() -> list[ObjectInfo]:
            found: list[ObjectInfo] = []
            more: dict[str, str] = {}
            while True:
                page = await fs._call_s3(
                    "list_objects_v2", Bucket=self._bucket, Prefix=self._prefix + prefix, **more
                )
                found += [
                    ObjectInfo(o["Key"][len(self._prefix) :], o["Size"]) for o in page.get("Contents", ())
                ]
                if not page.get("IsTruncated"):
                    return found
                more = {"ContinuationToken": page["NextContinuationToken"]}

        # Not every store lists in order of bytes. A key with a slash at its end is a folder's marker, none of ours.
        found = self._call(pages, _Call("list", prefix))
        return sorted((o for o in found if not o.key.endswith("/")), key=lambda o: o.key)

    def delete(self, key: str) -> None:
        address = self._address(key)
        fs = self._fs()
        try:
            self._call(lambda: fs._call_s3("delete_object", **address), _Call("delete", key))
        except ObjectMissingError:
            pass  # gone is what was wanted

    def _address(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _fs(self) -> S3FileSystem:
        with self._lock:
            if self._opened is None:
                self._opened = _open_session()
            return self._opened

    def _call(self, attempt: Callable[[], Awaitable[_T]], call: _Call) -> _T:
        """Run `attempt` on s3fs' loop until it succeeds, is refused, or time is up; raises the typed error."""
        begun = time.monotonic()
        deadline = begun + self._deadline_s + call.nbytes / SLOWEST_BYTES_PER_S
        may_have_worked = False
        tries = 0
        while True:
            try:
                return _on_loop(self._fs(), attempt, deadline - time.monotonic())
            except Exception as e:
                verdict = judge(e)
                tries += 1
                may_have_worked |= verdict is Verdict.CUT_OFF
                pause_s = _pause_s(tries, f"{self.root}/{call.key}")
                patience_ends = min(deadline, begun + UNREACHABLE_S) if verdict is Verdict.AWAY else deadline
                if verdict not in _WORTH_A_RETRY or time.monotonic() + pause_s > patience_ends:
                    self._raise(e, verdict, call, may_have_worked=may_have_worked, tries=tries)
            time.sleep(pause_s)  # backing off, with jitter

    def _raise(
        self, e: Exception, verdict: Verdict, call: _Call, *, may_have_worked: bool, tries: int
    ) -> NoReturn:
        code, status = answered(e)
        reason = f"{code or type(e).__name__}{f' ({status})' if status else ''}: {e}"
        said = f"{self.root}: cannot {call.what} {call.key}: {reason}"
        match verdict:
            case Verdict.EXISTS:
                raise ObjectExistsError(said) from e
            case Verdict.MISSING:
                raise ObjectMissingError(said) from e
            case Verdict.NO_BUCKET:
                raise ObjectStoreDeniedError(
                    f"{said}; create the bucket {self._bucket!r}, or correct the root"
                ) from e
            case Verdict.DENIED:
                raise ObjectStoreDeniedError(
                    f"{said}; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and AWS_DEFAULT_REGION, and "
                    f"that these keys may list, read, write and delete in the bucket {self._bucket!r}"
                ) from e
            case _ if call.creates and may_have_worked:
                raise ObjectUnknownError(
                    f"{said} (after {tries} tries); whether it took effect is unknown: read it back"
                ) from e
            case Verdict.PAST_END:
                raise _PastEndError(said) from e
            case Verdict.OTHER:
                raise ObjectStoreError(said) from e
            case _:
                raise ObjectStoreUnavailableError(
                    f"{said} (after {tries} tries); check that the store is up and AWS_ENDPOINT_URL leads to it"
                ) from e


def _on_loop(fs: S3FileSystem, attempt: Callable[[], Awaitable[_T]], timeout_s: float) -> _T:
    """Run a coroutine on s3fs' loop; TimeoutError after `timeout_s` even where it does not let itself be cancelled."""

    async def bounded() -> _T:
        return await asyncio.wait_for(attempt(), timeout_s)

    loop: Any = fs.loop
    future = asyncio.run_coroutine_threadsafe(bounded(), loop)
    try:
        return future.result(timeout_s + 1.0)
    except FutureTimeoutError as e:
        future.cancel()
        raise TimeoutError(f"no answer within {timeout_s:.1f} s") from e


def _pause_s(tries: int, name: str) -> float:
    """Exponential backoff; the jitter comes from process and key, so that nothing here is random and no two retry in step."""
    jitter = zlib.crc32(f"{os.getpid()}:{name}:{tries}".encode()) / 2**32
    return min(FIRST_PAUSE_S * 2 ** (tries - 1), LONGEST_PAUSE_S) * (0.5 + jitter / 2)


def _open_session() -> S3FileSystem:
    """A session that tries once and leaves patience to us. Not shared: s3fs would cache it, with our settings, for others."""
    fs = S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        config_kwargs={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": 30,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 32,
        },
    )
    fs.retries = 1
    return fs
