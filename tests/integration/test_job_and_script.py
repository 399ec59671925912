"""The same GPT by turns as a job on FSDP2 x TP (``surefoot run``) and as a plain DDP script, on one root: issue 3, "Done when"."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakeagent import write_text
from gpt_jobs import data
from homes import Home

from surefoot.ckpt.record import list_manifests
from surefoot.ckpt.store import open_store
from surefoot.ckpt.tiers import committed_rows
from surefoot.loader import Loader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANKS = 4
JOB = """
[job]
name = "{name}"
steps = {steps}
root = "{root}"
[program]
train = "gpt_jobs:train"
data = "gpt_jobs:data"
params = {{ data_root = "{folder}/text", notes = "{notes}", begin_with = "{begin_with}" }}
[layout]
ranks_per_node = 4
mesh = {{ dp = 2, tp = 2 }}
[checkpoint]
every_steps = 1
keep = 2
"""
RUN_S = 200.0


class Story:
    """Runs the job and the script; what they wrote down."""

    def __init__(self, home: Home, ranks: Callable[..., list[Any]]) -> None:
        self.home, self.ranks = home, ranks
        self.root = str(home.folder / "root")
        write_text(home.folder / "text")

    def run(self, steps: int, **changes: str) -> Any:
        """``surefoot run``, ended."""
        facts = {"name": "gpt", "root": self.root, "begin_with": "", "folder": self.home.folder} | changes
        notes = self.home.folder / f"notes-{facts['name']}"
        notes.mkdir(exist_ok=True)
        path = self.home.folder / f"{facts['name']}.toml"
        path.write_text(JOB.format(steps=steps, notes=notes, **facts))
        return self.home.call("run", str(path), timeout_s=RUN_S, PYTHONPATH=str(Path(__file__).parent))

    def job(self, steps: int, **changes: str) -> dict[str, Any]:
        """What its ranks found and left, each the same."""
        result = self.run(steps, **changes)
        assert result.returncode == 0, result.stderr
        notes = self.home.folder / f"notes-{changes.get('name', 'gpt')}"
        newest = sorted(notes.iterdir(), key=lambda p: int(p.name[1:].partition("-")[0]))[-RANKS:]
        found = [json.loads(path.read_text()) for path in newest]
        assert found == [found[0]] * RANKS
        return found[0]

    def script(self, steps: int, *, with_cursor: bool = True) -> dict[str, Any]:
        found = self.ranks(2, "gpt_jobs:script", self.root, f"{self.home.folder}/text", steps, with_cursor)
        assert found[0]["left"] == found[1]["left"]
        self.drawn = [a + b for a, b in zip(*(f["samples"] for f in found), strict=True)]
        return found[0]


@pytest.fixture
def story(home: Home, ranks: Callable[..., list[Any]]) -> Story:
    return Story(home, ranks)


def test_a_gpt_goes_from_a_job_to_a_script_and_back(story: Story) -> None:
    """Bit for bit, parameters and moments; data goes on where it stood, each sample once; nobody deletes the other's."""
    first = story.job(3)
    script = story.script(5)
    assert script["found"] == first["left"] != script["left"]
    second = story.job(8)
    assert second["found"] == script["left"] != second["left"]

    rows = committed_rows(open_store(story.root))
    places = [(r.step, r.dp_rank) for r in rows]
    assert places == [(step, dp) for step in (1, 2, 3, 6, 7, 8) for dp in (0, 1)]
    drawn = {step: [*a.samples, *b.samples] for step, a, b in _pairs(rows)}
    drawn |= dict(zip((4, 5), story.drawn, strict=True))
    with Loader(*data({"data_root": f"{story.home.folder}/text"})) as reference:
        assert [drawn[step] for step in range(1, 9)] == [list(next(reference).sample_ids) for _ in range(8)]

    steps = {m.step for m in list_manifests(open_store(story.root))}
    assert {5, 8} <= steps, "the script's is not the job's to delete"
    assert 1 not in steps

    export = story.home.folder / "weights"
    assert story.home.call("ckpt", "export", story.root, str(export)).returncode == 0
    ((given, loaded),) = story.ranks(1, "gpt_jobs:run_exported", story.root, str(export))
    assert given == loaded


def test_a_scripts_step_without_a_cursor_is_refused_with_the_way_out(story: Story) -> None:
    script = story.script(2, with_cursor=False)
    result = story.run(4)
    assert result.returncode == 4, result.stderr
    last = result.stderr.splitlines()[-1]
    assert "step 2 of generation 1 was saved without a loader cursor" in last
    assert "ckpt.load(OLD_ROOT, state, strict=False) at the top of train" in last
    assert story.home.left() == []

    begun = story.job(1, name="anew", root=str(story.home.folder / "anew"), begin_with=story.root)
    assert begun["found"] == script["left"] != begun["left"]


def _pairs(rows: list[Any]) -> list[tuple[int, Any, Any]]:
    return [(a.step, a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
