"""How a component ended, and the one line of its log that tells why. PURE."""

from __future__ import annotations

import re
import signal

_OURS = re.compile(r"surefoot(?:\[[^\]]*\])?: (.*)")
_LOGGED = re.compile(r".*?\b(?:ERROR|CRITICAL) [\w.]+: (.*)")
_RAISED = re.compile(r"(?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b.*")
_CHATTER = re.compile(r".*?\b(?:DEBUG|INFO) [\w.]+: .*")


def how_ended(name: str, code: int, error: str) -> str:
    """In words, from a return code (negative: the signal). `error` is what it said itself; what a signal ended did not
    say why."""
    if code < 0:
        return f"{name} was ended by {signal.Signals(-code).name}"
    return f"{name} ended with exit code {code}" + (f": {error}" if error else "")


def first_error(text: str) -> str:
    """The first line that a Surefoot process addressed to its user or logged as an error; else the last exception; else the
    last line that is no mere information; nothing where there is none of all these.

    A traceback is for the log: of it, only the line that names the exception is shown.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if match := _OURS.fullmatch(line) or _LOGGED.fullmatch(line):
            return match[1]
    for line in reversed(lines):
        if _RAISED.fullmatch(line):
            return line
    return next((line for line in reversed(lines) if not _CHATTER.fullmatch(line)), "")
