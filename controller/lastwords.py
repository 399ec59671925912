"""The one line of a component's log that tells why it ended. PURE."""

from __future__ import annotations

import re

_OURS = re.compile(r"surefoot(?:\[[^\]]*\])?: (.*)")
_LOGGED = re.compile(r".*?\b(?:ERROR|CRITICAL) [\w.]+: (.*)")
_RAISED = re.compile(r"(?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b.*")


def first_error(text: str) -> str:
    """The first line that a Surefoot process addressed to its user or logged as an error; else the last exception; else the
    last line.

    A traceback is for the log: of it, only the line that names the exception is shown.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if match := _OURS.fullmatch(line) or _LOGGED.fullmatch(line):
            return match[1]
    for line in reversed(lines):
        if _RAISED.fullmatch(line):
            return line
    return lines[-1] if lines else ""
