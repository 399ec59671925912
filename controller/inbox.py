"""The one queue of a controller: whatever happens anywhere becomes an event here, and one thread takes them in order.

Events belong to a *term*, the time from one election of this controller to the next. Threads of a former term may still
have something to say; what they post is dropped, as if it had never arrived.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from surefoot.controller.core.events import Elected, Event


class Inbox:
    """Any thread posts, one takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._term = 0
        self._numbers = itertools.count(1)

    def begin_term(self, event: Elected) -> int:
        """This controller was elected: what is still queued or on its way from before does not count any more."""
        with self._changed:
            self._term += 1
            self._events.clear()
            self._put(event)
            return self._term

    def post(self, events: Iterable[Event], *, term: int | None = None) -> None:
        """Queue events, unless they are of another term than the present one (None: of whatever term)."""
        with self._changed:
            if term is None or term == self._term:
                for event in events:
                    self._put(event)

    def wake(self) -> None:
        """Let a waiting `take` return."""
        with self._changed:
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[Event]:
        """All that is queued; waits for something up to `timeout_s`, or until `wake`."""
        with self._changed:
            if not self._events:
                self._changed.wait(timeout_s)
            events = list(self._events)
            self._events.clear()
            return events

    @property
    def term(self) -> int:
        with self._changed:
            return self._term

    def _put(self, event: Event) -> None:
        """Every event gets the number by which journal, log and the decisions it leads to name it."""
        if not event.cause_id:
            event = replace(event, cause_id=f"e{next(self._numbers)}")
        self._events.append(event)
        self._changed.notify_all()
