"""The map in docs/architecture.md names every module, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def chapter(package: str) -> str:
    """What the map says of a package: from its name in bold to the next one, or to the next heading."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    after = text.split(f"\n**{package}/**", 1)[1]
    return re.split(r"\n\*\*\w|\n## ", after, maxsplit=1)[0]


def names(text: str) -> set[str]:
    return {name.rpartition("/")[2] for name in re.findall(r"`([a-z0-9_/]+)`", text)}


def first_column(text: str) -> str:
    """Of tables; the second says what the modules do, in words that may look like names. Other lines as they are."""
    return "\n".join(line.split("|")[1] if line.startswith("|") else line for line in text.splitlines())


@pytest.mark.parametrize("package", ["agent", "chaos", "ckpt", "controller", "loader"])
def test_the_map_names_every_module(package: str) -> None:
    modules = {path.stem for path in (ROOT / package).rglob("*.py")} - {"__init__", "__main__"}
    text = chapter(package)
    assert sorted(modules - names(text) - {"errors"}) == [], "not on the map"
    assert sorted(names(first_column(text)) - modules) == [], "on the map only"
