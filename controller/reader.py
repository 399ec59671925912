"""Reads what etcd and the object store hold of a job, and makes `JobView` snapshots of it.

The shell around `observe`, shared by `surefoot status`, `surefoot run` and the demo. It writes nothing. Trouble with
one of the two stores never hides what the other one says: the last thing known stays, and `trouble` says what is wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import msgspec

from surefoot.ckpt.errors import CkptError
from surefoot.ckpt.record import ManifestRef, Record, list_manifests, list_records, read_record, read_records
from surefoot.ckpt.store import ObjectStore, ObjectStoreError
from surefoot.controller import wire
from surefoot.controller.journal import read_incidents
from surefoot.controller.keys import Keys
from surefoot.controller.spec.tables import JobSpec
from surefoot.controller.store import CoordError, CoordStore
from surefoot.controller.view.observing import observe
from surefoot.controller.view.types import JobFacts, JobView
from surefoot.controller.view.values import told

RELIST_S = 5.0
"""The object store is listed again after this, and at once when etcd names a generation or a commit not yet seen."""


def facts_of(spec: JobSpec) -> JobFacts:
    """What a view needs of the spec."""
    return JobFacts(name=spec.job.name, steps=spec.job.steps, nodes=spec.layout.nodes, root=spec.job.root)


def same_root(one: object, other: object) -> bool:
    """Do two ways of writing a root mean the same place?"""
    return _plain(one) == _plain(other)


def _plain(root: object) -> str:
    return str(root).removeprefix("file://").rstrip("/")


class JobReader:
    """Makes snapshots of one job, each carrying on the loss curve of the one before. Safe to use from several threads."""

    def __init__(
        self,
        facts: JobFacts,
        *,
        store: CoordStore | None,
        objects: ObjectStore | None,
        run_id: str | None = None,
    ) -> None:
        self.facts = facts
        self.trouble: tuple[str, ...] = ()
        """What could not be read at the last `read`, in words."""
        self._keys = Keys(facts.name)
        self._store = store
        self._objects = objects
        self._run_id = run_id
        self._one_at_a_time = threading.Lock()
        self._records: dict[int, Record] = {}
        self._manifests: list[ManifestRef] = []
        self._listed_at: float | None = None
        self._incidents: dict[str, wire.Incident] = {}
        self._last: JobView | None = None

    def read(self, *, relist: bool = False) -> JobView:
        """A fresh snapshot. Blocks no longer than the deadlines of the two stores.

        Args:
            relist: look at the object store even if nobody told of news there: who could tell may be gone.
        """
        with self._one_at_a_time:
            return self._read(relist)

    def _read(self, relist: bool) -> JobView:
        trouble: list[str] = []
        keys = self._list_keys(trouble)
        if self._objects is not None and (relist or self._stale(keys or {})):
            self._list_objects(self._objects, trouble)
        self.trouble = tuple(trouble)
        self._last = observe(
            self.facts,
            keys=keys,
            records=self._records,
            manifests=self._manifests,
            previous=self._last,
            incidents=tuple(self._incidents.values()),
            run_id=self._run_id,
        )
        # etcd keeps the last few incidents only; what was seen once is remembered.
        self._incidents.update({i.id: i for i in self._last.incidents})
        return self._last

    def recall(self) -> None:
        """Read the incidents of the journal, those that etcd has forgotten too.

        Raises: ObjectStoreError.
        """
        if self._objects is not None:
            self._incidents = {**read_incidents(self._objects), **self._incidents}

    def _list_keys(self, trouble: list[str]) -> dict[str, bytes] | None:
        if self._store is None:
            return None
        try:
            return {kv.key: kv.value for kv in self._store.list(self._keys.root).items}
        except CoordError as e:
            trouble.append(str(e))
            return None

    def _stale(self, keys: Mapping[str, bytes]) -> bool:
        if self._listed_at is None or time.monotonic() - self._listed_at >= RELIST_S:
            return True
        told_generation, told_commit = told(self._keys, keys)
        newest = max(((m.generation, m.step) for m in self._manifests), default=(0, 0))
        return told_generation > max(self._records, default=0) or told_commit > newest

    def _list_objects(self, objects: ObjectStore, trouble: list[str]) -> None:
        try:
            read_records(objects, self._records)
            self._manifests = list_manifests(objects)
            if self._store is None:
                self._incidents = read_incidents(objects)
        except (ObjectStoreError, CkptError) as e:
            trouble.append(str(e))
        self._listed_at = time.monotonic()


def read_once(
    facts: JobFacts, *, store: CoordStore | None, objects: ObjectStore
) -> tuple[JobView, tuple[str, ...]]:
    """One snapshot, and what could not be read of it. A job without a name gets that of its newest record's plan.

    Raises:
        ObjectStoreError, CkptError: there is no etcd to ask, and the object store cannot be read either.
    """
    if store is None or not facts.name:
        generations = list_records(objects)
        newest = read_record(objects, generations[-1])[0] if generations else None
        facts = msgspec.structs.replace(facts, name=facts.name or _job_of(newest))
    reader = JobReader(facts, store=store, objects=objects)
    if store is not None:
        try:
            reader.recall()
        except ObjectStoreError as e:  # etcd has the newest incidents, and all that is going on
            reader = JobReader(facts, store=store, objects=None)
            return reader.read(), (str(e), *reader.trouble)
    return reader.read(), reader.trouble


def _job_of(record: Record | None) -> str:
    """The job's name as a record's plan gives it; ``?`` where there is none."""
    name = record.plan.get("job") if record is not None and record.plan else None
    return name if isinstance(name, str) else "?"
