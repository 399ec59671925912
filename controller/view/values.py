"""The values under a job's keys and the plans of its records, read so that one bad value hides no other. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from surefoot.ckpt.record import Record
from surefoot.controller import wire
from surefoot.controller.keys import Keys

T = TypeVar("T")


def value_of(kind: type[T], value: bytes | None) -> T | None:
    """A value, or None where there is none or it is of a future format: a view never fails over one key."""
    if value is None:
        return None
    try:
        return wire.decode(kind, value)
    except msgspec.DecodeError:
        return None


def values_under(kind: type[T], held: Mapping[str, bytes], prefix: str) -> dict[str, T]:
    """All readable values under a prefix, by the rest of the key."""
    read = {
        key.removeprefix(prefix): value_of(kind, value)
        for key, value in held.items()
        if key.startswith(prefix)
    }
    return {name: value for name, value in read.items() if value is not None}


def outcome_of(value: bytes | None, run_id: str | None) -> wire.Outcome | None:
    """The outcome that stands in etcd, unless it is that of another run than `run_id`."""
    outcome = value_of(wire.Outcome, value)
    return outcome if outcome is not None and (run_id is None or outcome.run_id in ("", run_id)) else None


def told(layout: Keys, held: Mapping[str, bytes]) -> tuple[int, tuple[int, int]]:
    """The generation that the plan's key names, and the newest commit, (generation, step), that any node reports.

    Args:
        held: everything under the job's prefix in etcd, by key.
    """
    pointer = value_of(wire.PlanPointer, held.get(layout.plan))
    commits = [
        s.committed for s in values_under(wire.NodeStatus, held, layout.statuses).values() if s.committed
    ]
    acknowledged = [(c.generation, c.step) for c in commits if c.fenced_by is None and not c.failure]
    return pointer.generation if pointer else 0, max(acknowledged, default=(0, 0))


def plans_of(records: Mapping[int, Record]) -> dict[int, wire.Plan]:
    """The plans that the records carry, by generation, as far as there is one that can be read."""
    plans: dict[int, wire.Plan] = {}
    for generation, record in records.items():
        try:
            plans[generation] = msgspec.convert(record.plan, wire.Plan)
        except msgspec.ValidationError:
            continue  # made by `ckpt` alone, without a plan, or by a newer controller
    return plans
