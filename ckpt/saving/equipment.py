"""What one rank saves with: its view of the state, the staging buffer, the uploader. (torch)

Kept from save to save by a `Checkpointer`. A save goes one of two ways: `stage` copies into the buffer and leaves the rest to
the uploader, `write` stores straight from live memory and takes as long as that takes.
"""

from __future__ import annotations

import logging
import math

import torch

from surefoot.ckpt.channel import Channel
from surefoot.ckpt.live.livestate import LiveState
from surefoot.ckpt.live.pool import StagingBuffer
from surefoot.ckpt.live.streams import page_lock, page_unlock
from surefoot.ckpt.saving.flight import Part
from surefoot.ckpt.saving.handles import SaveHandle
from surefoot.ckpt.saving.jobs import UploadMsg
from surefoot.ckpt.saving.upload import store_job
from surefoot.ckpt.saving.writer import UploaderProcess
from surefoot.ckpt.store import ObjectStore
from surefoot.failpoint import failpoint

_log = logging.getLogger(__name__)
_left_to_devices: list[object] = []
"""Buffers that a device which hangs may still write to: their memory must stay."""


class Equipment:
    """See the module. For the caller's thread, between flights."""

    def __init__(self, store: ObjectStore, channel: Channel, memory_budget: int | None) -> None:
        self.live = LiveState(rank=channel.rank, world_size=channel.world_size, exchange=channel.exchange)
        self._store = store
        self._rank = channel.rank
        self._memory_budget = memory_budget
        self._buffer: StagingBuffer | None = None
        self._locked: torch.Tensor | None = None
        self._unlockable: StagingBuffer | None = None
        self._uploader: UploaderProcess | None = None
        self._told = False

    def get_ready(self) -> bool:
        """Have a buffer for the state that `live` has seen, and an uploader. False where it does not fit: `write` then.

        Neither is waited for: the buffer is touched and the process starts while the caller goes on.
        """
        needed, budget = self.live.staged_nbytes(), self._memory_budget
        if budget is not None and needed > budget:
            return self._refuse(
                f"staging the state takes {needed} bytes on this rank, and memory_budget is {budget}"
            )
        if self._buffer is None or self._buffer.nbytes < needed:
            self._drop_buffer()
            expected = self.live.expected_nbytes()
            expected = expected if budget is None else max(needed, min(expected, budget))
            try:
                self._buffer = StagingBuffer(expected)
            except OSError as e:
                return self._refuse(
                    f"there are no {expected} bytes of memory to stage the state in ({e.strerror})"
                )
        try:
            self.uploader()
        except OSError as e:
            return self._refuse(f"no process can be started to upload the state from a copy ({e.strerror})")
        return True

    def uploader(self) -> UploaderProcess:
        """The uploader; a new one where there is none, or the last one died."""
        if self._uploader is not None and not self._uploader.alive():
            self._uploader.close(0.0)
            self._uploader = None
        if self._uploader is None:
            self._uploader = UploaderProcess(self._store.root, self._rank)
        return self._uploader

    def _refuse(self, why: str) -> bool:
        if not self._told:
            self._told = True
            _log.warning(
                "%s: saves are written straight from live memory, and `save` returns when that is done", why
            )
        return False

    # ---- the two ways

    def stage(self, job: UploadMsg, part: Part, handle: SaveHandle) -> None:
        """Copy the state, and hand it over to the flight. `get_ready` comes first."""
        buffer, uploader, structure = self._buffer, self.uploader(), self.live.layout.structure
        assert buffer is not None, "get_ready made it"
        failpoint("save.before_stage")
        buffer.ready()
        self.live.copied(math.inf)
        self._lock_pages(buffer)
        fence = self.live.stage(buffer)
        failpoint("save.after_stage")

        def send() -> None:
            if fence is not None:
                fence.wait()
            handle.copied()
            part.require_wanted()
            uploader.send_upload(job, structure, buffer)

        if fence is None:
            handle.copied()
        part.hand_over(send)

    def write(self, job: UploadMsg, part: Part) -> None:
        """Store this rank's part from live memory. Raises CommitError (time is up, or another rank failed), ObjectStore…Error."""
        store_job(
            self._store,
            job,
            self.live.layout.structure,
            self.live.chunks(),
            hashes=self.live.hashes_of_any,
            require_wanted=part.require_wanted,
        )

    def _lock_pages(self, buffer: StagingBuffer) -> None:
        """A device copies into page-locked memory by itself; into other memory the host has to help it along."""
        device = self.live.device()
        if device is None or self._locked is not None or self._unlockable is buffer:
            return
        base = torch.frombuffer(buffer.view, dtype=torch.uint8)
        if page_lock(base, device):
            self._locked = base
        else:
            self._unlockable = buffer
            _log.warning(
                "%d bytes to stage in could not be page-locked: copies hold training up", buffer.nbytes
            )

    # ---- the end

    def _drop_buffer(self, wait_s: float = math.inf) -> None:
        """Not while a device copies into it: what hangs keeps its memory."""
        buffer, locked = self._buffer, self._locked
        self._buffer, self._locked = None, None
        if buffer is None:
            return
        if not self.live.copied(wait_s):
            _log.warning("a device does not end its copies: the memory that they go to is left to it")
            _left_to_devices.append((buffer, locked))
            return
        if locked is not None:
            page_unlock(locked)
            del locked
        buffer.close()

    def close(self, wait_s: float) -> None:
        """Let the uploader finish, for so long at most, and let go of everything."""
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.close(wait_s)
        self.live.forget()
        self._drop_buffer(wait_s)
