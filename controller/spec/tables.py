"""The tables of a job file, `JobSpec` as their whole, and what may be named in them. PURE."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTable:
    """``[job]``: what is trained, and where its truth is kept."""

    name: str
    """Names keys, folders and marks: letters, digits, ``_ . -``, at most 63."""
    seed: int = 0
    steps: int
    """The job is done when the checkpoint at this step is committed."""
    root: str
    """Of records and checkpoints: ``file:///absolute/path``, an absolute path, or ``s3://bucket/prefix``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTable:
    """``[program]``: the training code, by name."""

    train: str
    """``module:function``, called once per generation in every rank."""
    data: str
    """``module:function``, called with `params`; returns the mixture and the packing."""
    preload: tuple[str, ...] = ()
    """Modules that the zygote imports before it forks ranks."""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The job's own settings, free in form (anything JSON can say)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """``[layout]``: how many nodes and ranks are wanted, and what is allowed."""

    nodes: int = 1
    nodes_min: int
    """The mesh has to fit so many, too; nothing else yet: the job waits below `nodes`. Default: `nodes`."""
    standbys: int = 0
    ranks_per_node: int = 1
    mesh: Mapping[str, int]
    """Axis to size, all of `AXES`; one may be -1: whatever the ranks leave, and that is dp where the file does not say."""
    canonical: bool = False
    virtual_shards: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTable:
    """``[checkpoint]``: how often, how many, and how much memory."""

    memory_every_steps: int = 1
    every_steps: int = 20
    """A checkpoint in the object store each so many steps, and at the last step."""
    every: Literal["auto"] | None = None
    every_s: float | None = None
    """Instead: as often as is worth it (agent/cadence.py); or as soon as so many seconds have passed, by rank 0's clock."""
    keep: int = 3
    """The newest so many checkpoints that the job wrote are kept, of its lineage; those of scripts stay anyway."""
    keep_every_steps: int | None = None
    """Checkpoints at multiples of this are kept for good."""
    memory_budget: int | None = None
    """Bytes of one node's memory that snapshots may take (the file says "2GB"); None: as many as the pools need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectTable:
    """``[detect]``: when silence becomes a suspicion."""

    lease_ttl_s: int = 10
    hang_floor_s: float = 5.0
    """No phase is called hung before this."""
    hang_factor: float = 5.0
    """A phase is hung after so many times what it usually takes."""
    warmup_steps: int = 3
    """First steps of a generation (compilation, cold caches) that teach the detectors nothing."""
    observe: tuple[str, ...] = ()
    """Detectors that only report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTable:
    """``[policy]``: what is done about it, and how often."""

    restarts: Mapping[str, int]
    """Cause to the restarts it may have between two committed checkpoints."""
    wait_for_node_s: float = 60.0
    grace_s: float = 30.0
    """Between asking a rank to stop and SIGKILL."""
    spike_factor: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A whole job file, valid."""

    job: JobTable
    program: ProgramTable
    layout: LayoutTable
    checkpoint: CheckpointTable
    detect: DetectTable
    policy: PolicyTable

    @property
    def hash(self) -> str:
        """sha256 (hex) of what the file *means*: formatting, order of keys and defaults written out make no difference."""
        meant = dataclasses.asdict(self)
        for key in ("every", "every_s"):  # keys of later: without them a file means what it always meant
            if meant["checkpoint"][key] is None:
                del meant["checkpoint"][key]
        text = json.dumps(meant, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def world_size(self) -> int:
        """Ranks of the wanted layout."""
        return self.layout.nodes * self.layout.ranks_per_node

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Axis to size at `world_size`, outermost first, the -1 solved."""
        return self.mesh_at(self.world_size)

    def mesh_at(self, ranks: int) -> dict[str, int]:
        """`mesh_sizes` of another number of ranks.

        Raises:
            ValueError: the mesh does not fit that many.
        """
        return solve_mesh(self.layout.mesh, ranks)


TABLES: Final = tuple(f.name for f in dataclasses.fields(JobSpec))

AXES: Final = ("pp", "dp", "tp")
"""Outermost first: pipeline stages talk least, tensor parallel ranks most and so lie next to each other on a node."""

AXES_LATER: Final = ("cp", "ep")
"""Known by name, and refused: context and expert parallelism."""

CAUSES: Final[Mapping[str, int]] = {"workload": 3, "infrastructure": 20, "preemption": 100}
"""Whose budgets can be set, with their defaults (design: the JobSpec)."""

DETECTORS: Final = (
    "exit",
    "node_loss",
    "hang",
    "straggler",
    "nan",
    "spike",
    "corruption",
    "loader_stall",
    "checkpoint",
)

LEASE_TTL_S_MIN: Final = 10
"""Below this, one slow fsync of etcd or one busy second of an agent would look like the loss of a node."""


def solve_mesh(mesh: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Axis to size for `ranks` ranks, all of `AXES`, outermost first; an absent axis is 1.

    Raises:
        ValueError: they do not fit; the message says why.
    """
    sizes = {axis: mesh.get(axis, 1) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = next((axis for axis, size in sizes.items() if size == -1), None)
    written = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
    if free is None:
        if fixed != ranks:
            raise ValueError(f"the mesh {written} has {fixed} ranks, the layout has {ranks}")
    elif ranks % fixed:
        raise ValueError(f"{ranks} ranks do not divide by {fixed}, the fixed part of the mesh {written}")
    else:
        sizes[free] = ranks // fixed
    return sizes
