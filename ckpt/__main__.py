"""``python -m surefoot.ckpt``, which is ``surefoot ckpt``: what can be foreseen is one line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from surefoot.ckpt.errors import CkptError, CkptUserError
from surefoot.ckpt.store import ObjectStoreError
from surefoot.ckpt.tools.cli import app
from surefoot.exitcodes import ExitCode


def main() -> NoReturn:
    """Run a command and exit."""
    sys.exit(_run())


def _run() -> int:
    words = sys.argv[1:] or ["--help"]
    try:
        return app(args=words, prog_name="surefoot ckpt", standalone_mode=False) or ExitCode.DONE
    except (CkptUserError, ValueError) as e:
        return _complain(e, ExitCode.USAGE)
    except CkptError as e:
        return _complain(e, ExitCode.UNEXPECTED)
    except KeyboardInterrupt:
        return _complain("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Nobody reads: the flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except (ObjectStoreError, OSError) as e:  # OSError: of the folder that an export writes to
        return _complain(e, ExitCode.ENVIRONMENT)
    except Exception as e:
        # typer's own errors (a wrong option …) share no public base class; all can format themselves.
        if type(e).__name__ == "Abort":
            return _complain("interrupted", ExitCode.INTERRUPTED)
        if not hasattr(e, "format_message"):
            raise
        where = getattr(getattr(e, "ctx", None), "command_path", "surefoot ckpt")
        said = str(e.format_message()).rstrip(".")  # pyright: ignore[reportAttributeAccessIssue]
        return _complain(f"{said}. See {where} --help", ExitCode.USAGE)


def _complain(what: object, code: ExitCode) -> ExitCode:
    sys.stdout.flush()
    print(f"surefoot ckpt: {what}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
