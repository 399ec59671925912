"""``python -m surefoot.ckpt``, which is ``surefoot ckpt``: a known error is one line on stderr and an exit code."""

from __future__ import annotations

import os
import sys

from surefoot.ckpt.cli import app
from surefoot.ckpt.errors import CkptError, CkptUserError
from surefoot.ckpt.store import ObjectStoreError
from surefoot.exitcodes import ExitCode


def main() -> None:
    """Run a command and exit."""
    try:
        app()
    except (CkptUserError, ValueError) as e:
        _end(e, ExitCode.USAGE)
    except (ObjectStoreError, PermissionError) as e:
        _end(e, ExitCode.ENVIRONMENT)
    except CkptError as e:
        _end(e, ExitCode.UNEXPECTED)
    except BrokenPipeError:
        # Nobody reads: the flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as e:  # of the folder that an export writes to
        _end(e, ExitCode.ENVIRONMENT)


def _end(e: Exception, code: ExitCode) -> None:
    sys.stdout.flush()
    print(f"surefoot ckpt: {e}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
