"""The legal moves of the controller's mind, as one table. PURE.

House rule: whatever is not in `MOVES` raises `IllegalMoveError` and changes nothing. There are no automatic detours.

FORMING is where a new leader begins, since it has to look before it knows anything; a generation that it finds intact
moves it straight to RUNNING. Everything from the fault to the first step of the next generation is FORMING, its stages are
in state.py. HOLD_COMMITS is RUNNING with the object store away: whatever may happen to the one may happen to the
other. HELD refuses to act on a contradiction between etcd, the records and the agents until it is gone, or, where nobody is
there to mend it, until patience ends. DONE and FAILED are final, but for a leader that has to look again because it was
deposed before the outcome was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Mind(Enum):
    """The job as its leader sees it."""

    FORMING = "forming"
    RUNNING = "running"
    HOLD_COMMITS = "hold_commits"
    HELD = "held"
    DONE = "done"
    FAILED = "failed"


class Turn(Enum):
    """What happened to the mind; past tense."""

    ELECTED = "this controller was elected"
    CAME_UP = "all ranks of the generation had begun"
    FAULT_FOUND = "a fault was found"
    SUPERSEDED = "a record above the plan in force was found"
    TAKEN_OVER = "a record of another run was found above those of this run"
    STORE_LOST = "the object store did not answer"
    STORE_BACK = "the object store answered again"
    CONTRADICTED = "etcd, records and agents contradicted each other"
    CLEARED_UP = "the contradiction was gone"
    FINISHED = "the last step was committed"
    GAVE_UP = "the job could not go on"


_MOVES: Mapping[tuple[Mind, Turn], Mind] = {
    (Mind.FORMING, Turn.ELECTED): Mind.FORMING,
    (Mind.RUNNING, Turn.ELECTED): Mind.FORMING,
    (Mind.HELD, Turn.ELECTED): Mind.FORMING,
    (Mind.DONE, Turn.ELECTED): Mind.FORMING,
    (Mind.FAILED, Turn.ELECTED): Mind.FORMING,
    (Mind.FORMING, Turn.CAME_UP): Mind.RUNNING,
    (Mind.FORMING, Turn.FAULT_FOUND): Mind.FORMING,
    (Mind.FORMING, Turn.SUPERSEDED): Mind.FORMING,
    (Mind.FORMING, Turn.CONTRADICTED): Mind.HELD,
    (Mind.FORMING, Turn.FINISHED): Mind.DONE,
    (Mind.FORMING, Turn.GAVE_UP): Mind.FAILED,
    (Mind.FORMING, Turn.TAKEN_OVER): Mind.FAILED,
    (Mind.RUNNING, Turn.FAULT_FOUND): Mind.FORMING,
    (Mind.RUNNING, Turn.SUPERSEDED): Mind.FORMING,
    (Mind.RUNNING, Turn.STORE_LOST): Mind.HOLD_COMMITS,
    (Mind.RUNNING, Turn.CONTRADICTED): Mind.HELD,
    (Mind.RUNNING, Turn.FINISHED): Mind.DONE,
    (Mind.RUNNING, Turn.TAKEN_OVER): Mind.FAILED,
    (Mind.HOLD_COMMITS, Turn.STORE_BACK): Mind.RUNNING,
    (Mind.HELD, Turn.CLEARED_UP): Mind.FORMING,
    (Mind.HELD, Turn.GAVE_UP): Mind.FAILED,
    (Mind.HELD, Turn.TAKEN_OVER): Mind.FAILED,
}

MOVES: Mapping[tuple[Mind, Turn], Mind] = _MOVES | {
    (Mind.HOLD_COMMITS, turn): to
    for (mind, turn), to in _MOVES.items()
    if mind is Mind.RUNNING and turn is not Turn.STORE_LOST
}

FINAL = frozenset({Mind.DONE, Mind.FAILED})


class IllegalMoveError(Exception):
    """A bug of ours: the core wanted a move that is not in the table. Nothing was changed; the story tells how it came there."""

    def __init__(self, mind: Mind, turn: Turn, story: tuple[str, ...] = ()) -> None:
        lines = "".join(f"\n  {line}" for line in story)
        super().__init__(
            f"no move from {mind.name} when {turn.value} ({turn.name}); the story:{lines or ' none'}"
        )
        self.mind = mind
        self.turn = turn


def move(mind: Mind, turn: Turn, story: tuple[str, ...] = ()) -> Mind:
    """Where `mind` goes on `turn`.

    Raises:
        IllegalMoveError: the table does not have it.
    """
    try:
        return MOVES[mind, turn]
    except KeyError:
        raise IllegalMoveError(mind, turn, story) from None
