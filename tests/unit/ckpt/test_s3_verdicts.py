"""What each shape of failure means. No server: the exceptions as s3fs and botocore raise them."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, cast

import botocore.exceptions as boto
import pytest
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from surefoot.ckpt.objects import s3session
from surefoot.ckpt.objects.s3create import Body, Target
from surefoot.ckpt.objects.s3errors import Call, TooLateError, Verdict, judge
from surefoot.ckpt.objects.s3read import cut
from surefoot.ckpt.objects.s3session import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SILENT_TRIES,
    Patience,
    Session,
    patiently,
    pause_after,
    require_endpoint,
)
from surefoot.ckpt.objects.s3upload import S3Upload, Sizing
from surefoot.ckpt.store import ObjectStoreUnavailableError, ObjectUnknownError, open_store


def client_error(code: str, status: int, condition: str | None = None) -> ClientError:
    error: dict[str, Any] = {"Code": code, "Message": "m"}
    if condition:
        error["Condition"] = condition
    return ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("translated", [True, False])
@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (client_error("PreconditionFailed", 412, "If-None-Match"), Verdict.EXISTS),
        (client_error("PreconditionFailed", 412), Verdict.EXISTS),
        (client_error("412", 412), Verdict.EXISTS),
        (client_error("ConditionalRequestConflict", 409), Verdict.CONFLICT),
        (client_error("NoSuchKey", 404), Verdict.MISSING),
        (client_error("404", 404), Verdict.MISSING),
        (client_error("NoSuchBucket", 404), Verdict.NO_BUCKET),
        (client_error("AccessDenied", 403), Verdict.DENIED),
        (client_error("InvalidAccessKeyId", 403), Verdict.DENIED),
        (client_error("SignatureDoesNotMatch", 403), Verdict.DENIED),
        (client_error("ExpiredToken", 400), Verdict.DENIED),
        (client_error("AuthorizationHeaderMalformed", 400), Verdict.DENIED),
        (client_error("PermanentRedirect", 301), Verdict.DENIED),
        (client_error("SlowDown", 503), Verdict.BUSY),
        (client_error("SlowDown", 200), Verdict.BUSY),
        (client_error("ServiceUnavailable", 503), Verdict.BUSY),
        (client_error("InternalError", 500), Verdict.CUT_OFF),
        (client_error("InternalError", 200), Verdict.CUT_OFF),
        (client_error("502", 502), Verdict.CUT_OFF),
        (client_error("InvalidRange", 416), Verdict.PAST_END),
        (client_error("EntityTooLarge", 400), Verdict.OTHER),
        (client_error("NotImplemented", 501), Verdict.OTHER),
        (client_error("NoSuchUpload", 404), Verdict.NO_UPLOAD),
        (client_error("BadDigest", 400), Verdict.DAMAGED),
        (client_error("XAmzContentChecksumMismatch", 400), Verdict.DAMAGED),
    ],
)
def test_answers_of_the_server(error: ClientError, verdict: Verdict, translated: bool) -> None:
    """As botocore raises them, and as s3fs translates them (a 412 into FileExistsError or OSError(EINVAL))."""
    assert judge(translate_boto_error(error) if translated else error) is verdict


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (boto.EndpointConnectionError(endpoint_url="http://x"), Verdict.AWAY),
        (boto.ConnectTimeoutError(endpoint_url="http://x"), Verdict.AWAY),
        (ConnectionRefusedError(), Verdict.AWAY),
        (boto.ReadTimeoutError(endpoint_url="http://x"), Verdict.CUT_OFF),
        (boto.ConnectionClosedError(endpoint_url="http://x"), Verdict.CUT_OFF),
        (TimeoutError(), Verdict.CUT_OFF),
        (TooLateError("late"), Verdict.LATE),
        (ConnectionResetError(), Verdict.CUT_OFF),
        (boto.NoCredentialsError(), Verdict.DENIED),
        (PermissionError("no"), Verdict.DENIED),
        (FileExistsError("key"), Verdict.EXISTS),
        (FileNotFoundError("key"), Verdict.MISSING),
        (ValueError("?"), Verdict.OTHER),
    ],
)
def test_failures_without_an_answer(error: Exception, verdict: Verdict) -> None:
    assert judge(error) is verdict


def test_a_broken_body_is_cut_off() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    assert judge(aiohttp.ClientPayloadError("broken")) is Verdict.CUT_OFF


def test_pauses_grow_and_stay_bounded() -> None:
    pauses = [pause_after(n, "k") for n in range(1, 12)]
    assert all(FIRST_PAUSE_S / 2 <= p <= LONGEST_PAUSE_S for p in pauses)
    assert pauses[-1] > pauses[0]
    assert pause_after(3, "k") != pause_after(3, "another")


# ---------------------------------------------------------------- bytes in views


@pytest.mark.parametrize("nbytes", [1, 3, 4, 100])
def test_cutting_keeps_the_bytes_and_their_order(nbytes: int) -> None:
    views = [memoryview(b"abc"), memoryview(b""), memoryview(b"defgh"), memoryview(b"i")]
    runs = cut(views, nbytes)
    assert b"".join(v for run in runs for v in run) == b"abcdefghi"
    assert [sum(map(len, run)) for run in runs[:-1]] == [nbytes] * (len(runs) - 1)


def test_a_try_that_was_given_up_sees_no_byte_any_more() -> None:
    """It may hang in the middle of a part, and come back to life when the caller's buffer holds something else."""

    async def scenario() -> None:
        body = Body([memoryview(b"a"), memoryview(b"b")])
        first = aiter(body.again())
        assert await anext(first) == b"a"
        second = aiter(body.again())
        assert [bytes(v) async for v in second] == [b"a", b"b"]
        with pytest.raises(ConnectionAbortedError):
            await anext(first)
        third = aiter(body.again())
        body.close()
        with pytest.raises(ConnectionAbortedError):
            await anext(third)

    asyncio.run(scenario())


# ---------------------------------------------------------------- patience


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3session, "FIRST_PAUSE_S", 0.001)


def test_a_try_that_cannot_be_cancelled_is_left_behind(short_pauses: None) -> None:
    """As an aiobotocore PUT to a server that hangs."""

    async def deaf() -> None:
        nonlocal tries
        tries += 1
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if released:
                    raise

    async def scenario() -> None:
        nonlocal released
        patience = Patience(deadline=time.monotonic() + 0.3, try_s=0.05)
        try:
            with pytest.raises(ObjectStoreUnavailableError, match=r"cannot read k: .*no answer"):
                await patiently(deaf, Call(root="s3://b", what="read", key="k"), patience)
        finally:
            released = True

    tries, released = 0, False
    begun = time.monotonic()
    asyncio.run(scenario())
    assert tries >= 2
    assert time.monotonic() - begun < 1.0


def test_silence_is_given_up_before_the_deadline(short_pauses: None) -> None:
    async def silent() -> None:
        nonlocal tries
        tries += 1
        raise TimeoutError("no answer")

    tries = 0
    patience = Patience(deadline=time.monotonic() + 60.0, try_s=0.01)
    call = Call(root="s3://b", what="create", key="k", creates=True)
    with pytest.raises(ObjectUnknownError, match=f"after {SILENT_TRIES} tries"):
        asyncio.run(patiently(silent, call, patience))
    assert tries == SILENT_TRIES


CREATION = Call(root="s3://b", what="create", key="k", creates=True)


def test_what_comes_after_its_deadline_is_not_tried() -> None:
    """It is said by how much it came too late; and a creation of which nothing was sent has surely not worked."""

    async def never() -> None:
        raise AssertionError("sent all the same")

    now = time.monotonic()
    late = Patience(begun=now - 601.8, deadline=now - 1.8, try_s=10.0)
    said = r"^s3://b: cannot create k: its deadline of 600\.0 s has passed, \d+\.\d s ago$"
    with pytest.raises(ObjectStoreUnavailableError, match=said):
        asyncio.run(patiently(never, CREATION, late))


def test_a_creation_without_an_answer_stays_unknown_when_its_deadline_passes(
    short_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent() -> None:
        clock.now = 4.99  # time for a pause, and no more
        raise TimeoutError("no answer")

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            self.now += 0.001
            return self.now

    clock = Clock()
    monkeypatch.setattr(s3session, "time", clock)
    monkeypatch.setattr(s3session, "_tell", lambda *_: setattr(clock, "now", 6.0))
    patience = Patience(begun=0.0, deadline=5.0, try_s=10.0)
    with pytest.raises(
        ObjectUnknownError, match=r"deadline of 5\.0 s .* \(after 1 tries\); whether it took effect"
    ):
        asyncio.run(patiently(silent, CREATION, patience))


def test_parts_that_are_not_stored_in_time_are_named_with_the_deadline() -> None:
    class Hanging:
        """A store that has begun the upload, and then says nothing."""

        def run(self, *_: Any) -> dict[str, str]:
            return {"UploadId": "u1"}

        def submit(self, sending: Any) -> None:
            sending.close()

    target = Target(root="s3://b", bucket="b", prefix="", key="k")
    sizing = Sizing(part_nbytes=4, in_flight=1, try_s=1.0)
    upload = S3Upload(cast("Session", Hanging()), target, 12, sizing, -5.0)
    upload.put(memoryview(b"part"))
    with pytest.raises(
        ObjectStoreUnavailableError,
        match=r"k \(upload u1\): parts \[1\] are not stored, and its deadline of 0\.0 s has passed, 5\.\d s ago",
    ):
        upload.put(memoryview(b"part"))


def test_how_long_a_store_that_is_away_is_waited_for(short_pauses: None) -> None:
    """Shortly by a call that begins; an upload under way outlives a restart."""

    async def back_at_the_fourth() -> int:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise ConnectionRefusedError
        return tries

    def patience(unreachable_s: float) -> Patience:
        return Patience(deadline=time.monotonic() + 60.0, try_s=1.0, unreachable_s=unreachable_s)

    call = Call(root="s3://b", what="create", key="k", creates=True)
    tries = 0
    with pytest.raises(ObjectStoreUnavailableError, match="after 1 tries"):
        asyncio.run(patiently(back_at_the_fourth, call, patience(0.0)))
    tries = 0
    assert asyncio.run(patiently(back_at_the_fourth, call, patience(5.0))) == 4


def test_whoever_waits_is_told_once_what_for(
    short_pauses: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def back_at_the_fourth() -> None:
        nonlocal tries
        tries += 1
        if tries % 4:
            raise ConnectionRefusedError("refused")

    tries = 0
    call = Call(root="s3://slow", what="list", key="gen-")
    patience = Patience(deadline=time.monotonic() + 60.0, try_s=1.0)
    with caplog.at_level(logging.WARNING):
        asyncio.run(patiently(back_at_the_fourth, call, patience))
        assert caplog.messages == [], "a hiccup is nobody's business"
        monkeypatch.setattr(s3session, "TOLD_AFTER_S", 0.0)
        for _ in range(3):
            asyncio.run(patiently(back_at_the_fourth, call, patience))
    (said,) = caplog.messages
    assert said.startswith(
        "s3://slow: cannot list gen-: ConnectionRefusedError: refused; trying again for up to"
    )


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_without_a_scheme_is_refused_before_the_first_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for good in ("", "http://localhost:99", "HTTPS://s3.example"):
        require_endpoint({name: good})
    monkeypatch.setenv(name, "localhost:99")
    with pytest.raises(ValueError, match=f"{name}=localhost:99 .* needs http:// or https://"):
        open_store("s3://b/x")
