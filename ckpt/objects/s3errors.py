"""What a failure of S3 means, and the typed error it becomes. PURE but for the exception types it knows.

A 412 arrives as FileExistsError or as OSError(EINVAL), by store; AWS answers 409 while another conditional write to the key
is under way. So errors are judged by the server's own code and status, and only then by the exception's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import botocore.exceptions as boto
from botocore.parsers import ResponseParserError

from surefoot.ckpt.store import (
    ObjectExistsError,
    ObjectMissingError,
    ObjectStoreDeniedError,
    ObjectStoreError,
    ObjectStoreUnavailableError,
    ObjectUnknownError,
)


class PastEndError(ObjectStoreError):
    """A read began past the end: there are no such bytes. Never leaves the S3 modules."""


class UploadGoneError(ObjectStoreError):
    """The multipart upload is there no longer: somebody discarded it, or its completion worked. Never leaves the S3 modules."""


class DamagedPartError(Exception):
    """The store's checksum of a part differs from ours: it holds other bytes than were sent. Worth sending again."""


class TooLateError(Exception):
    """The deadline had passed before this try could be made."""


class Verdict(Enum):
    """What an exception of one try means."""

    EXISTS = "the key is taken"
    MISSING = "no such object"
    NO_BUCKET = "no such bucket"
    NO_UPLOAD = "no such upload"
    DENIED = "wrong keys or no permission"
    UNTRUSTED = "nobody vouches for the server's certificate"
    CONFLICT = "another conditional write is under way; nothing was done"
    LATE = "the time for it was over before; nothing was done"
    AWAY = "nobody answers; nothing was done"
    BUSY = "the store asks for patience; nothing was done"
    DAMAGED = "it arrived damaged; nothing was done"
    CUT_OFF = "the answer is missing; it may have been done"
    PAST_END = "the range lies past the end"
    OTHER = "refused"


_BY_CODE = {
    "PreconditionFailed": Verdict.EXISTS,
    "ConditionalRequestConflict": Verdict.CONFLICT,
    "OperationAborted": Verdict.CONFLICT,
    "NoSuchKey": Verdict.MISSING,
    "NoSuchUpload": Verdict.NO_UPLOAD,
    "NoSuchBucket": Verdict.NO_BUCKET,
    "SlowDown": Verdict.BUSY,
    "ServiceUnavailable": Verdict.BUSY,
    "BadDigest": Verdict.DAMAGED,
    "XAmzContentChecksumMismatch": Verdict.DAMAGED,
    "XAmzContentSHA256Mismatch": Verdict.DAMAGED,
    "IncompleteBody": Verdict.DAMAGED,
    "RequestTimeout": Verdict.CUT_OFF,
    "InvalidRange": Verdict.PAST_END,
    "PermanentRedirect": Verdict.DENIED,
    "ExpiredToken": Verdict.DENIED,
    "InvalidToken": Verdict.DENIED,
    "AuthorizationHeaderMalformed": Verdict.DENIED,
    "InvalidBucketName": Verdict.NO_BUCKET,
    "NotImplemented": Verdict.OTHER,
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
    501: Verdict.OTHER,
    503: Verdict.BUSY,
}
WORTH_A_RETRY = frozenset({Verdict.AWAY, Verdict.BUSY, Verdict.CUT_OFF, Verdict.CONFLICT, Verdict.DAMAGED})
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
    if isinstance(e, TooLateError):
        return Verdict.LATE
    if isinstance(e, DamagedPartError):
        return Verdict.DAMAGED
    if isinstance(e, (PermissionError, *_NO_KEYS)):
        return Verdict.DENIED
    if isinstance(e, FileExistsError):
        return Verdict.EXISTS
    if isinstance(e, FileNotFoundError):
        return Verdict.MISSING
    if isinstance(e, boto.SSLError) and "certificate" in str(e).lower():
        return Verdict.UNTRUSTED
    if isinstance(e, _AWAY):
        return Verdict.AWAY
    # aiohttp's payload and disconnection errors arrive bare; all of them mean a broken answer.
    if isinstance(e, _CUT_OFF) or type(e).__module__.startswith("aiohttp"):
        return Verdict.CUT_OFF
    return Verdict.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operation in words, for messages: ``s3://bucket/root: cannot create key (part 3 of upload …): …``."""

    root: str
    what: str
    key: str
    within: str = ""
    creates: bool = False
    """After a try without an answer the outcome is unknown."""


def words_of(e: BaseException, call: Call) -> str:
    """What could not be done, and the server's, the library's or our own reason. PURE."""
    code, status = answered(e)
    reason = f"{code or type(e).__name__}{f' ({status})' if status else ''}: {e}"
    if isinstance(e, TooLateError):
        reason = str(e)
    return f"{call.root}: cannot {call.what} {call.key}{f' ({call.within})' if call.within else ''}: {reason}"


def typed(
    e: Exception, verdict: Verdict, call: Call, *, may_have_worked: bool, tries: int
) -> ObjectStoreError:
    """The error for the caller. PURE."""
    said = words_of(e, call)
    bucket = call.root.removeprefix("s3://").partition("/")[0]
    match verdict:
        case Verdict.EXISTS:
            return ObjectExistsError(said)
        case Verdict.MISSING:
            return ObjectMissingError(said)
        case Verdict.NO_BUCKET:
            return ObjectStoreDeniedError(f"{said}; create the bucket {bucket!r}, or correct the root")
        case Verdict.DENIED:
            return ObjectStoreDeniedError(
                f"{said}; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and AWS_DEFAULT_REGION, and "
                f"that these keys may list, read, write and delete in the bucket {bucket!r}"
            )
        case Verdict.UNTRUSTED:
            return ObjectStoreDeniedError(
                f"{said}; name the file with its authority in AWS_CA_BUNDLE, or correct AWS_ENDPOINT_URL"
            )
        case Verdict.NO_UPLOAD:
            return UploadGoneError(f"{said}; somebody ended the upload: was this writer taken for dead?")
        case _ if call.creates and may_have_worked:
            return ObjectUnknownError(
                f"{said} (after {tries} tries); whether it took effect is unknown: read it back"
            )
        case Verdict.LATE:
            return ObjectStoreUnavailableError(said)
        case Verdict.PAST_END:
            return PastEndError(said)
        case Verdict.OTHER:
            return ObjectStoreError(said)
        case _:
            return ObjectStoreUnavailableError(
                f"{said} (after {tries} tries); check that the store is up and AWS_ENDPOINT_URL leads to it"
            )
