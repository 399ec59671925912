"""A bench for the pure core: toy nodes, a toy object store, and a clock that only the test moves.

`Bench.send` is one `advance`, after which every invariant is checked. What the core decides lands in `bench.wanted` and is
carried out by `bench.perform`, one default outcome each, unless the test answers something else first.

This file makes view_listings.py importable as well (in pytest's import mode `importlib` the tests are no package).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from surefoot.ckpt.record import ManifestRef, Record, encode_record, record_key
from surefoot.controller import wire
from surefoot.controller.core import decisions as dec
from surefoot.controller.core import events as ev
from surefoot.controller.core import invariants
from surefoot.controller.core.advance import advance
from surefoot.controller.core.moves import Mind
from surefoot.controller.core.settings import Settings
from surefoot.controller.core.state import State

sys.path.append(str(Path(__file__).parent))


def manifest(generation: int, step: int) -> ManifestRef:
    """A reference as a listing gives it."""
    return ManifestRef(
        step=step, generation=generation, key=f"gen-{generation:04d}/step-{step:010d}/manifest.json"
    )


@dataclass
class ToyNode:
    """One agent, as etcd and a probe show it. `answer`: ``answers``, ``refuses``, ``breaks`` or ``times_out``."""

    uid: str
    incarnation: str = "a"
    slots: int = 2
    answer: str = "answers"
    seq: int = 0
    generation: int = 0
    state: str = "parked"
    ranks: dict[int, wire.RankStatus] = field(default_factory=dict)
    snapshots: list[wire.SnapshotRef] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def info(self) -> wire.NodeInfo:
        return wire.NodeInfo(
            uid=self.uid,
            incarnation=self.incarnation,
            host="127.0.0.1",
            control_port=7000,
            flight_port=7001,
            pid=1,
            slots=self.slots,
            code_version="test",
        )

    def status(self) -> wire.NodeStatus:
        self.seq += 1
        return wire.NodeStatus(
            uid=self.uid,
            incarnation=self.incarnation,
            seq=self.seq,
            generation=self.generation,
            state=self.state,
            ranks=tuple(self.ranks[r] for r in sorted(self.ranks)),
            snapshots=tuple(self.snapshots),
            **self.extra,
        )


class Bench:
    """One controller's core, and a toy world around it."""

    def __init__(self, **settings: Any) -> None:
        base: dict[str, Any] = {
            "job": "toy",
            "run_id": "run1",
            "controller": "a",
            "code_version": "test",
            "spec_hash": "hash",
            "steps": 60,
            "nodes": 2,
            "ranks_per_node": 2,
            "mesh": {"pp": 1, "dp": 4, "tp": 1},
        }
        self.settings = Settings(**(base | settings))
        self.state = State(settings=self.settings)
        self.now = 100.0
        self.revision = 100
        self.nodes: dict[str, ToyNode] = {}
        self.records: dict[int, Record] = {}
        self.manifests: list[ManifestRef] = []
        self.aside: dict[tuple[int, int], str] = {}
        self.lacks = ""
        self.pointer: wire.PlanPointer | None = None
        self.outcome: wire.Outcome | None = None
        self.incidents: dict[str, wire.Incident] = {}
        self.held = ""
        """What the ``held`` key says."""
        self.wanted: list[dec.Decision] = []
        self.history: list[dec.Decision] = []
        self.ledger = invariants.Ledger()

    # ---- the core

    def send(self, *events: ev.Event, after_s: float = 0.0) -> list[dec.Decision]:
        """One advance, `after_s` later; returns what it decided."""
        self.now += after_s
        before = self.state
        self.state, decided = advance(before, events, self.now)
        assert invariants.check(before, self.state, decided) == []
        for decision in decided:
            self._note(decision)
        return list(decided)

    def _note(self, decision: dec.Decision) -> None:
        self.history.append(decision)
        if isinstance(decision, dec.OpenIncident | dec.UpdateIncident):
            self.incidents[decision.incident.id] = decision.incident
        elif not isinstance(decision, dec.Report):
            self.wanted.append(decision)

    def tick(self, after_s: float = 0.25) -> list[dec.Decision]:
        """Time goes by; everything decided is carried out."""
        decided = self.send(ev.Ticked(), after_s=after_s)
        self.perform()
        return decided

    def take(self, kind: type[Any]) -> Any:
        """The one decision of that kind that waits; it is the test's to answer."""
        found = [w for w in self.wanted if isinstance(w, kind)]
        assert len(found) == 1, f"{kind.__name__} is not wanted once: {self.wanted}"
        self.wanted.remove(found[0])
        return found[0]

    def perform(self, *, leave: tuple[type[Any], ...] = ()) -> None:
        """Carry out what is wanted, and what follows from it, until nothing more is; `leave` stays for the test."""
        for _ in range(100):
            todo = [w for w in self.wanted if not isinstance(w, leave)]
            if not todo:
                return
            self.wanted = [w for w in self.wanted if isinstance(w, leave)]
            for decision in todo:
                self.send(*self.outcomes(decision), after_s=0.001)
        pytest.fail("the core goes round in circles")

    def outcomes(self, decision: dec.Decision) -> list[ev.Event]:
        """What becomes of a decision in a world where everything works."""
        match decision:
            case dec.FollowWorld():
                return [self.world()]
            case dec.ListLineage(op=op):
                return [self.listing(op)]
            case dec.ProbeNodes(op=op, targets=targets):
                return [self.probe(op, t.uid) for t in targets]
            case dec.CreateRecord(op=op, record=record):
                return [self.create(op, record)]
            case dec.PublishPlan(op=op, pointer=pointer):
                assert self.ledger.publish(pointer) == []
                self.pointer = pointer
                self.revision += 1
                return [ev.PlanPublished(op=op, generation=pointer.generation, revision=self.revision)]
            case dec.ReadPlan(op=op):
                return [ev.PlanRead(op=op, pointer=self.pointer, revision=self.revision)]
            case dec.SetAside(generation=generation, step=step, reason=reason):
                self.aside.setdefault((generation, step), reason)
                return []
            case dec.TellHeld(reason=reason):
                self.held = reason
                return []
            case dec.WriteOutcome(op=op, outcome=outcome):
                self.outcome = outcome
                return [ev.OutcomeWritten(op=op)]
            case _:
                return []

    def create(self, op: int, record: Record) -> ev.Event:
        existing = self.records.setdefault(record.generation, record)
        if existing != record:
            return ev.RecordTaken(op=op, generation=record.generation)
        assert self.ledger.create(record) == []
        return ev.RecordCreated(
            op=op,
            generation=record.generation,
            hash=wire.digest(encode_record(record)),
            location=record_key(record.generation),
        )

    def listing(self, op: int) -> ev.LineageListed:
        return ev.LineageListed(
            op=op,
            records=dict(self.records),
            hashes={g: wire.digest(encode_record(r)) for g, r in self.records.items()},
            manifests=tuple(sorted(self.manifests)),
            aside=dict(self.aside),
            lacks=self.lacks,
        )

    def world(self) -> ev.WorldListed:
        self.revision += 1
        there = [n for n in self.nodes.values() if n.answer != "gone"]
        return ev.WorldListed(
            revision=self.revision,
            nodes=tuple(ev.NodeListed(info=n.info, revision=self._revision_of(n)) for n in there),
            statuses=tuple(n.status() for n in there),
            pointer=self.pointer,
            outcome=self.outcome,
        )

    def _revision_of(self, node: ToyNode) -> int:
        known = self.state.nodes.get(node.uid)
        same = known is not None and known.registered and known.incarnation == node.incarnation
        return known.revision if known is not None and same else self.revision

    def probe(self, op: int, uid: str) -> ev.Event:
        node = self.nodes[uid]
        match node.answer:
            case "answers":
                return ev.ProbeAnswered(op=op, uid=uid, status=node.status())
            case "refuses":
                return ev.ProbeRefused(op=op, uid=uid, detail="connection refused")
            case "breaks":
                return ev.ProbeBroken(op=op, uid=uid, detail="connection reset")
            case _:
                return ev.ProbeTimedOut(op=op, uid=uid)

    # ---- the world

    def lead(self, token: int = 10) -> None:
        self.send(ev.Elected(token=token))
        self.perform()

    def appear(self, *uids: str, leave: tuple[type[Any], ...] = (), **facts: Any) -> None:
        """Nodes register and report, parked unless `facts` say otherwise; `leave` as in `perform`."""
        for uid in uids:
            self.nodes[uid] = ToyNode(uid=uid, **facts)
            self.revision += 1
            self.send(ev.NodeAppeared(info=self.nodes[uid].info, revision=self.revision))
            self.report(uid)
        self.perform(leave=leave)

    def vanish(self, uid: str, *, perform: bool = True) -> None:
        """The node's key ends."""
        self.revision += 1
        self.send(ev.NodeVanished(uid=uid, revision=self.revision))
        if perform:
            self.perform()

    def report(self, uid: str) -> list[dec.Decision]:
        """The node writes its status."""
        return self.send(ev.StatusReported(status=self.nodes[uid].status()), after_s=0.001)

    def rank(self, rank: int, **facts: Any) -> str:
        """Change what is told of a rank; returns its node."""
        uid = next(u for u, n in self.nodes.items() if rank in n.ranks)
        node = self.nodes[uid]
        node.ranks[rank] = msgspec.structs.replace(node.ranks[rank], **facts)
        return uid

    def follow(self, *, phase: str = "step", step: int | None = None) -> None:
        """All living members follow the plan in force, and their ranks are where the arguments say."""
        plan = self.plan
        for node in self.nodes.values():
            member = plan.member(node.uid)
            if node.answer != "answers":
                continue
            mine = member is not None and member.incarnation == node.incarnation
            node.generation = plan.generation
            node.state = "running" if mine else "parked"
            ranks = range(member.first_rank, member.first_rank + member.ranks) if mine and member else ()
            at = plan.start.step + 1 if step is None else step
            node.ranks = {
                r: wire.RankStatus(rank=r, pid=100 + r, phase=phase, step=at, phase_age_s=0.0) for r in ranks
            }
            self.report(node.uid)
        self.perform()

    def step(self, step: int, *, snapshots: bool = True, step_s: float = 0.2) -> None:
        """All ranks of the plan have finished `step` - 1, snapshots of it included, and are in `step`."""
        plan = self.plan
        for member in plan.members:
            node = self.nodes[member.uid]
            for r in node.ranks:
                node.ranks[r] = msgspec.structs.replace(node.ranks[r], phase="step", step=step, step_s=step_s)
        if snapshots:
            self.snapshot(plan.generation, step - 1)
        self.now += step_s
        for member in plan.members:
            self.report(member.uid)
        self.perform()

    def snapshot(self, generation: int, step: int) -> None:
        """Every member holds its ranks' snapshots, and its peer the copies."""
        plan = self.plan
        for member in plan.members:
            for rank in range(member.first_rank, member.first_rank + member.ranks):
                own = wire.SnapshotRef(generation=generation, step=step, rank=rank)
                self.nodes[member.uid].snapshots.append(own)
                peer = plan.peers.get(member.uid)
                if peer is not None:
                    copy = msgspec.structs.replace(own, replica=True)
                    self.nodes[peer].snapshots.append(copy)

    def end(self, rank: int, **report: Any) -> list[dec.Decision]:
        """A rank's process ends, and its agent tells."""
        return self.report(self.rank(rank, exit=wire.ExitReport(**report)))

    def lose(self, uid: str) -> None:
        """The node is gone at once: nothing listens any more; its key stays until its lease ends."""
        self.nodes[uid].answer = "refuses"

    def running(self, *uids: str, step: int | None = None) -> Bench:
        """A leader with a generation that runs on these nodes (all of them members or spares)."""
        self.lead()
        self.appear(*(uids or ("n0", "n1")))
        self.follow()
        assert self.state.mind is Mind.RUNNING
        for at in range(2, (step or 1) + 1):
            self.step(at)
        return self

    # ---- what came of it

    @property
    def mind(self) -> Mind:
        return self.state.mind

    @property
    def plan(self) -> wire.Plan:
        assert self.state.in_force is not None
        return self.state.in_force.plan

    def decided(self, kind: type[Any]) -> list[Any]:
        return [x for x in self.history if isinstance(x, kind)]

    def stage(self) -> str:
        return type(self.state.forming.stage).__name__ if self.state.forming is not None else ""

    def other(self, name: str) -> Bench:
        """Another controller of the same job, in the same world, not leading yet."""
        twin = Bench()
        twin.__dict__.update(self.__dict__)
        twin.settings = replace(self.settings, controller=name)
        twin.state = State(settings=twin.settings)
        twin.wanted, twin.history = [], []
        return twin


@pytest.fixture
def bench() -> Bench:
    """A job of two nodes with two ranks each, 60 steps; nothing has happened yet."""
    return Bench()


@pytest.fixture
def make_bench() -> type[Bench]:
    """`Bench` itself, for other settings."""
    return Bench


@pytest.fixture
def committed() -> Any:
    """``committed(generation, step)``: a manifest as listed."""
    return manifest
