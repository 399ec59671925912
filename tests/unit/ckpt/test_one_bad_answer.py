"""One answer that was spoilt on the way condemns no checkpoint: what does not come whole is asked for once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from surefoot import ckpt
from surefoot.ckpt.objects.files import FileObjectStore
from surefoot.ckpt.store import ObjectMissingError


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value), "v": torch.full((2000,), value)}


class Spoilt:
    """The first answers about keys that contain `part` are spoilt; `left` says how many more will be."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, part: str, spoil: Callable[[bytes], bytes | None]
    ) -> None:
        self.left = 0
        read, read_into = FileObjectStore.read, FileObjectStore.read_into

        def spoilt_read(store: FileObjectStore, key: str, start: int = 0, length: int | None = None) -> bytes:
            data = read(store, key, start, length)
            if part not in key or not self.left:
                return data
            self.left -= 1
            found = spoil(data)
            if found is None:
                raise ObjectMissingError(key)
            return found

        def spoilt_read_into(
            store: FileObjectStore, key: str, start: int, views: Sequence[memoryview]
        ) -> int:
            found = read_into(store, key, start, views)
            if part not in key or not self.left:
                return found
            self.left -= 1
            left = spoil(bytes(found))
            if left is None:
                raise ObjectMissingError(key)
            return len(left)

        monkeypatch.setattr(FileObjectStore, "read", spoilt_read)
        monkeypatch.setattr(FileObjectStore, "read_into", spoilt_read_into)
        monkeypatch.setattr(FileObjectStore, "look", lambda *args: None)


def flipped(data: bytes) -> bytes:
    return data[:50] + bytes([data[50] ^ 1]) + data[51:]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("part", "spoil"),
    [
        ("manifest.json", flipped),
        ("manifest.json", lambda data: b"<html>"),
        ("pieces.parquet", flipped),
        ("generations/", flipped),
        (".safetensors", cut),
        (".safetensors", lambda data: None),
    ],
)
def test_what_comes_spoilt_once_is_read_again(
    part: str, spoil: Callable[[bytes], bytes | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.ckpt.format.piecetable.TABLE_PIECES_MIN", 1)
    with ckpt.Checkpointer(tmp_path) as c:
        for step in (1, 2):
            c.save(step, state(step), blocking=True)
    spoilt = Spoilt(monkeypatch, part, spoil)
    spoilt.left = 1
    found = state(0)
    loaded = ckpt.load(tmp_path, found)
    assert spoilt.left == 0, "the fault fired"
    assert loaded is not None
    assert loaded.step == 2
    assert not loaded.passed_over
    assert torch.equal(found["w"], state(2)["w"])
    assert not list(tmp_path.rglob("aside.json"))


@pytest.mark.parametrize("part", ["manifest.json", ".safetensors"])
def test_what_stays_spoilt_is_passed_over(part: str, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as c:
        for step in (1, 2):
            c.save(step, state(step), blocking=True)
    (damaged,) = [p for p in tmp_path.rglob(f"*{part}") if "step-0000000002" in str(p)]
    damaged.write_bytes(cut(damaged.read_bytes()))
    loaded = ckpt.load(tmp_path, state(0))
    assert loaded is not None
    assert loaded.step == 1
    assert [step for step, _ in loaded.passed_over] == [2]
