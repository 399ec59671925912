"""The board: what this node would tell if it were asked now. One owner of the facts, from which every status is made.

Belongs to the event loop's thread. Whoever changes it rings the bell (`changed`); `urgent` where the controller must hear
of it at once (a death, a change of state, an address others wait for).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from surefoot.agent import decide, exits, linux
from surefoot.agent.decide import HeldImage, Identity
from surefoot.agent.processes import WatchedProcess
from surefoot.controller import wire

log = logging.getLogger(__name__)

LOG_TAIL_BYTES = 8192
"""Read from the end of a dead rank's log, for its last words."""


@dataclass(slots=True, kw_only=True)
class RankLife:
    """One launched rank, from its order to its exit."""

    generation: int
    rank: int
    log_path: Path
    progress_at: float
    """When it last told of progress, on the event loop's clock."""
    restore_path: str | None = None
    process: WatchedProcess | None = None
    """None between the order and the zygote's answer."""
    writer: asyncio.StreamWriter | None = None
    connected: bool = False
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all that it said over its connection was heard."""
    phase: wire.Phase = "start"
    step: int = 0
    loss: str | None = None
    step_s: float | None = None
    error: wire.ErrorReport | None = None
    ended: wire.Ended | None = None
    """Its train() returned, and what ended its loop."""
    ending: bool = False
    """The agent is ending it: its exit is a teardown."""
    oom_kills_before: int = field(default_factory=linux.out_of_memory_kills)
    exit_seen: bool = False
    """Its process has ended; `exit` follows when its last words were heard."""
    exit: wire.ExitReport | None = None

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    def tell(self, message: msgspec.Struct) -> None:
        """Send to the rank, if it is connected; a rank that is gone is found by its exit."""
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(wire.encode(message) + b"\n")

    def note_exit(self, wait_status: int) -> exits.ExitVerdict:
        """Its process has ended: keep how."""
        words = exits.last_words(_tail(self.log_path))
        out_of_memory = linux.out_of_memory_kills() > self.oom_kills_before
        if out_of_memory:
            words = f"{words}\n{exits.OUT_OF_MEMORY_NOTE}".lstrip()
        self.exit = exits.exit_report(wait_status, error=self.error, last_words=words, teardown=self.ending)
        return exits.classify(self.exit, finished=self.ended is not None, out_of_memory=out_of_memory)

    def status(self, now: float) -> wire.RankStatus:
        return wire.RankStatus(
            rank=self.rank,
            pid=self.pid,
            phase=self.phase,
            step=self.step,
            phase_age_s=round(now - self.progress_at, 3),
            loss=self.loss,
            step_s=self.step_s,
            exit=self.exit,
            ended=self.ended or "",
        )


@dataclass(slots=True, kw_only=True)
class Board:
    """See the module."""

    me: Identity
    bell: Callable[[bool], None]
    """Called with `urgent`."""
    state: wire.NodeState = "warming"
    generation: int = 0
    plan: wire.Plan | None = None
    """The plan whose ranks run here."""
    rendezvous: wire.Rendezvous | None = None
    ranks: dict[int, RankLife] = field(default_factory=dict[int, RankLife])
    own: dict[str, HeldImage] = field(default_factory=dict[str, HeldImage])
    """Sealed snapshots of ranks that run or ran here, by the path of their slot."""
    replicas: tuple[HeldImage, ...] = ()
    committed: wire.Committed | None = None
    start_failure: wire.StartFailure | None = None
    notes: dict[str, str] = field(default_factory=dict[str, str])
    """Standing troubles by topic; the status tells them all."""
    seq: int = 0

    def changed(self, *, urgent: bool = False) -> None:
        self.bell(urgent)

    def set_state(self, state: wire.NodeState) -> None:
        if state != self.state:
            log.info("%s -> %s (generation %d)", self.state, state, self.generation)
            self.state = state
            self.changed(urgent=True)

    def set_note(self, topic: str, text: str) -> None:
        """Tell of a trouble, or with an empty text that it is over."""
        if self.notes.get(topic, "") == text:
            return
        if text:
            self.notes[topic] = text
        else:
            self.notes.pop(topic, None)
        self.changed()

    def held(self) -> list[HeldImage]:
        return [*self.own.values(), *self.replicas]

    def set_own_images(self, rank: int, images: list[HeldImage]) -> None:
        """What was found in the slots of one rank takes the place of what was noted of them."""
        self.own = {p: h for p, h in self.own.items() if h.rank != rank}
        self.own.update((h.path, h) for h in images)

    def fail_start(self, failure: wire.StartFailure) -> None:
        """This node cannot do its part of a generation."""
        log.error("generation %d cannot start here: %s: %s", failure.generation, failure.kind, failure.detail)
        self.start_failure = failure
        self.changed(urgent=True)

    def status(self, now: float) -> wire.NodeStatus:
        """A fresh status; `now` on the event loop's clock."""
        self.seq += 1
        return wire.NodeStatus(
            uid=self.me.uid,
            incarnation=self.me.incarnation,
            seq=self.seq,
            generation=self.generation,
            state=self.state,
            rendezvous=self.rendezvous,
            # Ranks of the generation before are still being ended when this one begins: they are nobody's news.
            ranks=tuple(
                life.status(now)
                for _, life in sorted(self.ranks.items())
                if life.generation == self.generation
            ),
            snapshots=decide.listed_snapshots(self.held()),
            committed=self.committed,
            start_failure=self.start_failure,
            note="; ".join(self.notes.values()),
        )


def _tail(path: Path) -> bytes:
    try:
        with open(path, "rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - LOG_TAIL_BYTES))
            return f.read()
    except OSError:
        return b""
