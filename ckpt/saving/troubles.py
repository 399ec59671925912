"""Errors over process borders: as a `Trouble`, and back as an error of the same class. Torch-free."""

from __future__ import annotations

import msgspec

from surefoot.ckpt import errors, store
from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import CommitError, ReplicasDifferError
from surefoot.ckpt.saving.jobs import Trouble

_PLAIN: tuple[type[Exception], ...] = (
    errors.CommitError,
    errors.CoverageError,
    errors.StateError,
    errors.LineageError,
    store.ObjectExistsError,
    store.ObjectMissingError,
    store.ObjectStoreDeniedError,
    store.ObjectStoreUnavailableError,
    store.ObjectUnknownError,
)
"""Classes that are made of a message alone."""
_BY_NAME = {kind.__name__: kind for kind in _PLAIN}


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
    return Trouble(kind=type(error).__name__, message=str(error), detail=detail)


def error_of(trouble: Trouble) -> Exception:
    """An error that says the same; a CommitError that names the class where it is none of ours."""
    if trouble.kind == ReplicasDifferError.__name__:
        d = trouble.detail
        return ReplicasDifferError(
            trouble.message,
            name=d["name"],
            box=Box(*(tuple(side) for side in d["box"])),
            ranks_by_checksum={c: tuple(ranks) for c, ranks in d["ranks_by_checksum"].items()},
            odd=tuple(d["odd"]),
        )
    kind = _BY_NAME.get(trouble.kind)
    return CommitError(f"{trouble.kind}: {trouble.message}") if kind is None else kind(trouble.message)


def words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
