"""What etcd and the object store hold of a job, made up in short, for the tests of its view."""

from collections.abc import Sequence

import msgspec

from surefoot.ckpt.record import ManifestRef, Record, StartRef
from surefoot.controller import wire
from surefoot.controller.keys import Keys
from surefoot.controller.view.observing import observe
from surefoot.controller.view.types import JobFacts, JobView

FACTS = JobFacts(name="gpt", steps=60, nodes=2, root="file:///data/gpt")
KEYS = Keys("gpt")

Item = tuple[str, bytes]
"""A key and its value."""


def put(key: str, value: msgspec.Struct | bytes) -> Item:
    return key, value if isinstance(value, bytes) else wire.encode(value)


def plan(
    generation: int, *, start: wire.StartingPoint | None = None, reason: wire.Reason | None = None, **changes
) -> wire.Plan:
    values = {
        "job": "gpt",
        "run_id": "r",
        "generation": generation,
        "members": (
            wire.Member(uid="n0", incarnation="a", index=0, first_rank=0, ranks=2),
            wire.Member(uid="n1", incarnation="b", index=1, first_rank=2, ranks=2),
        ),
        "world_size": 4,
        "mesh": {"pp": 1, "dp": 4, "tp": 1},
        "start": start or wire.StartingPoint(),
        "reason": reason or wire.Reason(kind="first_start"),
        "spec_hash": "h",
        "code_version": "v",
        "controller": "a",
    }
    return wire.Plan(**(values | changes))


def record(of: wire.Plan) -> Record:
    return Record(
        generation=of.generation,
        start=StartRef(generation=of.start.generation, step=of.start.step),
        reason=of.reason.kind,
        created_by="a",
        plan=msgspec.to_builtins(of),
    )


def pointer(generation: int) -> Item:
    return put(KEYS.plan, wire.PlanPointer(generation=generation, hash="h", location="l"))


def info(uid: str) -> Item:
    return put(
        KEYS.node(uid),
        wire.NodeInfo(
            uid=uid,
            incarnation="a",
            host="127.0.0.1",
            control_port=1,
            flight_port=2,
            pid=100,
            slots=2,
            code_version="v",
        ),
    )


def rank(number: int, phase: wire.Phase = "step", step: int = 23, **changes) -> wire.RankStatus:
    values = {"rank": number, "pid": 1000 + number, "phase": phase, "step": step, "phase_age_s": 0.1}
    return wire.RankStatus(**(values | {"loss": (2.5).hex(), "step_s": 0.25} | changes))


def status(
    uid: str, ranks: Sequence[wire.RankStatus] = (), *, generation: int = 1, state="running", **changes
) -> Item:
    value = wire.NodeStatus(
        uid=uid, incarnation="a", seq=1, generation=generation, state=state, ranks=tuple(ranks), **changes
    )
    return put(KEYS.status(uid), value)


def running(
    *, generation: int = 1, leader: bool = True, n1: Sequence[wire.RankStatus] | None = None
) -> list[Item]:
    keys = [
        pointer(generation),
        info("n0"),
        info("n1"),
        info("n2"),
        status("n0", [rank(0), rank(1)], generation=generation),
        status("n1", [rank(2), rank(3)] if n1 is None else n1, generation=generation),
        status("n2", generation=0, state="parked"),
    ]
    return [put(KEYS.leader, b"a"), *keys] if leader else keys


def seen_of(
    keys: Sequence[Item] | None, *plans: wire.Plan, manifests: Sequence[ManifestRef] = (), **more
) -> JobView:
    """What is observed with these keys in etcd (None: it cannot be asked) and the records of these plans."""
    return observe(
        FACTS,
        keys=None if keys is None else dict(keys),
        records={p.generation: record(p) for p in plans},
        manifests=manifests,
        **more,
    )


def manifest(generation: int, step: int) -> ManifestRef:
    return ManifestRef(
        generation=generation, step=step, key=f"gen-{generation:04d}/step-{step:010d}/manifest.json"
    )
