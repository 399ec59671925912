"""A line to rank 0's TCPStore on which no call lasts for ever. Torch-free: the connection is given."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from surefoot.ckpt.errors import ElsewhereError

_T = TypeVar("_T")

SLICES = 4
"""A wait is over after so many of its parts: who was held up himself (stopped, or by a call that kept Python's lock) has missed one
part when he goes on, and gives what has come meanwhile time to be heard."""


class ChannelError(ElsewhereError):
    """Another rank did not say what it had to in time, died, hangs or left the call; the message names it."""


class Line:
    """A connection to rank 0's TCPStore on which no call lasts for ever.

    A TCPStore has no limit for an answer: while its process is stopped, even a wait with a timeout does not end. So a thread makes
    the calls, one after the other, and what is not answered in time is left to it. Where the store is this process's own, it makes
    them itself.

    Args:
        runs: is rank 0's process seen to run? Then it is only slow to answer, and waited for.
    """

    def __init__(self, store: Any, *, own: bool = False, runs: Callable[[], bool] = lambda: False) -> None:
        self.store = store
        self._own = own
        self._runs = runs
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._awaited: Future[Any] | None = None

    def call(self, ask: Callable[[Any], _T], within_s: float) -> _T:
        """Raises: ChannelError: no answer in time, or as `fail` says; RuntimeError, DistError: what the store raises."""
        if self._own:
            return ask(self.store)
        answer = self._awaited = self._put(ask)
        for n in itertools.count(1):
            try:
                return answer.result(within_s / SLICES)
            except TimeoutError:
                if answer.done():
                    raise
            if n >= SLICES and not self._runs():
                break
        error = ChannelError(
            f"rank 0 has not answered for {within_s:.0f} s: its process is stopped or hangs, or its machine is cut off"
        )
        _settle(answer, lambda: answer.set_exception(error))
        return answer.result()

    def post(self, ask: Callable[[Any], Any]) -> None:
        """The same in its turn, and nobody waits for it. Raises nothing but what `call` does of an own store."""
        if self._own:
            ask(self.store)
        else:
            self._put(ask)

    def fail(self, error: ChannelError) -> None:
        """End the `call` that is waited for, from another thread. What it has asked is left to the line's thread."""
        answer = self._awaited
        if answer is not None:
            _settle(answer, lambda: answer.set_exception(error))

    def end(self) -> None:
        """Let go of the connection, when the last call is answered."""
        self._asked.put(None)
        del self.store

    def _put(self, ask: Callable[[Any], Any]) -> Future[Any]:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-line", daemon=True)
                self._thread.start()
        answer: Future[Any] = Future()
        self._asked.put((answer, ask))
        return answer

    def _run(self) -> None:
        store = self.store
        while (asked := self._asked.get()) is not None:
            answer, ask = asked
            if not answer.done():
                try:
                    value = ask(store)
                    _settle(answer, lambda answer=answer, value=value: answer.set_result(value))
                    del value
                except BaseException as e:
                    _settle(answer, lambda answer=answer, e=e: answer.set_exception(e))
            del asked, answer, ask  # what was raised holds on to the store


def _settle(answer: Future[Any], how: Callable[[], None]) -> None:
    """Unless it was settled by another thread."""
    if not answer.done():
        with suppress(InvalidStateError):
            how()
