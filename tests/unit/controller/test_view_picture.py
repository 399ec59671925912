"""The picture of a job on a terminal."""

import io
import math

from rich.console import Console
from view_listings import KEYS, manifest, plan, put, rank, running, seen_of

from surefoot.controller import wire
from surefoot.controller.view.picture import render, sparkline
from surefoot.controller.view.types import JobView


def test_sparkline() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert sparkline(list(range(100)), 4) == "▁▃▆█"
    assert sparkline([3.0, math.nan, 1.0, math.inf], 10) == "█!▁!"
    assert sparkline([math.nan], 10) == "!"


def drawn(seen: JobView, *, width: int = 110, color: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=color, color_system="truecolor" if color else None
    )
    console.print(render(seen, width=width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_render_shows_what_matters_and_fits() -> None:
    incident = wire.Incident(
        id="i1", fault="hang", cause="workload", generation=1, step=23, node="n1", rank=2
    )
    seen = seen_of([*running(), put(KEYS.incident("i1"), incident)], plan(1), manifests=[manifest(1, 20)])
    text = drawn(seen)
    for expected in (
        "gpt",
        "RUNNING",
        "23/60",
        "2.5000",
        "n0",
        "parked",
        "step 20 is committed",
        "stopped making progress",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 110
    assert "\x1b[" not in text
    assert "\x1b[" in drawn(seen, color=True)


def test_render_of_an_empty_job_and_of_a_dead_rank() -> None:
    assert "WAITING" in drawn(seen_of([]))
    seen = seen_of(running(n1=[rank(2, exit=wire.ExitReport(code=1)), rank(3)]), plan(1))
    assert "2 ✗ exit code 1" in drawn(seen)


def test_render_of_a_job_that_is_held() -> None:
    text = drawn(seen_of([*running(), put(KEYS.held, wire.Held(reason="a record is damaged"))], plan(1)))
    assert "HELD" in text
    assert "held: a record is damaged" in text
