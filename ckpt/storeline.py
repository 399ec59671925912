"""A line to rank 0's TCPStore on which no call lasts for ever. Torch-free: the connection is given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from surefoot.ckpt.errors import CkptWorldError

_T = TypeVar("_T")


class ChannelError(CkptWorldError):
    """Another rank did not say what it had to in time; the message names it."""


class Line:
    """A connection to rank 0's TCPStore on which no call lasts for ever.

    A TCPStore has no limit for an answer: while its process is stopped, even a wait with a timeout does not end. So a thread makes
    the calls, one after the other, and what is not answered in time is left to it. Where the store is this process's own, it makes
    them itself.
    """

    def __init__(self, store: Any, *, own: bool = False) -> None:
        self.store = store
        self._own = own
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, ask: Callable[[Any], _T], within_s: float) -> _T:
        """Raises: ChannelError: no answer in time; RuntimeError, DistError: what the store raises."""
        if self._own:
            return ask(self.store)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckpt-line", daemon=True)
            self._thread.start()
        answer: Future[_T] = Future()
        self._asked.put((answer, ask))
        try:
            return answer.result(within_s)
        except TimeoutError:
            if answer.done():
                raise
            answer.cancel()
            raise ChannelError(
                f"rank 0 has not answered for {within_s:.0f} s: its process is stopped or hangs, or its machine is cut off"
            ) from None

    def end(self) -> None:
        """Let go of the connection, when the last call is answered."""
        self._asked.put(None)
        del self.store

    def _run(self) -> None:
        store = self.store
        while (asked := self._asked.get()) is not None:
            answer, ask = asked
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(ask(store))
                except BaseException as e:
                    answer.set_exception(e)
            del asked, answer, ask  # what was raised holds on to the store
