"""Who may call a `Checkpointer`: its own process, one call at a time, and all ranks together. (torch)"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

from surefoot.ckpt.channel import Channel
from surefoot.ckpt.errors import CkptUserError
from surefoot.ckpt.opening import open_channel

CHANNEL_TIMEOUT_S = 300.0
"""How long ranks wait for each other at a save or load: they may come to it at different times."""


class Calls:
    """Of one `Checkpointer`. The ranks' channel is opened by the first call that needs it, and is there until `close`."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._owner = os.getpid()
        self._calling = threading.Lock()
        self._channel: Channel | None = None
        self._call = ExitStack()
        """Of the call under way, which all ranks make together."""
        self._name = ""

    @property
    def mine(self) -> bool:
        """False in a process that was forked from the owner's: connections and uploader are the owner's to use and to end."""
        return os.getpid() == self._owner

    def require_mine(self) -> None:
        """Raises CkptUserError in a forked process."""
        if not self.mine:
            raise CkptUserError(
                f"this Checkpointer belongs to process {self._owner}, from which this one was forked: make another one here"
            )

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """A call, by the name that its caller knows. Raises CkptUserError where another is under way, in another thread or below a signal handler: what one has looked
        at would be saved as the other's."""
        if not self._calling.acquire(blocking=False):
            raise CkptUserError(
                "another call of this Checkpointer is under way, in another thread or interrupted by this signal handler: calls come one "
                "after the other, on all ranks in the same order; let a handler set a flag, and save in the training loop"
            )
        try:
            with ExitStack() as self._call:
                self._name = name
                if self._channel is not None:
                    self._call.enter_context(self._channel.one_call(name))
                yield
        finally:
            self._calling.release()

    def channel(self) -> Channel:
        """For a call that is under way. Raises as `require_mine` and `open_channel`."""
        self.require_mine()
        if self._channel is None:
            self._channel = open_channel(self._group, CHANNEL_TIMEOUT_S, self._name)
            self._call.enter_context(self._channel.one_call(self._name))
        return self._channel

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def name_of(call: str, step: int | None) -> str:
    """As messages name it."""
    return f"{call}()" if step is None else f"{call}(step {step})"
