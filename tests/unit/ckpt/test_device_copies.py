"""What is asked of a CUDA device, and in which order: on a stand-in that writes it down. tests/unit/ckpt/test_gpu.py has the rest."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surefoot import ckpt
from surefoot.ckpt.live import streams
from surefoot.ckpt.live.livestate import LiveState
from surefoot.ckpt.live.pool import StagingBuffer
from surefoot.ckpt.live.streams import CallersStreams, SideStreams, page_lock
from surefoot.ckpt.loading import carrying
from surefoot.ckpt.objects.files import FileObjectStore
from surefoot.ckpt.saving import equipment

CUDA_0, CUDA_1 = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    def __init__(self, log: list[str], name: str, device: torch.device) -> None:
        self.log, self.name, self.device = log, name, device
        self.left = 0
        """How often it is not done yet when it is asked."""

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for the event after {event.after}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


class Event:
    after = ""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self, stream: Stream) -> None:
        self.after = self.log[-1]
        self.log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for the event after {self.after}")


class Cuda:
    """As much of torch.cuda as is used. `refuses`: memory cannot be page-locked."""

    def __init__(self, refuses: bool = False) -> None:
        self.log: list[str] = []
        self.refuses = refuses
        self.made: list[Stream] = []

    def Stream(self, device: torch.device) -> Stream:
        self.made.append(Stream(self.log, f"side {device.index}", device))
        return self.made[-1]

    def Event(self) -> Event:
        return Event(self.log)

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self.log, f"current {device.index}", device)

    def set_stream(self, stream: Stream) -> None:
        self.log.append(f"{threading.current_thread().name} works on {stream.name}")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield
        self.log.append(f"off {stream.name}")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.log.append(f"to device {device.index}")
        yield

    def cudart(self) -> Any:
        def register(address: int, nbytes: int, flags: int) -> int:
            self.log.append(f"register {nbytes}")
            return 2 if self.refuses else 0

        return SimpleNamespace(cudaHostRegister=register)


class Target:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def copy_(self, source: Any, *, non_blocking: bool) -> None:
        assert non_blocking
        self.log.append(f"copy {self.name}")


def pair(cuda: Cuda, name: str, device: torch.device) -> tuple[Any, Any]:
    return Target(cuda.log, name), SimpleNamespace(device=device)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()

    def zeros(_: int, device: torch.device) -> None:
        found.log.append("kernel")
        raise RuntimeError("the error of a call before")

    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=found, zeros=zeros))
    return found


def test_copies_come_after_what_was_launched_and_before_what_will_be(cuda: Cuda) -> None:
    """On each device: the side stream waits for the caller's, copies, and the caller's waits for that. Not the host."""
    side = SideStreams()
    pairs = [pair(cuda, "a", CUDA_0), pair(cuda, "b", CUDA_1), pair(cuda, "c", CUDA_0)]
    fence = side.copy(pairs)
    assert fence is not None
    assert cuda.log == [
        *("side 0 waits for current 0", "on side 0", "copy a", "copy c", "event on side 0", "off side 0"),
        "current 0 waits for the event after copy c",
        *("side 1 waits for current 1", "on side 1", "copy b", "event on side 1", "off side 1"),
        "current 1 waits for the event after copy b",
    ]
    cuda.log.clear()
    fence.wait()
    assert cuda.log == [
        *("to device 0", "host waits for the event after copy c"),
        *("to device 1", "host waits for the event after copy b"),
    ]
    side.copy(pairs)
    assert [s.name for s in cuda.made] == ["side 0", "side 1"], "made once"


def test_what_is_copied_lives_until_it_is(cuda: Cuda) -> None:
    source: Any = type("Source", (), {"device": CUDA_0})()
    gone = weakref.ref(source)
    fence = SideStreams().copy([(pair(cuda, "a", CUDA_0)[0], source)])
    del source
    assert fence is not None
    assert gone() is not None
    fence.wait()
    assert gone() is None


def test_copies_of_which_nobody_has_a_fence_can_be_waited_for(cuda: Cuda) -> None:
    side = SideStreams()
    assert side.idle(0.0)
    side.copy([pair(cuda, "a", CUDA_0)])
    cuda.made[0].left = 3
    assert side.idle(60.0)
    cuda.made[0].left = 10**9
    assert not side.idle(0.0), "a device that hangs"


def test_our_threads_work_on_the_streams_of_the_caller(cuda: Cuda) -> None:
    """A thread begins on device 0, where nobody else may have anything to do."""
    found = CallersStreams([CUDA_1, torch.device("cpu"), CUDA_0, CUDA_1])
    assert found
    assert not CallersStreams([torch.device("cpu")])
    thread = threading.Thread(target=found.adopt, name="reader")
    thread.start()
    thread.join()
    found.synchronize()
    assert cuda.log == [
        *("reader works on current 1", "reader works on current 0"),
        *("host waits for current 1", "host waits for current 0"),
    ]


def test_memory_that_cannot_be_locked_leaves_no_error_to_others(cuda: Cuda) -> None:
    base = torch.empty(4096, dtype=torch.uint8)
    assert page_lock(base, CUDA_1)
    cuda.refuses = True
    assert not page_lock(base, CUDA_1)
    assert cuda.log == ["to device 1", "register 4096"] * 2 + ["kernel"]


# ---------------------------------------------------------------- the staging buffer


@pytest.fixture
def locking(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the staging buffer of a state that is on a device, as it seems."""
    log: list[str] = []

    def logged(name: str, then: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            log.append(name)
            return then(*args)

        return call

    monkeypatch.setattr(LiveState, "device", lambda _: CUDA_1)
    monkeypatch.setattr(LiveState, "copied", logged("wait", LiveState.copied))
    monkeypatch.setattr(LiveState, "stage", logged("copy", LiveState.stage))
    monkeypatch.setattr(StagingBuffer, "close", logged("close", StagingBuffer.close))
    monkeypatch.setattr(equipment, "page_lock", logged("lock", lambda *_: True))
    monkeypatch.setattr(equipment, "page_unlock", logged("unlock", lambda *_: None))
    return log


def test_a_buffer_is_locked_once_and_given_back_when_nothing_is_copied_to_it(
    locking: list[str], tmp_path: Path
) -> None:
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, {"w": torch.ones(1000)})
        c.save(2, {"w": torch.ones(1000)})
        c.save(3, {"w": torch.ones(10_000)})
    assert locking == [
        *("wait", "lock", "copy"),
        *("wait", "copy"),
        *("wait", "unlock", "close"),
        *("wait", "lock", "copy"),
        *("wait", "unlock", "close"),
    ]


def test_a_buffer_that_cannot_be_locked_is_not_tried_again(
    locking: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equipment, "page_lock", lambda *_: locking.append("lock"))
    with ckpt.Checkpointer(tmp_path) as c:
        for step in (1, 2):
            c.save(step, {"w": torch.ones(1000)})
    assert locking.count("lock") == 1
    assert "unlock" not in locking
    assert ckpt.verify(str(tmp_path), 2).ok


def test_a_buffer_that_a_device_hangs_on_stays(
    locking: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages would be another's, and the device would write to them."""
    kept: list[object] = []
    monkeypatch.setattr(equipment, "_left_to_devices", kept)
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, {"w": torch.ones(1000)}).wait()
        monkeypatch.setattr(LiveState, "copied", lambda *_: False)
    assert locking == ["wait", "lock", "copy"]
    assert len(kept) == 1


def test_a_state_in_host_memory_asks_nothing_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equipment, "page_lock", lambda *_: pytest.fail("locked"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, {"w": torch.ones(1000)})


# ---------------------------------------------------------------- loading


def test_what_is_read_for_a_device_is_used_again_when_it_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all threads, on the streams of the caller, whatever is the current device there."""
    ckpt.save(tmp_path, 1, {f"w{n}": torch.full((2**21,), float(n)) for n in range(6)})
    log: list[tuple[str, str]] = []

    class Recorded:
        def __init__(self, devices: Any) -> None:
            self.devices = set(devices)

        def __bool__(self) -> bool:
            return False  # here nothing can be page-locked

        def adopt(self) -> None:
            log.append((threading.current_thread().name, "adopt"))

        def synchronize(self) -> None:
            log.append((threading.current_thread().name, "synchronize"))

    scratch: Any = carrying._Scratch
    give = scratch.give
    monkeypatch.setattr(
        scratch, "give", lambda *a: (log.append((threading.current_thread().name, "give")), give(*a))
    )
    monkeypatch.setattr(carrying, "CallersStreams", Recorded)
    monkeypatch.setattr(FileObjectStore, "nearby", False)
    live = {
        f"w{n}": torch.zeros(2**21, 2)[:, 0] for n in range(6)
    }  # of another layout in memory: through scratch
    ckpt.load(tmp_path, live)
    assert all(bool((t == n).all()) for n, t in enumerate(live.values()))
    threads = {name for name, what in log if what == "give"}
    assert threads
    assert all(name.startswith("ckpt-read") for name in threads)
    for name in threads:
        mine = [what for thread, what in log if thread == name]
        assert mine[0] == "adopt"
        assert all(mine[i - 1] == "synchronize" for i, what in enumerate(mine) if what == "give")
