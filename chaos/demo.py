"""``surefoot demo``: a small GPT on real text, once undisturbed and once through four faults, and the proof that nothing shows.

The harness starts two local runs of the same job and seed. Beside the second a thread injects faults: it reads what the
ranks write about themselves, knows pids, and has no channel to the product. Afterwards `judge` compares what was
committed. This module is the shell: it prepares, starts, draws and prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from surefoot import marks
from surefoot.chaos import checkers, faults
from surefoot.chaos.faults import FaultMissedError, Fired, RankWatch
from surefoot.chaos.judge import RESTARTS, RunEvidence, Verdict, judge
from surefoot.chaos.schedule import Fault, demo_schedule
from surefoot.chaos.trace import read_all
from surefoot.controller.local import LocalRun, RunFailedError, terminations_interrupt
from surefoot.controller.spec.problems import SpecError
from surefoot.controller.spec.reading import parse_spec
from surefoot.controller.view.picture import render
from surefoot.controller.view.types import JobView
from surefoot.controller.view.words import news
from surefoot.examples import text
from surefoot.exitcodes import ExitCode

RANK_FILES = "*/history/rank-*.jsonl"
CONTROLLER_FILES = "*/history/*.jsonl"
FAULT_DEADLINE_S = 90.0
"""How long a fault may wait for its moment, and a new generation for its first step: many times what either takes."""
RUN_DEADLINE_S = 600.0
PICTURES_PER_S = 4
FILE_WIDTH = 110
"""Columns of the table where no terminal says how many there are."""

JOB = """\
[job]
name = "{name}"
seed = {seed}
steps = {steps}
root = {root}

[program]
train = "surefoot.examples.gpt:train"
data = "surefoot.examples.gpt:data"
preload = ["surefoot.examples.gpt"]
params = {{ data_root = {data}, data_seed = {seed} }}

[layout]
nodes = {nodes}
standbys = 1
ranks_per_node = {ranks_per_node}

[checkpoint]
every_steps = 20

[detect]
hang_floor_s = 4
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line. `root` is where the objects go (None: the demo's own folder), `keep` gets logs, traces and objects."""

    steps: int
    nodes: int
    ranks_per_node: int
    seed: int
    root: str | None
    keep: Path | None
    json: str | None

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


class DemoError(Exception):
    """The demo cannot run; the message is for the user, `exit_code` for the shell."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# ---------------------------------------------------------------- the injector


@dataclass(slots=True)
class Injector:
    """Strikes the faults of a schedule, one after the other, each when the run has recovered from the one before.

    It runs in a thread of its own. `fired` and `doing` are for the picture and the judge.
    """

    run: LocalRun
    schedule: Sequence[Fault]
    world_size: int
    morgue: Path
    fired: list[Fired] = field(default_factory=list)
    missed: str = ""
    doing: str = "waits for the first step"
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        assert self.run.folder is not None
        self._thread = threading.Thread(
            target=self._work, args=(RankWatch.on(self.run.folder / "nodes"),), name="injector", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a fault that still waits for its moment is given up."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self, watch: RankWatch) -> None:
        try:
            for fault in self.schedule:
                self.doing = f"{fault.kind} is due in step {fault.step}"
                fired = self._strike(fault, watch)
                self.fired.append(fired)
                if fired.kind in RESTARTS:
                    self.doing = f"{fired.kind} struck; waits for the run to step again"
                    self._await_recovery(fired, watch)
            self.doing = "all faults have struck"
        except FaultMissedError as e:
            self.missed = self.doing = str(e)

    def _strike(self, fault: Fault, watch: RankWatch) -> Fired:
        rank = fault.target if fault.kind != "node_loss" else None
        if fault.kind == "controller_kill":
            self._await(watch, lambda: any(e["step"] >= fault.step for e in watch.last.values()))
            return faults.kill_controller(self._leader(), watch)
        if rank is None:
            ranks = self.world_size // self.run.spec.layout.nodes
            rank = fault.target * ranks
        proof = faults.await_rank_between(
            watch, rank, fault.step, deadline_s=FAULT_DEADLINE_S, stopped=self._ended.is_set
        )
        match fault.kind:
            case "rank_kill":
                return faults.kill_rank(proof)
            case "rank_hang":
                return faults.freeze_rank(proof)
            case "node_loss":
                return self._lose_node_of(proof)

    def _lose_node_of(self, proof: faults.Event) -> Fired:
        uid = self._node_of(proof["pid"])
        pids = [p.pid for p in marks.find(run_id=self.run.run_id, node=uid)]
        return faults.lose_node(
            pids,
            proof,
            state_dir=self.run.node_state(uid),
            shm_dir=self.run.node_shm(uid),
            morgue=self.morgue,
        )

    def _node_of(self, pid: int) -> str:
        for process in marks.find(run_id=self.run.run_id):
            if process.pid == pid:
                return process.mark.node
        raise FaultMissedError(f"process {pid} is gone before its node could be lost")

    def _leader(self) -> int:
        name = self.run.view().leader
        pid = self.run.controllers.get(name or "")
        if pid is None:
            raise FaultMissedError(f"no controller leads that could be killed (leader: {name})")
        return pid

    def _await_recovery(self, fired: Fired, watch: RankWatch) -> None:
        stepped: set[int] = set()

        def recovered() -> bool:
            return len(stepped) == self.world_size

        self._await(
            watch,
            recovered,
            on_event=lambda e: (
                stepped.add(e["rank"])
                if e["kind"] == "step_end" and e["generation"] > fired.generation
                else None
            ),
        )

    def _await(
        self, watch: RankWatch, met: Callable[[], bool], on_event: Callable[[faults.Event], Any] | None = None
    ) -> None:
        end = time.monotonic() + FAULT_DEADLINE_S
        while not self._ended.wait(0.02):
            for event in watch.refresh(look=True):
                if on_event is not None:
                    on_event(event)
            if met():
                return
            if time.monotonic() > end:
                raise FaultMissedError(f"nothing happened for {FAULT_DEADLINE_S:.0f} s: {self.doing}")
        raise FaultMissedError(f"the run ended while the injector waited: {self.doing}")


# ---------------------------------------------------------------- the picture


class Screen:
    """Draws the runs: live on a terminal, as plain lines elsewhere. All of it goes to stderr; stdout is for results."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._last: JobView | None = None
        self._told = 0

    def say(self, words: str) -> None:
        self.console.print(words, highlight=False, soft_wrap=True)

    @contextmanager
    def watching(self, title: str) -> Generator[Callable[[JobView, Injector | None], None]]:
        """Yields a function that shows the newest picture."""
        self._last, self._told = None, 0
        if not self.console.is_terminal:
            self.say(title)
            yield self._print_news
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            yield lambda view, injector: live.update(self._picture(title, view, injector), refresh=True)
        if self._last is not None:
            self.say(
                f"{title}: step {self._last.step}, loss {self._last.loss or 0:.4f}, {len(self._last.generations)} generations"
            )

    def _print_news(self, view: JobView, injector: Injector | None) -> None:
        if injector is not None:
            for fired in injector.fired[self._told :]:
                self.say(f"  step {fired.step:>3}  FAULT {fired.kind}: {fired.where}")
            self._told = len(injector.fired)
        for line in news(self._last, view):
            self.say(f"  step {view.step:>3}  {line}")
        self._last = view

    def _picture(self, title: str, view: JobView, injector: Injector | None) -> RenderableType:
        self._last = view
        parts: list[RenderableType] = [Text(title, style="bold"), render(view, width=self.console.width)]
        if injector is not None:
            parts.append(Text(""))
            parts += [
                Text(f"⚡ {f.kind} in step {f.step}: {f.where}", style="bold red") for f in injector.fired
            ]
            parts.append(Text(f"injector: {injector.doing}", style="red"))
        return Group(*parts)


# ---------------------------------------------------------------- one run


def run_once(
    options: Options, name: str, folder: Path, data: Path, screen: Screen, schedule: Sequence[Fault]
) -> tuple[RunEvidence, list[Fired]]:
    """Run the job to its end, with the faults of `schedule`; returns what it left and the faults that fired.

    Raises:
        DemoError: it could not start, or did not come to its end.
    """
    morgue, root = (
        folder / "lost" / name,
        f"{options.root or f'file://{folder}/objects'}/{folder.name}/{name}",
    )
    job_file = folder / f"{name}.toml"
    job_file.write_text(
        JOB.format(
            name=f"demo-{name}",
            seed=options.seed,
            steps=options.steps,
            root=json.dumps(root),
            data=json.dumps(str(data)),
            nodes=options.nodes,
            ranks_per_node=options.ranks_per_node,
        )
    )
    spec = parse_spec(job_file.read_text(), source=str(job_file))
    began = time.monotonic()
    with (
        screen.watching(f"{name} run") as show,
        LocalRun(spec, job_file, controllers=2, keep=folder if options.keep else None) as run,
    ):
        injector = Injector(run, schedule, options.world_size, morgue) if schedule else None
        if injector is not None:
            injector.start()
        try:
            _watch(run, injector, show)
        finally:
            if injector is not None:
                injector.stop()
        wall_s = time.monotonic() - began
        assert run.folder is not None
        evidence = RunEvidence(
            objects=checkers.Objects(root),
            ranks=read_all([run.folder / "nodes", morgue], RANK_FILES),
            controllers=read_all([run.folder / "controllers"], CONTROLLER_FILES),
            wall_s=wall_s,
        )
    if injector is not None and injector.missed:
        screen.say(f"surefoot demo: {injector.missed}")
    return evidence, injector.fired if injector is not None else []


def _watch(
    run: LocalRun, injector: Injector | None, show: Callable[[JobView, Injector | None], None]
) -> None:
    """Draw until the job has ended well."""
    end = time.monotonic() + RUN_DEADLINE_S
    while (outcome := run.wait(1 / PICTURES_PER_S)) is None:
        show(run.view(), injector)
        if time.monotonic() > end:
            raise DemoError(
                f"the run did not end within {RUN_DEADLINE_S:.0f} s: {run.view().now}", ExitCode.FAILED
            )
    show(run.view(), injector)
    if outcome.state != "done":
        raise DemoError(f"the job failed: {outcome.reason}", ExitCode.FAILED)


def expected_samples(data: Path, seed: int, steps: int) -> list[list[str]]:
    """The reference order: the ids of each step, enumerated without ranks."""
    from surefoot import loader
    from surefoot.examples import gpt

    mix, pack = gpt.data({"data_root": str(data), "data_seed": seed})
    return [[i for sequence in step.sequences for i in sequence] for step in loader.plan(mix, pack, steps)]


# ---------------------------------------------------------------- the whole


def demo(options: Options, screen: Screen) -> Verdict:
    """Both runs and their comparison.

    Raises:
        DemoError: something could not be run to its end; everything was cleaned up.
    """
    try:
        schedule = demo_schedule(
            options.seed, steps=options.steps, nodes=options.nodes, ranks_per_node=options.ranks_per_node
        )
    except ValueError as e:
        raise DemoError(str(e), ExitCode.USAGE) from e
    marks.sweep()
    with marks.RunOwner.create("demo") as owner:
        data = _prepare(screen)
        folder = owner.folder if options.keep is None else options.keep / owner.run_id
        folder.mkdir(parents=True, exist_ok=True)
        reference, _ = run_once(options, "reference", folder, data, screen, ())
        disturbed, fired = run_once(options, "disturbed", folder, data, screen, schedule)
        return judge(
            reference,
            disturbed,
            fired,
            expected_samples(data, options.seed, options.steps),
            world_size=options.world_size,
            kinds=[fault.kind for fault in schedule],
        )


def _prepare(screen: Screen) -> Path:
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "surefoot"
        / f"text-{platform.python_version()}"
    )
    try:
        with screen.console.status("preparing text from this Python's own library") as status:
            return text.prepare(
                cache, lambda what, done: status.update(f"preparing text: {what} ({done:.0%})")
            )
    except text.PrepareError as e:
        raise DemoError(str(e), ExitCode.ENVIRONMENT) from e


def table(verdict: Verdict) -> Table:
    """The result as people read it."""
    out = Table(
        title=f"{verdict.steps} steps, {verdict.generations} generations, {verdict.wall_s:.0f} s",
        title_justify="left",
    )
    for title in ("fault", "struck", "detected", "first step after", "steps recomputed", "restored from"):
        out.add_column(title)
    for f in verdict.faults:
        out.add_row(
            f.kind,
            f"step {f.step}",
            _seconds(f.detected_s),
            _seconds(f.first_step_s) if f.kind in RESTARTS else "training did not stop",
            "–" if f.steps_recomputed is None else str(f.steps_recomputed),
            f.restored_from or "–",
        )
    return out


def summary(verdict: Verdict) -> Iterator[str]:
    """The lines below the table."""
    s = verdict.samples
    yield f"loss of every execution of every step identical to the last bit: {_yes(verdict.loss_identical)}"
    yield f"final parameters and optimizer state identical: {_yes(verdict.params_identical)}"
    yield f"samples: {s['expected']} expected, {s['committed']} committed, {s['missing']} missing, {s['repeated']} repeated"
    yield f"goodput {verdict.goodput:.0%} (time of committed steps over wall time, start included)"
    yield from (f"NOT AS PROMISED: {failure}" for failure in verdict.failures)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Raises SystemExit(2) for what is no option."""
    parser = argparse.ArgumentParser(
        prog="surefoot demo",
        description="Train a small GPT on real text through a killed rank, a hang, a lost node and a dead controller.",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as one JSON object to FILE ('-': stdout)"
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    parser.add_argument(
        "--nodes", type=int, default=2, help="nodes that train; one more stands by (default 2)"
    )
    parser.add_argument("--ranks-per-node", type=int, default=2, help="ranks on each node (default 2)")
    parser.add_argument(
        "--root",
        metavar="URL",
        help="where checkpoints go: file:///… or s3://bucket/prefix (default: the demo's own folder)",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs, traces and checkpoints in DIR")
    parser.add_argument(
        "--seed", type=int, default=7, help="of the weights, the data and the faults (default 7)"
    )
    given = parser.parse_args(arguments)
    if given.ranks_per_node < 1:
        parser.error("--ranks-per-node must be at least 1")
    return Options(
        steps=given.steps,
        nodes=given.nodes,
        ranks_per_node=given.ranks_per_node,
        seed=given.seed,
        root=given.root.rstrip("/") if given.root else None,
        keep=given.keep.absolute() if given.keep else None,
        json=given.json,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_options(arguments)
    screen = Screen(Console(stderr=True))
    try:
        with terminations_interrupt():
            verdict = demo(options, screen)
    except KeyboardInterrupt:
        screen.say("surefoot demo: interrupted; everything it started has ended")
        return ExitCode.INTERRUPTED
    except DemoError as e:
        screen.say(f"surefoot demo: {e}")
        return e.exit_code
    except (RunFailedError, marks.RunFolderError) as e:
        screen.say(f"surefoot demo: {e}")
        return getattr(e, "exit_code", ExitCode.ENVIRONMENT)
    except SpecError as e:
        screen.say(f"surefoot demo: {e}")
        return ExitCode.USAGE
    except checkers.EvidenceError as e:
        screen.say(f"surefoot demo: the evidence does not hold: {e}")
        return ExitCode.FAILED
    _print_result(verdict, options)
    return ExitCode.FAILED if verdict.failures else ExitCode.DONE


def _print_result(verdict: Verdict, options: Options) -> None:
    console = Console(stderr=options.json == "-")
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table(verdict))
    for line in summary(verdict):
        console.print(line, highlight=False, style="bold red" if line.startswith("NOT") else None)
    if options.json == "-":
        print(json.dumps(verdict.as_json()))
    elif options.json:
        Path(options.json).write_text(json.dumps(verdict.as_json(), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
