"""How a rank's end is read: exit code, signal, last report and stacks -> what happened, in what role, on whose account.

Pure. One death shows as many: the neighbours of a dead rank get a communication error at once, the others later, and the
agents then end whoever is left. So every end has a *role*: ``initiating`` (it may be the cause), ``cascade`` (somebody
else's end reached it), ``teardown`` (the agent ended it). Only what is initiating explains an incident.

The table, first match wins:

==========================================  ============  ===========  ==============
seen                                        kind          role         account
==========================================  ============  ===========  ==============
the agent ended it                          torn_down     teardown     none
code 0, and train() had returned            finished      (none)       none
code 77, or an agent_lost report            agent_lost    cascade      infrastructure
a report of a communication error           collective    cascade      infrastructure
any other report                            exception     initiating   workload
SIGKILL while the kernel noted OOM          out_of_memory initiating   workload
SIGKILL                                     killed        initiating   infrastructure
SIGTERM, SIGINT, SIGHUP                     told_to_stop  initiating   preemption
SIGBUS                                      crashed       initiating   infrastructure
any other signal                            crashed       initiating   workload
code 0, train() had not returned            left_early    initiating   workload
any other code                              exited        initiating   workload
==========================================  ============  ===========  ==============

A report of a checkpoint failure is charged to the infrastructure: the object store or the shared memory failed, not the
training code. SIGBUS is what touching a page gives that a full shared-memory file system or a bad disk cannot back.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from surefoot.controller.wire import Cause, ErrorReport, ExitReport

AGENT_LOST_CODE = 77
"""What a rank exits with when its agent's socket is gone: then nobody can hear it."""

Kind = Literal[
    "torn_down",
    "finished",
    "agent_lost",
    "collective",
    "exception",
    "out_of_memory",
    "killed",
    "told_to_stop",
    "crashed",
    "left_early",
    "exited",
]
Role = Literal["none", "initiating", "cascade", "teardown"]
Whereabouts = Literal["collective", "data", "checkpoint", "code", "unknown"]

OUT_OF_MEMORY_NOTE = "[agent] the kernel's out-of-memory killer struck on this node while the rank ran"

LAST_WORDS_LINES = 20
LAST_WORDS_CHARS = 2000
"""Enough for the tail of a traceback; the whole log stays on the node's disk. A status value stays small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitVerdict:
    """One end, read by the table above. `words` is one line for logs."""

    kind: Kind
    role: Role
    account: Cause
    words: str


def exit_report(
    wait_status: int, *, error: ErrorReport | None, last_words: str, teardown: bool
) -> ExitReport:
    """What goes on the wire about one end. `wait_status` is waitpid's, of a process that has ended."""
    sig = wait_status & 0x7F
    if sig:
        return ExitReport(signal=sig, error=error, last_words=last_words, teardown=teardown)
    return ExitReport(code=wait_status >> 8 & 0xFF, error=error, last_words=last_words, teardown=teardown)


def classify(report: ExitReport, *, finished: bool, out_of_memory: bool = False) -> ExitVerdict:
    """Read one end.

    Args:
        report: the end as reported.
        finished: the rank had said that train() returned.
        out_of_memory: the kernel's out-of-memory killer is known to have struck on this node meanwhile.
    """
    return _by_agent(report) or _by_report(report, finished) or _by_ending(report, out_of_memory)


def _by_agent(report: ExitReport) -> ExitVerdict | None:
    if report.teardown:
        return _verdict("torn_down", "teardown", "none", f"ended by the agent ({_how(report)})")
    return None


def _by_report(report: ExitReport, finished: bool) -> ExitVerdict | None:
    error = report.error
    if report.code == 0 and finished:
        return _verdict("finished", "none", "none", "train() returned")
    if report.code == AGENT_LOST_CODE or (error is not None and error.kind == "agent_lost"):
        return _verdict("agent_lost", "cascade", "infrastructure", "it lost its agent")
    if error is None:
        return None
    told = f"{error.type}: {error.message}"
    if error.kind == "collective":
        return _verdict("collective", "cascade", "infrastructure", f"communication broke: {told}")
    account: Cause = "infrastructure" if error.kind == "checkpoint" else "workload"
    return _verdict("exception", "initiating", account, f"raised {told}")


def _by_ending(report: ExitReport, out_of_memory: bool) -> ExitVerdict:
    sig = report.signal
    if sig is None:
        if report.code == 0:
            return _verdict("left_early", "initiating", "workload", "exited with 0 before train() returned")
        return _verdict("exited", "initiating", "workload", f"exited with {report.code} without a report")
    if sig == signal.SIGKILL:
        if out_of_memory:
            words = "killed (SIGKILL) while the kernel was out of memory"
            return _verdict("out_of_memory", "initiating", "workload", words)
        return _verdict("killed", "initiating", "infrastructure", "killed (SIGKILL) from outside")
    if sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return _verdict("told_to_stop", "initiating", "preemption", f"ended by {_how(report)} from outside")
    account: Cause = "infrastructure" if sig == signal.SIGBUS else "workload"
    return _verdict("crashed", "initiating", account, f"crashed with {_how(report)}")


def _verdict(kind: Kind, role: Role, account: Cause, words: str) -> ExitVerdict:
    return ExitVerdict(kind=kind, role=role, account=account, words=words)


def _how(report: ExitReport) -> str:
    if report.signal is None:
        return f"code {report.code}"
    try:
        return signal.Signals(report.signal).name
    except ValueError:
        return f"signal {report.signal}"


def ending_in_words(wait_status: int) -> str:
    """How a process that is no rank ended, for logs."""
    report = exit_report(wait_status, error=None, last_words="", teardown=False)
    return f"ended by {_how(report)}" if report.signal is not None else f"exited with {report.code}"


def last_words(log_tail: bytes) -> str:
    """The last lines of a log, bounded; `log_tail` is the end of the file and may begin within a line or a character."""
    lines = log_tail.decode("utf-8", "replace").rstrip().splitlines()[-LAST_WORDS_LINES:]
    return "\n".join(lines)[-LAST_WORDS_CHARS:]


_COLLECTIVE = ("torch/distributed/", "all_gather", "all_reduce", "reduce_scatter", "barrier", "ncclComm")
_DATA = ("surefoot/loader/", "torch/utils/data/", "pyarrow/")
_CHECKPOINT = ("surefoot/ckpt/",)
_SIGNS: tuple[tuple[Whereabouts, tuple[str, ...]], ...] = (
    ("collective", _COLLECTIVE),
    ("data", _DATA),
    ("checkpoint", _CHECKPOINT),
)


def whereabouts(stacks: str) -> Whereabouts:
    """Where the main thread of a rank stands, from `py-spy dump`'s text: in a hang, ranks that wait in a collective are
    most likely waiting for the one that is somewhere else."""
    frames = _main_thread(stacks)
    if not frames:
        return "unknown"
    for place, signs in _SIGNS:
        # The innermost frames tell where it waits; further out stands the training loop, which calls all of them.
        if any(sign in frame for frame in frames[:6] for sign in signs):
            return place
    return "code"


def _main_thread(stacks: str) -> list[str]:
    """The frames of the main thread, innermost first."""
    frames: list[str] = []
    inside = False
    for line in stacks.splitlines():
        if line.startswith("Thread "):
            inside = "MainThread" in line
        elif inside and line.startswith("    ") and line.strip():
            frames.append(line.strip())
    return frames
