"""What S3 does to a writer and a reader, on the real server behind a proxy that fails on cue (s3proxy.py).

Rows CKP-33, 36, 37, 38 and 40 of the scenarios. Every test shows that its fault fired. Parts are as small as S3 allows.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from surefoot.ckpt.objects.probe import Exclusion, ensure_exclusive, probe_conditional
from surefoot.ckpt.objects.s3 import S3ObjectStore
from surefoot.ckpt.objects.s3session import Session
from surefoot.ckpt.store import (
    ObjectExistsError,
    ObjectInfo,
    ObjectStoreDeniedError,
    ObjectStoreError,
    ObjectStoreUnavailableError,
    ObjectUnknownError,
)

pytestmark = [pytest.mark.slow, pytest.mark.s3]

PART = 5 * 2**20
DATA = bytes(range(251)) * ((2 * PART + 1000) // 251)
"""Three parts."""


THROUGH_THE_PROXY = Session()
"""To make an S3 client takes longer than most tests; so all share one, and one proxy."""


def store_at(
    root: str, *, deadline_s: float = 20.0, try_s: float = 5.0, session: Session | None = THROUGH_THE_PROXY
) -> S3ObjectStore:
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    return S3ObjectStore(
        bucket, prefix, deadline_s=deadline_s, try_s=try_s, part_nbytes=PART, session=session
    )


@pytest.fixture(scope="module")
def shared_proxy(s3_server: Any, s3_faults: Any) -> Iterator[Any]:
    with s3_faults.run_proxy(s3_server, "") as proxy:
        yield proxy


@pytest.fixture
def s3_proxy(shared_proxy: Any, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("AWS_ENDPOINT_URL", shared_proxy.endpoint)
    shared_proxy.forget()
    shared_proxy.root = s3_url
    return shared_proxy


@pytest.fixture
def store(s3_proxy: Any) -> S3ObjectStore:
    return store_at(s3_proxy.root)


def save(store: S3ObjectStore, key: str = "k", *, deadline_s: float = 30.0) -> None:
    upload = store.upload(key, len(DATA), deadline_s=deadline_s)
    try:
        upload.put(memoryview(DATA))
        upload.finish()
    finally:
        upload.abort()


def require_saved(store: S3ObjectStore, key: str = "k") -> None:
    assert store.list("") == [ObjectInfo(key, len(DATA))]
    assert store.read(key) == DATA
    assert store.unfinished("") == []


def test_what_an_upload_asks_of_the_store(s3_proxy: Any, store: S3ObjectStore) -> None:
    """CKP-33: no rename and no copy; the commit is one conditional creation; every byte goes up once."""
    save(store)
    asked = [r.operation for r in s3_proxy.requests]
    assert sorted(asked) == [
        "CompleteMultipartUpload",
        "CreateMultipartUpload",
        "ListParts",
        *["UploadPart"] * 3,
    ]
    assert s3_proxy.nbytes_in("UploadPart") == len(DATA)
    assert s3_proxy.of("CompleteMultipartUpload")[0].headers["if-none-match"] == "*"
    assert all("x-amz-checksum-crc32" in r.headers for r in s3_proxy.of("UploadPart"))


# ---------------------------------------------------------------- CKP-38: errors that pass

PASSING = {
    "503": lambda f: f.status(503, "SlowDown"),
    "500": lambda f: f.status(500, "InternalError"),
    "reset": lambda f: f.reset(100),
    "reset after": lambda f: f.reset(done=True),
    "damaged": lambda f: f.damage(),
}


@pytest.mark.parametrize("fails", PASSING)
def test_a_part_that_fails_is_sent_again_and_the_others_are_not(
    s3_proxy: Any, s3_faults: Any, store: S3ObjectStore, fails: str
) -> None:
    """CKP-38"""
    fault = s3_proxy.fault("UploadPart", PASSING[fails](s3_faults), part=2, times=2)
    save(store)
    assert fault.fired == 2
    assert sorted(r.part for r in s3_proxy.of("UploadPart")) == [1, 2, 2, 2, 3]
    require_saved(store)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("fails", ["503", "500", "reset", "200 with an error"])
def test_a_completion_that_fails_or_only_seems_to(
    s3_proxy: Any, s3_faults: Any, store: S3ObjectStore, fails: str, done: bool
) -> None:
    """CKP-38: where the first try had worked after all, the second finds the key taken, by us."""
    act = {
        "503": s3_faults.status(503, "SlowDown", done=done),
        "500": s3_faults.status(500, "InternalError", done=done),
        "reset": s3_faults.reset(done=done),
        "200 with an error": s3_faults.error_in_200("InternalError", done=done),
    }[fails]
    fault = s3_proxy.fault("CompleteMultipartUpload", act)
    save(store)
    assert fault.fired == 1
    assert s3_proxy.count("CompleteMultipartUpload") == 2
    require_saved(store)


@pytest.mark.parametrize("done", [False, True])
def test_a_small_creation_whose_answer_is_lost(
    s3_proxy: Any, s3_faults: Any, store: S3ObjectStore, done: bool
) -> None:
    """CKP-38"""
    fault = s3_proxy.fault("PutObject", s3_faults.reset(done=done))
    store.create("k", b"data")
    assert fault.fired == 1
    assert store.read("k") == b"data"


ASKS: dict[str, Callable[[S3ObjectStore], object]] = {
    "PutObject": lambda s: s.create("new", b"x"),
    "GetObject": lambda s: s.read("k"),
    "ListObjectsV2": lambda s: s.list(""),
    "CreateMultipartUpload": lambda s: s.upload("new", len(DATA), deadline_s=10.0).abort(),
    "ListMultipartUploads": lambda s: s.unfinished(""),
    "DeleteObject": lambda s: s.delete("k"),
}


@pytest.mark.parametrize("operation", ASKS)
def test_whatever_is_asked_is_asked_again(
    s3_proxy: Any, s3_faults: Any, store: S3ObjectStore, operation: str
) -> None:
    """CKP-38: of a store that is busy, fails, and resets."""
    store.create("k", b"data")
    faults = [
        s3_proxy.fault(operation, act)
        for act in (
            s3_faults.status(503, "SlowDown"),
            s3_faults.status(500, "InternalError"),
            s3_faults.reset(),
        )
    ]
    ASKS[operation](store)
    assert [f.fired for f in faults] == [1, 1, 1]


def test_a_creation_that_another_won_meanwhile(s3_proxy: Any, s3_faults: Any, store: S3ObjectStore) -> None:
    """CKP-33, CKP-38: the answer is lost, nothing was done, and then another writer is faster."""

    def lose(exchange: Any) -> None:
        exchange.receive()
        store_at(s3_proxy.root).create("k", b"other")
        exchange.reset()

    fault = s3_proxy.fault("PutObject", lose)
    with pytest.raises(ObjectExistsError, match="k"):
        store.create("k", b"data")
    assert fault.fired == 1
    assert store.read("k") == b"other"


def test_a_creation_of_which_nothing_can_be_learnt_is_unknown(s3_proxy: Any, s3_faults: Any) -> None:
    """CKP-38: it worked, its answer was lost, and then the store is away."""
    store = store_at(s3_proxy.root, deadline_s=2.0, try_s=1.0)
    lost = s3_proxy.fault("PutObject", s3_faults.reset(done=True))
    away = s3_proxy.fault("HeadObject", s3_faults.status(503, "SlowDown"), times=None)
    with pytest.raises(ObjectUnknownError, match="k"):
        store.create("k", b"data")
    assert lost.fired == 1
    assert away.fired >= 1
    assert store.read("k") == b"data"


@pytest.mark.parametrize("fails", ["503", "500", "reset", "in mid body"])
def test_reads_go_on_where_they_broke_off(
    s3_proxy: Any, s3_faults: Any, store: S3ObjectStore, fails: str
) -> None:
    """CKP-38: what has come is not asked for again."""
    save(store)
    act = {
        "503": s3_faults.status(503, "SlowDown"),
        "500": s3_faults.status(500, "InternalError"),
        "reset": s3_faults.reset(),
        "in mid body": s3_faults.reset_answer(2**20),
    }[fails]
    fault = s3_proxy.fault("GetObject", act, times=2)
    found = bytearray(len(DATA))
    assert store.read_into("k", 0, [memoryview(found)[:1000], memoryview(found)[1000:]]) == len(DATA)
    assert fault.fired == 2
    assert found == DATA
    # What was in the proxy's and the kernel's buffers when the connection was reset is lost.
    assert s3_proxy.nbytes_out("GetObject") <= len(DATA) + 2 * 2**20 + 1000


# ---------------------------------------------------------------- CKP-36: a store that loses a part


@pytest.mark.parametrize("part", [1, 3])
def test_a_part_that_was_answered_and_not_stored(
    s3_proxy: Any, s3_faults: Any, store: S3ObjectStore, part: int
) -> None:
    """CKP-36: found by the list of parts, before anything is committed."""
    fault = s3_proxy.fault("UploadPart", s3_faults.drop(), part=part)
    with pytest.raises(ObjectStoreUnavailableError, match=rf"k \(upload \w+\): part {part} was answered"):
        save(store)
    assert fault.fired == 1
    assert s3_proxy.count("CompleteMultipartUpload") == 0
    assert store.list("") == store.unfinished("") == []
    save(store)
    require_saved(store)


def test_a_store_that_knows_no_crc32_is_checked_by_its_md5(
    s3_proxy: Any, s3_faults: Any, store: S3ObjectStore
) -> None:
    """CKP-36: as older Ceph."""

    def forget_crc(exchange: Any) -> None:
        answer = exchange.forward()
        headers = {n: v for n, v in answer.headers.items() if n.lower() != "x-amz-checksum-crc32"}
        assert len(headers) < len(answer.headers)
        exchange.send(s3_faults.Answer(answer.status, headers, answer.body))

    fault = s3_proxy.fault("UploadPart", forget_crc, times=None)
    save(store)
    assert fault.fired == 3
    require_saved(store)


def test_a_part_that_the_store_took_for_another(s3_proxy: Any, s3_faults: Any, store: S3ObjectStore) -> None:
    """CKP-36: a store that knows no CRC32 and stored other bytes: its ETag is not the MD5 of what was sent."""

    def wrong(exchange: Any) -> None:
        exchange.receive()
        exchange.send(s3_faults.Answer(200, {"ETag": f'"{"0" * 32}"'}, b""))

    fault = s3_proxy.fault("UploadPart", wrong, part=2, times=None)
    with pytest.raises(ObjectStoreUnavailableError, match="part 2 of upload"):
        save(store, deadline_s=1.5)
    assert fault.fired > 1
    assert store.list("") == store.unfinished("") == []


# ---------------------------------------------------------------- CKP-37: a store that never answers


def test_a_part_that_is_never_answered_has_a_deadline(s3_proxy: Any, s3_faults: Any) -> None:
    """CKP-37: one deadline for the part, one for the upload; the error names key and upload."""
    store = store_at(s3_proxy.root, try_s=0.3)
    fault = s3_proxy.fault("UploadPart", s3_faults.stall(), part=2, times=None)
    begun = time.monotonic()
    with pytest.raises(
        ObjectStoreUnavailableError, match=r"cannot create k \(part 2 of upload \w+\).* no answer"
    ):
        save(store, deadline_s=2.2)
    assert time.monotonic() - begun < 6.0
    assert fault.fired >= 2
    assert store.unfinished("") == []


def test_a_part_that_is_not_answered_once_goes_another_way(s3_proxy: Any, s3_faults: Any) -> None:
    """CKP-37"""
    store = store_at(s3_proxy.root, try_s=0.3)
    fault = s3_proxy.fault("UploadPart", s3_faults.stall(), part=1)
    save(store)
    assert fault.fired == 1
    require_saved(store)


def test_a_read_that_is_never_answered_has_a_deadline(s3_proxy: Any, s3_faults: Any) -> None:
    """CKP-37"""
    store = store_at(s3_proxy.root, deadline_s=1.0, try_s=0.4)
    store.create("k", b"data")
    fault = s3_proxy.fault("GetObject", s3_faults.stall(), times=None)
    begun = time.monotonic()
    with pytest.raises(ObjectStoreUnavailableError, match="k"):
        store.read_into("k", 0, [memoryview(bytearray(4))])
    assert time.monotonic() - begun < 3.0
    assert fault.fired >= 2


# ---------------------------------------------------------------- CKP-40: what is left behind


def test_only_ones_own_stale_uploads_are_ended(s3_proxy: Any, store: S3ObjectStore) -> None:
    """CKP-40: below a prefix, that is: another root's, and those of a generation that lives, stay."""
    other = store_at(s3_proxy.root + "-other")
    going = [
        s.upload(key, len(DATA), deadline_s=30.0)
        for s, key in ((store, "gen-0001/a"), (store, "gen-0002/b"), (other, "gen-0001/c"))
    ]
    for upload in going:
        upload.put(memoryview(DATA)[:PART])
        upload.drain()
    (stale,) = store.unfinished("gen-0001/")
    assert stale.key == "gen-0001/a"
    store.discard(stale)
    assert [u.key for s in (store, other) for u in s.unfinished("")] == ["gen-0002/b", "gen-0001/c"]
    going[0].put(memoryview(DATA)[PART:])
    with pytest.raises(ObjectStoreError, match="somebody ended the upload"):
        going[0].finish()
    for upload in going[1:]:
        upload.put(memoryview(DATA)[PART:])
        upload.finish()
    assert [o.key for o in store.list("")] == ["gen-0002/b"]


def test_a_failed_upload_is_aborted(s3_proxy: Any, s3_faults: Any, store: S3ObjectStore) -> None:
    """CKP-40"""
    fault = s3_proxy.fault("UploadPart", s3_faults.status(403, "AccessDenied"), part=2)
    with pytest.raises(ObjectStoreDeniedError, match="AWS_SECRET_ACCESS_KEY"):
        save(store)
    assert fault.fired == 1
    assert s3_proxy.count("AbortMultipartUpload") == 1
    assert store.unfinished("") == []


# ---------------------------------------------------------------- a store that knows no conditions


@contextmanager
def overwriting(s3_server: Any, s3_faults: Any) -> Iterator[Any]:
    """A fault: the PUT is done without its condition, as stores do that do not know it. (It cannot be taken out of the request on
    its way: the header is signed.)"""
    address = s3_server.env()
    client: Any = botocore.session.Session().create_client(
        "s3",
        endpoint_url=address["AWS_ENDPOINT_URL"],
        aws_access_key_id=address["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=address["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )

    def put(exchange: Any) -> None:
        exchange.receive()
        bucket, _, key = exchange.request.key.partition("/")
        metadata = {
            name.removeprefix("x-amz-meta-"): value
            for name, value in exchange.request.headers.items()
            if name.startswith("x-amz-meta-")
        }
        client.put_object(Bucket=bucket, Key=key, Body=exchange.request.body, Metadata=metadata)
        exchange.send(s3_faults.Answer(200, {"ETag": '"x"'}, b""))

    try:
        yield put
    finally:
        client.close()


def test_a_store_that_ignores_the_condition_is_found_and_done_without(
    s3_server: Any, s3_proxy: Any, s3_faults: Any, store: S3ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    """CKP-33: then writers one after the other are still told apart."""
    with overwriting(s3_server, s3_faults) as put:
        fault = s3_proxy.fault("PutObject", put, times=None)
        assert probe_conditional(store).exclusion is Exclusion.IGNORED
        assert not ensure_exclusive(store).exclusive
        assert "no other job" in caplog.text
        fired = fault.fired
        assert fired >= 4
        fault.stop()
        store.create("k", b"first")
        other = store_at(s3_proxy.root)
        other.do_without_conditions()
        with pytest.raises(ObjectExistsError, match="k"):
            other.create("k", b"second")
        assert store.read("k") == b"first"
        assert "if-none-match" not in s3_proxy.of("PutObject", key="/k")[0].headers


def test_without_conditions_the_overwritten_writer_of_two_learns_it(
    s3_proxy: Any, s3_faults: Any, store: S3ObjectStore
) -> None:
    """CKP-33: both looked before either had put; the one whose object is overwritten within `SETTLE_S` gives up."""
    store.do_without_conditions()
    other = store_at(s3_proxy.root)
    other.do_without_conditions()
    met = threading.Barrier(2)

    def meet(exchange: Any) -> None:
        answer = exchange.forward()
        met.wait(10.0)
        exchange.send(answer)

    fault = s3_proxy.fault("HeadObject", meet, times=2)
    outcomes: dict[str, Exception | None] = {}

    def create(name: str, through: S3ObjectStore) -> None:
        try:
            through.create("k", name.encode())
            outcomes[name] = None
        except ObjectExistsError as e:
            outcomes[name] = e

    threads = [threading.Thread(target=create, args=pair) for pair in (("a", store), ("b", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fault.fired == 2
    assert [name for name, error in outcomes.items() if error is None] == [store.read("k").decode()]


def test_a_store_that_refuses_the_condition(s3_proxy: Any, s3_faults: Any, store: S3ObjectStore) -> None:
    fault = s3_proxy.fault("PutObject", s3_faults.status(501, "NotImplemented"))
    assert probe_conditional(store).exclusion is Exclusion.REFUSED
    assert fault.fired == 1


# ---------------------------------------------------------------- TLS


@pytest.fixture
def tls_proxy(
    s3_server: Any, s3_url: str, s3_faults: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The proxy behind TLS, with a certificate that AWS_CA_BUNDLE names."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    pem, key = tmp_path / "tls.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=127.0.0.1"
    )
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(pem)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    pem.write_bytes(pem.read_bytes() + key.read_bytes())
    with s3_faults.run_proxy(s3_server, s3_url, pem) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(pem))
        yield proxy


def test_tls_that_breaks_off(tls_proxy: Any, s3_faults: Any) -> None:
    """CKP-38: resets, and bytes that are no TLS, in both directions."""
    store = store_at(tls_proxy.root, session=None)
    faults = [
        tls_proxy.fault("CreateMultipartUpload", s3_faults.reset(done=True)),
        tls_proxy.fault("UploadPart", s3_faults.reset(10**6), part=1),
        tls_proxy.fault("UploadPart", s3_faults.garbage(), part=2),
        tls_proxy.fault("CompleteMultipartUpload", s3_faults.garbage()),
        tls_proxy.fault("GetObject", s3_faults.reset_answer(10**6)),
        tls_proxy.fault("GetObject", s3_faults.garbage()),
    ]
    save(store)
    assert store.read("k") == DATA
    assert [f.fired for f in faults] == [1] * len(faults)


def test_a_certificate_that_nobody_vouches_for(tls_proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No retry helps, and nothing was done."""
    monkeypatch.delenv("AWS_CA_BUNDLE")
    with pytest.raises(ObjectStoreDeniedError, match=r"certificate.*AWS_CA_BUNDLE"):
        store_at(tls_proxy.root, session=None).create("k", b"x")
    assert tls_proxy.count() == 0
