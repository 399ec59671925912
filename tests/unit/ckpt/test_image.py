"""A slot holds a whole image or none, whatever moment its writer died."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from ckpt_images import arrays, make_images

from surefoot import failpoint
from surefoot.ckpt.errors import ImageError, SlotTooSmallError
from surefoot.ckpt.format.image import (
    ImageStructure,
    ImageWriter,
    block_sums,
    read_image,
    unseal,
    verify_image,
)
from surefoot.ckpt.manifest import PAGE_NBYTES


def kind_of(buf: memoryview) -> str:
    with pytest.raises(ImageError) as caught:
        verify_image(buf)
    return caught.value.kind


def test_what_was_sealed_is_read() -> None:
    image = make_images(arrays(), 2, generation=3, step=120)[1]
    info = verify_image(image)
    assert (info.generation, info.step, info.rank, info.world_size) == (3, 120, 1, 2)
    assert info.nbytes == len(image)
    assert info.meta.values == {"epoch": 3}
    assert info.meta.cursor == {"at": 5}
    assert info.meta.extra == {"rank": 1}
    assert info == read_image(image)


def test_a_slot_larger_than_the_image() -> None:
    image = make_images(arrays())[0]
    slot = memoryview(bytearray(bytes(image) + b"\xff" * 999))
    assert verify_image(slot).nbytes == len(image)


@pytest.mark.parametrize("where", [0, 9, 40, PAGE_NBYTES, PAGE_NBYTES + 70, -2])
def test_one_flipped_bit_is_found(where: int) -> None:
    """In the magic word, the seal, the data, its second block, the meta data."""
    image = make_images(arrays())[0]
    image[where] ^= 1
    assert kind_of(image) == ("foreign" if where == 0 else "corrupt")


def test_a_bit_in_what_is_only_kept_is_found() -> None:
    images = make_images(arrays(), 2)
    structure = read_image(images[0]).meta.structure
    assert structure.kept, "a replica that rank 1 writes"
    images[0][PAGE_NBYTES + structure.kept_start] ^= 1
    assert kind_of(images[0]) == "corrupt"
    assert read_image(images[0]).rank == 0


@pytest.mark.parametrize(
    ("buf", "kind"),
    [
        (bytearray(PAGE_NBYTES * 2), "unsealed"),
        (bytearray(100), "foreign"),
        (bytearray(b"PK\x03\x04" + bytes(PAGE_NBYTES)), "foreign"),
    ],
)
def test_what_is_no_image(buf: bytearray, kind: str) -> None:
    assert kind_of(memoryview(buf)) == kind


def test_a_truncated_image_is_corrupt() -> None:
    image = make_images(arrays())[0]
    assert kind_of(image[:-10]) == "corrupt"


def test_a_newer_format_is_foreign() -> None:
    image = make_images(arrays())[0]
    seal_nbytes = struct.calcsize("<IIIxxxxQQQQQQ")
    image[8:12] = struct.pack("<I", 99)
    body = bytes(image[8 : 8 + seal_nbytes])
    image[8 + seal_nbytes : 16 + seal_nbytes] = xxhash.xxh3_64_digest(body)
    assert kind_of(image) == "foreign"


def test_unseal() -> None:
    image = make_images(arrays())[0]
    unseal(image)
    assert kind_of(image) == "unsealed"


def structure(nbytes: int) -> ImageStructure:
    return ImageStructure(
        tensors={},
        aliases={},
        written=(),
        kept=(),
        shared=(),
        written_nbytes=nbytes,
        kept_start=nbytes,
        data_nbytes=nbytes,
    )


def seal(writer: ImageWriter) -> int:
    return writer.seal(
        generation=1, step=2, rank=0, world_size=1, values={}, cursor=None, ledger=(), extra=None
    )


def test_until_it_is_sealed_the_slot_holds_nothing() -> None:
    """Also what was there before is gone from the first byte on."""
    slot = memoryview(bytearray(3 * PAGE_NBYTES))
    writer = ImageWriter(slot, structure(100), b"{}")
    writer.begin()[:] = bytes(range(100))
    assert kind_of(slot) == "unsealed"


def test_killed_before_the_seal() -> None:
    image = make_images(arrays())[0]
    slot = memoryview(bytearray(bytes(image) + bytes(PAGE_NBYTES)))
    before = read_image(slot).meta.structure
    failpoint.arm(failpoint.parse("snapshot.before_seal=error"))
    try:
        writer = ImageWriter(slot, before, b"{}")
        writer.begin()
        with pytest.raises(failpoint.FailpointError):
            seal(writer)
    finally:
        failpoint.arm(None)
    assert kind_of(slot) == "unsealed"


def test_a_slot_too_small_says_what_it_needs() -> None:
    slot = memoryview(bytearray(PAGE_NBYTES + 64))
    with pytest.raises(SlotTooSmallError) as caught:
        ImageWriter(slot, structure(100), b"{}").begin()
    assert caught.value.needed > len(slot)


def test_a_slot_too_small_for_the_meta_data_stays_unsealed() -> None:
    slot = memoryview(bytearray(PAGE_NBYTES + 128 + 10))
    writer = ImageWriter(slot, structure(100), b"{}")
    writer.begin()
    with pytest.raises(SlotTooSmallError):
        seal(writer)
    assert kind_of(slot) == "unsealed"


def test_no_reference_to_the_slot_is_kept() -> None:
    slot = bytearray(bytes(make_images(arrays())[0]))
    view = memoryview(slot)
    info = verify_image(view)
    view[PAGE_NBYTES] ^= 1
    assert kind_of(view) == "corrupt"
    view.release()
    slot.clear()  # raises BufferError where somebody still looks at it
    assert info.step == 20


def test_block_sums() -> None:
    data = np.arange(100, dtype=np.uint8).tobytes()
    sums = block_sums(memoryview(data), 64)
    assert sums == [xxhash.xxh3_64_hexdigest(data[:64]), xxhash.xxh3_64_hexdigest(data[64:])]
    assert block_sums(memoryview(b""), 64) == []
