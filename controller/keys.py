"""The etcd key layout, in one place. Who writes what stands in docs/protocol.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job. Every method returns a whole key or a prefix that ends in a slash."""

    job: str

    @property
    def root(self) -> str:
        return f"/surefoot/{self.job}/"

    @property
    def leader(self) -> str:
        """The leading controller, under its lease; its creation revision is the fencing token."""
        return self.root + "leader"

    @property
    def plan(self) -> str:
        """A `wire.PlanPointer` to the record of the generation in force."""
        return self.root + "plan"

    @property
    def outcome(self) -> str:
        """A `wire.Outcome`, written once by the leader when the job ends; agents then leave."""
        return self.root + "outcome"

    @property
    def held(self) -> str:
        """A `wire.Held` under the leader's lease, as long as the job is held."""
        return self.root + "held"

    @property
    def nodes(self) -> str:
        return self.root + "nodes/"

    def node(self, uid: str) -> str:
        """A `wire.NodeInfo`, under the agent's lease."""
        return self.nodes + uid

    @property
    def statuses(self) -> str:
        return self.root + "status/"

    def status(self, uid: str) -> str:
        """A `wire.NodeStatus`, the heartbeat, under the agent's lease."""
        return self.statuses + uid

    @property
    def intents(self) -> str:
        return self.root + "intents/"

    @property
    def incidents(self) -> str:
        return self.root + "incidents/"

    def incident(self, incident: str) -> str:
        """A `wire.Incident`; the last N are kept."""
        return self.incidents + incident
