"""``python -m surefoot.ckpt``, which is ``surefoot ckpt``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

from surefoot.ckpt.errors import CkptError, CkptUserError
from surefoot.ckpt.store import ObjectStoreError
from surefoot.ckpt.tools.cli import NAME, app
from surefoot.command import complain, run_command
from surefoot.exitcodes import ExitCode


def main() -> NoReturn:
    """Run a command and exit."""
    words = sys.argv[1:]
    if (odd := _negative(words)) is not None:
        complain(NAME, f"{odd} is no step: steps are whole numbers from 0; without one the newest is taken")
        sys.exit(ExitCode.USAGE)
    sys.exit(run_command(app, words, name=NAME, foreseen=_code_of))


def _negative(words: Sequence[str]) -> str | None:
    """A negative number where a step stands; it would be taken for an option that there is not."""
    pairs = pairwise(words)
    return next((w for before, w in pairs if re.fullmatch(r"-\d+", w) and not before.startswith("--")), None)


def _code_of(error: Exception) -> ExitCode | None:
    if isinstance(error, CkptUserError | ValueError):
        return ExitCode.USAGE
    if isinstance(error, CkptError):
        return ExitCode.UNEXPECTED
    return ExitCode.ENVIRONMENT if isinstance(error, ObjectStoreError | OSError) else None


if __name__ == "__main__":
    main()
