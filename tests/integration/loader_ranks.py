"""Runs the ranks of a loader test as real processes, in lockstep. Started as a program by `test_loader_ranks.py`.

Like a node's zygote it imports torch, pyarrow and the loader once and forks the ranks. A step is *fetched* by every rank, then
*committed*: only then does the committed cursor move. What was asked for and what happened are JSON, in argv and on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

from surefoot.loader import Loader, Mixture, Pack, Source

DEADLINE_S = 60.0


class Rank:
    """A forked rank; this end of its socket."""

    def __init__(
        self, job: dict[str, Any], dp_rank: int, dp_size: int, cursor: dict[str, Any] | None
    ) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            status = 1
            try:
                serve(theirs, job, dp_rank, dp_size, cursor)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        ours.settimeout(DEADLINE_S)
        self.socket = ours
        self.lines = ours.makefile("rw")

    def fetch(self) -> dict[str, Any] | None:
        """The next batch of the rank, as `serve` tells it; None at the end of the data."""
        self.lines.write("next\n")
        self.lines.flush()
        line = self.lines.readline()
        if not line:
            raise SystemExit(f"rank with pid {self.pid} ended before its time")
        return json.loads(line)

    def kill(self) -> int:
        """SIGKILL; returns the signal it died of."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.lines.close()
        self.socket.close()
        return os.WTERMSIG(status)


def serve(theirs: socket.socket, job: dict[str, Any], dp_rank: int, dp_size: int, cursor: Any) -> None:
    """The life of a rank: a batch for each line, described in JSON, together with the cursor behind it."""
    loader = Loader(mixture(job), Pack(**job["pack"]), dp_rank, dp_size)
    if cursor is not None:
        loader.load_state_dict(cursor)
    lines = theirs.makefile("rw")
    for _ in iter(lines.readline, ""):
        batch = next(loader, None)
        told = None
        if batch is not None:
            told = {
                "step": batch.step,
                "ids": batch.sample_ids,
                "microbatches": len(batch.microbatches),
                "valid": batch.global_valid_tokens,
                "tokens": batch["tokens"].numpy().tobytes().hex(),
                "cursor": loader.state_dict(),
            }
        lines.write(json.dumps(told) + "\n")
        lines.flush()


def mixture(job: dict[str, Any]) -> Mixture:
    """The mixture a job asks for."""
    return Mixture([Source(**source) for source in job["sources"]], seed=job["seed"])


def run_generation(job: dict[str, Any], asked: dict[str, Any], cursors: list[Any]) -> dict[str, Any]:
    """Start ranks from a committed cursor, go on until a step, the end of the data or a kill.

    Args:
        asked: `dp_size`; `start`, a number in `cursors`; `until`, the last step or None; `kill`, [rank, step] or None.
        cursors: those committed at the end of each generation; this one's is appended.
    """
    committed = cursors[asked["start"]]
    ranks = [Rank(job, r, asked["dp_size"], committed) for r in range(asked["dp_size"])]
    steps: list[Any] = []
    died_of = None
    while True:
        fetched = [rank.fetch() for rank in ranks]
        if None in fetched:
            assert fetched == [None] * len(ranks), "the data ends on all ranks or on none"
            break
        step = fetched[0]["step"]
        assert all(batch["cursor"] == fetched[0]["cursor"] for batch in fetched), (
            "the cursor is free of ranks"
        )
        fired = asked["kill"] is not None and asked["kill"][1] == step
        steps.append(
            {"step": step, "committed": not fired, "ranks": [{**b, "cursor": None} for b in fetched]}
        )
        if fired:
            died_of = ranks.pop(asked["kill"][0]).kill()
            break
        committed = fetched[0]["cursor"]
        if step == asked["until"]:
            break
    for rank in ranks:
        rank.kill()
    cursors.append(committed)
    return {"steps": steps, "died_of": died_of, "cursor_bytes": len(json.dumps(committed))}


def main() -> None:
    job = json.loads(sys.argv[1])
    threads = len(os.listdir("/proc/self/task"))
    cursors: list[Any] = [None]
    generations = [run_generation(job, asked, cursors) for asked in job["generations"]]
    json.dump({"threads_before_fork": threads, "generations": generations}, sys.stdout)


if __name__ == "__main__":
    main()
