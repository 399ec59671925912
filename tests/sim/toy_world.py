"""A whole job in virtual time, around the real core: toy etcd, toy object store, toy agents, several controllers, seeded faults.

Everything takes time and may go wrong: answers are late, writes end unknown (done, not done, or done later), a controller is
stopped for longer than its lease and woken in the middle of a write, watch events get lost, nodes die and come back, ranks
are killed or hang, both stores go away. After every `advance` the core's invariants are checked; what the world must keep
(`World.broken`) is checked as it happens: numbers are never used twice, only the leader publishes, and what was
acknowledged stays on the lineage.

The same seed gives the same history.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from surefoot.ckpt.record import ManifestRef, Record, encode_record, lineage, record_key
from surefoot.controller import wire
from surefoot.controller.core import decisions as dec
from surefoot.controller.core import events as ev
from surefoot.controller.core import invariants
from surefoot.controller.core.advance import advance
from surefoot.controller.core.moves import FINAL
from surefoot.controller.core.settings import Settings
from surefoot.controller.core.state import State
from surefoot.exitcodes import ExitCode

TTL_S = 10.0
STEP_S = 0.4
TICK_S = 0.25
RELIST_S = 15.0
BEAT_S = 1.0


class Clock:
    """Virtual time: a heap of what happens next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), action))

    def run(self, until_s: float, stop: Callable[[], bool]) -> None:
        while self._heap and self._heap[0][0] <= until_s and not stop():
            self.now, _, action = heapq.heappop(self._heap)
            action()


@dataclass
class Agent:
    """One node."""

    uid: str
    incarnation: str
    alive: bool = True
    frozen: bool = False
    registered: bool = False
    lease_ends: float = 0.0
    generation: int = 0
    seq: int = 0
    ranks: dict[int, wire.RankStatus] = field(default_factory=dict)
    hung: set[int] = field(default_factory=set)
    snapshots: list[wire.SnapshotRef] = field(default_factory=list)
    committed: wire.Committed | None = None
    start_failure: wire.StartFailure | None = None
    uploaded_s: float = 0.0
    """When its uploads so far will be through."""
    stepping: int = 0
    """Of the generation for which a step is under way."""

    def info(self) -> wire.NodeInfo:
        return wire.NodeInfo(
            uid=self.uid,
            incarnation=self.incarnation,
            host="h",
            control_port=1,
            flight_port=2,
            pid=1,
            slots=2,
            code_version="sim",
        )

    def status(self) -> wire.NodeStatus:
        self.seq += 1
        return wire.NodeStatus(
            uid=self.uid,
            incarnation=self.incarnation,
            seq=self.seq,
            generation=self.generation,
            state="running" if self.ranks else "parked",
            ranks=tuple(self.ranks[r] for r in sorted(self.ranks)),
            snapshots=tuple(self.snapshots[-16:]),
            committed=self.committed,
            start_failure=self.start_failure,
        )


class Controller:
    """One controller around a core of its own. `pending` holds what it was about to do when it was stopped."""

    def __init__(self, world: World, name: str, settings: Settings) -> None:
        self.world, self.name = world, name
        self.state = State(settings=replace(settings, controller=name))
        self.alive, self.frozen = True, False
        self.token: int | None = None
        self.lease_ends = 0.0
        """As it counts itself, from before it asked; etcd's count is `lease_ends_in_etcd`."""
        self.lease_ends_in_etcd = 0.0
        self.term = 0
        self.queue: list[ev.Event] = []
        self.pending: list[Callable[[], None]] = []
        self.life = 0

    def post(self, event: ev.Event, term: int | None = None) -> None:
        if self.alive and (term is None or term == self.term):
            self.queue.append(event)
            if not self.frozen:
                self.world.clock.after(0.0, self.turn)

    def turn(self, *, tick: bool = False) -> None:
        if not self.alive or self.frozen or (not self.queue and not tick):
            return
        world = self.world
        if self.token is not None and world.clock.now >= self.lease_ends:
            self.depose("the lease may have ended")
        events, self.queue = [*self.queue, *([ev.Ticked()] if tick else [])], []
        before = self.state
        self.state, decided = advance(before, events, world.clock.now)
        world.advances += 1
        world.breaks(invariants.check(before, self.state, decided))
        for decision in decided:
            self.perform(decision)

    def depose(self, reason: str) -> None:
        if self.token is not None:
            self.token = None
            self.term += 1
            self.queue = [ev.Deposed(reason=reason)]

    def perform(self, decision: dec.Decision) -> None:
        if isinstance(decision, dec.StepDown | dec.Report):
            if isinstance(decision, dec.StepDown):
                self.world.resign(self)
            return
        term = self.term
        delay_s = self.world.rng.choice((0.001, 0.01, 0.05, 0.3, 2.0))
        if self.world.racy and isinstance(decision, dec.CreateRecord):
            delay_s = 3.0
        self.world.clock.after(delay_s, lambda: self._do(decision, term))

    def _do(self, decision: dec.Decision, term: int) -> None:
        if not self.alive:
            return
        if isinstance(decision, dec.CreateRecord | dec.PublishPlan) and self.world.chance(0.05):
            self.world.freeze_controller(self)  # as a failpoint would: between the decision and its effect
        if self.frozen:  # a thread stopped in mid-call goes on when the process is woken
            self.pending.append(lambda: self._do(decision, term))
            return
        for event, delay_s in self.world.effect(self, decision):
            self.world.clock.after(delay_s, lambda e=event: self.post(e, term))


class World:
    """The job and all that can happen to it."""

    def __init__(
        self,
        seed: int,
        *,
        run_id: str = "run1",
        beside: World | None = None,
        begins_s: float = 0.0,
        nodes: int = 2,
        spares: int = 1,
        steps: int = 100,
        fenced: bool = True,
        racy: bool = False,
    ) -> None:
        """
        Args:
            beside: a run that has an etcd and nodes of its own; time, chance and the object store are shared with it.
            begins_s: when this run begins.
        """
        self.rng = beside.rng if beside is not None else random.Random(seed)
        self.clock = beside.clock if beside is not None else Clock()
        self.settings = Settings(
            job="sim",
            run_id=run_id,
            controller="?",
            code_version="sim",
            spec_hash="h",
            steps=steps,
            nodes=nodes,
            ranks_per_node=2,
            mesh={"dp": 2 * nodes},
            restarts={"workload": 500, "infrastructure": 500, "preemption": 500},
            wait_for_node_s=1e6,
        )
        self.fenced = fenced
        """Whether etcd compares the leader key at all; off, it is a negative control."""
        self.racy = racy
        """Records take long to create and node memory is often lost, so that commits race with them."""
        self.revision = 1
        self.etcd_up = self.objects_up = True
        self.leader: tuple[Controller, int] | None = None
        self.pointer: wire.PlanPointer | None = None
        self.pointer_revision = 0
        self.outcome: wire.Outcome | None = None
        self.node_keys: dict[str, tuple[wire.NodeInfo, int]] = {}
        self.status_keys: dict[str, wire.NodeStatus] = {}
        self.records: dict[int, Record] = beside.records if beside is not None else {}
        self.manifests: dict[tuple[int, int], ManifestRef] = beside.manifests if beside is not None else {}
        self.acked: list[tuple[int, int]] = beside.acked if beside is not None else []
        self.damaged: set[tuple[int, int]] = beside.damaged if beside is not None else set()
        """Manifests whose objects cannot be read."""
        self.aside: dict[tuple[int, int], str] = beside.aside if beside is not None else {}
        self.ledger = invariants.Ledger()
        if beside is not None:
            self.ledger.records = beside.ledger.records
        self.broken: list[str] = []
        self.faults: list[str] = []
        self.advances = 0
        self.calm = False
        """No more chance failures: liveness is to be judged."""
        self.agents = {f"n{i}": Agent(uid=f"n{i}", incarnation=f"n{i}.0") for i in range(nodes + spares)}
        self.controllers = [Controller(self, name, self.settings) for name in ("a", "b")]
        for agent in self.agents.values():
            self.clock.after(
                begins_s + self.rng.uniform(0, 1), lambda a=agent: self._agent_beat(a, a.incarnation)
            )
        for controller in self.controllers:
            self.clock.after(
                begins_s + self.rng.uniform(0, 1), lambda c=controller: self._controller_beat(c, 0)
            )
        self.clock.after(RELIST_S, self._relist)

    def breaks(self, found: list[str]) -> None:
        self.broken += [f"{self.clock.now:.3f}: {f}" for f in found]

    def chance(self, probability: float) -> bool:
        return not self.calm and self.rng.random() < probability

    # ---- etcd

    def _expire(self) -> None:
        if not self.etcd_up:
            return
        now = self.clock.now
        if self.leader is not None and self.leader[0].lease_ends_in_etcd <= now:
            self.leader = None
            self.revision += 1
        for uid in list(self.node_keys):
            if self.agents[uid].lease_ends <= now:
                self._delete_node(uid)

    def _delete_node(self, uid: str) -> None:
        self.revision += 1
        self.node_keys.pop(uid, None)
        self.status_keys.pop(uid, None)
        self.agents[uid].registered = False
        self._tell(ev.NodeVanished(uid=uid, revision=self.revision))

    def _tell(self, event: ev.Event) -> None:
        """A watch event to whoever leads, or believes so: sometimes late, seldom lost."""
        for controller in self.controllers:
            if controller.token is not None and not self.chance(0.02):
                self.clock.after(
                    self.rng.choice((0.002, 0.02)),
                    lambda c=controller, t=controller.term: c.post(event, t),
                )

    def listing(self) -> ev.WorldListed:
        return ev.WorldListed(
            revision=self.revision,
            nodes=tuple(ev.NodeListed(info=i, revision=r) for i, r in self.node_keys.values()),
            statuses=tuple(self.status_keys.values()),
            pointer=self.pointer,
            outcome=self.outcome,
        )

    def _relist(self) -> None:
        self.clock.after(RELIST_S, self._relist)
        if self.etcd_up:
            for controller in self.controllers:
                if controller.token is not None:
                    controller.post(self.listing(), controller.term)

    def resign(self, controller: Controller) -> None:
        controller.token = None
        controller.term += 1
        if self.leader is not None and self.leader[0] is controller:
            self.leader = None
            self.revision += 1

    def _controller_beat(self, controller: Controller, life: int) -> None:
        """Time for one controller: its tick, its lease, its campaign."""
        if not controller.alive or controller.life != life:
            return
        self.clock.after(TICK_S, lambda: self._controller_beat(controller, life))
        self._expire()
        if controller.frozen:
            return
        if self.etcd_up and controller.token is not None and self.leader == (controller, controller.token):
            if controller.lease_ends - self.clock.now < TTL_S * 2 / 3:
                controller.lease_ends = self.clock.now + TTL_S
                controller.lease_ends_in_etcd = self.clock.now + TTL_S
        elif self._vacant(controller) and self.rng.random() < 0.5:
            self._elect(controller)
        controller.turn(tick=True)

    def _vacant(self, controller: Controller) -> bool:
        return self.etcd_up and controller.token is None and self.leader is None and not self.done

    def _elect(self, controller: Controller) -> None:
        self.revision += 1
        controller.token = self.revision
        controller.term += 1
        controller.lease_ends = controller.lease_ends_in_etcd = self.clock.now + TTL_S
        self.leader = (controller, self.revision)
        controller.queue = []
        controller.post(ev.Elected(token=self.revision), controller.term)

    @property
    def done(self) -> bool:
        return self.outcome is not None

    # ---- effects

    def effect(self, controller: Controller, decision: dec.Decision) -> list[tuple[ev.Event, float]]:
        """Carry one decision out, and say what its answer is and how long it takes."""
        delay_s = self.rng.choice((0.001, 0.01, 0.2))
        match decision:
            case dec.FollowWorld():
                if not self.etcd_up:
                    self.clock.after(0.5, lambda: controller.perform(decision))
                    return []
                return [(self.listing(), delay_s)]
            case dec.ProbeNodes():
                return [self._probe(decision.op, t) for t in decision.targets]
            case dec.ListLineage(op=op) if not self.objects_up:
                return [(ev.ObjectStoreUnavailable(op=op, detail="away"), delay_s)]
            case dec.ListLineage(op=op):
                return [(self._lineage(op), delay_s)]
            case dec.CreateRecord():
                return [(self._create(decision), delay_s)]
            case dec.PublishPlan():
                return [(self._publish(decision), delay_s)]
            case dec.ReadPlan(op=op) if not self.etcd_up:
                return [(ev.CoordStoreUnavailable(op=op, detail="away"), delay_s)]
            case dec.ReadPlan(op=op):
                return [(ev.PlanRead(op=op, pointer=self.pointer, revision=self.pointer_revision), delay_s)]
            case dec.WriteOutcome():
                return [(self._end(decision), delay_s)]
            case dec.SetAside(generation=generation, step=step, reason=reason):
                if self.objects_up and not self.chance(0.3):
                    self.aside.setdefault((generation, step), reason)
                return []
            case _:
                return []

    def _probe(self, op: int, target: dec.ProbeTarget) -> tuple[ev.Event, float]:
        agent = self.agents[target.uid]
        if agent.alive and agent.frozen:
            return ev.ProbeTimedOut(op=op, uid=agent.uid), 1.0
        if not agent.alive:
            if self.chance(0.3):  # the machine is gone, not only the process
                return ev.ProbeTimedOut(op=op, uid=agent.uid), 1.0
            return ev.ProbeRefused(op=op, uid=agent.uid, detail="refused"), 0.002
        if agent.incarnation != target.incarnation:
            return ev.ProbeRefused(op=op, uid=agent.uid, detail="another port now"), 0.002
        if self.chance(0.05):
            return ev.ProbeBroken(op=op, uid=agent.uid, detail="reset"), 0.002
        return ev.ProbeAnswered(op=op, uid=agent.uid, status=agent.status()), 0.003

    def _lineage(self, op: int) -> ev.LineageListed:
        return ev.LineageListed(
            op=op,
            records=dict(self.records),
            hashes={g: wire.digest(encode_record(r)) for g, r in self.records.items()},
            manifests=tuple(sorted(self.manifests.values())),
            aside=dict(self.aside),
        )

    def _create(self, decision: dec.CreateRecord) -> ev.Event:
        op, record = decision.op, decision.record
        if not self.objects_up:
            return ev.RecordUnknown(op=op, generation=record.generation, detail="away")
        if self.chance(0.1):
            later = self.rng.choice((None, 0.0, 3.0))
            if later is not None:
                self.clock.after(later, lambda: self._put_record(record))
            return ev.RecordUnknown(op=op, generation=record.generation, detail="timeout")
        if not self._put_record(record):
            return ev.RecordTaken(op=op, generation=record.generation)
        return ev.RecordCreated(
            op=op,
            generation=record.generation,
            hash=wire.digest(encode_record(record)),
            location=record_key(record.generation),
        )

    def _put_record(self, record: Record) -> bool:
        if self.records.setdefault(record.generation, record) != record:
            return False
        self.breaks(self.ledger.create(record))
        return True

    def _holds(self, token: int) -> bool:
        self._expire()
        return not self.fenced or (self.leader is not None and self.leader[1] == token)

    def _publish(self, decision: dec.PublishPlan) -> ev.Event:
        op, pointer = decision.op, decision.pointer
        if not self.etcd_up:
            return ev.CoordStoreUnavailable(op=op, detail="away")
        if self.chance(0.1):
            if self.rng.random() < 0.5 and self._holds(decision.token):
                self._put_pointer(pointer)
            return ev.PlanUnknown(op=op, generation=pointer.generation, detail="timeout")
        if not self._holds(decision.token):
            return ev.PlanRefused(op=op, generation=pointer.generation)
        self._put_pointer(pointer)
        return ev.PlanPublished(op=op, generation=pointer.generation, revision=self.revision)

    def _put_pointer(self, pointer: wire.PlanPointer) -> None:
        self.revision += 1
        if self.pointer != pointer:
            self.breaks(self.ledger.publish(pointer))
            if pointer.generation not in self.records:
                self.breaks([f"plan {pointer.generation} has no record"])
        self.pointer, self.pointer_revision = pointer, self.revision
        self._tell(ev.PointerSeen(pointer=pointer, revision=self.revision))

    def _end(self, decision: dec.WriteOutcome) -> ev.Event:
        if not self.etcd_up:
            return ev.CoordStoreUnavailable(op=decision.op, detail="away")
        if not self._holds(decision.token):
            return ev.OutcomeRefused(op=decision.op)
        self.outcome = decision.outcome
        return ev.OutcomeWritten(op=decision.op)

    # ---- agents

    def _agent_beat(self, agent: Agent, incarnation: str) -> None:
        """One agent's life goes by: register, follow the plan, step, beat."""
        if not agent.alive or agent.incarnation != incarnation:
            return
        self.clock.after(BEAT_S / 2, lambda: self._agent_beat(agent, incarnation))
        if agent.frozen:
            return
        if self.etcd_up:
            agent.lease_ends = self.clock.now + TTL_S
            if not agent.registered:
                agent.registered = True
                self.revision += 1
                self.node_keys[agent.uid] = (agent.info(), self.revision)
                self._tell(ev.NodeAppeared(info=agent.info(), revision=self.revision))
            self._follow(agent)
        self._write(agent)
        self._try_step(agent)

    def _write(self, agent: Agent) -> None:
        if self.etcd_up and agent.alive and not agent.frozen and agent.registered:
            self.revision += 1
            self.status_keys[agent.uid] = agent.status()
            self._tell(ev.StatusReported(status=self.status_keys[agent.uid]))

    def plan_of(self, generation: int) -> wire.Plan:
        return msgspec.convert(self.records[generation].plan, wire.Plan)

    def _follow(self, agent: Agent) -> None:
        if self.pointer is None or self.pointer.generation <= agent.generation:
            return
        plan = self.plan_of(self.pointer.generation)
        member = plan.member(agent.uid)
        agent.generation = plan.generation
        agent.hung.clear()
        agent.ranks = {}
        agent.start_failure = None
        if member is None or member.incarnation != agent.incarnation:
            return
        missing = [s.rank for s in plan.sources if not self._has(s, plan)]
        if missing:  # gone between the choice and now
            agent.start_failure = wire.StartFailure(
                generation=plan.generation, kind="snapshot_missing", detail=f"ranks {missing}"
            )
        else:
            agent.ranks = {
                r: wire.RankStatus(rank=r, pid=1, phase="step", step=plan.start.step + 1, phase_age_s=0.0)
                for r in range(member.first_rank, member.first_rank + member.ranks)
            }
            self._restore(agent, plan.start)

    def _restore(self, agent: Agent, start: wire.StartingPoint) -> None:
        """All ranks find a damaged step damaged, and end."""
        at = (start.generation, start.step)
        if start.tier != "object_store" or at not in self.damaged:
            return
        damaged = wire.DamagedStep(generation=at[0], step=at[1], key="r0", detail="one bit")
        error = wire.ErrorReport(kind="checkpoint", type="E", message="m", damaged=damaged)
        report = wire.ExitReport(code=1, error=error)
        agent.ranks = {
            r: msgspec.structs.replace(s, phase="restore", step=start.step, exit=report)
            for r, s in agent.ranks.items()
        }

    def _has(self, source: wire.SnapshotSource, plan: wire.Plan) -> bool:
        point = (plan.start.generation, plan.start.step, source.rank)
        return any((s.generation, s.step, s.rank) == point for s in self.agents[source.uid].snapshots)

    def _try_step(self, agent: Agent) -> None:
        """The first member moves the whole generation, as a collective would: only if everybody is there."""
        generation = agent.generation
        if not agent.ranks or agent.stepping == generation:
            return
        plan = self.plan_of(generation)
        if plan.members[0].uid != agent.uid or self._whole(plan) is None:
            return
        agent.stepping = generation
        self.clock.after(STEP_S, lambda: self._step(agent, plan))

    def _whole(self, plan: wire.Plan) -> list[Agent] | None:
        """All members, if every rank of the generation can take a step."""
        agents = [self.agents[m.uid] for m in plan.members]
        for agent, member in zip(agents, plan.members, strict=True):
            fits = agent.incarnation == member.incarnation and agent.generation == plan.generation
            if not (agent.alive and not agent.frozen and fits) or agent.hung:
                return None
            if any(r.exit is not None or r.phase == "done" for r in agent.ranks.values()):
                return None
        return agents

    def _step(self, first: Agent, plan: wire.Plan) -> None:
        if first.stepping == plan.generation:
            first.stepping = 0
        agents = self._whole(plan)
        if agents is None:
            return
        step = min(r.step for a in agents for r in a.ranks.values())
        for agent in agents:
            for rank in agent.ranks:
                own = wire.SnapshotRef(generation=plan.generation, step=step, rank=rank)
                agent.snapshots.append(own)
                peer = self.agents.get(plan.peers.get(agent.uid, ""))
                if peer is not None and peer.alive:
                    peer.snapshots.append(msgspec.structs.replace(own, replica=True))
        last = step == self.settings.steps
        if step % 5 == 0 or last:
            # One upload after the other, some of them slow.
            due_s = max(self.clock.now, first.uploaded_s) + self.rng.choice((0.01, 0.5, 2.0, 5.0))
            first.uploaded_s = due_s + 0.5
            self.clock.after(due_s - self.clock.now, lambda: self._commit(first, plan, step))
        for agent in agents:
            for rank, status in agent.ranks.items():
                agent.ranks[rank] = msgspec.structs.replace(
                    status,
                    step=step if last else step + 1,
                    phase="save" if last else "step",
                    step_s=STEP_S,
                )
            self._write(agent)
        if not last:
            self._try_step(first)

    def _commit(self, agent: Agent, plan: wire.Plan, step: int) -> None:
        """The committer: create the manifest, look for a higher record, acknowledge. Retries while the store is away."""
        member = plan.member(agent.uid)
        if not agent.alive or member is None or agent.incarnation != member.incarnation:
            return
        if agent.frozen or not self.objects_up:
            self.clock.after(1.0, lambda: self._commit(agent, plan, step))
            return
        key = (plan.generation, step)
        self.manifests[key] = ManifestRef(step=step, generation=plan.generation, key=f"{key}")
        self.clock.after(self.rng.choice((0.01, 0.3)), lambda: self._look(agent, plan, step))

    def _look(self, agent: Agent, plan: wire.Plan, step: int) -> None:
        if not agent.alive:
            return
        top = max(self.records)
        fenced = top > plan.generation
        agent.committed = wire.Committed(
            generation=plan.generation, step=step, fenced_by=top if fenced else None
        )
        if fenced:
            return
        self.acked.append((plan.generation, step))
        if step == self.settings.steps:
            for member in plan.members:
                other = self.agents[member.uid]
                if other.alive and other.generation == plan.generation:
                    other.ranks = {
                        r: msgspec.structs.replace(s, phase="done", step=step, exit=wire.ExitReport(code=0))
                        for r, s in other.ranks.items()
                    }
                    self._write(other)

    # ---- faults

    def disturb(self) -> None:
        """One fault, drawn by weight."""
        kinds: dict[str, tuple[int, Callable[[], Any]]] = {
            "kill_rank": (30, self._kill_rank),
            "hang_rank": (10, self._hang_rank),
            "kill_node": (15, self._kill_node),
            "freeze_agent": (8, self._freeze_agent),
            "kill_controller": (8, self._kill_controller),
            "freeze_controller": (12, self._freeze_controller),
            "etcd_away": (6, self._etcd_away),
            "objects_away": (8, self._objects_away),
            "revoke_leases": (3, self._revoke_leases),
            "wipe_memory": (100 if self.racy else 15, self._wipe_memory),
            "damage_step": (40 if self.racy else 12, self._damage_step),
        }
        names = list(kinds)
        name = self.rng.choices(names, [kinds[n][0] for n in names])[0]
        what = kinds[name][1]()
        if what is not None:
            self.faults.append(f"{self.clock.now:.2f} {name} {what}")

    def _working(self) -> list[Agent]:
        return [a for a in self.agents.values() if a.alive and a.ranks]

    def _kill_rank(self) -> Any:
        if not (agents := self._working()):
            return None
        agent = self.rng.choice(agents)
        rank = self.rng.choice(sorted(agent.ranks))
        if agent.ranks[rank].exit is not None or agent.ranks[rank].phase == "done":
            return None
        report = self.rng.choice(
            (
                wire.ExitReport(signal=9),
                wire.ExitReport(code=1, error=wire.ErrorReport(kind="workload", type="E", message="m")),
                wire.ExitReport(code=1, error=wire.ErrorReport(kind="collective", type="E", message="reset")),
            )
        )
        agent.ranks[rank] = msgspec.structs.replace(agent.ranks[rank], exit=report)
        self._write(agent)
        return f"{rank} on {agent.uid}"

    def _hang_rank(self) -> Any:
        if not (agents := self._working()):
            return None
        agent = self.rng.choice(agents)
        agent.hung.add(self.rng.choice(sorted(agent.ranks)))
        return agent.uid

    def _kill_node(self) -> Any:
        alive = [a for a in self.agents.values() if a.alive]
        if len(alive) < 2:
            return None
        agent = self.rng.choice(alive)
        agent.alive = False
        keep = self.rng.random() < 0.3  # only the agent died: shared memory is adopted by its next life
        self.clock.after(self.rng.uniform(0.5, 25.0), lambda: self._revive(agent, keep))
        return agent.uid

    def _revive(self, agent: Agent, keep: bool) -> None:
        life = int(agent.incarnation.split(".")[1]) + 1
        fresh = Agent(uid=agent.uid, incarnation=f"{agent.uid}.{life}")
        if keep:
            fresh.snapshots = list(agent.snapshots)
        # The key of the former life may stand still; the new one is put over it.
        fresh.lease_ends = agent.lease_ends
        self.agents[agent.uid] = fresh
        self._agent_beat(fresh, fresh.incarnation)

    def _freeze_agent(self) -> Any:
        awake = [a for a in self.agents.values() if a.alive and not a.frozen]
        if not awake:
            return None
        agent = self.rng.choice(awake)
        agent.frozen = True
        self.clock.after(self.rng.choice((0.5, 3.0, 20.0)), lambda: setattr(agent, "frozen", False))
        return agent.uid

    def _kill_controller(self) -> Any:
        alive = [c for c in self.controllers if c.alive]
        if not alive:
            return None
        controller = self.rng.choice(alive)
        controller.alive = False
        self.clock.after(self.rng.uniform(0.5, 5.0), lambda: self._restart(controller))
        return controller.name

    def _restart(self, controller: Controller) -> None:
        controller.life += 1
        life = controller.life
        controller.state = State(settings=replace(self.settings, controller=controller.name))
        controller.alive, controller.frozen, controller.token = True, False, None
        controller.term += 1
        controller.queue, controller.pending = [], []
        self._controller_beat(controller, life)

    def _freeze_controller(self) -> Any:
        awake = [c for c in self.controllers if c.alive and not c.frozen]
        if not awake:
            return None
        controller = self.rng.choice(awake)
        self.freeze_controller(controller)
        return controller.name

    def freeze_controller(self, controller: Controller) -> None:
        """SIGSTOP now, SIGCONT later: sometimes long after its lease has ended."""
        controller.frozen = True
        life = controller.life
        self.clock.after(self.rng.choice((1.0, 12.0, 30.0)), lambda: self._wake(controller, life))

    def _wipe_memory(self) -> Any:
        """Every snapshot is gone: what is not in the object store is lost."""
        for agent in self.agents.values():
            agent.snapshots.clear()
        return "all"

    def _damage_step(self) -> Any:
        """One of the newest steps turns out damaged: a start finds it so, or `ckpt verify` does while ranks train on. Mostly memory
        is lost with it; another step is always left to start from."""
        line = [at for at in self.lineage() if at not in self.damaged]
        if len(line) < 2:
            return None
        at = self.rng.choice(line[-2:])
        self.damaged.add(at)
        if self.objects_up and self.rng.random() < 0.3:
            self.aside.setdefault(at, "verified")
        if self.rng.random() < 0.7:
            self._wipe_memory()
        return at

    def _wake(self, controller: Controller, life: int) -> None:
        if not controller.alive or controller.life != life:
            return
        controller.frozen = False
        pending, controller.pending = controller.pending, []
        for action in pending:  # its threads go on first: the worst case
            action()
        controller.turn(tick=True)

    def _etcd_away(self) -> Any:
        if not self.etcd_up:
            return None
        self.etcd_up = False
        seconds = self.rng.choice((1.0, 8.0, 25.0))
        self.clock.after(seconds, self._etcd_back)
        return seconds

    def _etcd_back(self) -> None:
        """Leases get their full time again; the dead do not renew theirs."""
        self.etcd_up = True
        for uid in self.node_keys:
            self.agents[uid].lease_ends = self.clock.now + TTL_S
        if self.leader is not None:
            self.leader[0].lease_ends_in_etcd = self.clock.now + TTL_S

    def _objects_away(self) -> Any:
        if not self.objects_up:
            return None
        self.objects_up = False
        seconds = self.rng.choice((1.0, 10.0, 30.0))
        self.clock.after(seconds, lambda: setattr(self, "objects_up", True))
        return seconds

    def _revoke_leases(self) -> Any:
        if not self.etcd_up:
            return None
        for uid in list(self.node_keys):
            self._delete_node(uid)
        return "all"

    # ---- a whole history

    def run(self, *, disturbed_s: float = 60.0, calm_s: float = 300.0) -> None:
        """Disturb for a while, heal, and give the job time to end."""
        run_all([self], disturbed_s=disturbed_s, calm_s=calm_s)
        if self.outcome is not None and self.outcome.state != "done":
            self.breaks([f"INV-19: the job failed: {self.outcome.reason}"])

    def strike(self, until_s: float) -> None:
        """Faults at random moments until then."""
        if self.clock.now < until_s and not self.done:
            self.disturb()
            self.clock.after(self.rng.expovariate(1 / 6.0), lambda: self.strike(until_s))

    def check_end(self) -> None:
        if self.outcome is None:
            states = [(c.name, c.state.mind.name, c.state.leads) for c in self.controllers]
            self.breaks([f"INV-19: the job did not end: {states}"])
        lost = [a for a in self.acked if a not in self.lineage() and a not in self.damaged]
        if lost:
            self.breaks([f"INV-03: acknowledged and off the lineage of {self.head}: {lost}"])
        for controller in self.controllers:
            if controller.state.mind in FINAL and controller.state.the_end is None:
                self.breaks([f"{controller.name} ended without an outcome"])

    @property
    def head(self) -> int:
        """The newest generation that committed."""
        return max((g for g, _ in self.manifests), default=0)

    def lineage(self) -> list[tuple[int, int]]:
        """(generation, step) of what counts in the end."""
        found = lineage(self.records, self.manifests.values(), self.head)
        return [(m.generation, m.step) for m in found]


def run_all(worlds: list[World], *, disturbed_s: float, calm_s: float) -> None:
    """Disturb all of them for a while, heal, and give them time to end."""
    clock = worlds[0].clock
    for world in worlds:
        clock.after(world.rng.uniform(1.0, 6.0), lambda w=world: w.strike(disturbed_s))
    clock.run(disturbed_s + 30.0, lambda: all(w.done for w in worlds))
    for world in worlds:
        world.calm = True
    clock.run(disturbed_s + 30.0 + calm_s, lambda: all(w.done for w in worlds))
    for world in worlds:
        world.check_end()


class TwoRuns:
    """Two runs of one job into one root, each with an etcd and nodes of its own: neither knows of the other but by the
    object store. The nodes of a run that has ended train on, which is the worst they can do."""

    def __init__(self, seed: int, *, racy: bool = False) -> None:
        first = World(seed, racy=racy)
        begins_s = first.rng.choice((0.0, 0.0, 3.0, 15.0, 30.0))
        second = World(seed, racy=racy, run_id="run2", beside=first, begins_s=begins_s)
        self.runs = {"run1": first, "run2": second}
        self.taken_over: list[str] = []
        """Runs that ended because of the other's record."""

    @property
    def broken(self) -> list[str]:
        return [b for w in self.runs.values() for b in w.broken]

    @property
    def order(self) -> list[str]:
        """Whose records follow one another, repetitions left out."""
        records = self.runs["run1"].records
        owners = [records[g].plan["run_id"] for g in sorted(records)]
        return [o for o, _ in itertools.groupby(owners)]

    def run(self, *, disturbed_s: float = 60.0, calm_s: float = 300.0) -> None:
        run_all([*self.runs.values()], disturbed_s=disturbed_s, calm_s=calm_s)
        first = self.runs["run1"]
        if len(set(self.order)) != len(self.order):
            first.breaks([f"INV-03: the runs' records alternate: {self.order}"])
        ends = [step for _, step in first.lineage() if step == first.settings.steps]
        if len(ends) != 1:
            first.breaks([f"INV-03: the last step stands {len(ends)} times on the lineage of {first.head}"])
        for name, world in self.runs.items():
            if world.outcome is not None and world.outcome.state != "done":
                self._judge_failure(name, world, world.outcome)
        if len(self.taken_over) == len(self.runs):
            first.breaks(["INV-19: both runs were taken over, and nobody is done"])

    def _judge_failure(self, name: str, world: World, outcome: wire.Outcome) -> None:
        self.taken_over.append(name)
        if "has taken over this root" not in outcome.reason or outcome.exit_code != ExitCode.ENVIRONMENT:
            world.breaks([f"INV-19: {name} failed: {outcome.reason}"])
        elif self.order.index(name) == len(self.order) - 1:
            world.breaks([f"INV-03: {name} has the newest record and gave way: {self.order}"])
