"""Manifests and part records that lie: refused by name, in bounded time and memory, and nothing is read from where they say."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import xxhash
from ckpt_images import arrays, make_images
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.ckpt import tiers
from surefoot.ckpt.errors import CkptError, DamagedError, FormatError
from surefoot.ckpt.format.merge import merge_parts
from surefoot.ckpt.format.sound import nbytes_of_tensor, require_listed, require_sound
from surefoot.ckpt.loading.restore import decode_manifest, read_manifest
from surefoot.ckpt.manifest import PartRecord, decode, encode, manifest_key, object_key, part_key
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import MemoryObjectStore

KEY = manifest_key(1, 20)
A = "attempt-a"


def committed() -> MemoryObjectStore:
    """A real checkpoint of two ranks, with a sharded tensor, replicas, tied weights and values."""
    store = MemoryObjectStore()
    create_record(store, Record(generation=1, start=StartRef(), reason="test", created_by="t"))
    for writer, image in enumerate(make_images(arrays(), 2)):
        tiers.upload_images(store, [image], generation=1, step=20, attempt=A, writer=writer, deadline_s=10)
    outcome = tiers.commit(store, generation=1, step=20, attempt=A, writers=2, deadline_s=5, facts={})
    assert isinstance(outcome, tiers.Committed)
    return store


STORE = committed()
MANIFEST = read_manifest(STORE, 1, 20)
PLAIN: dict[str, Any] = msgspec.json.decode(STORE.read(KEY))
PARTS: list[dict[str, Any]] = [msgspec.json.decode(STORE.read(part_key(1, 20, A, w))) for w in range(2)]
SIZES = {o.key: o.size for o in STORE.list("gen-0001/")}


def sealed(plain: dict[str, Any]) -> bytes:
    """As a forger would store it: with a checksum that is right."""
    body = msgspec.json.encode({k: v for k, v in plain.items() if k != "checksum"})[:-1]
    return body + b',"checksum":"%s"}' % xxhash.xxh3_64_hexdigest(body).encode()


def changed(change: Callable[[dict[str, Any]], None]) -> bytes:
    plain = copy.deepcopy(PLAIN)
    change(plain)
    return sealed(plain)


def set_at(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the entry at path[:-1] to path[-1]."""

    def change(plain: Any) -> None:
        *way, last, value = path
        for step in way:
            plain = plain[step]
        plain[last] = value

    return change


def stretch_tensor(plain: dict[str, Any]) -> None:
    plain["tensors"]["model.w"]["shape"] = [2**31, 2**31]
    plain["objects"][0]["pieces"][0].update(name="model.w", offset=[0, 0], extent=[2**31, 2**31])


def doubled_object(plain: dict[str, Any]) -> None:
    plain["objects"].append(plain["objects"][0])


def swapped_pieces(plain: dict[str, Any]) -> None:
    first, second = max((o["pieces"] for o in plain["objects"]), key=len)[:2]
    first["at"], second["at"] = second["at"], first["at"]


def test_the_real_one_is_sound() -> None:
    require_sound(MANIFEST)
    assert decode_manifest(sealed(PLAIN), 1, 20) == MANIFEST
    require_listed(MANIFEST, SIZES)


FORGED = [
    pytest.param(set_at("objects", 0, "key", "../../etc/passwd.safetensors"), "no data object", id="out of the root"),
    pytest.param(
        set_at("objects", 0, "key", f"gen-0001/step-0000000020/{A}/../b/r.safetensors"),
        "no data object",
        id="out of the attempt",
    ),
    pytest.param(
        set_at("objects", 0, "key", object_key(1, 40, A, 0)), "no data object", id="another step's object"
    ),
    pytest.param(set_at("objects", 0, "key", "/etc/passwd"), "no data object", id="absolute"),
    pytest.param(set_at("objects", 0, "key", KEY), "no data object", id="no data"),
    pytest.param(set_at("attempt", "../x"), "attempt '../x' must be", id="attempt"),
    pytest.param(set_at("ledger", {"key": "../ledger.json", "size": 1, "checksum": "0"}), "its ledger", id="ledger elsewhere"),
    pytest.param(
        set_at("table", {"key": "../p", "size": 1, "checksum": ""}), "table of pieces lies outside", id="table elsewhere"
    ),
    pytest.param(set_at("objects", 0, "size", 2**61), "make no object of", id="huge object"),
    pytest.param(set_at("objects", 0, "data_nbytes", 2**61), "make no object of", id="huge data"),
    pytest.param(set_at("objects", 0, "block_nbytes", 0), "blocks of 0 bytes", id="no blocks"),
    pytest.param(set_at("objects", 0, "block_nbytes", 2**40), "blocks of", id="huge blocks"),
    pytest.param(set_at("objects", 0, "block_nbytes", 1), "checksums", id="many blocks"),
    pytest.param(set_at("objects", 0, "checksums", []), "checksums", id="no checksums"),
    pytest.param(set_at("objects", 0, "data_start", -1), "Expected `int` >= 0", id="negative"),
    pytest.param(set_at("objects", 0, "pieces", 0, "at", 2**70), "is no Manifest", id="beyond 64 bits"),
    pytest.param(set_at("objects", 0, "pieces", 0, "at", 1), "of no piece|of both", id="moved piece"),
    pytest.param(set_at("tensors", "model.b", "shape", [2**40] * 3), "more than", id="product overflows"),
    pytest.param(set_at("tensors", "model.b", "shape", [1] * 65), "impossible shape", id="dimensions"),
    pytest.param(set_at("tensors", "model.b", "shape", [6]), "element .* is covered 0 times", id="larger tensor"),
    pytest.param(set_at("tensors", "model.b", "shape", [4]), "covered 2 times", id="smaller tensor"),
    pytest.param(set_at("tensors", "model.b", "dtype", "object"), "does not know", id="type"),
    pytest.param(set_at("tensors", "model.b", "dtype", "float32"), "of no piece|of both|pieces end", id="other type"),
    pytest.param(
        set_at("tensors", "ghost", {"dtype": "float32", "shape": [2**20]}), "ghost .* covered 0 times", id="ghost"
    ),
    pytest.param(set_at("aliases", "model.tied", "nobody"), "is tied to 'nobody'", id="alias of nothing"),
    pytest.param(set_at("aliases", "model.w", "model.b"), "is tied to", id="alias over a tensor"),
    pytest.param(stretch_tensor, "more than|reaches|covered", id="huge shape and extent"),
    pytest.param(doubled_object, "listed twice", id="object twice"),
    pytest.param(swapped_pieces, "of no piece|of both", id="pieces swapped"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), FORGED)
def test_a_forged_manifest_is_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    """Through the whole reading, from a store: nothing but the manifest itself is read."""
    store = MemoryObjectStore()
    store.create(KEY, changed(change))
    with pytest.raises(DamagedError, match=words) as caught:
        read_manifest(store, 1, 20)
    assert caught.value.key == KEY


def test_what_it_names_must_be_there_in_full() -> None:
    for sizes in ({}, {**SIZES, object_key(1, 20, A, 1): 5}):
        with pytest.raises(DamagedError, match=r"r0000[01]-0.safetensors should have"):
            require_listed(MANIFEST, sizes)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"format":1,"values":' + b"[" * 100_000, id="deep, open"),
        pytest.param(
            sealed({**PLAIN, "values": {}})[:-40] + b"[" * 100_000 + b"]" * 100_000, id="deep, closed"
        ),
        pytest.param(b"", id="empty"),
        pytest.param(b"T", id="a table follows, and nothing does"),
        pytest.param(b"T" + (2**63).to_bytes(8, "little") + b"{}", id="a table follows far away"),
        pytest.param(b"\xff" * 64, id="no text"),
        pytest.param(b"null", id="null"),
    ],
)
def test_what_is_no_manifest_at_all(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_manifest(data, 1, 20)


def test_depth_is_refused_with_the_right_checksum_too() -> None:
    body = sealed(PLAIN).replace(b'"epoch":3', b'"epoch":' + b"[" * 50_000 + b"]" * 50_000)
    end = body.rindex(b',"checksum"')
    data = body[:end] + b',"checksum":"%s"}' % xxhash.xxh3_64_hexdigest(body[:end]).encode()
    with pytest.raises(DamagedError):
        decode_manifest(data, 1, 20)


@pytest.mark.parametrize(("change", "words"), FORGED)
def test_a_forged_manifest_costs_no_memory(change: Callable[[dict[str, Any]], None], words: str) -> None:
    """Whatever sizes it claims, judging it takes as much memory as it is long, give or take."""
    store = MemoryObjectStore()
    store.create(KEY, changed(change))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match=words):
            read_manifest(store, 1, 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * 2**20


# ---------------------------------------------------------------- fuzzed

EVIL = st.sampled_from(
    [
        *(-1, 0, 1, 2, 3, 7, 2**31, 2**62, 2**63, 2**64, 2**200, 1.5, True, None, "", "x", "../..", "/", "\0", "float32"),
        *([], {}, [0], [[0]], [2**62] * 4, {"a": {"b": 1}}, [0] * 70, object_key(1, 20, A, 0), "model.w", "1" * 5000),
    ]
)  # fmt: skip


def places(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutated(data: st.DataObject, plain: Any) -> Any:
    """Something real, with up to three entries replaced, removed or doubled."""
    plain = copy.deepcopy(plain)
    for _ in range(data.draw(st.integers(1, 3))):
        if not (left := list(places(plain))):
            break  # everything was removed
        *way, last = data.draw(st.sampled_from(left))
        at = plain
        for step in way:
            at = at[step]
        match data.draw(st.sampled_from(["replace", "replace", "remove", "double"])):
            case "replace":
                at[last] = copy.deepcopy(data.draw(EVIL))
            case "remove":
                del at[last]
            case "double" if isinstance(at, list):
                at.append(copy.deepcopy(at[last]))
            case _:
                at[data.draw(st.sampled_from(["model.w", "zz", "../x"]))] = copy.deepcopy(at[last])
    return plain


@settings(max_examples=150)
@given(st.data())
def test_any_mutation_is_refused_or_harmless(data: st.DataObject) -> None:
    """What passes names only objects of its own attempt, and claims no more bytes than these are said to have."""
    try:
        found = decode_manifest(sealed(mutated(data, PLAIN)), 1, 20)
        require_listed(found, SIZES)
    except (DamagedError, FormatError):
        return
    assert {o.key for o in found.objects} <= set(SIZES)
    assert found.nbytes <= sum(SIZES.values())
    assert sum(nbytes_of_tensor(meta) for meta in found.tensors.values()) == found.nbytes


@settings(max_examples=100)
@given(st.data())
def test_any_mutation_of_part_records_is_refused_or_gives_a_sound_manifest(data: st.DataObject) -> None:
    """A writer's word is believed as little: what is merged is sound, or refused as an error of ours."""
    parts = mutated(data, PARTS)
    try:
        decoded = [decode(PartRecord, msgspec.json.encode(p), key="part") for p in parts]
        manifest, _ = merge_parts(decoded, SIZES, generation=1, step=20, attempt=A, facts={})
    except CkptError:
        return
    assert decode_manifest(encode(manifest), 1, 20) == manifest


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_flipped_byte_is_found(at: int, flip: int) -> None:
    data = bytearray(STORE.read(KEY))
    data[at % len(data)] ^= flip
    with pytest.raises((DamagedError, FormatError)):
        decode_manifest(bytes(data), 1, 20)
