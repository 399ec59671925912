"""A snapshot drawn for a terminal, with rich."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surefoot.controller.view.types import QUIET_S, EventView, JobView, RankView

EVENTS_SHOWN = 7

_PHASE_STYLE = {
    "start": "yellow",
    "restore": "yellow",
    "compile": "yellow",
    "data": "blue",
    "step": "green",
    "save": "cyan",
    "eval": "magenta",
    "done": "bright_green",
}
_JOB_STYLE = {
    "waiting": "yellow",
    "forming": "bold yellow",
    "starting": "yellow",
    "running": "bold green",
    "held": "bold red",
    "done": "bold bright_green",
    "failed": "bold red",
    "unknown": "magenta",
}
_EVENT_STYLE = {"generation": "yellow", "commit": "green", "incident": "red", "outcome": "bold"}
_SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a line of at most `width` blocks, each the mean of its share; higher is more, and ``!`` is no number."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    bounds = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    numbers = [mean for mean in means if math.isfinite(mean)]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] if math.isfinite(mean) else "!" for mean in means)


def render(view: JobView, *, width: int = 100) -> RenderableType:
    """The whole picture for a terminal of `width` columns."""
    parts: list[RenderableType] = [_header(view), _progress(view, width), Text(view.now, style="italic")]
    if view.nodes:
        parts.append(_node_table(view))
    parts.extend(_event_line(event) for event in view.events[-EVENTS_SHOWN:])
    return Group(*parts)


def _header(view: JobView) -> Text:
    line = Text.assemble(
        (view.job, "bold"), "  ", (f" {view.phase.upper()} ", f"reverse {_JOB_STYLE[view.phase]}")
    )
    facts = [
        ("generation", str(view.generation) if view.generation else "–"),
        ("leader", view.leader or "none"),
        ("step", f"{view.step}/{view.steps or '?'}"),
        ("loss", f"{view.loss:.4f}" if view.loss is not None else "–"),
        ("steps/s", f"{view.steps_per_s:.1f}" if view.steps_per_s else "–"),
        ("committed", str(view.committed.step) if view.committed else "–"),
    ]
    for name, value in facts:
        line.append(f"   {name} ", style="dim")
        line.append(value, style="bold")
    return line


def _progress(view: JobView, width: int) -> Text:
    """The bar: committed steps, then those that memory holds, then the rest; the loss curve behind it."""
    room = max(10, width // 2)
    committed = view.committed.step if view.committed else 0
    in_memory = max(view.step if view.phase == "done" else view.step - 1, committed, 0)
    steps = view.steps or max(view.step, 1)
    durable = room * min(committed, steps) // steps
    reached = room * min(in_memory, steps) // steps
    line = Text()
    line.append("━" * durable, style="bright_green")
    line.append("━" * (reached - durable), style="cyan")
    line.append("─" * (room - reached), style="bright_black")
    curve = sparkline([p.loss for p in view.losses], max(0, width - room - 4))
    line.append(f"  {curve}", style="magenta")
    return line


def _node_table(view: JobView) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("node", "state", "ranks", "in memory", "copies", "note"):
        table.add_column(title, no_wrap=title != "note")
    for node in view.nodes:
        style = {"lost": "red", "standby": "dim", "member": "", "free": ""}[node.role]
        state = (
            f"standby, {node.state}"
            if node.role == "standby"
            else "lost"
            if node.role == "lost"
            else node.state
        )
        table.add_row(
            Text(node.uid, style=style or "bold"),
            Text(state, style=style),
            Text("   ").join(_rank_cell(rank) for rank in node.ranks),
            _step_cell(node.snapshot_step),
            _step_cell(node.copies_step),
            Text(node.note, style="dim"),
        )
    return table


def _step_cell(step: int | None) -> Text:
    return Text("–" if step is None else f"step {step}", style="dim" if step is None else "")


def _rank_cell(rank: RankView) -> Text:
    if rank.ended and rank.phase != "done":
        return Text(f"{rank.rank} ✗ {rank.ended}"[:40], style="red")
    style = "bold red" if rank.phase_age_s >= QUIET_S and rank.phase == "step" else _PHASE_STYLE[rank.phase]
    return Text.assemble((f"{rank.rank} ", "bold"), (f"{rank.phase:<7} {rank.step:>4}", style))


def _event_line(event: EventView) -> Text:
    mark = {"generation": "▸", "commit": "✓", "incident": "!", "outcome": "■"}[event.kind]
    line = Text(overflow="ellipsis", no_wrap=True)
    line.append(f"{mark} ", style=_EVENT_STYLE[event.kind])
    line.append(event.text)
    return line
