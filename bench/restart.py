"""How long a job stands still when one of its ranks is killed: Surefoot against torchrun, on the same model, turn by turn.

A four-rank FSDP2 job (the GPT of examples/) runs on this machine; one rank gets SIGKILL in the middle of a step, and the
clock runs from the signal to the end of the first step that *all* ranks have finished after it. Each pair is one run under
Surefoot (from memory, no step lost) and one under torchrun (c10d rendezvous), then the next pair.

``bench/restart.py --json`` prints one JSON object: medians in seconds of `surefoot_s`, `torchrun_s` and of the parts of
`surefoot_s` (`detect_s`, `plan_s`, `launch_s`, `restore_s`, `first_step_s`), `speedup` (of the medians), `spread` (least and
greatest of each), `pairs` (every measurement) and `machine`. ``--quick`` measures one pair.

What is in torchrun's favour: its job saves and restores nothing and starts again at step 1, both jobs' data and packages are
in the page cache, and it is given TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which a restart can burn all attempts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.chaos.trace import Event, TraceTail
from surefoot.controller.local import LocalRun
from surefoot.controller.spec.reading import parse_spec
from surefoot.examples import text

WORLD = 4
PAIRS = 5
STEPS = 400
"""More than any run gets through before it is stopped."""
KILL_AFTER_STEP = 5
"""Past the warm-up: first steps of a process are slower, and that is no matter of restarts."""
DEADLINE_S = 120.0

PARTS = ("detect_s", "plan_s", "launch_s", "restore_s", "first_step_s")

JOB = """\
[job]
name = "bench"
seed = 7
steps = {steps}
root = {root}
[program]
train = "surefoot.examples.gpt:train"
data = "surefoot.examples.gpt:data"
preload = ["surefoot.examples.gpt"]
params = {{ data_root = {data} }}
[layout]
nodes = 1
ranks_per_node = {world}
[checkpoint]
every_steps = {steps}
"""


class BenchError(Exception):
    """Nothing could be measured; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where `total_s` went. They follow each other without a gap."""

    detect_s: float
    """Signal to the agent's note of the rank's exit."""
    plan_s: float
    """To the new plan in the agent's hands: status, decision, record, the second listing, publication."""
    launch_s: float
    """To the last rank in the process group: the other ranks ended, a TCPStore, forks, rendezvous."""
    restore_s: float
    """Building the model and restoring it from shared memory, on the slowest rank."""
    first_step_s: float
    """To the end of the step on the slowest rank."""


# ---------------------------------------------------------------- reading the traces (pure)


def firsts(events: Iterable[Event], kind: str, generation: int) -> list[float]:
    """When each rank noted its first `kind` of `generation`, in order of time."""
    seen: dict[int, float] = {}
    for event in events:
        if event["kind"] == kind and event.get("generation") == generation:
            seen.setdefault(event["rank"], event["t"])
    return sorted(seen.values())


def all_stepped(events: Iterable[Event], generation: int) -> float | None:
    """When the last of all ranks ended its first step of `generation`; None while one has not."""
    ends = firsts(events, "step_end", generation)
    return ends[-1] if len(ends) == WORLD else None


def rank_pid(events: Iterable[Event], rank: int) -> int:
    return next(e["pid"] for e in events if e["kind"] == "launched" and e["rank"] == rank)


def parts_of(ranks: Sequence[Event], others: Sequence[Event], killed_at: float, stepped_at: float) -> Parts:
    """Cut the time from signal to step at what the processes noted.

    Args:
        ranks: the ranks' events.
        others: those of the agent.
    """

    def first_after(kind: str, **fields: Any) -> float:
        times = [
            e["t"]
            for e in others
            if e["kind"] == kind and e["t"] > killed_at and all(e.get(k) == v for k, v in fields.items())
        ]
        if not times:
            raise BenchError(f"no process noted {kind} {fields} after the kill")
        return min(times)

    detected = first_after("rank_exit")
    planned = first_after("plan_seen", generation=2)
    joined = firsts(ranks, "joined", 2)[-1]
    restored = firsts(ranks, "restored", 2)[-1]
    return Parts(
        detect_s=detected - killed_at,
        plan_s=planned - detected,
        launch_s=joined - planned,
        restore_s=restored - joined,
        first_step_s=stepped_at - restored,
    )


# ---------------------------------------------------------------- one measurement of either


class Watch:
    """The events of all history files below a folder, kept current."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._tail = TraceTail(folder, pattern)
        self.events: list[Event] = []

    def until(self, met: Callable[[list[Event]], Any], alive: Callable[[], object], what: str) -> Any:
        """Poll until `met(events)` is something; `alive` raises where waiting is in vain."""
        end = time.monotonic() + DEADLINE_S
        while True:
            self._tail.look()
            self.events += self._tail.read()
            if (found := met(self.events)) not in (None, False):
                return found
            alive()
            if time.monotonic() > end:
                raise BenchError(f"{what} did not happen within {DEADLINE_S:.0f} s")
            time.sleep(0.005)  # files that others write can only be looked at


def kill_one(watch: Watch, rank: int, alive: Callable[[], object]) -> tuple[float, float]:
    """SIGKILL `rank` once all ranks are past the warm-up; returns when, and when all had stepped again."""

    def warm(events: list[Event]) -> bool:
        past = {e["rank"] for e in events if e["kind"] == "step_end" and e["step"] >= KILL_AFTER_STEP}
        return len(past) == WORLD

    watch.until(warm, alive, f"step {KILL_AFTER_STEP} of all ranks")
    pid = rank_pid(watch.events, rank)
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return killed_at, watch.until(lambda e: all_stepped(e, 2), alive, "the first step after the kill")


def measure_surefoot(folder: Path, data: Path, rank: int, keep: Path | None) -> tuple[float, Parts]:
    """One run under the local runner: seconds from signal to step, and where they went. `keep` gets its logs."""
    job_file = folder / "job.toml"
    job_file.write_text(
        JOB.format(
            steps=STEPS,
            root=json.dumps(f"file://{folder}/root"),
            data=json.dumps(str(data)),
            world=WORLD,
        )
    )
    spec = parse_spec(job_file.read_text(), source=str(job_file))
    with LocalRun(spec, job_file, base=folder, keep=keep) as run:
        assert run.folder is not None
        watch = Watch(run.folder, "nodes/*/history/rank-*.jsonl")
        killed_at, stepped_at = kill_one(watch, rank, run.check)
        others = Watch(run.folder, "nodes/*/history/agent*.jsonl")
        others.until(lambda events: len(events) > 0, run.check, "a history")
        parts = parts_of(watch.events, others.events, killed_at, stepped_at)
    return stepped_at - killed_at, parts


def measure_torchrun(folder: Path, data: Path, rank: int) -> float:
    """One run under torchrun: seconds from signal to step."""
    job = Path(__file__).with_name("torchrun_job.py")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(WORLD)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", "3"),
        *(str(job), str(folder), str(data), str(STEPS)),
    ]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def alive() -> None:
        if process.poll() is not None:
            tail = (folder / "torchrun.log").read_text(errors="replace")[-2000:]
            raise BenchError(f"torchrun ended with {process.returncode}: {tail}")

    try:
        killed_at, stepped_at = kill_one(Watch(folder, "rank-*.jsonl"), rank, alive)
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its workers' own groups
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return stepped_at - killed_at


# ---------------------------------------------------------------- all of it


def run_pairs(count: int, data: Path, keep: Path | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    pairs = []
    for i in range(count):
        rank = 1 + i % (WORLD - 1)
        with tempfile.TemporaryDirectory(prefix="sf-bench-") as folder:
            surefoot_s, parts = measure_surefoot(_made(Path(folder) / "a"), data, rank, keep)
            torchrun_s = measure_torchrun(_made(Path(folder) / "b"), data, rank)
        say(f"pair {i + 1} of {count}, rank {rank}: surefoot {surefoot_s:.2f} s, torchrun {torchrun_s:.2f} s")
        pairs.append({"rank": rank, "surefoot_s": surefoot_s, "torchrun_s": torchrun_s, **asdict(parts)})
    return pairs


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def summary(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread of all pairs. Pure."""
    names = ("surefoot_s", "torchrun_s", *PARTS)
    columns = {name: [pair[name] for pair in pairs] for name in names}
    medians = {name: round(statistics.median(values), 3) for name, values in columns.items()}
    return {
        **medians,
        "speedup": round(medians["torchrun_s"] / medians["surefoot_s"], 2),
        "spread": {name: [round(min(v), 3), round(max(v), 3)] for name, v in columns.items()},
        "pairs": [{k: round(v, 3) for k, v in pair.items()} for pair in pairs],
    }


def machine() -> dict[str, Any]:
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--quick", action="store_true", help="one pair only")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"how many pairs (default {PAIRS})")
    parser.add_argument("--keep", type=Path, help="a folder that gets logs and histories of Surefoot's runs")
    args = parser.parse_args()

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    # Told to end, it ends what it started: the jobs have sessions of their own and would go on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surefoot" / "text"
    try:
        here = machine()
        data = text.prepare(cache)
        result = summary(run_pairs(1 if args.quick else args.pairs, data, args.keep, say)) | {"machine": here}
    except (BenchError, text.PrepareError) as e:
        say(f"restart: {e}")
        return 1
    if args.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0


def _print(result: dict[str, Any]) -> None:
    print(
        f"SIGKILL of one of {WORLD} ranks to the end of the first step after it, median (least to greatest):"
    )
    for name in ("surefoot_s", *PARTS, "torchrun_s"):
        least, greatest = result["spread"][name]
        indent = "    " if name in PARTS else "  "
        print(f"{indent}{name:<16}{result[name]:7.2f} s  ({least:.2f} to {greatest:.2f})")
    print(f"  {'speedup':<18}{result['speedup']:5.1f}")


if __name__ == "__main__":
    sys.exit(main())
