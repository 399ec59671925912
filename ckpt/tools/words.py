"""What the words of ``surefoot ckpt`` mean: roots, steps, sizes, rules, folders of this machine."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from surefoot.ckpt.errors import CkptUserError
from surefoot.ckpt.store import ObjectStore, open_store

DEADLINE_S = 15.0

_NOT_THERE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


def open_root(url: str) -> ObjectStore:
    """A root in which a job has begun. Raises StepMissingError: nobody looks at a root that he is yet to make."""
    from surefoot.ckpt.tools.inspect import require_begun

    store = open_store(url, deadline_s=DEADLINE_S)
    require_begun(store)
    return store


@contextmanager
def local(what: str, folder: str) -> Iterator[None]:
    """The command names a folder of this machine; where the system does not let us, another has to be named. A full or broken disk
    is none of that."""
    try:
        yield
    except OSError as e:
        if e.errno not in _NOT_THERE:
            raise
        raise CkptUserError(
            f"cannot {what} {folder}: {e.strerror} ({e.filename}): name another folder"
        ) from e


def local_folder(dest: str | os.PathLike[str]) -> Path:
    """Raises CkptUserError for a URL of another kind."""
    parts = urlsplit(os.fspath(dest))
    if parts.scheme not in ("", "file") or parts.netloc:
        raise CkptUserError(
            f"{os.fspath(dest)!r} is no local folder: write there, then copy it where it is wanted"
        )
    return Path(unquote(parts.path) if parts.scheme else os.fspath(dest))


def open_regular(path: Path) -> BinaryIO:
    """Raises: CkptUserError (a folder, or a pipe, which might never end), OSError."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise CkptUserError(f"{path} is {what} and no file: move it away, or name what is to be imported")
    return open(path, "rb")


def which_step(word: int | None, option: int | None) -> int | None:
    if word is not None and option is not None and word != option:
        raise CkptUserError(f"which step, {word} or {option}? Give one")
    return option if word is None else word


def refuse_options(what: str, why: str, given: Mapping[str, object]) -> None:
    """Of options that mean nothing in this mode. `given`: name to value; None: it was not given.

    Raises CkptUserError naming those that were: what is ignored in silence is taken for done.
    """
    if named := [name for name, value in given.items() if value is not None]:
        raise CkptUserError(f"{what} takes no {', '.join(named)}: {why}")


def rename_rule(text: str) -> tuple[str, str]:
    pattern, equals, new = text.partition("=")
    if not equals or not pattern:
        raise CkptUserError(f"--rename {text!r} must be REGEX=NEW")
    return pattern, new


def size_of(text: str) -> int:
    """``5GB``: powers of 1000; ``5GiB``: of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise CkptUserError(f"{text!r} must be a size such as 5GB or 512MiB")
    unit = (match[2] or "").lower()
    power = " kmgt".index(unit[0]) if unit else 0
    return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** power)
