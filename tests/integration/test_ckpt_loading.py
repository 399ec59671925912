"""Loads by several ranks: what is read, how it is shared, and how they fall back together."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from surefoot.ckpt.manifest import encode, manifest_key
from surefoot.ckpt.store import ObjectStore, open_store
from surefoot.ckpt.tools.inspect import find

pytestmark = pytest.mark.slow

Ranks = Callable[..., list[Any]]


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


@pytest.fixture
def memory_fs() -> Iterator[str]:
    """A root on a tmpfs, whose objects ranks look at instead of reading them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = (Path(folder) / "root").as_uri()
        yield root


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def anywhere(request: pytest.FixtureRequest, root: str) -> str:
    """A root on files, and on S3."""
    return request.getfixturevalue("s3_url") if request.param == "s3" else root


def data_read(
    told: list[dict[str, Any]], store: ObjectStore, step: int = 20, *, by_kernel: bool = False
) -> tuple[int, int]:
    """Bytes of data objects read by all ranks together, and how many there are. `by_kernel`: what several read is read once."""
    manifest, _ = find(store, step)
    total: Counter[str] = sum((Counter(t["read"]) for t in told), Counter())
    if by_kernel:
        total = Counter()
        for key, _, nbytes in {tuple(r) for t in told for r in t["ranges"]}:
            total[key] += nbytes
    return sum(total[o.key] for o in manifest.objects), sum(o.data_nbytes for o in manifest.objects)


@pytest.mark.parametrize(
    ("saved", "by", "loaded", "on", "shared_by"),
    [
        ("ddp", 1, "ddp", 8, "pages"),
        ("ddp", 1, "ddp", 8, "memory"),
        ("ddp", 1, "ddp", 8, "group"),
        ("fsdp", 2, "fsdp", 2, "pages"),
        ("fsdp", 2, "fsdp", 2, "memory"),
        ("fsdp", 2, "fsdp", 2, "group"),
        ("fsdp", 4, "fsdp", 3, "pages"),
        ("fsdp", 4, "fsdp", 3, "memory"),
        ("fsdp", 4, "fsdp", 3, "group"),
        ("fsdp", 2, "tp", 4, "pages"),
        ("fsdp", 2, "tp", 4, "memory"),
        ("fsdp", 2, "tp", 4, "group"),
        ("tp", 2, "hsdp", 4, "pages"),
        ("tp", 2, "hsdp", 4, "memory"),
        ("tp", 2, "hsdp", 4, "group"),
        ("ddp", 2, "fsdp", 4, "pages"),
        ("ddp", 2, "fsdp", 4, "memory"),
        ("ddp", 2, "fsdp", 4, "group"),
        ("ddp", 1, "ddp", 4, "memory fs"),
        ("fsdp", 4, "fsdp", 3, "memory fs"),
        ("fsdp", 2, "tp", 4, "memory fs"),
        ("tp", 2, "hsdp", 4, "memory fs"),
    ],
)
def test_every_byte_is_read_once_per_job(
    request: pytest.FixtureRequest,
    ranks: Ranks,
    root: str,
    saved: str,
    by: int,
    loaded: str,
    on: int,
    shared_by: str,
) -> None:
    """CKP-43 (8 data-parallel ranks), and its siblings: whatever the layouts, and float8 as well."""
    if shared_by == "memory fs":
        root = request.getfixturevalue("memory_fs")
    ranks(by, "loading_acts:save", root, saved, 20)
    told = ranks(on, "loading_acts:load", root, loaded, shared_by)
    assert [t["error"] for t in told] == [""] * on
    read, stored = data_read(told, open_store(root), by_kernel=shared_by in ("pages", "memory fs"))
    assert read == stored
    manifests = [sum(n for key, n in t["read"].items() if key.endswith("manifest.json")) for t in told]
    assert manifests[1:] == [0] * (on - 1), "rank 0 reads the manifest for all"
    if on == 8 and shared_by != "pages":
        by_rank = [sum(n for key, n in t["read"].items() if key.endswith(".safetensors")) for t in told]
        assert max(by_rank) < stored, "the reading is divided"


@pytest.mark.parametrize(("loaded", "shared_by"), [("ddp", "memory"), ("tp", "group"), ("tp", "pages")])
def test_a_rank_that_fails_in_the_middle_fails_all_and_none_hangs(
    ranks: Ranks, root: str, loaded: str, shared_by: str
) -> None:
    """The store goes away for one rank, in its first block, within one, and in the last of all rounds: everybody raises, and
    names it."""
    ranks(1, "loading_acts:save", root, "ddp", 20)
    for fail_rank, after in ((0, 0), (0, 3), (2, 0)):
        told = ranks(4, "loading_acts:load", root, loaded, shared_by, fail_rank, after)
        for rank, t in enumerate(told):
            assert "the cable is out" in t["error"], t
            kind = "ObjectStoreUnavailableError" if rank == fail_rank else "ElsewhereError: rank"
            assert t["error"].startswith(kind)


def test_a_rank_that_fails_before_it_reads_fails_all_and_none_hangs(ranks: Ranks, root: str) -> None:
    """The others are about to pass on what they have read."""
    ranks(4, "loading_acts:save", root, "fsdp", 20)
    told = ranks(4, "loading_acts:load", root, "fsdp", "group", 2, -1)
    errors = [t["error"] for t in told]
    assert errors[2] == "ObjectStoreUnavailableError: the cable is out"
    assert all(errors[r].startswith("ElsewhereError: rank 2: ") for r in (0, 1, 3)), errors


def test_damage_is_found_by_whoever_of_those_that_look_checks_the_block(ranks: Ranks, memory_fs: str) -> None:
    """All want a part of every block of two tensors, and each block is checked by one of them: whoever it is, all fall back."""
    ranks(2, "loading_acts:save", memory_fs, "fsdp", 20, 40)
    store = open_store(memory_fs)
    manifest, _ = find(store, 40)
    for source in manifest.objects:
        whole = store.read(source.key)
        for block in range(len(source.checksums)):
            data = bytearray(whole)
            data[source.data_start + block * source.block_nbytes + 5] ^= 1
            replace(store, source.key, bytes(data))
            told = ranks(2, "loading_acts:load", memory_fs, "tp")
            assert [(t["error"], t["step"]) for t in told] == [("", 20)] * 2
            assert source.key in told[0]["passed_over"][0][1]
            for flag in [o.key for o in store.list("gen-") if o.key.endswith("aside.json")]:
                store.delete(flag)
        replace(store, source.key, whole)


def flip_last_block(root: str, step: int, rank: int) -> str:
    """One bit of what `rank` wrote; returns the object's key."""
    store = open_store(root)
    manifest, _ = find(store, step)
    source = next(o for o in manifest.objects if f"r{rank:05d}" in o.key)
    data = bytearray(store.read(source.key))
    data[-1] ^= 1
    replace(store, source.key, bytes(data))
    return source.key


def replace(store: ObjectStore, key: str, data: bytes) -> None:
    """As somebody else's hand would, or a store that forgets."""
    store.delete(key)
    store.create(key, data)


def test_damage_that_one_rank_sees_sends_all_to_the_same_older_step(ranks: Ranks, anywhere: str) -> None:
    """CKP-35, CKP-34: only rank 2 reads the bad shard. It is set aside, not deleted; the next load passes it over at once, and
    one that asks for it tries it."""
    root = anywhere
    ranks(4, "loading_acts:save", root, "fsdp", 20, 40, 60)
    key = flip_last_block(root, 60, 2)
    told = ranks(4, "loading_acts:load", root, "fsdp")
    assert [(t["error"], t["step"]) for t in told] == [("", 40)] * 4
    whats = [t["passed_over"] for t in told]
    assert whats == [whats[0]] * 4
    [(step, what)] = whats[0]
    assert step == 60
    assert what.startswith("rank 2: ")
    assert key in what
    store = open_store(root)
    assert store.read(key), "nothing is deleted"
    assert any(o.key.endswith("step-0000000060/aside.json") for o in store.list("gen-"))
    again = ranks(4, "loading_acts:load", root, "fsdp")
    assert [t["step"] for t in again] == [40] * 4
    assert data_read(again, store, 60)[0] == 0, "it is not tried again"
    assert key in again[3]["passed_over"][0][1]


@pytest.mark.parametrize("sums", [(), ("",)])
def test_a_checksum_that_is_missing_sends_all_to_the_same_older_step(
    ranks: Ranks, anywhere: str, sums: tuple[str, ...]
) -> None:
    """CKP-35, second run: every byte is there, but what rank 2 wrote has no checksum, or an empty one."""
    ranks(4, "loading_acts:save", anywhere, "fsdp", 20, 40)
    store = open_store(anywhere)
    manifest, _ = find(store, 40)
    bare = tuple(
        msgspec.structs.replace(o, checksums=sums) if "r00002" in o.key else o for o in manifest.objects
    )
    assert bare != manifest.objects
    replace(
        store, manifest_key(manifest.generation, 40), encode(msgspec.structs.replace(manifest, objects=bare))
    )
    told = ranks(4, "loading_acts:load", anywhere, "fsdp")
    assert [(t["error"], t["step"]) for t in told] == [("", 20)] * 4
    assert all(t["passed_over"] == told[0]["passed_over"] for t in told)
    [(step, what)] = told[0]["passed_over"]
    assert step == 40
    assert re.search("0 checksums|without a checksum", what)
    read = [key for t in told for key in t["read"] if key.endswith(".safetensors")]
    assert read, "step 20 was"
    assert not [key for key in read if "step-0000000040" in key], "it is found before anything is read"


def test_ranks_under_an_agent_share_and_never_fall_back(ranks: Ranks, root: str) -> None:
    """CKP-43 and CKP-35 through restore_committed: damage is told to all, and which step comes next is not theirs to say."""
    ranks(2, "loading_acts:save", root, "fsdp", 20, 40)
    told = ranks(4, "loading_acts:restore", root, "ddp", 40)
    assert [t["error"] for t in told] == [""] * 4
    read, stored = data_read(told, open_store(root), 40, by_kernel=True)
    assert read == stored
    key = flip_last_block(root, 40, 1)
    told = ranks(4, "loading_acts:restore", root, "ddp", 40)
    assert all(t["error"].startswith(f"{key} rank ") for t in told), told
    assert len({t["error"] for t in told}) == 1


def test_eight_replicas_fetch_a_checkpoint_once_from_s3(ranks: Ranks, s3_proxy: Any) -> None:
    """CKP-43: the proxy counts what 8 data-parallel ranks fetch, manifests and lists included."""
    ranks(1, "loading_acts:save", s3_proxy.root, "ddp", 20)
    stored = sum(o.data_nbytes for o in find(open_store(s3_proxy.root), 20)[0].objects)
    before = s3_proxy.nbytes_out("*")
    assert ranks(8, "loading_acts:load_plainly", s3_proxy.root, "ddp") == [20] * 8
    fetched = s3_proxy.nbytes_out("*") - before
    assert stored <= fetched <= 1.1 * stored


def test_ranks_with_different_roots_or_wishes_are_told(ranks: Ranks, root: str) -> None:
    """Nothing is loaded, saved or set aside; a path with a time in it, or a relative one, is not the same for all."""
    ranks(2, "loading_acts:save", root, "fsdp", 20, 40)
    told = ranks(2, "loading_acts:load_each", [root, root + "-other"], [None, None])
    assert all("different roots (rank 0: " in t and "-other)" in t for t in told), told
    told = ranks(2, "loading_acts:load_each", [root, root], [20, 40])
    assert all("different steps (rank 0: 20, rank 1: 40)" in t for t in told), told
    told = ranks(2, "loading_acts:save_each", [root + "-a", root + "-b"])
    assert all("different roots (rank 0: " in t for t in told), told
    assert ranks(2, "loading_acts:load_each", [root, root], [None, None]) == ["step 40"] * 2


def test_what_rank_0_finds_is_raised_by_all(ranks: Ranks, root: str) -> None:
    """Who catches a step that is not there, and goes on, does so on all ranks; other trouble is told as another rank's."""
    ranks(2, "loading_acts:save", root, "fsdp", 20)
    told = ranks(2, "loading_acts:load_each", [root, root], [40, 40])
    assert all(t.startswith("StepMissingError: ") and "no committed step 40" in t for t in told), told
    (Path(root.removeprefix("file://")) / "generations" / "0001.json").write_bytes(b"{}")
    told = ranks(2, "loading_acts:load_each", [root, root], [None, None])
    assert told[0].partition(":")[0] in ("DamagedError", "FormatError"), told
    assert told[1].startswith("ElsewhereError: rank 0 "), told


def test_what_one_rank_alone_does_not_see_is_not_set_aside(ranks: Ranks, root: str) -> None:
    """A machine without the mount would otherwise condemn every checkpoint of a sound root, from the newest down."""
    ranks(2, "loading_acts:save", root, "fsdp", 20, 40)
    told = ranks(2, "loading_acts:load_without_mount", root, 1)
    assert all(t.startswith("CkptWorldError: rank 1: ") for t in told), told
    assert all("finds it whole" in t for t in told), told
    assert not [o.key for o in open_store(root).list("gen-") if o.key.endswith("aside.json")]
    assert ranks(2, "loading_acts:load_each", [root, root], [None, None]) == ["step 40"] * 2
