"""Carries out what the core decides. Every decision with an `op` is answered by exactly one event that bears it.

Nothing here decides. Store operations run in a small pool of threads; each of them looks whether this controller still leads
before it begins, and the fenced ones are refused by etcd where it does not. What could not be known is told as unknown.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from surefoot import history
from surefoot.ckpt.control import aside_among, ensure_exclusive, set_aside, why_aside
from surefoot.ckpt.errors import CkptError, DamagedError, FormatError
from surefoot.ckpt.manifest import ManifestRef, manifest_key, manifest_refs
from surefoot.ckpt.record import (
    Record,
    RecordTakenError,
    create_record,
    list_records,
    read_record,
    record_key,
    require_recorded,
)
from surefoot.ckpt.store import (
    ObjectStore,
    ObjectStoreDeniedError,
    ObjectStoreError,
    ObjectUnknownError,
    each_of,
)
from surefoot.controller import wire
from surefoot.controller.core import decisions as dec
from surefoot.controller.core import events as ev
from surefoot.controller.election import Leadership
from surefoot.controller.journal import Journal
from surefoot.controller.keys import Keys
from surefoot.controller.probes import probe_all
from surefoot.controller.store import (
    CoordError,
    CoordStore,
    CoordUnknownError,
    CreatedAt,
    Delete,
    Put,
)
from surefoot.failpoint import failpoint

log = logging.getLogger(__name__)

INCIDENTS_MAX = 50
"""Incidents kept in etcd (docs/protocol.md); all of them are in the object store."""

HELD_RETRY_S = 1.0
"""Pause before etcd is asked again to take the ``held`` key."""

D = TypeVar("D")

Post = Callable[[Iterable[ev.Event]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What effects are made with."""

    store: CoordStore
    objects: ObjectStore
    keys: Keys
    job: str
    token: str
    """The job's token, for probes."""
    journal: Journal


class Records:
    """The records read so far: they never change, so each is read once."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._known: dict[int, tuple[Record, str]] = {}

    def all(self) -> tuple[dict[int, Record], dict[int, str]]:
        """Every record there is, and the hash of each one's bytes. Raises: CkptError, ObjectStore…Error."""
        generations = list_records(self._objects)
        each_of(self._read, [g for g in generations if g not in self._known])
        found = {g: self._known[g] for g in generations}
        return {g: r for g, (r, _) in found.items()}, {g: h for g, (_, h) in found.items()}

    def _read(self, generation: int) -> None:
        record, data = read_record(self._objects, generation)
        with self._lock:
            self._known[generation] = (record, wire.digest(data))


class Trial:
    """Does the object store create conditionally? Tried once in a controller's life, before it relies on that."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._lacks: str | None = None

    def lacks(self) -> str:
        """What it lacks, in words; the store then does without from now on. Empty: nothing.

        Raises: ObjectStoreDeniedError: it cannot hold a job; ObjectStoreUnavailableError: it could not be asked.
        """
        with self._lock:
            if self._lacks is None:
                try:
                    probe = ensure_exclusive(self._objects)
                except ObjectStoreDeniedError as e:
                    raise ObjectStoreDeniedError(
                        f"{e} (a controller tries at its start whether the object store creates conditionally: it may list, read, create"
                        f" and delete below job.root, {self._objects.root}, or cannot run the job)"
                    ) from e
                self._lacks = "" if probe.exclusive else probe.detail
            return self._lacks


class Effects:
    """The hands of one controller for the length of one term."""

    def __init__(
        self, means: Means, records: Records, trial: Trial, leadership: Leadership, post: Post
    ) -> None:
        self._means, self._records, self._trial = means, records, trial
        self._leadership, self._post = leadership, post
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="effects")
        self._probes = ThreadPoolExecutor(max_workers=2, thread_name_prefix="probes")
        self._diary = ThreadPoolExecutor(max_workers=1, thread_name_prefix="incidents")
        """One thread: versions of an incident, and what is held, are written in their order."""
        self._stopped = threading.Event()

    def stop(self) -> None:
        """No more effects; what is under way comes to its end by itself."""
        self._stopped.set()
        for pool in (self._pool, self._probes, self._diary):
            pool.shutdown(wait=False, cancel_futures=True)

    def finish(self) -> None:
        """Wait for the incidents that are still to be written, and end."""
        self._stopped.set()
        self._diary.shutdown(wait=True)
        self.stop()

    def perform(self, decision: dec.Decision) -> None:
        """Begin to carry it out; never blocks. FollowWorld, StepDown and Report are the loop's own."""
        match decision:
            case dec.ProbeNodes():
                self._probes.submit(self._probe, decision)
            case dec.CreateRecord():
                self._submit(decision.op, self._create_record, decision)
            case dec.ListLineage():
                self._submit(decision.op, self._list_lineage, decision)
            case dec.PublishPlan():
                self._submit(decision.op, self._publish, decision)
            case dec.ReadPlan():
                self._submit(decision.op, self._read_plan, decision)
            case dec.WriteOutcome():
                self._submit(decision.op, self._write_outcome, decision)
            case dec.TellHeld():
                self._diary.submit(self._tell_held, decision)
            case dec.SetAside():
                self._pool.submit(self._set_aside, decision)
            case dec.OpenIncident() | dec.UpdateIncident():
                self._means.journal.incident(decision.incident)
                self._diary.submit(self._write_incident, decision.incident, decision.token)
            case dec.FollowWorld() | dec.StepDown() | dec.Report():
                pass

    def _submit(self, op: int, work: Callable[[D], ev.Event], decision: D) -> None:
        def run() -> None:
            if not self._leadership.alive():
                return  # the term is over: nobody waits for the answer
            try:
                event = work(decision)
            except Exception as e:
                # A bug of ours or a failure that no store has a name for: the stage must not wait for ever.
                log.exception("%s failed", type(decision).__name__)
                event = ev.ObjectStoreUnavailable(op=op, detail=f"{type(decision).__name__} failed: {e!r}")
            self._post([event])

        self._pool.submit(run)

    # ---- probes

    def _probe(self, decision: dec.ProbeNodes) -> None:
        silent = {t.uid for t in decision.targets}

        def tell(outcome: ev.ProbeOutcome) -> None:
            silent.discard(outcome.uid)
            self._post([outcome])

        try:
            probe_all(
                decision.targets,
                op=decision.op,
                job=self._means.job,
                token=self._means.token,
                deadline_s=decision.deadline_s,
                tell=tell,
            )
        except Exception:
            log.exception("probing failed")  # no descriptors left, for one: an inquiry must not wait for ever
        self._post([ev.ProbeTimedOut(op=decision.op, uid=uid) for uid in sorted(silent)])

    # ---- the object store

    def _create_record(self, decision: dec.CreateRecord) -> ev.Event:
        op, generation = decision.op, decision.record.generation
        failpoint("plan.before_record")
        try:
            data = create_record(self._means.objects, decision.record)
        except (RecordTakenError, DamagedError, FormatError):
            # Taken in any case; what stands there and cannot be read is for the listing that follows to tell.
            return ev.RecordTaken(op=op, generation=generation)
        except ObjectUnknownError as e:
            return ev.RecordUnknown(op=op, generation=generation, detail=str(e))
        except (ObjectStoreError, CkptError) as e:
            # Read back or created, it may stand by now: a creation that failed half-way is never "nothing was done".
            return (
                ev.ObjectStoreDenied(op=op, detail=str(e))
                if isinstance(e, ObjectStoreDeniedError)
                else ev.RecordUnknown(op=op, generation=generation, detail=str(e))
            )
        failpoint("plan.after_record")
        return ev.RecordCreated(
            op=op, generation=generation, hash=wire.digest(data), location=record_key(generation)
        )

    def _list_lineage(self, decision: dec.ListLineage) -> ev.Event:
        op = decision.op
        try:
            lacks = self._trial.lacks()
            keys = [o.key for o in self._means.objects.list("gen-")]
            aside = {at: why_aside(self._means.objects, *at) for at in aside_among(keys)}
            # Records after manifests: a generation has its record before its first manifest, so whatever manifest was
            # listed, its record is listed too.
            records, hashes = self._records.all()
            manifests = tuple(manifest_refs(keys))
            require_recorded(records, manifests)
        except ObjectStoreDeniedError as e:
            return ev.ObjectStoreDenied(op=op, detail=str(e))
        except ObjectStoreError as e:
            return ev.ObjectStoreUnavailable(op=op, detail=str(e))
        except CkptError as e:
            return ev.LineageDamaged(op=op, detail=str(e))
        return ev.LineageListed(
            op=op, records=records, hashes=hashes, manifests=manifests, aside=aside, lacks=lacks
        )

    def _set_aside(self, decision: dec.SetAside) -> None:
        """Not fenced by etcd, and need not be: that bytes are damaged does not depend on who leads."""
        if not self._leadership.alive():
            return
        generation, step = decision.generation, decision.step
        with history.operation("set_aside", generation=generation, step=step) as result:
            ref = ManifestRef(step=step, generation=generation, key=manifest_key(generation, step))
            result["there"] = set_aside(self._means.objects, ref, decision.reason, finder="the controller")

    # ---- etcd, fenced

    def _publish(self, decision: dec.PublishPlan) -> ev.Event:
        op, generation = decision.op, decision.pointer.generation
        keys = self._means.keys
        failpoint("plan.before_publish")
        try:
            with history.operation("publish_plan", generation=generation, token=decision.token) as result:
                done = self._means.store.txn(
                    [CreatedAt(keys.leader, decision.token)],
                    # An outcome that stands here is a former run's: a plan in force and an end exclude each other.
                    [Put(keys.plan, wire.encode(decision.pointer)), Delete(keys.outcome)],
                )
                result.update(generation=generation, published=done.succeeded, revision=done.revision)
        except CoordUnknownError as e:
            return ev.PlanUnknown(op=op, generation=generation, detail=str(e))
        except CoordError as e:
            return ev.CoordStoreUnavailable(op=op, detail=str(e))
        failpoint("plan.after_publish_before_ack")
        if not done.succeeded:
            return ev.PlanRefused(op=op, generation=generation)
        return ev.PlanPublished(op=op, generation=generation, revision=done.revision)

    def _read_plan(self, decision: dec.ReadPlan) -> ev.Event:
        try:
            kv = self._means.store.get(self._means.keys.plan)
        except CoordError as e:
            return ev.CoordStoreUnavailable(op=decision.op, detail=str(e))
        if kv is None:
            return ev.PlanRead(op=decision.op, pointer=None, revision=0)
        pointer = wire.decode(wire.PlanPointer, kv.value)
        return ev.PlanRead(op=decision.op, pointer=pointer, revision=kv.mod_revision)

    def _write_outcome(self, decision: dec.WriteOutcome) -> ev.Event:
        op, keys = decision.op, self._means.keys
        try:
            with history.operation(
                "write_outcome", state=decision.outcome.state, token=decision.token
            ) as result:
                done = self._means.store.txn(
                    [CreatedAt(keys.leader, decision.token)],
                    [Put(keys.outcome, wire.encode(decision.outcome))],
                )
                result["written"] = done.succeeded
        except CoordUnknownError as e:
            return ev.OutcomeUnknown(op=op, detail=str(e))
        except CoordError as e:
            return ev.CoordStoreUnavailable(op=op, detail=str(e))
        return ev.OutcomeWritten(op=op) if done.succeeded else ev.OutcomeRefused(op=op)

    def _tell_held(self, decision: dec.TellHeld) -> None:
        """Until it stands or the term is over: under the leader's lease, the key never outlives whoever holds."""
        key, lease = self._means.keys.held, self._leadership.keeper.lease
        held = wire.encode(wire.Held(reason=decision.reason))
        change = Put(key, held, lease) if decision.reason else Delete(key)
        while self._leadership.alive() and not self._stopped.is_set():
            try:
                self._means.store.txn([CreatedAt(self._means.keys.leader, decision.token)], [change])
            except CoordError as e:
                log.debug("telling that the job is held failed: %s", e)
                self._stopped.wait(HELD_RETRY_S)
            else:
                return

    def _write_incident(self, incident: wire.Incident, token: int) -> None:
        """At best effort: the object store's copy is the durable one."""
        keys = self._means.keys
        try:
            old = self._means.store.list(keys.incidents).items if not incident.closed else ()
            others = [kv for kv in old if kv.key != keys.incident(incident.id)]
            surplus = sorted(others, key=lambda kv: kv.create_revision)[: len(others) - INCIDENTS_MAX + 1]
            self._means.store.txn(
                [CreatedAt(keys.leader, token)],
                [
                    Put(keys.incident(incident.id), wire.encode(incident)),
                    *(Delete(kv.key) for kv in surplus if len(others) >= INCIDENTS_MAX),
                ],
            )
        except CoordError as e:
            log.warning("incident %s is not in etcd, only in the object store: %s", incident.id, e)
