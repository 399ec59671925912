"""What the core needs to know of the job, and its times. PURE.

`Settings` is made once, by the shell, from the JobSpec and the command line; the core never reads a file or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from surefoot.controller.spec.tables import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Durations in seconds, all on the controller's monotonic clock. What the spec can say stands in `Settings`."""

    probe_deadline_s: float = 1.0
    """How long an agent may take to answer a probe. An answer is a few milliseconds; one second is a busy node's worst."""
    reprobe_s: float = 0.25
    """A node whose fate holds up a decision is asked again this soon."""
    settle_s: float = 0.5
    """How long cascade evidence waits for what initiated it: gloo's neighbours of a dead rank fail within milliseconds, the
    news of the death itself may come a little later, from another node."""
    last_call_s: float = 15.0
    """A former member that neither answers nor loses its lease is waited for this long (scenario CTL-07)."""
    quiet_status_s: float = 3.0
    """A member that rewrites its status each second at most and was silent this long is asked directly. At scale heartbeats
    stretch, and so does this: see `Settings.quiet_after_s`."""
    standby_s: float = 20.0
    """A job of a single node begins without its standby, and so without copies elsewhere, only after this long."""
    ready_s: float = 120.0
    """A generation makes progress towards its first step at least this often (an import of torch on a busy laptop: 20 s)."""
    warmup_s: float = 60.0
    """The hang deadline within the first `warmup_steps` steps of a generation: caches are cold, kernels not yet built."""
    slow_phase_s: float = 600.0
    """The deadline of evaluation, compilation and of the last save, which waits for the object store (CTL-31: 10 min)."""
    end_skew_s: float = 10.0
    """Ranks that have come to the end of their data early wait this long for the others before it is called a fault."""
    held_look_s: float = 3.0
    """A job that is held looks this often whether the contradiction is gone."""
    relist_s: float = 15.0
    """Records and manifests are listed again this often, as the keys in etcd are (CTL-21)."""
    store_retry_s: float = 0.2
    """First pause before a store that failed is asked again; doubles up to `store_retry_max_s`."""
    store_retry_max_s: float = 5.0
    store_patience_s: float = 60.0
    """A job of which nothing runs yet gives up on an object store that does not answer for this long."""
    final_listing_s: float = 1.0
    """Pause between the looks for the last checkpoint once all ranks are done."""


FINAL_LISTINGS = 5
"""So often the last checkpoint is looked for. Stores are read-after-write consistent: one look should do."""

CRASH_SIGNATURES_MAX = 3
"""So many equal crashes with nothing committed in between end the job (scenario CTL-41: k = 3)."""

START_TRIES = 2
"""A manifest that fails to load is tried so often before an older one is named: a store may stumble once."""

CONTROLLER_RESTARTS = 20
"""Restarts that a quarrel between controllers may cost; as many as infrastructure's default."""


def _as_in_the_spec() -> dict[str, int]:
    return {"workload": 3, "infrastructure": 20, "preemption": 100}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The job as the core sees it."""

    job: str
    run_id: str
    controller: str
    """The name of this controller, unique among those of the job."""
    code_version: str
    spec_hash: str
    steps: int
    nodes: int
    ranks_per_node: int
    standbys: int = 0
    """Spare nodes the operator means to run."""
    mesh: Mapping[str, int]
    """Axis to size at nodes x ranks_per_node, outermost first."""
    lease_ttl_s: float = 10.0
    hang_floor_s: float = 5.0
    hang_factor: float = 5.0
    warmup_steps: int = 3
    observe: frozenset[str] = frozenset()
    """Detectors that only report."""
    restarts: Mapping[str, int] = field(default_factory=_as_in_the_spec)
    """Cause to the restarts it may have between two commits."""
    wait_for_node_s: float = 60.0
    held_patience_s: float | None = None
    """A job that is held fails after this long; None: it waits for an operator, as long as that takes."""
    times: Times = field(default_factory=Times)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def limit(self, cause: str) -> int | None:
        """Restarts that `cause` may have between two commits; None: it is not counted."""
        if cause in ("none", "operator"):
            return None
        return self.restarts.get(cause, CONTROLLER_RESTARTS)

    def quiet_after_s(self, nodes: int) -> float:
        """Silence of a status after which a node is asked directly: at least three heartbeats of a job of `nodes` nodes,
        which together write at most 500 a second (design: Control)."""
        return max(self.times.quiet_status_s, 4 * nodes / 500)

    @staticmethod
    def of(
        spec: JobSpec,
        *,
        run_id: str,
        controller: str,
        code_version: str,
        held_patience_s: float | None = None,
    ) -> Settings:
        """The settings of a valid spec."""
        return Settings(
            job=spec.job.name,
            run_id=run_id,
            controller=controller,
            code_version=code_version,
            spec_hash=spec.hash,
            steps=spec.job.steps,
            nodes=spec.layout.nodes,
            ranks_per_node=spec.layout.ranks_per_node,
            standbys=spec.layout.standbys,
            mesh=spec.mesh_sizes,
            lease_ttl_s=float(spec.detect.lease_ttl_s),
            hang_floor_s=spec.detect.hang_floor_s,
            hang_factor=spec.detect.hang_factor,
            warmup_steps=spec.detect.warmup_steps,
            observe=frozenset(spec.detect.observe),
            restarts=spec.policy.restarts,
            wait_for_node_s=spec.policy.wait_for_node_s,
            held_patience_s=held_patience_s,
        )
