"""The ``surefoot`` command. It holds no logic: it parses words, calls one thing, and prints what that returns.

Results go to stdout, progress and errors to stderr; ``--json`` prints the very snapshot that the view draws; no colour
where stdout is no terminal. What can be foreseen is one message ``surefoot: what, where, what to do`` and an exit code of
`surefoot.exitcodes` (docs/operations.md has the table).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer

from surefoot import marks
from surefoot.command import CommandError, Commands, run_command
from surefoot.exitcodes import ExitCode

if TYPE_CHECKING:  # what a command needs is imported when it runs: --help should not wait for any of it
    from rich.console import Console

    from surefoot.controller.local import LocalRun
    from surefoot.controller.spec.tables import JobSpec
    from surefoot.controller.view.types import JobFacts, JobView

app = typer.Typer(
    name="surefoot",
    cls=Commands,
    help="Keeps a large PyTorch training job on its feet.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

PASS_ON: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
    "add_help_option": False,
}
"""For commands that are another program's: all words go to it, ``--help`` too."""

PICTURES_PER_S = 8
STEP_LINE_S = 5.0
"""Without a terminal `run` prints where it is this often, and at once what is new."""

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)]
MaybeJobFile = Annotated[
    Path | None, typer.Argument(metavar="[JOB.toml]", help="The job file.", show_default=False)
]
JobOption = Annotated[
    Path | None,
    typer.Option("--job", metavar="JOB.toml", help="The job file, as an option.", show_default=False),
]
RootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="URL",
        help="The job's object store, where no job file is at hand.",
        show_default=False,
    ),
]
EtcdOption = Annotated[
    str | None,
    typer.Option(
        "--etcd",
        metavar="HOST:PORT",
        help="The job's etcd. Default: the one of a local run of this job, if one is running.",
        show_default=False,
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the snapshot as JSON.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    logging.basicConfig(stream=sys.stderr, format="surefoot: %(message)s", level=logging.WARNING)
    words = sys.argv[1:] if arguments is None else arguments
    sys.exit(run_command(app, words, name="surefoot"))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"surefoot {metadata.version('surefoot')}")
        raise typer.Exit


@app.callback()
def surefoot(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keeps a large PyTorch training job on its feet."""


# ---------------------------------------------------------------- commands that are another program


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process, so that signals and exit codes pass through."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"surefoot.{module}", *arguments])


@app.command()
def demo(
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the result as one JSON object to FILE ('-': stdout)."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 60,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that train; one more stands by.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 2,
    root: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Object store: file:///folder or s3://bucket/prefix. Default: a temporary folder.",
        ),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep logs, histories and checkpoints in DIR.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the data, the model, and the moments at which faults strike.")
    ] = 7,
) -> None:
    """Train on real text, twice: undisturbed, and through a killed rank, a hang, a lost node and a dead controller."""
    arguments = ["--steps", steps, "--nodes", nodes, "--ranks-per-node", ranks_per_node, "--seed", seed]
    for name, value in (("--json", json), ("--root", root), ("--keep", keep)):
        arguments += [name, value] if value is not None else []
    _become("chaos.demo", [str(a) for a in arguments])


@app.command(**PASS_ON)
def controller(context: typer.Context) -> None:
    """One controller of a job (several may run, one leads). Options: surefoot controller --help."""
    _become("controller", context.args)


@app.command(**PASS_ON)
def agent(context: typer.Context) -> None:
    """The agent of a node. Options: surefoot agent --help."""
    _become("agent", context.args)


@app.command(**PASS_ON)
def ckpt(context: typer.Context) -> None:
    """Checkpoints: ls, show, verify, diff, export, import, keep, gc. Options: surefoot ckpt --help."""
    _become("ckpt", context.args)


# ---------------------------------------------------------------- run


@app.command()
def run(
    job: JobFile,
    json: Annotated[bool, typer.Option("--json", help="Print the last snapshot as JSON.")] = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Copy logs and histories to DIR/<run id> at the end. Default: only of failed runs.",
        ),
    ] = None,
    controllers: Annotated[int, typer.Option(min=1, help="How many controllers; one leads.")] = 1,
    etcd: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="An etcd that is running. Default: an embedded one."),
    ] = None,
    etcd_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Where the embedded etcd listens. Default: any free port."),
    ] = None,
) -> int:
    """Run a whole job on this machine; on a root with checkpoints it resumes."""
    from surefoot.controller import local

    spec = _load(job)
    the_run = local.LocalRun(
        spec, job, controllers=controllers, keep=keep, etcd_endpoint=etcd, etcd_port=etcd_port
    )
    try:
        with local.terminations_interrupt(), the_run:
            last = _follow(the_run)
    except local.RunFailedError as e:
        raise CommandError(f"{e}{_logs_of(the_run)}", e.exit_code) from e
    outcome = last.outcome
    assert outcome is not None, "the run was followed to its outcome"
    if json:
        _print_json(last)
    if outcome.state == "done":
        if not json:
            print(f"{last.job}: {outcome.reason} (step {outcome.step}, generation {outcome.generation})")
        return ExitCode.DONE
    raise CommandError(f"{last.job} failed: {outcome.reason}{_logs_of(the_run)}", ExitCode(outcome.exit_code))


def _logs_of(the_run: LocalRun) -> str:
    return f" (logs: {the_run.kept})" if the_run.kept else ""


def _follow(the_run: LocalRun) -> JobView:
    """Show the run until its outcome; returns the last snapshot."""
    return _follow_live(the_run) if sys.stderr.isatty() else _follow_plainly(the_run)


def _follow_live(the_run: LocalRun) -> JobView:
    from rich.console import Console
    from rich.live import Live

    from surefoot.controller.view.picture import render

    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=PICTURES_PER_S, transient=False) as live:
        while True:
            seen = the_run.view()
            live.update(render(seen, width=console.width))
            if the_run.wait(1 / PICTURES_PER_S) is not None:
                seen = the_run.view()
                live.update(render(seen, width=console.width))
                return seen


def _follow_plainly(the_run: LocalRun) -> JobView:
    from surefoot.controller.view.words import news

    before, printed_at = the_run.view(), 0.0
    if before.committed is not None:
        resumed = f"resuming: step {before.committed.step} of {before.steps} is committed"
        print(
            f"{_clock()} {resumed}, by generation {before.committed.generation}", file=sys.stderr, flush=True
        )
    while True:
        ended = the_run.wait(0.25) is not None
        seen = the_run.view()
        for line in news(before, seen):
            print(f"{_clock()} {line}", file=sys.stderr, flush=True)
        if seen.phase == "running" and time.monotonic() - printed_at >= STEP_LINE_S:
            printed_at = time.monotonic()
            loss = f", loss {seen.loss:.4f}" if seen.loss is not None else ""
            print(f"{_clock()} in step {seen.step} of {seen.steps}{loss}", file=sys.stderr, flush=True)
        before = seen
        if ended:
            return seen


def _clock() -> str:
    """For people who read a log; nothing is decided by it."""
    return time.strftime("%H:%M:%S")


# ---------------------------------------------------------------- looking at a job


@app.command()
def status(
    job_file: MaybeJobFile = None,
    job: JobOption = None,
    root: RootOption = None,
    etcd: EtcdOption = None,
    json: JsonFlag = False,
) -> None:
    """Where a job stands: phase, step, nodes, ranks, and why. Without etcd: what the object store proves."""
    from surefoot.controller.view.picture import render

    seen = _look(_target(job_file or job, root, etcd))
    if json:
        _print_json(seen)
    else:
        console = _console()
        console.print(render(seen, width=console.width))


@app.command()
def events(
    job_file: MaybeJobFile = None,
    job: JobOption = None,
    root: RootOption = None,
    etcd: EtcdOption = None,
    json: JsonFlag = False,
) -> None:
    """The story of a job: generations, commits and incidents, oldest first."""
    seen = _look(_target(job_file or job, root, etcd))
    if json:
        _print_json(seen.events)
        return
    for event in seen.events:
        print(event.text)


@app.command()
def why(
    incident: Annotated[
        str, typer.Argument(metavar="INCIDENT", help="Its id, or 'last'.", show_default=False)
    ],
    job_file: MaybeJobFile = None,
    job: JobOption = None,
    root: RootOption = None,
    etcd: EtcdOption = None,
    json: JsonFlag = False,
) -> None:
    """One incident: evidence, cause, decision, and what it cost. Works after etcd is gone."""
    from surefoot.controller.view.words import incident_story

    seen = _look(_target(job_file or job, root, etcd))
    found = [i for i in seen.incidents if incident in ("last", i.id)]
    if not found:
        known = ", ".join(i.id for i in seen.incidents) or "none"
        raise CommandError(
            f"there is no incident {incident!r} in job {seen.job}; known: {known}", ExitCode.USAGE
        )
    if json:
        _print_json(found[-1])
    else:
        print("\n".join(incident_story(found[-1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """Which job is looked at, and where."""

    facts: JobFacts
    root: str
    etcd: str | None


def _target(job_file: Path | None, root: str | None, etcd: str | None) -> _Target:
    """What the options name; a run of that job on this machine lends its etcd's address, and its job file."""
    from surefoot.controller.reader import facts_of, same_root
    from surefoot.controller.view.types import JobFacts

    if job_file is None and root is None:
        raise CommandError("which job? Give JOB.toml, or --root URL", ExitCode.USAGE)
    if job_file is None:
        assert root is not None
        living = _living_run(lambda facts: same_root(facts.get("root"), root))
        own_file = living.folder / "job.toml" if living else None
        facts = (
            facts_of(_load(own_file)) if own_file else JobFacts(name="", steps=None, nodes=None, root=root)
        )
    else:
        facts = facts_of(_load(job_file))
        root = root or facts.root
        living = _living_run(lambda f: f.get("job") == facts.name and same_root(f.get("root"), root))
    return _Target(facts=facts, root=root, etcd=etcd or (living.facts.get("etcd") if living else None))


def _living_run(fits: Callable[[Mapping[str, Any]], bool]) -> marks.LivingRun | None:
    return next((run for run in reversed(marks.living_runs()) if fits(run.facts)), None)


def _look(target: _Target) -> JobView:
    """One snapshot. An etcd that does not answer is said on stderr, and the object store is read alone."""
    from surefoot.ckpt.errors import CkptError
    from surefoot.ckpt.store import ObjectStoreError, open_store
    from surefoot.controller.reader import read_once
    from surefoot.controller.store import CoordError, connect

    store = None
    if target.etcd is not None:
        try:
            store = connect(target.etcd)
        except CoordError as e:
            print(f"surefoot: {e}; showing what the object store has", file=sys.stderr)
    try:
        seen, trouble = read_once(target.facts, store=store, objects=open_store(target.root, deadline_s=15.0))
    except ValueError as e:
        raise CommandError(str(e), ExitCode.USAGE) from e
    except (ObjectStoreError, CkptError) as e:
        raise CommandError(str(e), ExitCode.ENVIRONMENT) from e
    finally:
        if store is not None:
            store.close()
    for words in trouble:
        print(f"surefoot: {words}", file=sys.stderr)
    return seen


# ---------------------------------------------------------------- printing and reading


def _load(path: Path) -> JobSpec:
    from surefoot.controller.spec.problems import SpecError
    from surefoot.controller.spec.reading import load_spec

    try:
        return load_spec(path)
    except SpecError as e:
        alone = len(e.problems) == 1  # then it fits on one line
        raise CommandError(f"{e.source}: {e.problems[0]}" if alone else str(e), ExitCode.USAGE) from e


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def _console() -> Console:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=120, no_color=True)


if __name__ == "__main__":
    main()
