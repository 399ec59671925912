"""The parts of the controller's shell by themselves: inbox, probes, what etcd's keys say, journal, election."""

from __future__ import annotations

import json
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from surefoot.ckpt.manifest import manifest_key
from surefoot.ckpt.record import Record, StartRef, encode_record, record_key
from surefoot.ckpt.store import (
    MemoryObjectStore,
    ObjectStoreDeniedError,
    ObjectStoreUnavailableError,
    ObjectUnknownError,
)
from surefoot.controller import wire
from surefoot.controller.core import decisions as dec
from surefoot.controller.core import events as ev
from surefoot.controller.effects import Effects, Means, Records, Trial
from surefoot.controller.election import Election, Leadership
from surefoot.controller.inbox import Inbox
from surefoot.controller.journal import Journal, line_of, read_incidents
from surefoot.controller.keys import Keys
from surefoot.controller.leases import LeaseKeeper
from surefoot.controller.probes import probe_all
from surefoot.controller.store import CreatedAt, MemoryStore, Put
from surefoot.controller.world import WorldFollower, WorldReader

# ---------------------------------------------------------------- inbox


def test_events_of_a_former_term_are_dropped() -> None:
    inbox = Inbox()
    first = inbox.begin_term(ev.Elected(token=1))
    inbox.post([ev.Ticked()], term=first)
    second = inbox.begin_term(ev.Elected(token=2))
    inbox.post([ev.NodeVanished(uid="n0", revision=3)], term=first)
    inbox.post([ev.NodeVanished(uid="n1", revision=3)], term=second)
    taken = inbox.take(0.0)
    assert [type(e).__name__ for e in taken] == ["Elected", "NodeVanished"]
    assert taken[1].uid == "n1"
    assert len({e.cause_id for e in taken}) == 2


def test_wake_ends_a_wait() -> None:
    inbox = Inbox()
    threading.Timer(0.01, inbox.wake).start()
    began = time.monotonic()
    assert inbox.take(10.0) == []
    assert time.monotonic() - began < 5


# ---------------------------------------------------------------- probes


def status(uid: str = "n0") -> wire.NodeStatus:
    return wire.NodeStatus(uid=uid, incarnation="a", seq=1, state="parked")


@contextmanager
def agent(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """One connection is accepted, one line read, `answer` says the rest; gives the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.makefile("rb").readline()
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(5)


def ask(port: int, deadline_s: float = 2.0) -> Any:
    told: list[Any] = []
    target = dec.ProbeTarget(uid="n0", incarnation="a", host="127.0.0.1", port=port)
    probe_all([target], op=7, job="j", token="t", deadline_s=deadline_s, tell=told.append)
    assert len(told) == 1
    assert told[0].op == 7
    return told[0]


def test_answer() -> None:
    reply = wire.encode(wire.ProbeReplyMsg(status=status())) + b"\n"
    with agent(lambda c: c.sendall(reply)) as port:
        assert ask(port) == ev.ProbeAnswered(op=7, uid="n0", status=status())


def test_answer_in_pieces() -> None:
    reply = wire.encode(wire.ProbeReplyMsg(status=status())) + b"\n"

    def slowly(connection: socket.socket) -> None:
        for i in range(0, len(reply), 11):
            connection.sendall(reply[i : i + 11])

    with agent(slowly) as port:
        assert isinstance(ask(port), ev.ProbeAnswered)


def test_another_agent_has_the_port_now() -> None:
    reply = wire.encode(wire.ProbeReplyMsg(status=status("n9"))) + b"\n"
    with agent(lambda c: c.sendall(reply)) as port:
        assert isinstance(ask(port), ev.ProbeRefused)


def test_wrong_token_is_no_death() -> None:
    reply = wire.encode(wire.RefusedMsg(reason="the token is wrong")) + b"\n"
    with agent(lambda c: c.sendall(reply)) as port:
        outcome = ask(port)
    assert isinstance(outcome, ev.ProbeBroken)
    assert "token is wrong" in outcome.detail


@pytest.mark.parametrize("words", [b"hello\n", b"{}\n", b'{"type": "probe_reply"}\n', b""])
def test_nonsense_and_hanging_up(words: bytes) -> None:
    with agent(lambda c: c.sendall(words)) as port:
        assert isinstance(ask(port), ev.ProbeBroken)


def test_nobody_listens() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    assert isinstance(ask(port), ev.ProbeRefused)


def test_no_answer() -> None:
    released = threading.Event()
    with agent(lambda c: released.wait(5) and None) as port:
        began = time.monotonic()
        outcome = ask(port, deadline_s=0.1)
        took_s = time.monotonic() - began
        released.set()
    assert outcome == ev.ProbeTimedOut(op=7, uid="n0")
    assert took_s < 1


# ---------------------------------------------------------------- what etcd's keys say


def test_world_follower_lists_watches_and_lists_again(eventually: Any) -> None:
    store, keys = MemoryStore(), Keys("j")
    info = wire.NodeInfo(
        uid="n0",
        incarnation="a",
        host="h",
        control_port=1,
        flight_port=2,
        pid=3,
        slots=2,
        code_version="t",
    )
    store.put(keys.node("n0"), wire.encode(info))
    store.put(keys.status("n1"), b"not json")
    got: list[Any] = []
    follower = WorldFollower(store, WorldReader("j"), got.extend, relist_s=0.1)
    follower.start()
    eventually(lambda: got)
    assert [n.info.uid for n in got[0].nodes] == ["n0"]
    assert got[0].statuses == ()
    store.put(keys.status("n0"), wire.encode(status()))
    store.put(keys.leader, b"a")
    store.put(keys.plan, wire.encode(wire.PlanPointer(generation=1, hash="h", location="l")))
    store.delete(keys.node("n0"))
    eventually(lambda: any(isinstance(e, ev.NodeVanished) for e in got))
    kinds = [type(e).__name__ for e in got if not isinstance(e, ev.WorldListed)]
    assert kinds == ["StatusReported", "PointerSeen", "NodeVanished"]
    eventually(lambda: sum(isinstance(e, ev.WorldListed) for e in got) >= 3)
    follower.stop()


def test_compacted_watch_lists_again(eventually: Any) -> None:
    """CTL-22: the watch fell behind a compaction: a fresh listing follows."""
    store = MemoryStore()
    got: list[Any] = []
    follower = WorldFollower(store, WorldReader("j"), got.extend, relist_s=60)
    follower.start()
    eventually(lambda: got)
    eventually(lambda: follower._watch is not None)
    watch = follower._watch
    assert watch is not None
    watch.next_revision = 1  # type: ignore[attr-defined] - a MemoryWatch, made to stand far back
    revision = 0
    for _ in range(5):
        revision = store.put("/surefoot/j/x", b"")
    store.compact(revision)
    eventually(lambda: sum(isinstance(e, ev.WorldListed) for e in got) >= 2)
    follower.stop()


# ---------------------------------------------------------------- journal


class Flaky(MemoryObjectStore):
    """Fails on cue: the errors in `failures` are raised by the next creations."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[Exception] = []

    def create(self, key: str, data: bytes | memoryview) -> None:
        if self.failures:
            raise self.failures.pop(0)
        super().create(key, data)


def lines(store: MemoryObjectStore) -> list[dict[str, Any]]:
    data = b"".join(store.read(o.key) for o in store.list("journal/"))
    return [json.loads(line) for line in data.splitlines()]


def incident(step: int, **facts: Any) -> wire.Incident:
    return wire.Incident(id="inc-0001", fault="hang", cause="none", generation=1, step=step, **facts)


def test_journal_is_kept_through_failures(tmp_path: Path, eventually: Any) -> None:
    store = Flaky()
    store.failures = [ObjectStoreUnavailableError("away"), ObjectUnknownError("timeout")]
    journal = Journal(tmp_path, store, "a")
    journal.add({"what": 1})
    journal.start()
    journal.incident(incident(3))
    journal.add({"what": 2})
    journal.stop(10)
    assert {entry["n"]: entry["what"] for entry in lines(store)} == {1: 1, 2: 2}
    assert store.failures == []
    local = (next(tmp_path.glob("*.jsonl"))).read_text().splitlines()
    assert [json.loads(entry)["what"] for entry in local] == [1, 2]


def test_incidents_newest_version_counts(tmp_path: Path) -> None:
    store = MemoryObjectStore()
    for facts in ({}, {"decision": "restart"}):
        journal = Journal(tmp_path / str(len(facts)), store, "a")
        journal.start()
        journal.incident(incident(3, **facts))
        journal.incident(incident(4, **facts))
        journal.stop()
    found = read_incidents(store)
    assert list(found) == ["inc-0001"]
    assert (found["inc-0001"].step, found["inc-0001"].decision) == (4, "restart")
    assert len(store.list("incidents/inc-0001/")) == 4
    store.create("incidents/inc-0002/0001.json", b"{broken")
    assert list(read_incidents(store)) == ["inc-0001"]


def test_heartbeats_are_left_out_and_ends_are_not(bench: Any) -> None:
    bench.running(step=4)
    beat = ev.StatusReported(status=bench.nodes["n0"].status())
    assert line_of(bench.state, [ev.Ticked(), beat], [], 1.0) is None
    bench.rank(1, exit=wire.ExitReport(signal=9))
    end = ev.StatusReported(status=bench.nodes["n0"].status(), cause_id="e9")
    decided = bench.send(end)
    line = line_of(bench.state, [end], decided, 1.0)
    assert line is not None
    text = json.dumps(line)
    assert '"signal": 9' in text
    assert "ProbeNodes" in text
    assert all(d["cause_id"] == "e9" for d in line["decisions"] if d["type"] == "ProbeNodes")


# ---------------------------------------------------------------- election


class Candidate:
    def __init__(self, store: MemoryStore, name: str) -> None:
        self.won: list[Leadership] = []
        self.lost: list[str] = []
        self.outcomes: list[wire.Outcome] = []
        self.election = Election(
            store,
            Keys("j"),
            name=name,
            ttl_s=10,
            on_elected=self.won.append,
            on_deposed=self.lost.append,
            on_outcome=self.outcomes.append,
            is_ours=lambda outcome: outcome.run_id == "r",
            rng=random.Random(name),
        )
        self.election.start()


def test_one_leads_and_hands_over(eventually: Any) -> None:
    store, keys = MemoryStore(), Keys("j")
    a = Candidate(store, "a")
    eventually(lambda: a.won)
    b = Candidate(store, "b")
    key = store.get(keys.leader)
    assert key is not None
    assert (key.value, key.create_revision) == (b"a", a.won[0].token)
    assert a.won[0].alive()
    assert b.won == []
    a.election.stop()
    eventually(lambda: b.won)
    assert b.won[0].token > a.won[0].token
    fenced = store.txn([CreatedAt(keys.leader, a.won[0].token)], [Put(keys.plan, b"x")])
    assert not fenced.succeeded
    assert not a.won[0].alive() or a.lost == []
    b.election.stop()
    assert store.get(keys.leader) is None


def test_lost_lease_deposes(eventually: Any) -> None:
    store, keys = MemoryStore(), Keys("j")
    a = Candidate(store, "a")
    eventually(lambda: a.won)
    key = store.get(keys.leader)
    assert key is not None
    store.revoke(key.lease)
    eventually(lambda: a.lost, within_s=8)
    eventually(lambda: len(a.won) == 2, within_s=8)
    a.election.stop()


def test_a_late_resignation_ends_no_later_leadership(eventually: Any) -> None:
    """Its thread has won again by the time its loop gives the former leadership up: it must not lose the new one."""
    store, keys = MemoryStore(), Keys("j")
    a = Candidate(store, "a")
    eventually(lambda: a.won)
    store.revoke(store.get(keys.leader).lease)
    eventually(lambda: len(a.won) == 2, within_s=8)
    a.won[0].resign()
    assert a.won[0].over.is_set()
    assert not a.won[1].over.is_set()
    a.won[1].resign()
    eventually(lambda: len(a.won) == 3)
    assert store.get(keys.leader).create_revision == a.won[2].token
    a.election.stop()


def test_standby_leaves_when_the_job_has_ended(eventually: Any) -> None:
    store, keys = MemoryStore(), Keys("j")
    a = Candidate(store, "a")
    eventually(lambda: a.won)
    b = Candidate(store, "b")
    former = wire.Outcome(state="failed", exit_code=3, step=0, reason="x", generation=1, run_id="r0")
    ours = wire.Outcome(state="done", exit_code=0, step=9, reason="x", generation=1, run_id="r")
    store.put(keys.outcome, wire.encode(former))
    store.put(keys.outcome, wire.encode(ours))
    a.election.stop()
    eventually(lambda: b.outcomes == [ours])
    assert b.won == []
    b.election.stop()


# ---------------------------------------------------------------- effects


@contextmanager
def effects(folder: Path, store: MemoryStore, objects: MemoryObjectStore) -> Iterator[tuple[Effects, Any]]:
    """The hands of a leader of job ``j``, and the queue of what they answer."""
    keys, answers = Keys("j"), queue.SimpleQueue[Any]()
    keeper = LeaseKeeper(store, 10, on_lost=lambda reason: None, rng=random.Random(1))
    keeper.start()
    token = store.txn([CreatedAt(keys.leader, 0)], [Put(keys.leader, b"a", keeper.lease)]).revision
    journal = Journal(folder, objects, "a")
    journal.start()
    means = Means(store=store, objects=objects, keys=keys, job="j", token="t", journal=journal)
    hands = Effects(
        means,
        Records(objects),
        Trial(objects),
        Leadership(token, keeper),
        lambda e: [answers.put(x) for x in e] and None,
    )
    yield hands, answers
    hands.finish()
    journal.stop()
    keeper.stop()


def test_what_is_held_stands_in_etcd_under_the_leaders_lease(tmp_path: Path, eventually: Any) -> None:
    store, key = MemoryStore(), Keys("j").held
    with effects(tmp_path, store, MemoryObjectStore()) as (hands, _):
        leader = store.get(Keys("j").leader)
        hands.perform(dec.TellHeld(token=leader.create_revision, reason="a record is damaged"))
        kv = eventually(lambda: store.get(key))
        assert wire.decode(wire.Held, kv.value).reason == "a record is damaged"
        assert kv.lease == leader.lease
        hands.perform(dec.TellHeld(token=leader.create_revision, reason=""))
        eventually(lambda: store.get(key) is None)
        hands.perform(dec.TellHeld(token=leader.create_revision - 1, reason="of one who leads no longer"))
        hands.perform(dec.TellHeld(token=leader.create_revision, reason="again"))
        eventually(lambda: store.get(key))
        assert wire.decode(wire.Held, store.get(key).value).reason == "again"
    assert store.get(key) is None


def test_a_damaged_record_where_one_is_to_be_created_is_a_taken_number(tmp_path: Path) -> None:
    """Not an unknown outcome, which would be tried again for ever: the listing that follows tells what is wrong there."""
    objects = MemoryObjectStore()
    objects.create(record_key(1), b'{"format": 1, "gener')
    with effects(tmp_path, MemoryStore(), objects) as (hands, answers):
        record = Record(generation=1, start=StartRef(), reason="first_start", created_by="a@1")
        hands.perform(dec.CreateRecord(op=5, record=record))
        assert answers.get(timeout=10) == ev.RecordTaken(op=5, generation=1)
        hands.perform(dec.ListLineage(op=6))
        damaged = answers.get(timeout=10)
        assert isinstance(damaged, ev.LineageDamaged)
        assert "generations/0001.json (20 bytes) is damaged" in damaged.detail
        assert "restore it" in damaged.detail


def test_a_record_that_was_deleted_is_missed_by_what_its_generation_committed(tmp_path: Path) -> None:
    """Else the leader would give its number out again."""
    objects = MemoryObjectStore()
    objects.create(manifest_key(1, 20), b"{}")
    with effects(tmp_path, MemoryStore(), objects) as (hands, answers):
        hands.perform(dec.ListLineage(op=1))
        damaged = answers.get(timeout=10)
        assert isinstance(damaged, ev.LineageDamaged)
        assert "restore generations/0001.json from a backup" in damaged.detail


def test_flags_are_raised_and_read_with_the_next_listing(tmp_path: Path, eventually: Any) -> None:
    objects = MemoryObjectStore()
    objects.create(
        record_key(1), encode_record(Record(generation=1, start=StartRef(), reason="r", created_by="a"))
    )
    for step in (10, 20):
        objects.create(manifest_key(1, step), b"{}")
    objects.create("gen-0001/step-0000000010/aside.json", b"not ours")
    with effects(tmp_path, MemoryStore(), objects) as (hands, answers):
        hands.perform(dec.SetAside(token=1, generation=1, step=20, reason="r0: block 0 differs"))
        eventually(lambda: [o for o in objects.list("gen-") if "20/aside" in o.key])
        hands.perform(dec.SetAside(token=1, generation=1, step=20, reason="late, and harmless"))
        hands.perform(dec.ListLineage(op=1))
        listed = answers.get(timeout=10)
        assert [m.step for m in listed.manifests] == [10, 20]
        assert listed.aside == {
            (1, 10): "it says no more",
            (1, 20): "r0: block 0 differs (found by the controller)",
        }
        assert listed.lacks == ""


class WithoutConditions(MemoryObjectStore):
    """A store that does not know conditions: what comes second overwrites, unless one looks first."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = False

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        if not self.looks:
            self.delete(key)
        super().create(key, data)

    def do_without_conditions(self) -> None:
        self.looks = True


def test_a_store_without_conditions_is_found_before_anything_is_decided(tmp_path: Path) -> None:
    """The first listing tells; from then on a second record of one number is refused all the same. It is tried once."""
    objects = WithoutConditions()
    with effects(tmp_path, MemoryStore(), objects) as (hands, answers):
        hands.perform(dec.ListLineage(op=1))
        assert "a second creation of probes/" in answers.get(timeout=10).lacks
        assert objects.looks
        for op, who in ((2, "a@1"), (3, "b@2")):
            record = Record(generation=1, start=StartRef(), reason="first_start", created_by=who)
            hands.perform(dec.CreateRecord(op=op, record=record))
            answer = answers.get(timeout=10)
            assert isinstance(answer, ev.RecordCreated if op == 2 else ev.RecordTaken)
        objects.looks = False
        hands.perform(dec.ListLineage(op=4))
        assert "a second creation of probes/" in answers.get(timeout=10).lacks
        assert not objects.looks
        assert not objects.list("probes/")


class ReadOnly(MemoryObjectStore):
    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        raise ObjectStoreDeniedError(f"memory://: cannot create {key}: AccessDenied")


def test_a_store_that_denies_creation_is_told_before_anything_is_decided(tmp_path: Path) -> None:
    with effects(tmp_path, MemoryStore(), ReadOnly()) as (hands, answers):
        hands.perform(dec.ListLineage(op=1))
        denied = answers.get(timeout=10)
        assert isinstance(denied, ev.ObjectStoreDenied)
        assert "cannot create probes/" in denied.detail
        assert "it may list, read, create and delete below job.root, memory://" in denied.detail


@pytest.mark.parametrize("deposed_by", ["nobody holds the key", "another leads"])
def test_whoever_leads_no_longer_ends_no_job_and_publishes_no_plan(tmp_path: Path, deposed_by: str) -> None:
    """The fence alone: this controller still believes that it leads, for its lease's time is not up."""
    store, keys = MemoryStore(), Keys("j")
    with effects(tmp_path, store, MemoryObjectStore()) as (hands, answers):
        token = store.get(keys.leader).create_revision
        store.delete(keys.leader)
        if deposed_by == "another leads":
            store.put(keys.leader, b"b")
        outcome = wire.Outcome(state="done", exit_code=0, step=9, reason="x", generation=1)
        hands.perform(dec.WriteOutcome(op=1, token=token, outcome=outcome))
        assert answers.get(timeout=5) == ev.OutcomeRefused(op=1)
        pointer = wire.PlanPointer(generation=2, hash="h", location="l")
        hands.perform(dec.PublishPlan(op=2, token=token, pointer=pointer))
        assert isinstance(answers.get(timeout=5), ev.PlanRefused)
        assert store.get(keys.outcome) is None
        assert store.get(keys.plan) is None
