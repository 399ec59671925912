"""Saving from, and loading into, the memory of a CUDA device: collected everywhere, run where there is one.

What is asked of a device in which order is tested without one: tests/unit/ckpt/test_device_copies.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot import ckpt
from surefoot.ckpt.live.staging import Stager
from surefoot.ckpt.objects.files import FileObjectStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CYCLES = 200_000_000
"""A tenth of a second and more: what is launched behind it has not happened when the host goes on."""


@pytest.fixture(params=["near", "far"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Far: read by several threads, as from S3."""
    monkeypatch.setattr(FileObjectStore, "nearby", request.param == "near")
    return str(tmp_path / "root")


def numbers(n: float, device: str = "cuda") -> dict[str, Any]:
    """Tensors of several types and layouts: large, small, transposed, strided, empty, of no dimension."""
    big = torch.arange(3_000_000, device=device, dtype=torch.float32) + n
    return {
        "big": big,
        "half": (torch.arange(70_000, device=device) % 1000 + n).to(torch.bfloat16),
        "turned": (torch.arange(600_000, device=device).view(600, 1000) + int(n)).t(),
        "strided": torch.stack([big, -big], dim=1)[:, 0],
        "complex": torch.full((33,), complex(n, -n), device=device),
        "whole": torch.tensor(int(n), device=device),
        "none": torch.empty(0, 3, device=device),
        "host": torch.arange(1000.0) + n,
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


# ---------------------------------------------------------------- loading


def test_what_lies_on_a_device_is_filled_in_place(root: str) -> None:
    ckpt.save(root, 1, numbers(5.0))
    live = numbers(0.0)
    before = {name: t.data_ptr() for name, t in live.items()}
    ckpt.load(root, live)
    assert same(live, numbers(5.0))
    assert {name: t.data_ptr() for name, t in live.items()} == before
    assert live["turned"].is_cuda


@pytest.mark.parametrize(("saved_on", "loaded_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_where_it_lay_makes_no_difference(root: str, saved_on: str, loaded_on: str) -> None:
    ckpt.save(root, 1, numbers(5.0, saved_on))
    live = numbers(0.0, loaded_on)
    ckpt.load(root, live)
    assert same(live, numbers(5.0))


def cut(w: torch.Tensor, *ends: int) -> ckpt.Boxes:
    """The tensor, as stretches of its elements up to these, each in memory of its own."""
    flat, parts, start = w.reshape(-1), [], 0
    for end in ends:
        parts += ckpt.Boxes.flat(tuple(w.shape), start=start, tensor=flat[start:end].clone()).parts
        start = end
    return ckpt.Boxes(tuple(w.shape), [(box.offset, part) for box, part in parts])


def test_another_layout_on_the_device(root: str) -> None:
    w = torch.arange(4_000_003 * 3, device="cuda").view(4_000_003, 3)
    ckpt.save(root, 1, {"w": cut(w, 5_000_002, w.numel()), "v": w})
    live = {"w": torch.zeros_like(w), "v": cut(torch.zeros_like(w), 7, 9_000_001, w.numel())}
    ckpt.load(root, live)
    assert torch.equal(live["w"], w)
    again = {"w": torch.zeros_like(w), "v": torch.zeros_like(w)}
    ckpt.save(root, 2, live)
    ckpt.load(root, again)
    assert torch.equal(again["v"], w)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_optimizer_state_that_is_not_there_yet_is_made_where_torch_makes_it(
    root: str, options: dict[str, Any]
) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(1000, 300, device="cuda")
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)

    def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
        optim.zero_grad()
        model(torch.ones(4, 1000, device="cuda")).sum().backward()
        optim.step()

    model, optim = make()
    step(model, optim)
    ckpt.save(root, 1, {"model": model, "optim": optim})
    other, fresh = make()
    ckpt.load(root, {"model": other, "optim": fresh})
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        mine, theirs = optim.state[p], fresh.state[q]
        assert {k: t.device for k, t in theirs.items()} == {k: t.device for k, t in mine.items()}
        assert all(torch.equal(theirs[k], t) for k, t in mine.items())
    step(model, optim)
    step(other, fresh)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_what_was_launched_before_a_load_is_over_when_it_fills(root: str) -> None:
    """On a stream of the caller's that nothing else waits for."""
    ckpt.save(root, 1, numbers(5.0))
    live = numbers(0.0)
    torch.cuda.synchronize()
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        torch.cuda._sleep(CYCLES)
        for t in live.values():
            t.zero_()
        ckpt.load(root, live)
        doubled = live["big"] * 2
    own.synchronize()
    assert same(live, numbers(5.0))
    assert torch.equal(doubled, numbers(5.0)["big"] * 2)


def test_a_snapshot_goes_back_to_the_device(tmp_path: Path) -> None:
    live = numbers(5.0)
    stager = Stager(live, rank=0, world_size=1, exchange=lambda data: [data])
    slot = memoryview(bytearray(stager.nbytes()))
    torch.cuda._sleep(CYCLES)
    live["big"].add_(1)  # launched, and not done when the copy is asked for
    stager.stage(slot, generation=1, step=3, cursor={}, ledger=[])
    for t in live.values():
        t.zero_()
    assert stager.restore(slot).step == 3
    expected = numbers(5.0)
    expected["big"] += 1
    assert same(live, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one(root: str) -> None:
    assert torch.cuda.current_device() == 0
    ckpt.save(root, 1, numbers(5.0, "cuda:1"))
    live = numbers(0.0, "cuda:1") | {"other": torch.zeros(5, device="cuda:0")}
    ckpt.load(root, live, strict=False)
    assert same(live, numbers(5.0) | {"other": torch.zeros(5)})


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("own_stream", [False, True])
def test_what_changes_right_after_a_save_is_not_in_it(root: str, own_stream: bool) -> None:
    """By kernels on the stream of the save, whichever that is; and what was launched before it is."""
    live = numbers(0.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream), ckpt.Checkpointer(root) as c:
        for step in range(1, 5):
            torch.cuda._sleep(CYCLES // 10)
            live["big"].add_(1)
            handle = c.save(step, live)
            live["big"].add_(100)
            live["turned"].zero_()
            live["big"].sub_(100)
            handle.wait()
            assert torch.equal(ckpt.read(root, step, "big"), numbers(float(step))["big"].cpu())
            live["turned"].copy_(numbers(0.0)["turned"])
            assert torch.equal(ckpt.read(root, step, "turned"), numbers(0.0)["turned"].cpu())


def test_memory_that_is_freed_right_after_a_save_is_copied_first(root: str) -> None:
    with ckpt.Checkpointer(root) as c:
        for step in range(1, 6):
            w = torch.full((8 * 2**20,), float(step), device="cuda")
            handle = c.save(step, {"w": w})
            del w
            torch.full((8 * 2**20,), -1.0, device="cuda")  # the same memory, from the allocator
            handle.wait()
            found = ckpt.read(root, step, "w")
            assert found.min().item() == found.max().item() == step


def test_a_buffer_that_grows_is_unlocked_and_locked_again(root: str) -> None:
    """As when optimizer state appears; and each goes back when nothing is copied there any more."""
    with ckpt.Checkpointer(root) as c:
        for step, nbytes in enumerate((2**20, 2**24, 2**26), start=1):
            c.save(step, {"w": torch.full((nbytes,), step, dtype=torch.uint8, device="cuda")})
            assert c._equipment is not None
            assert c._equipment._locked is not None
    torch.cuda.synchronize()
    torch.zeros(10, device="cuda").add_(1).cpu()  # no error was left behind
    for step in (1, 2, 3):
        assert ckpt.read(root, step, "w").unique().tolist() == [step]
