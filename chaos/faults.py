"""The injector. It knows pids and files on disk; it has no channel to the product.

A fault is *proved* by what the victim wrote before it was struck: the victim is stopped first, its trace read to the
end, and only if it stands where the schedule wants it is it killed; otherwise it goes on and the next step is tried.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from surefoot.chaos.trace import Event, TraceTail

BETWEEN = frozenset({"forward_end", "reported"})
"""A rank whose last event is one of these has run forward (and perhaps backward), and has not begun its optimizer step."""


class FaultMissedError(Exception):
    """The fault could not be put where the schedule wanted it: the run counts as *not run*, which is red."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """A fault that took place at `at_s` (CLOCK_MONOTONIC), with what proves it. `generation`: the one that was struck."""

    kind: str
    at_s: float
    generation: int
    step: int
    pids: tuple[int, ...]
    where: str
    proof: Event | None


@dataclass(slots=True)
class RankWatch:
    """The newest event of each rank of the newest generation, kept current from the trace."""

    tail: TraceTail
    last: dict[int, Event]
    generation: int = 0

    @classmethod
    def on(cls, folder: Path) -> RankWatch:
        return cls(TraceTail(folder, "*/history/rank-*.jsonl"), {})

    def refresh(self, *, look: bool = False) -> list[Event]:
        """Read on; returns the new events."""
        if look:
            self.tail.look()
        events = self.tail.read()
        for event in events:
            generation, rank = event.get("generation"), event.get("rank")
            if not isinstance(generation, int) or not isinstance(rank, int) or generation < self.generation:
                continue
            if generation > self.generation:
                self.generation, self.last = generation, {}
            self.last[rank] = event
        return events


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it ended by itself in between: the proof decides whether the fault counts


def await_rank_between(
    watch: RankWatch,
    rank: int,
    step: int,
    *,
    deadline_s: float,
    stopped: Callable[[], bool],
    poll_s: float = 0.002,
) -> Event:
    """Wait until `rank` stands between forward and optimizer step of a step ≥ `step`, and leave it stopped there.

    Returns the rank's last event: the proof.

    Raises:
        FaultMissedError: it did not come there before the deadline, or the run ended.
    """
    end, next_look = time.monotonic() + deadline_s, 0.0
    while (now := time.monotonic()) < end and not stopped():
        watch.refresh(look=now >= next_look)
        next_look = now + 0.1 if now >= next_look else next_look
        event = watch.last.get(rank)
        if event is not None and event["kind"] in BETWEEN and event["step"] >= step:
            _signal([event["pid"]], signal.SIGSTOP)
            watch.refresh()
            last = watch.last[rank]
            if last["kind"] in BETWEEN and last["pid"] == event["pid"]:
                return last
            _signal([event["pid"]], signal.SIGCONT)
        time.sleep(poll_s)  # the trace is a file that somebody else writes: it can only be looked at
    raise FaultMissedError(f"rank {rank} was not seen between forward and optimizer of step {step} or later")


def kill_rank(proof: Event) -> Fired:
    """SIGKILL the rank that `await_rank_between` left stopped."""
    at_s = time.monotonic()
    _signal([proof["pid"]], signal.SIGKILL)
    return _fired("rank_kill", at_s, proof, [proof["pid"]])


def freeze_rank(proof: Event) -> Fired:
    """Leave the rank stopped for ever: a hang. It was stopped a moment ago, which is when the fault began."""
    return _fired("rank_hang", time.monotonic(), proof, [proof["pid"]])


def lose_node(pids: list[int], proof: Event, *, state_dir: Path, shm_dir: Path, morgue: Path) -> Fired:
    """End everything of a node at one moment, and its disk and memory with it.

    The state folder is moved out of the product's reach rather than deleted, so that the harness can read afterwards
    what its ranks computed.
    """
    _signal(pids, signal.SIGSTOP)
    at_s = time.monotonic()
    _signal(pids, signal.SIGKILL)
    shutil.rmtree(shm_dir, ignore_errors=True)
    morgue.mkdir(parents=True, exist_ok=True)
    shutil.move(state_dir, morgue / state_dir.name)
    return _fired("node_loss", at_s, proof, pids)


def kill_controller(pid: int, watch: RankWatch) -> Fired:
    """SIGKILL the leading controller."""
    newest = max(watch.last.values(), key=lambda e: e["t"])
    at_s = time.monotonic()
    _signal([pid], signal.SIGKILL)
    return Fired(
        kind="controller_kill",
        at_s=at_s,
        generation=watch.generation,
        step=newest["step"],
        pids=(pid,),
        where="the leading controller",
        proof=None,
    )


def _fired(kind: str, at_s: float, proof: Event, pids: list[int]) -> Fired:
    return Fired(
        kind=kind,
        at_s=at_s,
        generation=proof["generation"],
        step=proof["step"],
        pids=tuple(pids),
        where=f"rank {proof['rank']}, after {proof['kind']} of step {proof['step']}",
        proof=proof,
    )
