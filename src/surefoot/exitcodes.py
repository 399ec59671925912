"""The exit codes of every Surefoot process, as listed in docs/operations.md."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a process tells whoever started it. Only `FAILED` and `ENVIRONMENT` are worth starting again."""

    DONE = 0
    """The job reached its last step, or the command did what it was asked."""

    UNEXPECTED = 1
    """A bug or something unforeseen; the traceback is on stderr."""

    USAGE = 2
    """The command line or the JobSpec is wrong; nothing was started."""

    FAILED = 3
    """The job failed; another attempt may get further."""

    DO_NOT_REQUEUE = 4
    """The job failed and would fail again: the restart budget is spent, or the training code fails the same way each time."""

    ENVIRONMENT = 5
    """etcd or the object store cannot be reached or denies access, a port is in use, a tool is missing."""

    INTERRUPTED = 130
    """Ctrl-C or SIGTERM; everything was cleaned up first."""
