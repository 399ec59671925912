"""How the answers of `surefoot ckpt` look: tables and sentences. Holds no logic; rich is used here and by the progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a command needs is imported when it runs
    from surefoot.ckpt.keeping.cleaning import GcPlan
    from surefoot.ckpt.planning.resharding import ReshardPlan
    from surefoot.ckpt.progress import Progress
    from surefoot.ckpt.tools.comparing import CheckpointDiff, TensorDiff
    from surefoot.ckpt.tools.exporting import ExportPlan
    from surefoot.ckpt.tools.inspect import CheckpointRow, Shown
    from surefoot.ckpt.tools.tensorstats import TensorStats
    from surefoot.ckpt.tools.verifying import Report

SHOWN_MAX = 20
"""Lines of a list of differences; JSON has all."""
BAR_WIDTH = 40


def say(what: Any) -> None:
    """A text or a table, to stdout."""
    from rich.console import Console

    # Without a terminal nothing may be cut off or wrapped: the reader is a program.
    console = Console() if sys.stdout.isatty() else Console(width=400, no_color=True)
    if isinstance(what, str):
        console.print(what, markup=False, highlight=False)
    else:
        console.print(what)


@contextmanager
def progress_bar(what: str, *, sizes: bool = True) -> Iterator[Progress | None]:
    """A bar on stderr where that is a terminal; otherwise nothing. `sizes`: what is counted are bytes."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    counted = (DownloadColumn(), TransferSpeedColumn()) if sizes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def human(nbytes: float) -> str:
    """``9.4 MB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def counted(n: int, what: str) -> str:
    """``1 object``, ``2 objects``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def ago(seconds: float | None) -> str:
    """``2 h``; empty where it is not known."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def print_rows(rows: Sequence[CheckpointRow]) -> None:
    from rich.table import Table

    table = Table(box=None)
    for head in (
        "step",
        "generation",
        "",
        "age",
        "size",
        "tensors",
        "ranks",
        "reason",
    ):
        table.add_column(
            head, justify="right" if head in ("step", "age", "size", "tensors", "ranks") else "left"
        )
    for r in rows:
        mark = ", ".join(_marks(r))
        if r.problem:
            table.add_row(str(r.step), str(r.generation), mark, "", "", "", "", r.reason)
            continue
        size, tensors, ranks = human(r.nbytes), str(r.tensors), str(r.world_size)
        about = (ago(r.age_s), size, tensors, ranks, r.reason)
        table.add_row(str(r.step), str(r.generation), mark, *about)
    say(table)
    for r in rows:
        if r.problem:
            say(f"step {r.step} of generation {r.generation} cannot be read: {r.problem}")
    for r in rows:
        if r.newest and r.resumes and not r.loads and "aside" not in r.flags:
            say(_resumed(r))
    if rows and (why := rows[-1].facts.get("interval")):
        say(f"saving: {why}")


_FLAG_WORDS = {"verified": "verified", "kept": "kept", "aside": "set aside: damaged"}


def _marks(r: CheckpointRow) -> Iterator[str]:
    """What there is to say of a checkpoint in its row. That loads take the newest goes without saying."""
    if r.newest or not r.counts:
        yield "newest" if r.newest else "off the lineage"
    if r.loads and not r.newest:
        yield "loads take it"
    yield from (_FLAG_WORDS[f] for f in r.flags)
    if r.resumes:
        yield counted(r.resumes, "resume")
    if r.problem:
        yield "unreadable"


def _resumed(r: CheckpointRow) -> str:
    from surefoot.ckpt.loading.aside import ways_out

    return (
        f"step {r.step} of generation {r.generation}: {counted(r.resumes, 'start')} resumed from it and did not get to a next commit, so "
        f"loads take the one before it; {ways_out(r.step)}"
    )


def print_shown(shown: Shown) -> None:
    from rich.table import Table

    from surefoot.ckpt.format.plain import decode_plain

    state = "counts" if shown.counts else "is off the lineage"
    say(
        f"step {shown.step} of generation {shown.generation} {state}; attempt {shown.attempt}, {counted(shown.world_size, 'rank')}"
    )
    say(f"{human(shown.nbytes)} in {counted(len(shown.objects), 'object')}; {_facts(shown.facts)}")
    table = Table(box=None)
    for head in ("tensor", "type", "shape", "size", "pieces", "tied to"):
        # A name is folded, not cut off: somebody may want to copy it.
        table.add_column(head, justify="right" if head in ("size", "pieces") else "left", overflow="fold")
    for t in shown.tensors:
        table.add_row(t.name, t.dtype, str(list(t.shape)), human(t.nbytes), str(t.pieces), t.tied_to)
    say(table)
    names = list(shown.values)
    more = f" and {len(names) - SHOWN_MAX} more (--json lists all)" if len(names) > SHOWN_MAX else ""
    say(f"values: {', '.join(names[:SHOWN_MAX]) or 'none'}{more}")
    say(f"cursor: {decode_plain('cursor', shown.cursor) or 'none'}")


def _facts(facts: dict[str, Any]) -> str:
    """``committed at 2026-01-31 12:00:00 UTC, host a, pid 3``."""
    words: list[str] = []
    for name, value in facts.items():
        if name == "committed_at" and isinstance(value, int | float):
            at = datetime.fromtimestamp(value, UTC)
            words.append(f"committed at {at:%Y-%m-%d %H:%M:%S} UTC")
        else:
            words.append(f"{name} {value}")
    return ", ".join(words)


def print_reshard(plan: ReshardPlan) -> None:
    from rich.table import Table

    say(
        f"step {plan.step} of generation {plan.generation}, saved by {counted(plan.saved_by, 'rank')}, read by {plan.world_size} "
        f"(each tensor cut along its first dimension, as FSDP does); {human(plan.unique_nbytes)} in all"
    )
    say(
        "whole blocks are read, once for the job: where several ranks need the same, one reads it and the others have it from that one (from "
        "files, where they share a machine, each reads for itself)"
    )
    table = Table(box=None)
    for head in ("rank", "holds", "needs", "from objects"):
        table.add_column(head, justify="right")
    for r in plan.ranks:
        table.add_row(str(r.rank), human(r.held_nbytes), human(r.read_nbytes), str(r.objects))
    held = sum(r.held_nbytes for r in plan.ranks)
    table.add_row("job", human(held), human(plan.read_nbytes), str(plan.objects))
    say(table)


def print_stats(s: TensorStats) -> None:
    tied = f", stored as {s.stored_as}" if s.stored_as != s.name else ""
    say(
        f"{s.name}: {s.dtype}{list(s.shape)}, {human(s.nbytes)}, step {s.step} of generation {s.generation}{tied}"
    )
    say(f"elements {s.numel}, zero {s.zeros}, NaN {s.nan}, infinite {s.inf}")
    if s.min is not None and s.max is not None:
        say(f"min {s.min:.6g}  max {s.max:.6g}  mean {s.mean:.6g}  std {s.std:.6g}")
    if s.histogram and s.min is not None and s.max is not None:
        top, width = max(s.histogram), (s.max - s.min) / len(s.histogram)
        for i, n in enumerate(s.histogram):
            bar = "█" * round(BAR_WIDTH * n / top) or ("▏" if n else "")
            say(f"  {s.min + i * width:>12.4g} {bar} {n}")
    for p in s.pieces:
        say(f"  {p.box or '[]'} at byte {p.at} of {p.key}, {human(p.nbytes)}")


def print_report(report: Report) -> None:
    which = f"step {report.step} of generation {report.generation} in {report.root}"
    of = "" if report.nbytes == report.total_nbytes else f" of {human(report.total_nbytes)}"
    compared = (
        f"{human(report.nbytes)}{of} in {counted(report.objects, 'object')} compared with their checksums"
    )
    if report.ok:
        say(f"{which}: sound; {compared}")
        return
    bad = f", {human(report.damaged_nbytes)} damaged or missing" if report.damage else ""
    say(f"{which}: NOT SOUND; {compared if report.objects else 'its manifest cannot be read'}{bad}")
    _listed("", report.problems)


def print_diff(d: CheckpointDiff) -> None:
    say(f"from {d.a} to {d.b}")
    _listed("only in the first", d.only_a)
    _listed("only in the second", d.only_b)
    _listed("another shape or type", [f"{c.name}: {c.a} -> {c.b}" for c in d.changed])
    _listed("other bits", [_differs(t) for t in d.differ])
    _listed("tied otherwise", d.ties_changed)
    _listed("other values", d.values)
    if not d.cursor_equal:
        say("the loader's cursor differs")
    alike = (
        "all tensors are equal bit for bit" if d.same_tensors else f"{d.equal} tensors are equal bit for bit"
    )
    say(f"{alike}{', and so is everything else' if d.same else ''}")


def _differs(t: TensorDiff) -> str:
    gap = f"largest difference {t.max_abs:.6g}" if t.max_abs is not None else "no finite difference"
    odd = f", {t.not_finite} not finite" if t.not_finite else ""
    return f"{t.name}: {t.differ} of {t.numel} elements, {gap}{odd}"


def _listed(what: str, names: Sequence[str]) -> None:
    begin = f"  {what}: " if what else "  "
    for line in names[:SHOWN_MAX]:
        say(f"{begin}{line}")
    if (more := len(names) - SHOWN_MAX) > 0:
        say(f"{begin}and {more} more (--json lists all)")


def print_export(plan: ExportPlan, dest: str) -> None:
    say(
        f"step {plan.step} of generation {plan.generation}: {human(plan.nbytes)} in {counted(len(plan.files), 'file')} in {dest}"
        + (f"; {plan.left_out} other tensors left out" if plan.left_out else "")
    )
    for tied, written in plan.ties.items():
        say(f"  {tied} is tied to {written}, which is written")


def print_gc(plan: GcPlan, *, done: bool) -> None:
    verb = "deleted" if done else "would delete"
    for c in plan.checkpoints:
        say(f"  {verb} step {c.ref.step} of generation {c.ref.generation}, {human(c.nbytes)}: {c.why}")
    for o in (*plan.orphans, *plan.abandoned):
        a = o.attempt
        say(
            f"  {verb} attempt {a.attempt} at step {a.step} of generation {a.generation}, {human(o.nbytes)}: {o.reason}"
        )
    for key in plan.stale_flags:
        say(f"  {verb} {key}: its checkpoint is gone")
    for text in plan.unfinished:
        say(f"  {verb} {text}: never finished, and another start followed")
    for key in plan.foreign[:SHOWN_MAX]:
        say(f"  left alone: {key} is none of ours")
    if (more := len(plan.foreign) - SHOWN_MAX) > 0:
        say(f"  left alone: {more} more that are none of ours")
    if plan.waiting or plan.waiting_uploads:
        hint = (
            ""
            if plan.untouched_since is not None
            else " (--abandoned HOURS: those of starts before the newest one, too)"
        )
        say(
            f"  left alone: {counted(plan.waiting, 'unfinished attempt')} ({human(plan.waiting_nbytes)}) and "
            f"{counted(plan.waiting_uploads, 'upload')} under way, of starts that are running or have died; they go by "
            f"themselves when a later start has committed{hint}"
        )
    if not (plan.checkpoints or plan.orphans or plan.abandoned or plan.stale_flags or plan.unfinished):
        say("nothing to delete")
    else:
        say(f"{human(plan.nbytes)} {'freed' if done else 'to be freed; nothing was deleted: --yes does it'}")
