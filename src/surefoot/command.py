"""How a command ends: what can be foreseen is one line on stderr and an exit code; a traceback is a bug of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer.core

from surefoot.exitcodes import ExitCode


class CommandError(Exception):
    """Ends the command with one message and `exit_code`."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Commands(typer.core.TyperGroup):
    """Ctrl-C is answered here: typer itself would make an empty line and an exit of it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as e:
            raise CommandError("interrupted", ExitCode.INTERRUPTED) from e


def run_command(
    app: typer.Typer,
    words: Sequence[str],
    *,
    name: str,
    foreseen: Callable[[Exception], ExitCode | None] = lambda e: None,
) -> int:
    """Run `app` (made with ``cls=Commands``) with these words, and return its exit code.

    Args:
        name: what the command line begins with, and each complaint.
        foreseen: the exit code of an error of the command's own; None: none of those, it is a bug.
    """
    try:
        return app(args=list(words) or ["--help"], prog_name=name, standalone_mode=False) or ExitCode.DONE
    except CommandError as e:
        return _end(name, e, e.exit_code)
    except KeyboardInterrupt:
        return _end(name, "interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Nobody reads: the flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except Exception as e:
        if (code := foreseen(e)) is not None:
            return _end(name, e, code)
        # typer's own errors (a wrong option …) share no public base class; all can format themselves.
        if not hasattr(e, "format_message"):
            raise
        where = getattr(getattr(e, "ctx", None), "command_path", name)
        said = str(e.format_message()).removesuffix(".")  # pyright: ignore[reportAttributeAccessIssue]
        return _end(name, f"{said}{'' if said.endswith('?') else '.'} See {where} --help", ExitCode.USAGE)


def complain(name: str, what: object) -> None:
    """One line on stderr, behind whatever was printed before."""
    sys.stdout.flush()
    print(f"{name}: {what}", file=sys.stderr)


def _end(name: str, what: object, code: ExitCode) -> ExitCode:
    complain(name, what)
    return code
