"""What we ask of a CUDA device besides copying: streams of our own and the caller's, and page-locked memory. (torch)

A thread has a current device and current streams of its own, and begins with device 0 and the default streams. So whatever
another thread than the caller's does here it does under the caller's device and streams: on others a copy would be waited for by
nobody, and the first call that asks device 0 for anything takes half a gigabyte of its memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

POLL_S = 0.001
"""How often it is looked whether copies are done, where that may not take for ever."""


class Fence:
    """Copies that devices still make. `wait` blocks the calling thread until they are done."""

    def __init__(self, events: Sequence[tuple[torch.device, Any]], sources: Sequence[torch.Tensor]) -> None:
        self._events = events
        self._sources = sources
        """Kept, so that their memory is not given to others meanwhile."""

    def wait(self) -> None:
        for device, event in self._events:
            with torch.cuda.device(device):
                event.synchronize()
        self._sources = ()


class SideStreams:
    """One stream for copies per device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Fence | None:
        """Start copies (target in host memory, source on a device). None where there are none."""
        if not pairs:
            return None
        events: list[tuple[torch.device, Any]] = []
        for device in dict.fromkeys(source.device for _, source in pairs):
            side, current = self._on(device), torch.cuda.current_stream(device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for target, source in pairs:
                    if source.device == device:
                        target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(side)
            current.wait_event(event)
            events.append((device, event))
        return Fence(events, [source for _, source in pairs])

    def _on(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is copied any more, also of what nobody has a fence of. False where that takes longer: a device may
        hang. One that has failed copies nothing."""
        until = time.monotonic() + timeout_s
        for side in self._streams.values():
            while not _finished(side):
                if time.monotonic() > until:
                    return False
                time.sleep(POLL_S)  # CUDA has no wait that ends after a time
        return True


def _finished(stream: Any) -> bool:
    try:
        return stream.query()
    except RuntimeError:
        return True


class CallersStreams:
    """The streams on which the caller works, on each CUDA device among these. False where there is none.

    Made in the caller's thread. What is copied to a device on them comes after all that the caller has launched.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        found = dict.fromkeys(d for d in devices if d.type == "cuda")
        self._streams = [torch.cuda.current_stream(d) for d in found]

    def __bool__(self) -> bool:
        return bool(self._streams)

    def adopt(self) -> None:
        """Let the calling thread, one of ours, work on them too."""
        for stream in self._streams:
            torch.cuda.set_stream(stream)

    def synchronize(self) -> None:
        """Wait until all that was launched on them is done."""
        for stream in self._streams:
            stream.synchronize()


# ---------------------------------------------------------------- page-locked memory


def page_lock(base: torch.Tensor, device: torch.device) -> bool:
    """Let devices copy into `base` by themselves. False where that cannot be: then copies go through torch's own buffers, and hold
    the host up."""
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart()
        if int(cudart.cudaHostRegister(base.data_ptr(), base.numel(), 0)) == 0:
            return True
        _take_up_error(device)
        return False


def _take_up_error(device: torch.device) -> None:
    """The runtime keeps the error of a call that failed for whoever asks next, which is torch after the next kernel."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return


def page_unlock(base: torch.Tensor) -> None:
    """Before the memory is given back, and when nothing is copied there any more."""
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(base.data_ptr())
