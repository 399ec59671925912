"""What an agent is started with. The command line is read once, in ``__main__``."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from surefoot.agent.errors import AgentUsageError

HEARTBEAT_S = 1.0
"""How often a status is rewritten when nothing happens (contract of the heartbeat; stretched for large jobs)."""

RANK_ENTRY = "surefoot.agent.session:main"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """One agent: which job, which node, where things are."""

    job_file: Path
    uid: str
    incarnation: str
    """Names this life of the node; never used twice."""
    etcd: str
    run_id: str
    state_dir: Path
    """Logs, history, notes; the node's own disk."""
    shm_dir: Path
    """The node's snapshots; survives the agent."""
    token_file: Path
    host: str = "127.0.0.1"
    """The address under which peers and the controller reach this node."""
    heartbeat_s: float = HEARTBEAT_S
    rank_entry: str = RANK_ENTRY
    """What a rank runs; tests put something small here."""
    rank_modules: tuple[str, ...] | None = None
    """What the zygote imports of ours; None: what a rank needs."""

    @property
    def logs(self) -> Path:
        return self.state_dir / "logs"

    @property
    def histories(self) -> Path:
        return self.state_dir / "history"

    @property
    def socket(self) -> Path:
        return self.state_dir / "agent.sock"


def lock_node(config: AgentConfig) -> int:
    """Take the state folder for this process; a descriptor that holds the lock until it is closed.

    Raises:
        AgentUsageError: another agent lives in it; OSError: it cannot be made.
    """
    for folder in (config.state_dir, config.logs, config.histories):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(config.state_dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise AgentUsageError(
            f"another agent lives in {config.state_dir}: end it, or give this one another --state-dir and --uid"
        ) from None
    return fd
