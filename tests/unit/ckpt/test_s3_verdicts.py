"""What each shape of failure means. No server: the exceptions as s3fs and botocore raise them."""

from __future__ import annotations

from typing import Any

import botocore.exceptions as boto
import pytest
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from surefoot.ckpt.s3errors import Verdict, judge
from surefoot.ckpt.s3session import FIRST_PAUSE_S, LONGEST_PAUSE_S, pause_after


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
