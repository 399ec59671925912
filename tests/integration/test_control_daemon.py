"""The real controller process and a real etcd; agents are toys (control_agents.py), so that everything happens in seconds."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.control_agents import ControllerProcess, ToyJob, free_port, until, write_job

from surefoot.ckpt.record import lineage, list_manifests, list_records, read_record
from surefoot.ckpt.store import ObjectStore, open_store
from surefoot.controller import wire
from surefoot.controller.etcd import EmbeddedEtcd
from surefoot.controller.journal import read_incidents
from surefoot.controller.keys import Keys
from surefoot.controller.store import CoordStore

pytestmark = pytest.mark.slow


class Bed:
    """One job: controllers, toy agents, stores."""

    def __init__(self, folder: Path, store: CoordStore, endpoint: str, job: str) -> None:
        self.folder, self.store, self.endpoint, self.job = folder, store, endpoint, job
        self.keys = Keys(job)
        self.controllers: list[ControllerProcess] = []
        self.toy: ToyJob | None = None
        self.objects: ObjectStore

    def start(self, *uids: str, steps: int = 400, hang_floor_s: float = 5.0) -> ToyJob:
        self.job_file, root = write_job(self.folder, self.job, steps=steps, hang_floor_s=hang_floor_s)
        self.objects = open_store(root)
        self.toy = ToyJob(self.store, self.objects, self.job, steps=steps)
        self.toy.add(*uids)
        return self.toy

    def controller(self, name: str, **env: str) -> ControllerProcess:
        started = ControllerProcess(self.folder, name, self.job_file, self.endpoint, **env)
        self.controllers.append(started)
        return started

    def leader(self) -> str | None:
        kv = self.store.get(self.keys.leader)
        return kv.value.decode() if kv is not None else None

    def outcome(self) -> wire.Outcome | None:
        kv = self.store.get(self.keys.outcome)
        return wire.decode(wire.Outcome, kv.value) if kv is not None else None

    def incident(self, identity: str) -> wire.Incident | None:
        kv = self.store.get(self.keys.incident(identity))
        return wire.decode(wire.Incident, kv.value) if kv is not None else None

    def steps_on(self, beyond: int = 3) -> None:
        assert self.toy is not None
        toy, at = self.toy, self.toy.step
        until(lambda: toy.step >= at + beyond, 15, f"{beyond} more steps; {self.words()}")

    def words(self) -> str:
        return "\n".join(c.words() for c in self.controllers)

    def close(self) -> None:
        for controller in self.controllers:
            controller.close()
        if self.toy is not None:
            self.toy.close()


@pytest.fixture
def bed(tmp_path: Path, etcd: EmbeddedEtcd, coord: CoordStore, job: str) -> Iterator[Bed]:
    made = Bed(tmp_path, coord, etcd.endpoint, job)
    yield made
    made.close()


def test_start_kill_hang_and_end(bed: Bed) -> None:
    """First start; a rank is killed (planned in well under 100 ms); a rank hangs; the job ends, and so do its controllers."""
    toy = bed.start("n0", "n1", steps=150, hang_floor_s=1.0)
    first = bed.controller("a")
    until(lambda: toy.generation == 1, 15, f"a first plan; {bed.words()}")
    standby = bed.controller("b")
    bed.steps_on()

    ended_s = toy.agent_of(1).end_rank(1, signal=9)
    until(lambda: toy.generation == 2, 5, f"generation 2; {bed.words()}")
    assert toy.plan is not None
    assert (toy.plan.reason.fault, toy.plan.start.tier) == ("rank_exit", "memory")
    assert toy.plans[2][1] - ended_s < 0.5  # the median is about 30 ms; this is for two busy cores
    bed.steps_on()

    with toy.lock:
        toy.agent_of(2).frozen.add(2)
    until(lambda: toy.generation == 3, 10, f"generation 3; {bed.words()}")
    assert toy.plan.reason.fault == "hang"
    until(lambda: (i := bed.incident("inc-0002")) and i.closed, 10, "the incident is closed")
    incident = bed.incident("inc-0002")
    assert incident is not None
    assert (incident.fault, incident.new_generation) == ("hang", 3)
    assert incident.first_step_s is not None

    until(lambda: first.process.poll() is not None, 30, f"the end; {bed.words()}")
    until(lambda: standby.process.poll() is not None, 15, f"the standby's end; {bed.words()}")
    assert (first.process.returncode, standby.process.returncode) == (0, 0)
    outcome = bed.outcome()
    assert outcome is not None
    assert (outcome.state, outcome.step, outcome.run_id) == ("done", 150, "run1")
    assert bed.leader() is None
    assert list_records(bed.objects) == [1, 2, 3]
    durable = read_incidents(bed.objects)
    assert {i: (d.fault, d.closed) for i, d in durable.items()} == {
        "inc-0001": ("rank_exit", True),
        "inc-0002": ("hang", True),
    }
    assert any(o.key.startswith("journal/") for o in bed.objects.list("journal/"))
    assert [e["fault"] for e in first.events("incident")] == ["rank_exit", "hang"]
    assert standby.events("elected") == []


def test_node_loss_and_standby(bed: Bed) -> None:
    """All of a node is gone; a survivor's broken connection leads to the probe, the probe to the verdict: no TTL is sat out."""
    toy = bed.start("n0", "n1", "n2")
    bed.controller("a")
    until(lambda: toy.generation == 1, 15, f"a first plan; {bed.words()}")
    bed.steps_on()
    assert toy.plan is not None
    lost = toy.plan.members[1].uid
    spare = next(u for u in toy.agents if toy.plan.member(u) is None)
    toy.agents[lost].die()
    error = wire.ErrorReport(kind="collective", type="RuntimeError", message="Connection closed by peer")
    ended_s = toy.agents[toy.plan.members[0].uid].end_rank(0, code=1, error=error)
    until(lambda: toy.generation == 2, 10, f"generation 2; {bed.words()}")
    assert (toy.plan.reason.kind, toy.plan.reason.fault) == ("replace", "node_loss")
    assert toy.plan.members[1].uid == spare
    assert toy.plan.start.tier == "memory"
    assert toy.plans[2][1] - ended_s < 2.0
    bed.steps_on()


def test_killed_leader(bed: Bed) -> None:
    """SIGKILL of the leader: ranks step on, the standby leads within the TTL, and leaves the generation as it is."""
    toy = bed.start("n0", "n1", steps=2000)
    first = bed.controller("a")
    until(lambda: bed.leader() == "a", 15, f"a leads; {bed.words()}")
    second = bed.controller("b")
    until(lambda: toy.generation == 1, 15, f"a first plan; {bed.words()}")
    bed.steps_on()
    at = toy.step
    first.process.kill()
    until(lambda: bed.leader() == "b", 13, f"b leads; {bed.words()}")
    assert toy.step > at + 50
    bed.steps_on()
    until(lambda: any("left as it is" in e["text"] for e in second.events("report")), 5, bed.words())
    assert list_records(bed.objects) == [1]
    toy.agent_of(3).end_rank(3, signal=9)
    until(lambda: toy.generation == 2, 5, f"generation 2; {bed.words()}")


@pytest.mark.parametrize(
    ("point", "standby"),
    [
        ("plan.before_record", True),
        ("plan.after_record", True),
        ("plan.before_publish", True),
        ("plan.before_publish", False),
    ],
)
def test_woken_controller(bed: Bed, point: str, standby: bool) -> None:
    """CTL-13: the leader is stopped in the middle of preparing a plan for longer than its lease, and woken.

    With a standby that has published meanwhile, and without one: each write is refused (or is a record, which makes the
    leader form the next generation and loses no acknowledged commit), it steps down within 2 s, and the history tells.
    """
    toy = bed.start("n0", "n1", steps=2000)
    # The first record and plan come up undisturbed; the second one, for the killed rank, is where it stops.
    frozen = bed.controller("a", SUREFOOT_CHAOS="1", SUREFOOT_FAILPOINTS=f"{point}=freeze@2")
    until(lambda: toy.generation == 1, 15, f"a first plan; {bed.words()}")
    until(lambda: toy.acked, 20, f"a commit; {bed.words()}")
    other = bed.controller("b") if standby else None
    toy.agent_of(1).end_rank(1, signal=9)
    until(lambda: frozen.events("failpoint"), 5, f"it stops; {bed.words()}")
    if other is not None:
        until(lambda: toy.generation > 1, 25, f"b publishes; {bed.words()}")
    else:
        until(lambda: bed.leader() is None, 25, "the lease ends")
    before = list_records(bed.objects)

    frozen.process.send_signal(signal.SIGCONT)
    until(lambda: frozen.events("report", topic="leadership"), 2.0, f"it steps down; {bed.words()}")
    if point == "plan.before_publish":
        refused = until(lambda: frozen.events("ok", op="publish_plan", published=False), 5, bed.words())
        assert len(refused) == 1
    published = [e["generation"] for e in frozen.events("ok", op="publish_plan", published=True)]
    assert published[:1] == [1]
    if other is not None:
        if point == "plan.before_record":
            # Its record came to be, or found the number taken; either way nobody's plan points to it.
            assert published == [1]
        bed.steps_on()
        assert bed.leader() == "b"
    else:
        # It was woken without anybody else: it stands for election again, and forms the generation as a new leader.
        until(lambda: toy.generation > 1, 15, f"the next plan; {bed.words()}")
        assert len(frozen.events("elected")) == 2
        assert len(list_records(bed.objects)) > len(before)
    generations = [toy.plans[g][0].generation for g in sorted(toy.plans)]
    assert generations == sorted(set(generations))

    # What it has written as a record before it was deposed, or when it was woken, no plan ever points to: the leader forms
    # the next generation above it.
    records = {g: read_record(bed.objects, g)[0] for g in list_records(bed.objects)}
    theirs = f"a@{frozen.events('elected')[0]['token']}"
    left = [g for g, r in records.items() if g > 1 and r.created_by == theirs]
    assert bool(left) == (point != "plan.before_record")
    for generation in left:
        assert generation not in toy.plans
        assert records[generation + 1].plan["reason"]["kind"] == "burnt"
    # A commit of the generation that goes on is acknowledged, and none that ever was is off its lineage.
    until(lambda: any(g == toy.generation for g, _ in toy.acked), 20, f"a commit later on; {bed.words()}")
    counted = {(m.generation, m.step) for m in lineage(records, list_manifests(bed.objects), toy.generation)}
    assert set(toy.acked) <= counted


@pytest.mark.parametrize(
    "point",
    [
        "plan.before_record",
        "plan.after_record",
        "plan.before_publish",
        "plan.after_publish_before_ack",
        "leader.after_win",
    ],
)
def test_leader_crashes_at_every_failpoint(bed: Bed, point: str) -> None:
    """CTL-16: SIGKILL of the leader at each edge while a fault is being answered: the standby ends what it began, once."""
    hit = "" if point == "leader.after_win" else "@2"
    toy = bed.start("n0", "n1", "n2", steps=2000)
    first = bed.controller("a", SUREFOOT_CHAOS="1", SUREFOOT_FAILPOINTS=f"{point}=crash{hit}")
    until(lambda: bed.leader() == "a", 15, f"a leads; {bed.words()}")
    bed.controller("b")
    if point != "leader.after_win":
        until(lambda: toy.generation == 1, 15, f"a first plan; {bed.words()}")
        bed.steps_on()
        toy.agent_of(1).end_rank(1, signal=9)
    until(lambda: first.process.poll() is not None, 10, f"a crashes; {bed.words()}")
    assert first.process.returncode == -signal.SIGKILL
    assert first.events("failpoint", name=point)
    until(lambda: bed.leader() == "b", 13, f"b leads; {bed.words()}")
    wanted = 1 if point == "leader.after_win" else 2
    until(lambda: toy.generation >= wanted, 10, f"a plan; {bed.words()}")
    bed.steps_on()
    records = list_records(bed.objects)
    if point != "leader.after_win":
        assert len(records) == (3 if point in ("plan.after_record", "plan.before_publish") else 2)
        assert toy.plan is not None
        assert toy.plan.reason.fault == "rank_exit"


def test_no_etcd(tmp_path: Path, job: str) -> None:
    job_file, _ = write_job(tmp_path, job)
    controller = ControllerProcess(tmp_path, "a", job_file, f"127.0.0.1:{free_port()}")
    try:
        assert controller.process.wait(20) == 5
        assert "etcd" in controller.words()
        assert "Traceback" not in controller.words()
    finally:
        controller.close()


def test_bad_spec(tmp_path: Path) -> None:
    job_file = tmp_path / "job.toml"
    job_file.write_text("[job]\nname = 3\n")
    controller = ControllerProcess(tmp_path, "a", job_file, "127.0.0.1:1")
    try:
        assert controller.process.wait(20) == 2
        assert "job.name" in controller.words()
    finally:
        controller.close()


def test_sigterm_hands_over_at_once(bed: Bed) -> None:
    toy = bed.start("n0", "n1", steps=2000)
    first = bed.controller("a")
    until(lambda: toy.generation == 1, 15, f"a first plan; {bed.words()}")
    bed.controller("b")
    until(lambda: "standing by" in bed.words(), 10, bed.words())
    first.process.terminate()
    until(lambda: bed.leader() == "b", 3, f"b leads; {bed.words()}")
    assert first.process.wait(5) == 130
    bed.steps_on()
    assert list_records(bed.objects) == [1]


def test_running_again_on_a_finished_root(bed: Bed) -> None:
    toy = bed.start("n0", "n1", steps=20)
    first: Any = bed.controller("a")
    assert first.process.wait(30) == 0
    toy.store.delete(bed.keys.outcome)
    again = bed.controller("b")
    assert again.process.wait(15) == 0
    assert list_records(bed.objects) == [1]
