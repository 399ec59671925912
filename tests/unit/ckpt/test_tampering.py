"""CKP-42: whatever stands in a checkpoint, no code of it runs, and what was tampered with is reported.

A payload that would run code when it is unpickled is put in place of, and inside of, every object of a checkpoint, one at a
time; then everything that reads a checkpoint reads it.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from surefoot import ckpt
from surefoot.ckpt.errors import CkptError
from surefoot.ckpt.keeping.cleaning import plan_gc
from surefoot.ckpt.manifest import Ledger, LedgerRef, encode, ledger_key, manifest_key
from surefoot.ckpt.store import ObjectStoreError, open_store
from surefoot.ckpt.tools.boxreader import BoxReader
from surefoot.ckpt.tools.comparing import compare
from surefoot.ckpt.tools.dcp.exporting import export_dcp
from surefoot.ckpt.tools.inspect import find, list_checkpoints, show
from surefoot.ckpt.tools.tensorstats import tensor_stats


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.makedirs, (self.mark,)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "root"
    state = {"model": torch.nn.Linear(5, 3), "words": {"a": "text", "b": (1, 2)}}
    manifest = ckpt.save(str(root), 20, state, cursor={"at": 5})
    # As under the agent, which records what was trained on.
    key = ledger_key(manifest.generation, 20, manifest.attempt)
    data = encode(Ledger(generation=manifest.generation, step=20))
    (root / key).write_bytes(data)
    ref = LedgerRef(key=key, size=len(data), checksum=xxhash.xxh3_64_hexdigest(data))
    path = root / manifest_key(manifest.generation, 20)
    path.write_bytes(encode(msgspec.structs.replace(manifest, ledger=ref)))
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "root"))


def readers(root: Path | str, out: Path) -> dict[str, Callable[[], Any]]:
    """Everything that reads a checkpoint, by name."""
    url = str(root)

    def reader() -> BoxReader:
        return BoxReader(open_store(url), find(open_store(url), None)[0])

    return {
        "list": lambda: list_checkpoints(open_store(url)),
        "show": lambda: show(open_store(url), None),
        "verify": lambda: ckpt.verify(url),
        "load": lambda: ckpt.load(url, {"model": torch.nn.Linear(5, 3), "words": {"a": "", "b": ()}}),
        "read": lambda: ckpt.read(url, 20, "model.weight"),
        "stats": lambda: tensor_stats(reader(), "model.weight"),
        "diff": lambda: compare(reader(), reader()),
        "export": lambda: ckpt.export(url, None, out / "hf"),
        "export to dcp": lambda: export_dcp(url, None, out / "dcp"),
        "gc": lambda: plan_gc(open_store(url), None),
    }


def outcomes(root: Path | str, out: Path) -> dict[str, str]:
    """What each reader said: an error's text, a report's problems, or nothing."""
    said: dict[str, str] = {}
    for name, call in readers(root, out).items():
        try:
            found = call()
        except (CkptError, ObjectStoreError) as e:
            said[name] = f"{type(e).__name__}: {e}"
        else:
            said[name] = "; ".join(getattr(found, "problems", ()))
            if name == "list":
                said[name] = "; ".join(r.problem for r in found)
    return said


def test_the_payload_fires_where_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "fired")))
    assert (tmp_path / "fired").exists()


def test_an_honest_checkpoint_gives_no_complaint(root: Path, tmp_path: Path) -> None:
    assert set(outcomes(root, tmp_path / "out").values()) == {""}


KINDS = ("manifest.json", ".part.json", "ledger.json", "r00000-0.safetensors", "generations/0001.json")


def object_of(root: Path, kind: str) -> Path:
    (path,) = [p for p in root.rglob("*") if p.is_file() and str(p).endswith(kind)]
    return path


REPORTED_BY = {
    "manifest.json": {"list", "show", "verify", "load", "read", "export"},
    "ledger.json": {"verify"},
    "r00000-0.safetensors": {"verify", "load", "read", "stats", "diff", "export", "export to dcp"},
    "generations/0001.json": {"list", "show", "load", "verify"},
    ".part.json": set[str](),  # nobody reads it once the manifest stands
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["instead", "torch.save", "before", "after"])
def test_a_payload_in_any_object(root: Path, tmp_path: Path, kind: str, how: str) -> None:
    mark = tmp_path / "fired"
    path = object_of(root, kind)
    was = path.read_bytes()
    if how == "torch.save":
        torch.save(Payload(mark), path)
    else:
        bomb = pickle.dumps(Payload(mark))
        path.write_bytes({"instead": bomb, "before": bomb + was, "after": was + bomb}[how])
    assert path.read_bytes() != was
    said = outcomes(root, tmp_path / "out")
    assert not mark.exists(), "code of the checkpoint was run"
    silent = {name for name in REPORTED_BY[kind] if not said[name]}
    if how == "after" and kind == "r00000-0.safetensors":
        silent = set()  # what stands behind an object belongs to nothing, and nobody reads it
    assert not silent, said


@pytest.mark.slow
@pytest.mark.s3
def test_a_payload_in_any_object_on_s3(saved: Path, s3_url: str, tmp_path: Path) -> None:
    for kind in (None, *KINDS):
        url, mark = f"{s3_url}/{kind or 'honest'}", tmp_path / f"fired-{kind}"
        store, spoilt = open_store(url), object_of(saved, kind) if kind else None
        for path in filter(Path.is_file, saved.rglob("*")):
            data = pickle.dumps(Payload(mark)) if path == spoilt else path.read_bytes()
            store.create(path.relative_to(saved).as_posix(), data)
        said = outcomes(url, tmp_path / f"out-{kind}")
        assert not mark.exists(), "code of the checkpoint was run"
        complaints = {name for name, words in said.items() if words}
        assert complaints >= REPORTED_BY[kind] if kind else not complaints, said


@pytest.mark.parametrize(
    "tag", ["pickle", "__reduce__", "object", "py/object", "enum", "wrapped", "namedtuple"]
)
def test_a_value_that_names_code_is_no_value(root: Path, tmp_path: Path, tag: str) -> None:
    """The manifest's own checksum is made anew, as who tampers would."""
    from surefoot.ckpt.manifest import Manifest, decode, encode

    path = object_of(root, "manifest.json")
    manifest = decode(Manifest, path.read_bytes(), key="m")
    mark = tmp_path / "fired"
    manifest.values["words.a"] = {tag: ["os", "makedirs", [str(mark)]]}
    path.write_bytes(encode(manifest))
    said = outcomes(root, tmp_path / "out")
    assert not mark.exists()
    assert "words" in said["load"], said


def test_a_safetensors_header_that_lies(root: Path, tmp_path: Path) -> None:
    path = object_of(root, "r00000-0.safetensors")
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["format"] = "pickle"
    encoded = json.dumps(header).encode().ljust(length)
    data[8 : 8 + length] = encoded[:length]
    path.write_bytes(data)
    assert "header" in outcomes(root, tmp_path / "out")["verify"]


@pytest.mark.parametrize(
    "key", ["../../outside", "/etc/passwd", "gen-0001/step-0000000020/other/r00000-0.safetensors", "", "a\0b"]
)
def test_a_manifest_cannot_lead_out_of_its_attempt(root: Path, tmp_path: Path, key: str) -> None:
    import msgspec

    from surefoot.ckpt.manifest import Manifest, decode, encode

    path = object_of(root, "manifest.json")
    manifest = decode(Manifest, path.read_bytes(), key="m")
    objects = tuple(msgspec.structs.replace(o, key=key) for o in manifest.objects)
    path.write_bytes(encode(msgspec.structs.replace(manifest, objects=objects)))
    said = outcomes(root, tmp_path / "out")
    for name in ("verify", "load", "read", "export"):
        assert "manifest" in said[name], said
