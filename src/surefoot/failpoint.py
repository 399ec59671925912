"""Named points at the edges of every protocol, where a test can crash, freeze, fail or delay a process.

Off, a failpoint costs one global read. It is armed by two environment variables together, so that no single mistake
switches it on in production: ``SUREFOOT_CHAOS=1`` and ``SUREFOOT_FAILPOINTS``, a list separated by semicolons::

    plan.before_publish=freeze;ckpt.before_manifest=crash@2;leader.after_win=delay:0.5

``name=action[:seconds][@n]``: the action happens at the n-th hit only (default: the first). Actions: ``crash`` (SIGKILL
to itself), ``freeze`` (SIGSTOP to itself), ``error`` (raises `FailpointError`), ``delay`` (sleeps). The idea is FreeBSD's
fail(9).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot import history


class FailpointError(RuntimeError):
    """What an armed failpoint with the action ``error`` raises. Never seen outside tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arming:
    """What one armed failpoint does: `action` at the `hit`-th pass (from 1), `seconds` for a delay."""

    action: str
    hit: int = 1
    seconds: float = 0.0


ACTIONS = ("crash", "freeze", "error", "delay")


def parse(text: str) -> dict[str, Arming]:
    """Read the form of ``SUREFOOT_FAILPOINTS``.

    Raises:
        ValueError: a clause is not ``name=action[:seconds][@n]``.
    """
    armed: dict[str, Arming] = {}
    for clause in filter(None, (part.strip() for part in text.split(";"))):
        name, _, rest = clause.partition("=")
        rest, _, hit = rest.partition("@")
        action, _, seconds = rest.partition(":")
        if action not in ACTIONS:
            raise ValueError(f"failpoint {clause!r}: the action must be one of {', '.join(ACTIONS)}")
        armed[name] = Arming(action=action, hit=int(hit or 1), seconds=float(seconds or 0))
    return armed


def from_environment(environ: Mapping[str, str]) -> dict[str, Arming] | None:
    """The armed failpoints of an environment, or None where chaos is off."""
    if environ.get("SUREFOOT_CHAOS") != "1" or not environ.get("SUREFOOT_FAILPOINTS"):
        return None
    return parse(environ["SUREFOOT_FAILPOINTS"])


_armed: dict[str, Arming] | None = from_environment(os.environ)
_hits: dict[str, int] = {}


def arm(armed: dict[str, Arming] | None) -> None:
    """Arm this process (tests, and children forked with another environment); None switches all off."""
    global _armed
    _armed = armed
    _hits.clear()


def armed_text() -> str:
    """What is armed here, in the form of ``SUREFOOT_FAILPOINTS``: for a process that does part of this one's work."""
    return ";".join(
        f"{name}={a.action}{f':{a.seconds}' if a.seconds else ''}@{a.hit}"
        for name, a in (_armed or {}).items()
    )


def failpoint(name: str) -> None:
    """Pass the protocol edge `name`."""
    if _armed is not None:
        _pass(name, _armed.get(name))


def _pass(name: str, arming: Arming | None) -> None:
    if arming is None:
        return
    _hits[name] = _hits.get(name, 0) + 1
    if _hits[name] != arming.hit:
        return
    history.note("failpoint", name=name, action=arming.action)
    if arming.action == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif arming.action == "freeze":
        # To this very thread: one sent to the process may reach another thread first, and this one would run on for a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif arming.action == "delay":
        time.sleep(arming.seconds)  # the fault itself, not a synchronisation
    else:
        raise FailpointError(f"failpoint {name} was armed to fail here")
