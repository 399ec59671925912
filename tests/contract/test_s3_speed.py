"""CKP-46: our transfers against boto3's managed ones, same parts, same bytes, turn by turn. bench/ckpt.py does it with 2 GB."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from surefoot.ckpt.objects.s3 import PART_NBYTES, S3ObjectStore

pytestmark = [pytest.mark.soak, pytest.mark.s3]

NBYTES = 256 * 2**20
PUT_NBYTES = 2**20
"""As the uploader puts them."""
ROUNDS = 5


def seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


@pytest.mark.timeout(600)
def test_as_fast_as_boto3(s3_url: str) -> None:
    boto3 = pytest.importorskip("boto3", reason="boto3 is in the extra surefoot[bench]")
    transfer: Any = pytest.importorskip("boto3.s3.transfer")
    config = transfer.TransferConfig(multipart_threshold=PART_NBYTES, multipart_chunksize=PART_NBYTES)
    client = boto3.client("s3")
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    store = S3ObjectStore(bucket, prefix, deadline_s=60.0)
    data = memoryview(bytearray(range(256)) * (NBYTES // 256))
    into = memoryview(bytearray(NBYTES))

    def save(key: str) -> None:
        upload = store.upload(key, NBYTES, deadline_s=300.0)
        for at in range(0, NBYTES, PUT_NBYTES):
            upload.put(data[at : at + PUT_NBYTES])
        upload.finish()

    class Memory(io.BytesIO):
        """A file over memory that was written before."""

        def write(self, b: Any) -> int:
            at, n = self.tell(), len(b)
            into[at : at + n] = b
            self.seek(at + n)
            return n

    ratios: dict[str, list[float]] = {"save": [], "load": []}
    for i in range(ROUNDS):
        boto_key = f"{prefix}/boto3-{i}"
        theirs = seconds(lambda k=boto_key: client.upload_fileobj(io.BytesIO(data), bucket, k, Config=config))
        ours = seconds(lambda i=i: save(f"ours-{i}"))
        ratios["save"].append(theirs / ours)
        theirs = seconds(lambda k=boto_key: client.download_fileobj(bucket, k, Memory(), Config=config))
        ours = seconds(lambda i=i: store.read_into(f"ours-{i}", 0, [into]))
        ratios["load"].append(theirs / ours)
        assert into == data
        store.delete(f"ours-{i}")
        store.delete(f"boto3-{i}")
    client.close()
    print({name: [round(r, 2) for r in found] for name, found in ratios.items()})
    assert {name: statistics.median(found) >= 0.9 for name, found in ratios.items()} == {
        "save": True,
        "load": True,
    }
