"""What can go wrong in a rank, whose fault it is, and how the agent is told.

::

    SessionError
    ├── MisuseError              the training code or the spec is wrong; the message says where and what to write instead
    │   ├── EntryPointError          `module:function` names nothing
    │   ├── BatchCountError          not exactly one next(data) in a step
    │   ├── DataEndedError           a step was begun after the data had ended
    │   └── StartCursorError         the starting point does not say where the data goes on
    ├── RankWorldError           the world failed: the next generation may do better
    │   ├── AgentTimeoutError        the agent did not answer in time
    │   ├── StartupError             the starting point could not be taken up by all ranks
    │   ├── StartDamagedError        it is a committed step, and its objects are damaged or gone
    │   └── CommitGivenUpError       the last checkpoint could not be committed
    └── RanksDisagreeError       ranks are not in the same step: our bug, or two generations mixed

A rank that loses its agent does not raise: it ends with `exits.AGENT_LOST_CODE` at once, for nobody is left to tell.
This module is pure; it knows torch's errors by their names only.
"""

from __future__ import annotations

import traceback
from typing import Literal

from surefoot.controller.wire import DamagedStep, ErrorReport

ErrorKind = Literal["collective", "workload", "data", "checkpoint", "startup", "agent_lost"]
Area = Literal["data", "checkpoint"]
"""Whose code of ours was running when an exception came out of it."""

MESSAGE_CHARS_MAX = 2_000
TRACEBACK_CHARS_MAX = 8_000
"""A status holds the reports of all ranks of a node and must stay far below etcd's 1.5 MB per request."""


class SessionError(Exception):
    """Base of all errors a rank's session raises itself."""


class MisuseError(SessionError):
    """The caller's mistake."""


class EntryPointError(MisuseError):
    """A ``module:function`` of the spec does not name a function."""


class BatchCountError(MisuseError):
    """next(data) was not called exactly once in a step."""


class DataEndedError(MisuseError):
    """A step was begun after the data had ended."""


class StartCursorError(MisuseError):
    """The checkpoint to start from holds no cursor of the loader, or that of another step."""


class RankWorldError(SessionError):
    """The world failed, not the training code."""


class AgentTimeoutError(RankWorldError):
    """The agent is connected but did not answer within the deadline."""


class StartupError(RankWorldError):
    """The plan's starting point was not restored, or not by all ranks alike."""


class StartDamagedError(RankWorldError):
    """The committed step that the plan starts from is damaged; `damaged` says where."""

    def __init__(self, damaged: DamagedStep) -> None:
        super().__init__(
            f"step {damaged.step} of generation {damaged.generation} cannot be restored: {damaged.detail}"
        )
        self.damaged = damaged


class CommitGivenUpError(RankWorldError):
    """The object store did not take the last checkpoint, after all tries."""


class RanksDisagreeError(SessionError):
    """The ranks' words of one exchange do not fit together."""


# Names and not classes: torch is not imported here, and DistError's children all have it among their bases.
_COLLECTIVE_CLASSES = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
# What gloo and NCCL say when a peer is gone or silent; gloo raises plain RuntimeErrors.
_COLLECTIVE_TEXTS = (
    "gloo",
    "NCCL",
    "Connection reset by peer",
    "Connection closed by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "ProcessGroup",
)


def is_collective(error: BaseException) -> bool:
    """True if `error` came out of a communication: most likely the effect of somebody else's death."""
    if any(base.__name__ in _COLLECTIVE_CLASSES for base in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _COLLECTIVE_TEXTS)


def kind_of(error: BaseException, *, area: Area | None, first_step_begun: bool) -> ErrorKind:
    """Classify what ended a rank.

    Args:
        area: set while our own loader or checkpoint code ran on the rank's behalf.
        first_step_begun: a batch of this generation was taken; before that all else is ``startup``.
    """
    if is_collective(error):
        return "collective"
    if area is not None:
        return area
    for base in type(error).__mro__:
        if base.__module__.startswith("surefoot.loader"):
            return "data"
        if base.__module__.startswith("surefoot.ckpt"):
            return "checkpoint"
    if isinstance(error, CommitGivenUpError):
        return "checkpoint"
    return "workload" if first_step_begun else "startup"


# Names again: the loader is not imported here. What it cannot reach may be there the next time; what is wrong stays wrong.
_PERMANENT_LOADER_CLASSES = frozenset({"LoaderUsageError", "BadDataError", "SourceMissingError"})


def is_permanent(error: BaseException) -> bool:
    """True where the same code, spec and data must fail in the same way again."""
    return isinstance(error, MisuseError) or any(
        base.__name__ in _PERMANENT_LOADER_CLASSES and base.__module__.startswith("surefoot.loader")
        for base in type(error).__mro__
    )


def report(error: BaseException, *, area: Area | None, first_step_begun: bool) -> ErrorReport:
    """The bounded account of `error` that travels to the agent and on to the controller."""
    return ErrorReport(
        kind=kind_of(error, area=area, first_step_begun=first_step_begun),
        type=type(error).__name__,
        message=_bounded(str(error) or repr(error), MESSAGE_CHARS_MAX),
        traceback=_bounded("".join(traceback.format_exception(error)), TRACEBACK_CHARS_MAX),
        permanent=is_permanent(error),
        damaged=error.damaged if isinstance(error, StartDamagedError) else None,
    )


def _bounded(text: str, chars_max: int) -> str:
    """The end of a text is what tells most: the innermost frames and the message."""
    return text if len(text) <= chars_max else "… " + text[-(chars_max - 2) :]
