"""What can go wrong in an agent, by whose fault it is.

::

    AgentError
    ├── AgentUsageError           the caller's: a path too long, a job the agent cannot serve
    ├── NodeError                 this machine's: the message says what to free or mend
    │   ├── MemoryBudgetError     snapshots would need more than `checkpoint.memory_budget`
    │   ├── SharedMemoryFullError the shared-memory file system is full
    │   └── StillAliveError       processes that would not end
    ├── LaunchError               ranks could not be started; becomes a `wire.StartFailure`
    ├── RecordUnreadableError     the record that the plan key names cannot be had, or is not what the key says
    ├── ChannelClosedError        a process of this node (zygote, snapshot server) went away; it is started again
    └── TransferError             a snapshot did not get from one node to another; `kind` says how
"""

from __future__ import annotations

from surefoot.agent.messages import TransferFailure
from surefoot.controller.wire import ErrorReport


class AgentError(Exception):
    """Base of what the agent raises itself."""


class AgentUsageError(AgentError):
    """The agent was started with something it cannot serve."""


class NodeError(AgentError):
    """This machine cannot give what is needed."""


class MemoryBudgetError(NodeError):
    """Snapshots would need more memory than the job's budget allows."""


class SharedMemoryFullError(NodeError):
    """The file system of the shared-memory folder has no room."""


class StillAliveError(NodeError):
    """Processes of a former generation or incarnation did not end in time."""


class LaunchError(AgentError):
    """Ranks could not be started. `error` is set where the job's own code is to blame: no other node will do better."""

    def __init__(self, message: str, error: ErrorReport | None = None) -> None:
        super().__init__(message)
        self.error = error


class RecordUnreadableError(AgentError):
    """The record that a pointer names cannot be had, or is not what the pointer says."""


class ChannelClosedError(AgentError):
    """The process at the other end of a channel has gone."""


class TransferError(AgentError):
    """A snapshot could not be brought here, or to a peer."""

    def __init__(self, kind: TransferFailure, message: str) -> None:
        super().__init__(message)
        self.kind: TransferFailure = kind
