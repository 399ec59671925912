"""``python -m surefoot.ckpt ls|show|verify URL``: what a root holds, in a table on a terminal, or as JSON."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer

from surefoot.ckpt.errors import CkptError, CkptUserError
from surefoot.ckpt.inspect import CheckpointRow, Report, Shown, list_checkpoints, show, verify_step
from surefoot.ckpt.record import list_records
from surefoot.ckpt.store import ObjectStore, ObjectStoreError, open_store
from surefoot.exitcodes import ExitCode

DEADLINE_S = 15.0

app = typer.Typer(
    name="surefoot ckpt",
    help="Checkpoints of a root.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Root = Annotated[str, typer.Argument(metavar="URL", help="file:///path, a path, or s3://bucket/prefix.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Step = Annotated[int | None, typer.Option(min=0, help="Default: the newest on the lineage.")]
Generation = Annotated[
    int | None, typer.Option(min=1, help="Look among this generation's own, also off the lineage.")
]


@app.command("ls")
def ls_command(url: Root, json: Json = False) -> None:
    """List the checkpoints, those off the lineage as well."""
    store = _open(url)
    rows = list_checkpoints(store)
    if json:
        _print_json(rows)
    elif rows:
        _print_rows(rows)
    else:
        begun = bool(list_records(store))
        _print("no checkpoints yet" if begun else f"no checkpoints: no job has ever begun under {store.root}")


@app.command("show")
def show_command(url: Root, step: Step = None, generation: Generation = None, json: Json = False) -> None:
    """Show one checkpoint: tensors, values, cursor."""
    shown = show(_open(url), step, generation)
    if json:
        _print_json(shown)
    else:
        _print_shown(shown)


@app.command("verify")
def verify_command(url: Root, step: Step = None, generation: Generation = None, json: Json = False) -> None:
    """Read one checkpoint whole and compare every byte with its checksum. Exit code 1 if it is not sound."""
    report = verify_step(_open(url), step, generation)
    if json:
        _print_json({**msgspec.to_builtins(report), "ok": report.ok})
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(ExitCode.UNEXPECTED)


def _open(url: str) -> ObjectStore:
    return open_store(url, deadline_s=DEADLINE_S)


# ---------------------------------------------------------------- printing


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def _print_rows(rows: list[CheckpointRow]) -> None:
    from rich.table import Table

    table = Table(
        "step", "generation", "", "size", "tensors", "ranks", "attempt", "generation exists for", box=None
    )
    for r in rows:
        mark = "newest" if r.newest else "" if r.counts else "off the lineage"
        if r.problem:
            table.add_row(
                str(r.step), str(r.generation), f"{mark} unreadable".strip(), "", "", "", "", r.problem
            )
            continue
        size, tensors = human(r.nbytes), str(r.tensors)
        table.add_row(
            str(r.step), str(r.generation), mark, size, tensors, str(r.world_size), r.attempt, r.reason
        )
    _print(table)


def _print_shown(shown: Shown) -> None:
    from rich.table import Table

    state = "counts" if shown.counts else "is off the lineage"
    _print(
        f"step {shown.step} of generation {shown.generation} {state}; attempt {shown.attempt}, {shown.world_size} ranks, "
    )
    _print(f"{human(shown.nbytes)} in {len(shown.objects)} objects; facts: {shown.facts}")
    table = Table("tensor", "type", "shape", "size", "pieces", "tied to", box=None)
    for t in shown.tensors:
        table.add_row(t.name, t.dtype, str(list(t.shape)), human(t.nbytes), str(t.pieces), t.tied_to)
    _print(table)
    _print(f"values: {', '.join(shown.values) or 'none'}")
    _print(f"cursor: {shown.cursor}")


def _print_report(report: Report) -> None:
    verdict = "sound" if report.ok else "NOT SOUND"
    _print(
        f"step {report.step} of generation {report.generation} in {report.root}: {verdict}; "
        f"{human(report.nbytes)} in {report.objects} objects compared with their checksums"
    )
    for problem in report.problems:
        _print(f"  {problem}")


def _print(what: Any) -> None:
    from rich.console import Console

    # Without a terminal nothing may be cut off or wrapped: the reader is a program.
    console = Console() if sys.stdout.isatty() else Console(width=400, no_color=True)
    console.print(what, markup=False, highlight=False) if isinstance(what, str) else console.print(what)


def human(nbytes: int) -> str:
    """``9.4 MB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def main() -> None:
    """Run a command; a known error is one line on stderr and an exit code."""
    try:
        app()
    except (CkptUserError, ValueError) as e:
        _end(e, ExitCode.USAGE)
    except ObjectStoreError as e:
        _end(e, ExitCode.ENVIRONMENT)
    except CkptError as e:
        _end(e, ExitCode.UNEXPECTED)


def _end(e: Exception, code: ExitCode) -> None:
    print(f"surefoot ckpt: {e}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
