"""The errors of the controller's shell, one tree. Those of the stores stand with the stores.

::

    ControllerError
    ├── ControllerUsageError     the caller's: a token file that cannot be read
    └── CoreBrokenError          our bug: the core raised, or an invariant does not hold
"""

from __future__ import annotations


class ControllerError(Exception):
    """Base of what a controller raises on purpose. The message says what, where, and what to do."""


class ControllerUsageError(ControllerError):
    """The command line or a file it names is wrong."""


class CoreBrokenError(ControllerError):
    """A bug of ours: the core raised. The journal holds the events that led there; a standby goes on from the stores."""
