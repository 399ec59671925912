"""What the agent and the processes it started on its own node say to each other, one JSON object a line.

Agent and zygote, agent and snapshot server talk over a socket pair that only they hold, so no token is asked; the host
of a TCPStore reports over the agent's Unix socket, like a rank, with the token. None of this leaves the node.

Requests carry a `serial` that the answer repeats. A peer that closes its end has died: what it was asked is then unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from surefoot.controller.wire import ErrorReport


class _NodeMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One line between processes of one node."""


# ---------------------------------------------------------------- agent <-> zygote


class RankOrder(_NodeMessage, frozen=True, kw_only=True, tag="rank"):
    """One rank to start. The process gets `env` on top of the zygote's own, its output goes to `log_path` (created)."""

    generation: int
    rank: int
    entry: str
    """``module:function``; its return value is the exit code."""
    env: dict[str, str]
    log_path: str
    cwd: str
    agent_pid: int
    """May trace the rank (PR_SET_PTRACER)."""


class StoreOrder(_NodeMessage, frozen=True, kw_only=True, tag="store"):
    """A host of a TCPStore to start; it reports with `StoreUpMsg`."""

    host: str
    env: dict[str, str]
    log_path: str
    cwd: str
    agent_pid: int


class WarmUpMsg(_NodeMessage, frozen=True, kw_only=True, tag="warm_up"):
    """The zygote's first order: import `modules` (ours: they must work) and `preload` (the job's), with `path` added to
    the module search path."""

    modules: tuple[str, ...]
    preload: tuple[str, ...]
    path: tuple[str, ...]


class WarmMsg(_NodeMessage, frozen=True, kw_only=True, tag="warm"):
    """The zygote can fork. `failure`: a module of the job cannot be imported, and no rank could do better."""

    import_s: float
    threads: int
    failure: ErrorReport | None = None


class ForkMsg(_NodeMessage, frozen=True, kw_only=True, tag="fork"):
    """Start all of these; answered by `ForkedMsg` or `ForkRefusedMsg`."""

    serial: int
    orders: tuple[RankOrder | StoreOrder, ...]


class ForkedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One started process, named so that it cannot be taken for another: `start_time` in clock ticks since boot."""

    pid: int
    start_time: int


class ForkedMsg(_NodeMessage, frozen=True, kw_only=True, tag="forked"):
    """The processes in the order of the orders; fewer where the last could not be forked, and `failure` says why."""

    serial: int
    processes: tuple[ForkedProcess, ...]
    failure: str = ""


class ForkRefusedMsg(_NodeMessage, frozen=True, kw_only=True, tag="fork_refused"):
    """Nothing was started: a process with `threads` threads must not fork. The agent spawns instead."""

    serial: int
    threads: int


AgentToZygote = WarmUpMsg | ForkMsg
ZygoteToAgent = WarmMsg | ForkedMsg | ForkRefusedMsg
Order = RankOrder | StoreOrder


# ---------------------------------------------------------------- TCPStore host -> agent, over the agent's Unix socket


class StoreUpMsg(_NodeMessage, frozen=True, kw_only=True, tag="store_up"):
    """The TCPStore of process `pid` listens on `port`. The connection then stays open: its end is the host's end."""

    token: str
    pid: int
    port: int


# ---------------------------------------------------------------- agent <-> snapshot server

TransferFailure = Literal["snapshot_missing", "snapshot_corrupt", "peer_unreachable", "memory", "refused"]
"""How a snapshot did not get from one node to another: it is not there; it did not arrive whole; no answer; no room for
it; the token or the generation is wrong."""


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """One sealed snapshot in a slot file."""

    rank: int
    generation: int
    step: int
    path: str


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A node's snapshot server."""

    uid: str
    host: str
    port: int


class GenerationMsg(_NodeMessage, frozen=True, kw_only=True, tag="generation"):
    """What is in force: snapshots of its starting point are kept until newer ones are complete. Replicas of older
    generations are refused from now on."""

    generation: int
    start_generation: int
    start_step: int
    drop_replicas: tuple[int, ...] = ()
    """Ranks whose copies are of no more use here; their slots are removed."""
    conditional: bool = True
    """As in the plan."""


class ReplicateMsg(_NodeMessage, frozen=True, kw_only=True, tag="replicate"):
    """Copy one own snapshot to the peer. With `pin_path`, first copy it there for the upload: the answer
    `ReplicatedAnswer` means that the slot may be overwritten by the rules of the pool. Without `peer`, only pin."""

    serial: int
    image: Image
    peer: PeerAddress | None = None
    pin_path: str | None = None
    deadline_s: float


class FetchMsg(_NodeMessage, frozen=True, kw_only=True, tag="fetch"):
    """Bring the snapshot of (image.generation, image.step, image.rank) from `peer` into the slot file image.path.

    It is broken off when another generation than `in_force` is in force: the slot is then somebody else's to write."""

    serial: int
    image: Image
    peer: PeerAddress
    in_force: int
    deadline_s: float


class UploadMsg(_NodeMessage, frozen=True, kw_only=True, tag="upload"):
    """Upload pinned snapshots of one attempt as uploader `writer`; a failure is also left in the object store."""

    serial: int
    generation: int
    step: int
    attempt: str
    writer: int
    paths: tuple[str, ...]
    deadline_s: float


class GiveUpMsg(_NodeMessage, frozen=True, kw_only=True, tag="give_up"):
    """Leave in the object store that uploader `writer` gave up on the attempt, so that the committer need not wait."""

    serial: int
    generation: int
    step: int
    attempt: str
    writer: int
    reason: str
    deadline_s: float


class CommitMsg(_NodeMessage, frozen=True, kw_only=True, tag="commit"):
    """Wait for all `writers` uploaders of the attempt and create the manifest."""

    serial: int
    generation: int
    step: int
    attempt: str
    writers: int
    deadline_s: float
    facts: dict[str, str] = {}
    """For the manifest: who committed, under which spec and code."""


class ServingMsg(_NodeMessage, frozen=True, kw_only=True, tag="serving"):
    """The snapshot server's first words: it listens, and holds these replicas."""

    port: int
    replicas: tuple[Image, ...]


class ReplicasMsg(_NodeMessage, frozen=True, kw_only=True, tag="replicas"):
    """The replicas held, after a change."""

    replicas: tuple[Image, ...]


class FinishedAnswer(_NodeMessage, frozen=True, kw_only=True, tag="finished_job"):
    """A replication, fetch, upload or give-up succeeded."""

    serial: int
    seconds: float


class FailedAnswer(_NodeMessage, frozen=True, kw_only=True, tag="failed_job"):
    """It did not. `pinned`: the pin that went with a replication stands all the same."""

    serial: int
    kind: TransferFailure | Literal["object_store"]
    detail: str
    pinned: bool = False


class CommitAnswer(_NodeMessage, frozen=True, kw_only=True, tag="commit_answer"):
    """How a commit ended: the manifest exists and counts (both empty), it must not be counted, or there is none."""

    serial: int
    fenced_by: int | None = None
    failure: str = ""


AgentToServer = GenerationMsg | ReplicateMsg | FetchMsg | UploadMsg | GiveUpMsg | CommitMsg
ServerToAgent = ServingMsg | ReplicasMsg | FinishedAnswer | FailedAnswer | CommitAnswer


# Decoders, made once: a union as a type argument is something type checkers cannot express yet.
decode_to_zygote: Callable[[bytes], AgentToZygote] = msgspec.json.Decoder(AgentToZygote).decode
decode_from_zygote: Callable[[bytes], ZygoteToAgent] = msgspec.json.Decoder(ZygoteToAgent).decode
decode_order: Callable[[bytes], Order] = msgspec.json.Decoder(Order).decode
decode_to_server: Callable[[bytes], AgentToServer] = msgspec.json.Decoder(AgentToServer).decode
decode_from_server: Callable[[bytes], ServerToAgent] = msgspec.json.Decoder(ServerToAgent).decode
