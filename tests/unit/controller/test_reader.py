"""What `status` reads: trouble with one of the two stores does not hide what the other says."""

from __future__ import annotations

from surefoot.ckpt.store import MemoryObjectStore, ObjectInfo, ObjectStoreUnavailableError
from surefoot.controller.reader import read_once
from surefoot.controller.store import MemoryStore
from surefoot.controller.view.types import JobFacts


class Away(MemoryObjectStore):
    def list(self, prefix: str) -> list[ObjectInfo]:
        raise ObjectStoreUnavailableError(f"memory://: cannot list {prefix}: SlowDown (503)")


def test_an_object_store_that_is_away_hides_nothing_of_etcd() -> None:
    """CKP-39: the status is what shows why nothing is committed."""
    facts = JobFacts(name="j", steps=100, nodes=1, root="memory://")
    seen, trouble = read_once(facts, store=MemoryStore(), objects=Away())
    assert seen.job == "j"
    assert seen.phase == "waiting"
    assert len(trouble) == 1
    assert "SlowDown" in trouble[0]
