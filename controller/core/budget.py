"""How often the job may still be restarted: a fold over the records and commits, no counter. PURE.

Each record names the cause it is charged to. Walking this run's records upwards, a commit on the lineage by a generation
wipes out what was charged before it; nothing else gives budget back. So every controller, also one that came a second ago,
counts the same, and what is counted are the restarts that took place (INV-15).

A *signature* names a crash: what was raised where, at which step. So many equal ones with nothing committed in between end
the job even where budget is left: it would crash again.

A new run (`run_id`) is the operator's decision to try again, and begins with a full budget.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from surefoot.ckpt.record import ManifestRef, Record
from surefoot.controller.core.settings import CRASH_SIGNATURES_MAX, Settings
from surefoot.controller.wire import ErrorReport, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was charged since the last commit: restarts by cause, and the crash signatures in order."""

    restarts: Mapping[str, int]
    signatures: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The restart may take place. `left`: what the cause has left after it; None where it is not counted."""

    left: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """The cause has had all its restarts."""

    cause: str
    limit: int

    @property
    def detail(self) -> str:
        return (
            f"{self.limit} restarts for {self.cause} faults took place since the last commit, and no more are allowed"
            f" (policy.restarts.{self.cause})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashLoop:
    """The same crash, again and again, with nothing committed in between."""

    signature: str
    times: int

    @property
    def detail(self) -> str:
        return f"the same crash {self.times} times with nothing committed in between: {self.signature}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hopeless:
    """The fault says of itself that it would come again."""

    @property
    def detail(self) -> str:
        return "no restart can help"


BudgetVerdict = Allowed | Exhausted | CrashLoop | Hopeless


def plan_of(record: Record) -> Plan | None:
    """The plan in a record; None where it was written without a controller, or by another version."""
    if record.plan is None:
        return None
    try:
        return msgspec.convert(record.plan, Plan)
    except msgspec.ValidationError:
        return None


def run_of(record: Record) -> str:
    """The run that a record belongs to; one written without a controller is a run of its own, named by its creator."""
    run_id = record.plan.get("run_id") if record.plan is not None else None
    return run_id if isinstance(run_id, str) else record.created_by


def spent(records: Mapping[int, Record], lineage: Iterable[ManifestRef], run_id: str) -> Spent:
    """Fold the records of one run.

    Args:
        lineage: the manifests that count.
    """
    committed = {m.generation for m in lineage}
    restarts: Counter[str] = Counter()
    signatures: list[str] = []
    before = 0
    for generation in sorted(records):
        if any(before <= g < generation for g in committed):
            restarts.clear()
            signatures.clear()
        before = generation
        plan = plan_of(records[generation])
        if plan is None or plan.run_id != run_id or plan.reason.cause == "none":
            continue
        restarts[plan.reason.cause] += 1
        signatures.append(plan.reason.signature)
    if any(g >= before for g in committed):
        restarts.clear()
        signatures.clear()
    return Spent(restarts=dict(restarts), signatures=tuple(signatures))


def interruptions(records: Mapping[int, Record], run_id: str) -> int:
    """How many generations of this run something forced."""
    plans = (plan_of(r) for r in records.values())
    return sum(1 for p in plans if p is not None and p.run_id == run_id and p.reason.cause != "none")


def judge(
    settings: Settings, account: Spent, *, cause: str, signature: str, permanent: bool = False
) -> BudgetVerdict:
    """May a fault of this cause and signature be answered by another restart? Not if it is `permanent`."""
    if permanent:
        return Hopeless()
    if signature:
        times = 1 + account.signatures.count(signature)
        if times >= CRASH_SIGNATURES_MAX:
            return CrashLoop(signature=signature, times=times)
    limit = settings.limit(cause)
    if limit is None:
        return Allowed(left=None)
    used = account.restarts.get(cause, 0)
    if used >= limit:
        return Exhausted(cause=cause, limit=limit)
    return Allowed(left=limit - used - 1)


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


def signature_of(error: ErrorReport, step: int) -> str:
    """Names a crash: type, place in the code and step. Where no place is known the message stands in, its numbers and
    addresses removed, for those differ from crash to crash."""
    frames = _FRAME.findall(error.traceback)
    if frames:
        path, line = frames[-1]
        return f"{error.type} at {path.rsplit('/', 1)[-1]}:{line}, step {step}"
    return f"{error.type}: {_VARYING.sub('#', error.message)[:120]}, step {step}"
