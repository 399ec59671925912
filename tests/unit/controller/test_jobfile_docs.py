"""docs/jobfile.md against the code: every key, its default, and which keys nothing acts on."""

import ast
import dataclasses
import re
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.controller.core.faults import DETECTOR_OF
from surefoot.controller.core.settings import Times
from surefoot.controller.spec.problems import SpecError
from surefoot.controller.spec.reading import parse_spec
from surefoot.controller.spec.tables import AXES, DETECTORS, TABLES, JobSpec

SOURCE = Path(surefoot.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "jobfile.md"
EXAMPLES = re.findall(r"(?ms)^```toml\n(.*?)^```$", PAGE.read_text())
NODES = 3
LEAST = EXAMPLES[0] + f"[layout]\nnodes = {NODES}\n"
TYPES = typing.get_type_hints(JobSpec)

REFUSED = {
    "layout.canonical": "[layout]\ncanonical = true\n",
    "checkpoint.memory_every_steps": "[checkpoint]\nmemory_every_steps = 2\n",
}
"""What nothing reads, because no other value than the default is let in."""


def section(table: str) -> str:
    return PAGE.read_text().partition(f"\n## [{table}]\n")[2].partition("\n## ")[0]


def rows(table: str) -> dict[str, tuple[str, str]]:
    """Key to default and meaning, as the page has them."""
    found = re.findall(r"(?m)^\| `(\w+)` \| (.+?) \| (.+) \|$", section(table))
    return {key: (default, means) for key, default, means in found}


def test_there_is_a_section_for_each_table_and_no_other() -> None:
    assert tuple(re.findall(r"(?m)^## \[(\w+)\]$", PAGE.read_text())) == TABLES


@pytest.mark.parametrize("table", TABLES)
def test_every_key_is_there_in_the_order_of_the_code(table: str) -> None:
    assert list(rows(table)) == [f.name for f in dataclasses.fields(TYPES[table])]


def value_of(default: str) -> Any:
    return tomllib.loads(f"value = {default.strip('`')}")["value"]


@pytest.mark.parametrize("table", TABLES)
def test_defaults_are_those_of_a_file_that_does_not_say(table: str) -> None:
    spec = parse_spec(LEAST)
    for key, (default, _) in rows(table).items():
        held = getattr(getattr(spec, table), key)
        if default == "required":
            without = re.sub(rf"(?m)^{key} = .*\n", "", LEAST)
            with pytest.raises(SpecError, match=rf"{table}\.{key}: is missing"):
                parse_spec(without)
        elif default == "none":
            assert held is None, key
        elif default == "`nodes`":
            assert held == NODES, key
        elif (table, key) == ("layout", "nodes"):
            assert value_of(default) == parse_spec(EXAMPLES[0]).layout.nodes
        elif (table, key) == ("layout", "mesh"):
            assert held == {axis: 1 for axis in AXES} | value_of(default)
        else:
            assert (list(held) if isinstance(held, tuple) else held) == value_of(default), key


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_are_job_files(example: str) -> None:
    parse_spec(example)


def modules() -> Iterator[Path]:
    """All of ours but those that read the job file. (The packages are symlinks, which rglob does not follow by itself.)"""
    for entry in SOURCE.iterdir():
        for path in [entry] if entry.suffix == ".py" else entry.rglob("*.py"):
            if "spec" not in path.relative_to(SOURCE).parts:
                yield path


def keys_that_are_read() -> set[str]:
    """``table.key`` where some module says ``….table.key``; the mesh is asked for by way of its sizes."""
    found: set[str] = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                found.add(f"{node.value.attr}.{node.attr}")
            if isinstance(node, ast.Attribute) and node.attr in ("mesh_sizes", "mesh_at"):
                found.add("layout.mesh")
    return found


def test_what_nothing_acts_on_is_said_to_have_no_effect() -> None:
    """Whoever makes a key work takes the words away; whoever adds one that does nothing yet says so."""
    every = {f"{table}.{key}": means for table in TABLES for key, (_, means) in rows(table).items()}
    unread = every.keys() - keys_that_are_read()
    assert {
        key for key, means in every.items() if means.startswith("**No effect yet**")
    } == unread - REFUSED.keys()
    assert unread >= REFUSED.keys()
    for key, text in REFUSED.items():
        assert "refused" in every[key]
        with pytest.raises(SpecError, match="later"):
            parse_spec(EXAMPLES[0] + text)


def test_detectors_are_told_apart_from_names_of_some_that_are_to_come() -> None:
    """In [detect]: those that there are in one sentence, those that are accepted and do nothing in the next."""
    there, coming = section("detect").partition("Names for `observe`")[2].split(" are the detectors", 1)
    assert set(re.findall(r"`(\w+)`", there)) == set(DETECTOR_OF.values())
    assert set(re.findall(r"`(\w+)`", coming)) == set(DETECTORS) - set(DETECTOR_OF.values())


def test_times_that_cannot_be_set_are_those_of_the_code() -> None:
    detect, times = rows("detect"), Times()
    assert f"have {times.ready_s:g} s" in detect["hang_factor"][1]
    assert f"at least {times.slow_phase_s:g} s" in detect["hang_factor"][1]
    assert f"at least {times.warmup_s:g} s" in detect["warmup_steps"][1]
