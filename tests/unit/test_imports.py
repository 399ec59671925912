"""Who may import whom: read from the syntax trees of all modules, so that it holds for code that no test runs.

The tables are the rules of docs/architecture.md. A module named here stands for itself and for all below it. What a
function imports counts for the borders between packages; for cycles and start-up cost only what a module imports when it
is loaded. `TYPE_CHECKING` blocks count for borders alone.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import surefoot

SOURCE = Path(surefoot.__file__).parent

SHARED = ("command", "failpoint", "history", "marks", "exitcodes", "tether")
"""All may import these; they import none of ours beyond each other."""

CKPT_FOR_ALL = ("ckpt.manifest", "ckpt.record", "ckpt.store", "ckpt.errors")
CONTROLLER_FOR_AGENTS = (
    "controller.spec.problems",
    "controller.spec.reading",
    "controller.spec.tables",
    "controller.wire",
    "controller.keys",
    "controller.store",
    "controller.leases",
)

BORDERS: dict[str, tuple[str, ...]] = {
    "ckpt": (),
    "loader": (),
    "controller": (*CKPT_FOR_ALL, "ckpt.control"),
    "agent": (*CKPT_FOR_ALL, "ckpt.tiers", *CONTROLLER_FOR_AGENTS),
    "agent.session": (*CKPT_FOR_ALL, "ckpt.tiers", *CONTROLLER_FOR_AGENTS, "loader", "loader.client"),
    "examples": ("agent", "loader"),
}
"""What a package (or a module of it) sees of the others. chaos sees all, and nobody sees chaos: the CLI starts it."""

CKPT_LAYERS = ("objects", "planning", "format", "live", "keeping", "loading", "saving", "tools")
"""The packages inside `ckpt`: each imports those to its left alone. The modules beside them are what all of them share."""

PURE = (
    *("controller.core", "controller.spec", "controller.wire", "controller.keys"),
    *(
        "controller.view.types",
        "controller.view.values",
        "controller.view.observing",
        "controller.view.words",
    ),
    *("agent.exits", "ckpt.manifest", "ckpt.keeping.retention"),
    # Arrays over all ranks or pieces: numpy computes, and does no IO.
    *(
        "ckpt.planning.plan",
        "ckpt.boxes",
        "ckpt.planning.layouts",
        "ckpt.planning.dealing",
        "ckpt.planning.coverage",
        "ckpt.format.merge",
    ),
    *("ckpt.format.sound", "ckpt.planning.replicas", "ckpt.format.values"),
    *(
        "ckpt.planning.agreeing",
        "ckpt.planning.interval",
        "ckpt.keeping.orphans",
        "ckpt.progress",
        "ckpt.planning.resharding",
        "ckpt.planning.ties",
        "ckpt.format.stformat",
        "ckpt.tools.tiemeta",
        "ckpt.format.names",
    ),
    *("loader.mixture", "loader.order", "loader.cursor", "loader.pack"),
)
PURE_MAY_USE = (
    *(
        "__future__",
        "abc",
        "base64",
        "bisect",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "difflib",
        "enum",
    ),
    *(
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "json",
        "math",
        "operator",
        "re",
        "statistics",
    ),
    *(
        "string",
        "struct",
        "textwrap",
        "tomllib",
        "types",
        "typing",
        "zlib",
        "msgspec",
        "xxhash",
        "numpy",
        "typing_extensions",
    ),
)
"""No IO, clock, thread, randomness or log is reachable from these."""
PURE_MAY_SEE = ("exitcodes", "ckpt.record", "ckpt.errors", "ckpt.boxes", "loader.errors")
"""Ours, not all pure, but asked for types and pure functions only."""
PURE_BUT = {
    "controller.spec.reading": ("pathlib",),
    "agent.exits": ("signal",),
    "ckpt.format.values": ("binascii", "io"),
}
"""`load_spec` reads the one file it is given; exits are named after the table of signals; arrays are encoded in memory."""

DOORS: dict[str, tuple[str, ...]] = {
    "etcd3": ("controller.etcdstore",),
    "grpc": ("controller.etcdstore",),
    "rich": ("controller.cli", "controller.view.picture", "ckpt.tools.tables", "chaos.demo"),
    "typer": ("command", "controller.cli", "ckpt.tools.cli"),
    "s3fs": ("ckpt.objects.s3session",),
    "botocore": ("ckpt.objects.s3errors",),
    "fsspec": ("ckpt", "loader.source", "chaos"),
    "pyarrow": ("agent.flight", "agent.snapshots", "ckpt", "loader.source", "examples", "chaos"),
    "torch": (
        *(
            *(
                "ckpt.live.collecting",
                "ckpt.live.copying",
                "ckpt.saving.equipment",
                "ckpt.live.livestate",
                "ckpt.live.declared",
                "ckpt.live.filling",
                "ckpt.live.gathering",
                "ckpt.live.kinds",
                "ckpt.live.leaves",
            ),
            *(
                "ckpt.live.optimizer_load",
                "ckpt.live.optimizers",
                "ckpt.live.overlaps",
                "ckpt.live.placing",
                "ckpt.live.scratch",
                "ckpt.live.streams",
                "ckpt.live.walking",
                "ckpt.live.wrapped",
            ),
            "ckpt.saving.calls",
            "ckpt.saving.checkpointer",
            "ckpt.saving.oneshot",
            "ckpt.loading.together",
            "ckpt.loading.abandon",
            "ckpt.loading.carrying",
            "ckpt.loading.fetching",
            "ckpt.loading.nodememory",
            "ckpt.loading.sharing",
            "ckpt.channel",
            "ckpt.opening",
            *("ckpt.tools.comparing", "ckpt.tools.dcp", "ckpt.tools.tensorstats", "ckpt.tools.onetensor"),
            "loader.client",
            "agent.session",
            "examples",
        ),
        # What a rank runs beside the session, and the zygote that becomes it.
        *("agent.clip", "agent.exchange", "agent.seeding", "agent.tracing", "agent.zygote", "agent.child"),
    ),
}
"""Heavy libraries and the modules that may load them."""
TORCH_IN_FUNCTIONS = ("ckpt.tiers", "ckpt.live.staging", "ckpt.tools.exporting")
"""Loaded by torch-free processes as well."""


@dataclass(frozen=True)
class Import:
    """`module` imports `name`: ours without the leading ``surefoot.``, others by their full name. `late`: not on load."""

    module: str
    name: str
    ours: bool
    late: bool
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"


def modules() -> dict[str, str]:
    """Name (without ``surefoot.``) to source text; a package is named like its ``__init__``."""
    files = [path for top in SOURCE.iterdir() for path in (top.rglob("*.py") if top.is_dir() else [top])]
    names = {path: path.relative_to(SOURCE).with_suffix("").parts for path in files if path.suffix == ".py"}
    return {
        ".".join(name).removesuffix(".__init__"): path.read_text()
        for path, name in names.items()
        if name != ("__init__",)
    }


def imports(module: str, text: str, known: Iterable[str]) -> Iterator[Import]:
    """Every import of one module."""
    tree = ast.parse(text)
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(outer)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import; write the whole name"
            both = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("surefoot.") in known else node.module or "" for name in both]
        for name in names:
            ours = name.startswith("surefoot.")
            yield Import(module, name.removeprefix("surefoot."), ours, id(node) in late, node.lineno)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def within(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def crosses_a_border(found: Import) -> bool:
    package, other = found.module.partition(".")[0], found.name.partition(".")[0]
    if not found.ours or package == other or found.name in SHARED:
        return False
    return found.name not in BORDERS.get(found.module, BORDERS.get(package, ())) and package != "chaos"


def climbs(found: Import) -> bool:
    mine, other = (name.split(".")[1:2] for name in (found.module, found.name))
    inside = found.module.startswith("ckpt.") and found.ours and found.name.startswith("ckpt.")
    if not inside or mine[0] not in CKPT_LAYERS or other[0] not in CKPT_LAYERS:
        return False
    return CKPT_LAYERS.index(other[0]) > CKPT_LAYERS.index(mine[0])


def is_impure(found: Import) -> bool:
    if not within(found.module, PURE):
        return False
    if found.ours:
        return not within(found.name, (*PURE, *PURE_MAY_SEE))
    return not within(found.name, (*PURE_MAY_USE, *PURE_BUT.get(found.module, ()))) or within(
        found.name, ("numpy.random",)
    )


def forces_a_door(found: Import) -> bool:
    root = found.name.partition(".")[0]
    if found.ours or root not in DOORS or within(found.module, DOORS[root]):
        return False
    return not (root == "torch" and found.late and within(found.module, TORCH_IN_FUNCTIONS))


RULES = {"borders": crosses_a_border, "layers": climbs, "pure": is_impure, "doors": forces_a_door}
ALL = modules()
FOUND = [found for module, text in ALL.items() for found in imports(module, text, ALL)]


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str):
    broken = [str(found) for found in FOUND if RULES[rule](found)]
    assert not broken, "\n".join([f"{len(broken)} imports break the rule {rule!r}:", *broken])


def test_no_cycles():
    graph: dict[str, set[str]] = {module: set() for module in ALL}
    for found in FOUND:
        if found.ours and not found.late and found.name != found.module:
            graph[found.module].add(found.name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(" <- ".join(e.args[1]))


def test_the_walk_sees_everything():
    """A rule that looks at nothing is kept by everybody."""
    assert {"controller.core", "controller.spec", "ckpt.store", "loader.order", "history"} <= ALL.keys()
    assert {name for name in BORDERS if not within(name, ALL)} == set()
    assert {name for name in (*PURE, *PURE_BUT) if name not in ALL} == set()
    assert {name for names in DOORS.values() for name in names if name not in ALL} == set()
    assert len(FOUND) > 100


@pytest.mark.parametrize(
    ("module", "text", "broken"),
    [
        ("ckpt.store", "from surefoot.controller import wire", "borders"),
        ("ckpt.store", "import surefoot.loader", "borders"),
        ("loader.source", "def f():\n    from surefoot import ckpt", "borders"),
        ("agent.daemon", "from surefoot.controller.view import x", "borders"),
        ("agent.daemon", "from surefoot import controller", "borders"),
        ("agent.daemon", "from surefoot.loader import Mixture", "borders"),
        ("controller.daemon", "from surefoot.ckpt import tiers", "borders"),
        ("controller.cli", "from surefoot.chaos import demo", "borders"),
        ("history", "from surefoot.ckpt import store", "borders"),
        ("ckpt.loading.aside", "from surefoot.ckpt.saving.commit import x", "layers"),
        ("controller.core.policy", "import time", "pure"),
        ("controller.core.policy", "def f():\n    import random", "pure"),
        ("controller.core.policy", "from surefoot.controller import store", "pure"),
        ("loader.order", "from numpy.random import Generator", "pure"),
        ("controller.store", "import grpc", "doors"),
        ("agent.daemon", "def f():\n    import torch", "doors"),
        ("ckpt.tiers", "import torch", "doors"),
        ("controller.daemon", "from rich.console import Console", "doors"),
    ],
)
def test_each_rule_can_be_broken(module: str, text: str, broken: str):
    known = {*ALL, "ckpt.tiers", "chaos.demo", "controller.view"}
    (found,) = imports(module, text, known)
    assert [rule for rule, is_broken in RULES.items() if is_broken(found)] == [broken]


def test_what_is_allowed_in_functions_is_allowed_there():
    (found,) = imports("ckpt.tiers", "def f():\n    import torch", ALL)
    assert not any(is_broken(found) for is_broken in RULES.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("agent.session", ("etcd3", "grpc")),
        ("agent.daemon", ("torch",)),
        ("agent.snapshots", ("torch", "etcd3", "grpc")),
        ("controller.daemon", ("torch", "pyarrow")),
        ("controller.cli", ("torch", "pyarrow")),
        ("loader", ("torch",)),
        ("ckpt.store", ("torch",)),
        ("ckpt.saving.uploader", ("torch", "pyarrow", "s3fs")),
    ],
)
def test_processes_do_not_load_what_they_must_not(module: str, unwanted: tuple[str, ...]):
    """The tables above say who imports whom; this says what it comes to."""
    if module not in ALL:
        pytest.skip(f"there is no {module} yet")
    code = f"import sys, surefoot.{module}; print([name for name in {unwanted} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
