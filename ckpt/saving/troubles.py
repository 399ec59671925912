"""Errors over process borders, as a `Trouble` and back as an error of the same class; and what they are to a save. Torch-free.

Of a save that comes to nothing all ranks raise the same class: `CommitError` with what was in the way as its cause (`failed`),
or the error itself where it is the caller's to mend or says more than that.
"""

from __future__ import annotations

import msgspec

from surefoot.ckpt import errors, store, storeline
from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import CkptError, CommitError, ReplicasDifferError
from surefoot.ckpt.saving.jobs import Trouble

_OURS: tuple[type[CkptError], ...] = (
    errors.CkptUserError,
    errors.CommitError,
    errors.CoverageError,
    errors.FormatError,
    errors.StateError,
    errors.LineageError,
    storeline.ChannelError,
)
_STORES: tuple[type[Exception], ...] = (
    store.ObjectExistsError,
    store.ObjectMissingError,
    store.ObjectStoreDeniedError,
    store.ObjectStoreError,
    store.ObjectStoreUnavailableError,
    store.ObjectUnknownError,
)
"""Classes that are made of a message alone."""
_BY_NAME = {kind.__name__: kind for kind in (*_OURS, *_STORES)}
_KEPT = (errors.CkptUserError, errors.CoverageError, errors.FormatError, errors.LineageError)
"""What a save raises as it is: nothing that the next one may get over."""


def trouble_of(error: BaseException) -> Trouble:
    detail = {}
    if isinstance(error, ReplicasDifferError):
        detail = msgspec.to_builtins(
            {
                "name": error.name,
                "box": error.box,
                "ranks_by_checksum": dict(error.ranks_by_checksum),
                "odd": error.odd,
            }
        )
    why = error.__cause__ if isinstance(error, CommitError) else None
    return Trouble(
        kind=type(error).__name__,
        message=str(error),
        detail=detail,
        cause=None if why is None else Trouble(kind=type(why).__name__, message=str(why)),
    )


def error_of(trouble: Trouble) -> Exception:
    """An error that says the same; a CommitError that names the class where it is none of ours."""
    error = _error_of(trouble)
    if trouble.cause is not None:
        error.__cause__ = error_of(trouble.cause)
    return error


def _error_of(trouble: Trouble) -> Exception:
    if trouble.kind == ReplicasDifferError.__name__:
        d = trouble.detail
        return ReplicasDifferError(
            trouble.message,
            name=d["name"],
            box=None if d["box"] is None else Box(*(tuple(side) for side in d["box"])),
            ranks_by_checksum={c: tuple(ranks) for c, ranks in d["ranks_by_checksum"].items()},
            odd=tuple(d["odd"]),
        )
    kind = _BY_NAME.get(trouble.kind)
    return CommitError(f"{trouble.kind}: {trouble.message}") if kind is None else kind(trouble.message)


def failed(what: str, error: Exception, who: str = "") -> CkptError:
    """What a save raises because of `error`: it itself, or a CommitError with the reason as its cause.

    Args:
        what: how the message begins, such as ``step 3 was not committed``.
        who: whose error it is, where that is one rank's: all raise the same then.
    """
    own = f"{who} failed: " if who else ""
    if isinstance(error, (*_KEPT, CommitError)) and not who:
        return error
    if isinstance(error, _KEPT):
        kind = _BY_NAME.get(type(error).__name__, errors.CkptUserError)
        assert issubclass(kind, CkptError), "those of the object store are not kept"
        told = kind(f"{what}: {own}{error}")
        told.__cause__ = error.__cause__
        return told
    told = CommitError(f"{what}: {own}{words_of(error)}")
    told.__cause__ = reason_of(error)
    return told


def reason_of(error: BaseException) -> BaseException:
    """What a CommitError says was in the way; any other error is its own reason."""
    return error.__cause__ or error if isinstance(error, CommitError) else error


def refusal(kind: str, message: str) -> CkptError:
    """The error of class `kind` that all ranks raise where one cannot save; CommitError where that class is none to be raised by a
    save."""
    found = _BY_NAME.get(kind)
    return found(message) if found is not None and issubclass(found, _KEPT) else CommitError(message)


def words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
