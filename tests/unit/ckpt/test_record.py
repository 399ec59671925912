"""Records: bytes, and creation that may be answered, refused or lost."""

from __future__ import annotations

import msgspec
import pytest
from ckpt_faulty import FaultyStore

from surefoot.ckpt.errors import DamagedError, FormatError
from surefoot.ckpt.record import (
    Record,
    RecordTakenError,
    StartRef,
    create_record,
    decode_record,
    encode_record,
    highest_record,
    list_manifests,
    list_records,
    read_record,
    read_records,
    record_key,
)
from surefoot.ckpt.store import (
    MemoryObjectStore,
    ObjectMissingError,
    ObjectStoreDeniedError,
    ObjectUnknownError,
)


def record(generation: int = 4, by: str = "controller-a") -> Record:
    return Record(
        generation=generation,
        start=StartRef(generation=3, step=20),
        reason="restart",
        created_by=by,
        plan={"members": [{"uid": "n0"}], "mesh": {"dp": 4}},
    )


def test_bytes_are_canonical_and_come_back() -> None:
    data = encode_record(record())
    assert decode_record(data) == record()
    assert encode_record(decode_record(data)) == data


def test_unknown_fields_are_ignored_and_older_versions_wrote_no_checksum() -> None:
    fields = msgspec.to_builtins(record()) | {"later": [1]}
    assert decode_record(msgspec.json.encode(fields)) == record()


def test_no_flipped_bit_makes_another_record_of_it() -> None:
    """One digit of the starting point would let other checkpoints count, and `gc --off-lineage` delete what did."""
    data = encode_record(record())
    refused = 0
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            try:
                assert decode_record(bytes(flipped), key="generations/0004.json") == record()
            except (DamagedError, FormatError):
                refused += 1
    assert refused > 7 * len(data)


def test_a_record_that_does_not_match_its_checksum_says_so() -> None:
    data = encode_record(record())
    for damaged in (data.replace(b'"step":20', b'"step":10'), data[:-3] + b'z"}'):
        with pytest.raises(
            DamagedError, match=r"generations/0004\.json .*match its checksum\): restore it from a backup"
        ) as caught:
            decode_record(damaged, key="generations/0004.json")
        assert caught.value.key == "generations/0004.json"


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b'{"format": 2, "generation": "four"}', FormatError, "format 2"),
        (b"", DamagedError, "generations/0004.json"),
        (b"{", DamagedError, "damaged"),
        (b'{"generation": 4}', DamagedError, "format"),
        (b'{"format": 1, "generation": 4}', DamagedError, "no record"),
        (b"[" * 100_000, DamagedError, "damaged"),
    ],
)
def test_what_is_no_record(data: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        decode_record(data, key="generations/0004.json")


def test_keys() -> None:
    assert record_key(4) == "generations/0004.json"
    assert record_key(12345) == "generations/12345.json"
    with pytest.raises(ValueError, match="from 1"):
        record_key(0)


def test_create_list_read() -> None:
    store = MemoryObjectStore()
    assert highest_record(store) == 0
    data = create_record(store, record(4))
    create_record(store, record(10000))
    store.create("generations/notes.txt", b"")
    assert list_records(store) == [4, 10000]
    assert highest_record(store) == 10000
    assert read_record(store, 4) == (record(4), data)
    assert read_records(store, {4: record(4, "known")})[4].created_by == "known"
    with pytest.raises(ObjectMissingError):
        read_record(store, 5)


def test_the_same_bytes_again_are_a_success() -> None:
    store = MemoryObjectStore()
    assert create_record(store, record()) == create_record(store, record())


def test_another_record_is_taken() -> None:
    store = MemoryObjectStore()
    create_record(store, record(by="controller-a"))
    with pytest.raises(RecordTakenError, match="controller-a") as caught:
        create_record(store, record(by="controller-b"))
    assert caught.value.existing.created_by == "controller-a"
    assert caught.value.generation == 4


@pytest.mark.parametrize("script", [["done"], ["lost"], ["lost", "done"], ["lost", "lost"], ["done", "ok"]])
def test_lost_answers_are_settled_by_reading_back(script: list[str | Exception]) -> None:
    store = FaultyStore()
    store.script[".json"] = script
    create_record(store, record())
    assert read_record(store, 4)[0] == record()


def test_what_nobody_knows_is_said() -> None:
    store = FaultyStore()
    store.script[".json"] = ["lost"] * 3
    with pytest.raises(ObjectUnknownError):
        create_record(store, record())


def test_a_lost_answer_and_another_winner() -> None:
    store = FaultyStore()
    store.script["4.json"] = ["lost"]
    store.before["4.json"] = lambda: MemoryObjectStore.create(
        store, record_key(4), encode_record(record(by="b"))
    )
    with pytest.raises(RecordTakenError):
        create_record(store, record(by="a"))


def test_other_errors_pass() -> None:
    store = FaultyStore()
    store.script[".json"] = [ObjectStoreDeniedError("wrong keys")]
    with pytest.raises(ObjectStoreDeniedError):
        create_record(store, record())


def test_a_record_under_the_wrong_number() -> None:
    store = MemoryObjectStore()
    store.create(record_key(5), encode_record(record(4)))
    with pytest.raises(DamagedError, match="calls itself generation 4"):
        read_record(store, 5)


def test_list_manifests() -> None:
    store = MemoryObjectStore()
    for key in ("gen-0004/step-0000000040/manifest.json", "gen-0003/step-0000000020/manifest.json"):
        store.create(key, b"")
    store.create("gen-0004/step-0000000060/a/r00000-0.safetensors", b"")
    assert [(m.generation, m.step) for m in list_manifests(store)] == [(3, 20), (4, 40)]
