"""The one door to s3fs: its session, its event loop, and our own patience around every call.

An aiobotocore PUT to a hung server outlives its ``read_timeout``, and s3fs' own retries made a ranged read with a 2 s timeout
fail after 123 s. So s3fs and botocore try once; `patiently` repeats, with a deadline for each try and one for all of them.
A try that does not let itself be cancelled is left behind: nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from s3fs import S3FileSystem

from surefoot.ckpt.objects.s3errors import (
    WORTH_A_RETRY,
    Call,
    TooLateError,
    Verdict,
    judge,
    typed,
    words_of,
)

CONNECT_TIMEOUT_S = 3.0
"""A server that does not accept a connection within this is treated as away; a TCP SYN is repeated after 1 s."""
UNREACHABLE_S = 5.0
"""How long connections are tried before the caller hears that nobody is there: seconds, not the whole deadline."""
SLOWEST_BYTES_PER_S = 4 * 2**20
"""Large objects get time by their size on top of the deadline; the slowest link a checkpoint makes sense on."""
SILENT_TRIES = 5
"""So often one call may go without any answer, each time until the deadline of its try, before it is given up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
TOLD_AFTER_S, TOLD_AGAIN_S = 2.0, 30.0
"""A call that has come to nothing for so long, and is tried again, is told of; then no other for a while."""
LATE_S = 2.0
"""How long after its deadline a call that the loop does not end is waited for."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_told: dict[str, float] = {}
"""When it was said of a root that its store keeps us waiting, on the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long one call may take. `deadline` is on the monotonic clock; `try_s` bounds one try."""

    deadline: float
    try_s: float
    begun: float = field(default_factory=time.monotonic)
    """Since when the time counts, on the same clock: a call may be one of several that share it."""
    unreachable_s: float = UNREACHABLE_S
    """How long connections are tried."""

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def try_now_s(self) -> float:
        """How long a try may take that is made now. Raises TooLateError."""
        left_s = self.left_s()
        if left_s <= 0:
            raise TooLateError(over(self.deadline - self.begun, -left_s))
        return min(self.try_s, left_s)


def over(deadline_s: float, late_s: float) -> str:
    """For messages: how long it might take, and since when that is over. PURE."""
    return f"its deadline of {deadline_s:.1f} s has passed, {late_s:.1f} s ago"


async def patiently(attempt: Callable[[], Awaitable[_T]], call: Call, patience: Patience) -> _T:
    """Repeat `attempt` (on s3fs' loop) until it succeeds, is refused, or time is up.

    Raises: the typed error of `call`.
    """
    begun = time.monotonic()
    may_have_worked = False
    tries = silent = 0
    while True:
        try:
            try_s = patience.try_now_s()
            return await _bounded(attempt(), try_s)
        except Exception as e:
            verdict = judge(e)
            tries += verdict is not Verdict.LATE
            silent += isinstance(e, TimeoutError)
            may_have_worked |= verdict is Verdict.CUT_OFF
            pause_s = pause_after(tries, f"{call.root}/{call.key}/{call.within}")
            patience_ends = (
                min(patience.deadline, begun + patience.unreachable_s)
                if verdict is Verdict.AWAY
                else patience.deadline
            )
            if (
                verdict not in WORTH_A_RETRY
                or silent >= SILENT_TRIES
                or time.monotonic() + pause_s > patience_ends
            ):
                raise typed(e, verdict, call, may_have_worked=may_have_worked, tries=tries) from e
            _tell(e, call, begun, patience_ends)
        await asyncio.sleep(pause_s)  # backing off, with jitter


def _tell(e: Exception, call: Call, begun: float, ends: float) -> None:
    """Whoever waits for the call shall know what for."""
    now = time.monotonic()
    if now - begun >= TOLD_AFTER_S and now - _told.get(call.root, -TOLD_AGAIN_S) >= TOLD_AGAIN_S:
        _told[call.root] = now
        _log.warning("%s; trying again for up to %.0f s", words_of(e, call), ends - now)


async def _bounded(attempt: Awaitable[_T], timeout_s: float) -> _T:
    """TimeoutError after `timeout_s` also where the attempt does not end when it is cancelled (`wait_for` would wait on)."""
    task = asyncio.ensure_future(attempt)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_forget)
    if not task.done():
        raise TimeoutError(f"no answer within {timeout_s:.1f} s")
    return task.result()


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # looked at, so that nobody logs it


def pause_after(tries: int, name: str) -> float:
    """Exponential backoff; the jitter comes from process and key, so that nothing here is random and no two retry in step."""
    jitter = zlib.crc32(f"{os.getpid()}:{name}:{tries}".encode()) / 2**32
    return min(FIRST_PAUSE_S * 2 ** (tries - 1), LONGEST_PAUSE_S) * (0.5 + jitter / 2)


def require_endpoint(environment: Mapping[str, str]) -> None:
    """Raises ValueError for an address of the store that botocore would choke on, deep in its first call. PURE."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        url = environment.get(name, "")
        if url and not url.lower().startswith(("http://", "https://")):
            raise ValueError(f"{name}={url} is no address of a store: it needs http:// or https:// before it")


class Session:
    """An s3fs session of our own: it tries once and leaves patience to us. Opens, and starts s3fs' loop, with the first call."""

    def __init__(self) -> None:
        self._opened: Any = None
        self._client: Any = None
        self._lock = threading.Lock()

    def open(self, call: Call, patience: Patience) -> None:
        """Find keys and endpoint, make a client. Takes part of a second at first, and nothing of a try's time; `call` is for the
        words of the error. Raises: the typed error of `call`, never ObjectUnknownError."""
        if self._client is None:
            with self._lock:
                self._client = self._client or self._waited(
                    patiently(self._connect, call, patience), call, patience
                )

    def run(self, attempt: Callable[[], Awaitable[_T]], call: Call, patience: Patience) -> _T:
        """`patiently`, from a thread that waits. Raises: the typed error of `call`."""
        return self.wait(patiently(attempt, call, patience), call, patience)

    def wait(self, coroutine: Coroutine[Any, Any, _T], call: Call, patience: Patience) -> _T:
        """Run a coroutine that keeps to `patience` by itself; `call` is for the words of the error. Raises: whatever it raises; the
        typed error of `call`."""
        try:
            self.open(replace(call, creates=False), patience)
        except BaseException:
            coroutine.close()
            raise
        return self._waited(coroutine, call, patience)

    async def call(self, method: str, **arguments: Any) -> Any:
        """One call of the S3 client, as botocore names it; tried once. Raises what botocore raises."""
        return await getattr(self._client, method)(**arguments)

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start it on s3fs' loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._fs().loop)

    def _fs(self) -> Any:
        if self._opened is None:
            # Not shared: s3fs would cache it, with our settings, for others.
            self._opened = S3FileSystem(
                skip_instance_cache=True, use_listings_cache=False, config_kwargs=_SETTINGS
            )
        return self._opened

    async def _connect(self) -> Any:
        client = await self._fs().set_session()
        client.meta.events.register_last("before-call.s3", _expect_nothing, unique_id="surefoot")
        return client

    def _waited(self, coroutine: Coroutine[Any, Any, _T], call: Call, patience: Patience) -> _T:
        future = self.submit(coroutine)
        try:
            return future.result(max(patience.left_s(), 0.0) + LATE_S)
        except FutureTimeoutError as e:
            future.cancel()
            stuck = TimeoutError("the event loop of s3fs does not answer")
            raise typed(stuck, Verdict.CUT_OFF, call, may_have_worked=call.creates, tries=1) from e


def _expect_nothing(params: dict[str, Any], **_: Any) -> None:
    """No ``Expect: 100-continue``, which botocore adds to streamed bodies: aiohttp would wait without end for the "continue" of
    a store that knows nothing of it."""
    params["headers"].pop("Expect", None)


_SETTINGS = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "read_timeout": 30,
    "retries": {"total_max_attempts": 1},
    "max_pool_connections": 64,
    # What is written goes with a CRC32 of ours in its (signed) headers, which the store compares; a SHA-256 of the body on top
    # would take a second per GB of a core that has better things to do. What is read is checked by our own checksums.
    "s3": {"payload_signing_enabled": False},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
