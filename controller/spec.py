"""`JobSpec`: what a job file says, checked without touching the world.

House rules. Keys are exactly those of the TOML file, tables are frozen dataclasses, everything that can be left out has a
default here and nowhere else. `parse_spec` finds *all* problems of a file before it refuses it, each with its place, its
reason and, for a name that does not exist, the nearest one that does. Nothing is imported, connected or looked up: a
laptop can check the spec of a thousand GPUs. What the file may already say but Surefoot cannot do yet is refused in so
many words ("comes later"), never ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

# ---------------------------------------------------------------- the tables


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTable:
    """``[job]``: what is trained, and where its truth is kept."""

    name: str
    """Names keys, folders and marks: letters, digits, ``_ . -``, at most 63."""
    seed: int = 0
    steps: int
    """The job is done when the checkpoint at this step is committed."""
    root: str
    """Of records and checkpoints: ``file:///absolute/path``, an absolute path, or ``s3://bucket/prefix``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTable:
    """``[program]``: the training code, by name."""

    train: str
    """``module:function``, called once per generation in every rank."""
    data: str
    """``module:function``, called with `params`; returns the mixture and the packing."""
    preload: tuple[str, ...] = ()
    """Modules that the zygote imports before it forks ranks."""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The job's own settings, free in form (anything JSON can say)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """``[layout]``: how many nodes and ranks are wanted, and what is allowed."""

    nodes: int = 1
    nodes_min: int
    """The job waits below this many nodes. Default: `nodes`."""
    standbys: int = 0
    ranks_per_node: int = 1
    mesh: Mapping[str, int]
    """Axis to size, all of `AXES`; one may be -1: whatever the ranks leave, and that is dp where the file does not say."""
    canonical: bool = False
    virtual_shards: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTable:
    """``[checkpoint]``: how often, how many, and how much memory."""

    memory_every_steps: int = 1
    every_steps: int = 20
    """A checkpoint in the object store each so many steps, and at the last step."""
    every: Literal["auto"] | None = None
    every_s: float | None = None
    """Instead: as often as is worth it (agent/cadence.py); or as soon as so many seconds have passed, by rank 0's clock."""
    keep: int = 3
    """The newest so many checkpoints of the lineage are kept."""
    keep_every_steps: int | None = None
    """Checkpoints at multiples of this are kept for good."""
    memory_budget: int | None = None
    """Bytes of one node's memory that snapshots may take (the file says "2GB"); None: as many as the pools need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectTable:
    """``[detect]``: when silence becomes a suspicion."""

    lease_ttl_s: int = 10
    hang_floor_s: float = 5.0
    """No phase is called hung before this."""
    hang_factor: float = 5.0
    """A phase is hung after so many times what it usually takes."""
    warmup_steps: int = 3
    """First steps of a generation (compilation, cold caches) that teach the detectors nothing."""
    observe: tuple[str, ...] = ()
    """Detectors that only report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTable:
    """``[policy]``: what is done about it, and how often."""

    restarts: Mapping[str, int]
    """Cause to the restarts it may have between two committed checkpoints."""
    wait_for_node_s: float = 60.0
    grace_s: float = 30.0
    """Between asking a rank to stop and SIGKILL."""
    spike_factor: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A whole job file, valid."""

    job: JobTable
    program: ProgramTable
    layout: LayoutTable
    checkpoint: CheckpointTable
    detect: DetectTable
    policy: PolicyTable

    @property
    def hash(self) -> str:
        """sha256 (hex) of what the file *means*: formatting, order of keys and defaults written out make no difference."""
        meant = dataclasses.asdict(self)
        for key in ("every", "every_s"):  # keys of later: without them a file means what it always meant
            if meant["checkpoint"][key] is None:
                del meant["checkpoint"][key]
        text = json.dumps(meant, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def world_size(self) -> int:
        """Ranks of the wanted layout."""
        return self.layout.nodes * self.layout.ranks_per_node

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Axis to size at `world_size`, outermost first, the -1 solved."""
        return self.mesh_at(self.world_size)

    def mesh_at(self, ranks: int) -> dict[str, int]:
        """`mesh_sizes` of another number of ranks.

        Raises:
            ValueError: the mesh does not fit that many.
        """
        return solve_mesh(self.layout.mesh, ranks)


AXES: Final = ("pp", "dp", "tp")
"""Outermost first: pipeline stages talk least, tensor parallel ranks most and so lie next to each other on a node."""

CAUSES: Final[Mapping[str, int]] = {"workload": 3, "infrastructure": 20, "preemption": 100}
"""Whose budgets can be set, with their defaults (design: the JobSpec)."""

DETECTORS: Final = (
    "exit",
    "node_loss",
    "hang",
    "straggler",
    "nan",
    "spike",
    "corruption",
    "loader_stall",
    "checkpoint",
)

LEASE_TTL_S_MIN: Final = 10
"""Below this, one slow fsync of etcd or one busy second of an agent would look like the loss of a node."""


def solve_mesh(mesh: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Axis to size for `ranks` ranks, all of `AXES`, outermost first; an absent axis is 1.

    Raises:
        ValueError: they do not fit; the message says why.
    """
    sizes = {axis: mesh.get(axis, 1) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = next((axis for axis, size in sizes.items() if size == -1), None)
    written = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
    if free is None:
        if fixed != ranks:
            raise ValueError(f"the mesh {written} has {fixed} ranks, the layout has {ranks}")
    elif ranks % fixed:
        raise ValueError(f"{ranks} ranks do not divide by {fixed}, the fixed part of the mesh {written}")
    else:
        sizes[free] = ranks // fixed
    return sizes


# ---------------------------------------------------------------- errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a job file. `nearest` is a valid name close to the one that was found."""

    place: str
    reason: str
    line: int | None = None
    nearest: str | None = None

    def __str__(self) -> str:
        at = f"line {self.line}: " if self.line is not None else ""
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest is not None else ""
        return f"{at}{self.place}: {self.reason}{hint}"


class SpecError(ValueError):
    """The job file cannot be used; `problems` lists everything that is wrong with it."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        head = f"{source}: {len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        super().__init__("\n  ".join([head, *map(str, self.problems)]))


# ---------------------------------------------------------------- reading


def load_spec(path: str | Path) -> JobSpec:
    """Read and check a job file.

    Raises:
        SpecError: it cannot be read, is not TOML, or says something that cannot be.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        reason = f"cannot be read: {e.strerror}. Give the path of a job file"
        raise SpecError(str(path), [Problem(place="file", reason=reason)]) from e
    except UnicodeDecodeError as e:
        raise SpecError(str(path), [Problem(place="file", reason="is not UTF-8 text")]) from e
    return parse_spec(text, source=str(path))


def parse_spec(text: str, *, source: str = "job.toml") -> JobSpec:
    """Read and check the text of a job file; `source` names it in messages.

    Raises:
        SpecError: with every problem found.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        at = re.search(r"at line (\d+)", str(e))
        line = int(at[1]) if at else None
        raise SpecError(source, [Problem(place="TOML", reason=str(e), line=line)]) from e
    check = _Check(_lines(text))
    check.unknown_tables(raw)
    spec = JobSpec(
        job=_job(check.table(raw, "job", JobTable)),
        program=_program(check.table(raw, "program", ProgramTable, extra=("command",))),
        layout=_layout(check.table(raw, "layout", LayoutTable)),
        checkpoint=_checkpoint(check.table(raw, "checkpoint", CheckpointTable)),
        detect=_detect(check.table(raw, "detect", DetectTable)),
        policy=_policy(check.table(raw, "policy", PolicyTable)),
    )
    if not check.problems:  # sizes that are wrong by themselves would only repeat themselves here
        _fit(spec, check)
    if check.problems:
        raise SpecError(source, sorted(check.problems, key=lambda p: p.line or 0))
    return spec


def _lines(text: str) -> dict[str, int]:
    """Place (``table`` or ``table.key``) to line number, from 1. A quick look, not a parser: good enough to point."""
    places: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([\w.-]+)\s*\]", line):
            table = header[1]
            places.setdefault(table, number)
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            places.setdefault(f"{table}.{key[1]}".lstrip("."), number)
    return places


TABLES: Final = tuple(f.name for f in dataclasses.fields(JobSpec))


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to `name`, if one is close enough to have been meant."""
    return next(iter(difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)), None)


_Wrong = tuple[str, str | None] | None
"""What is wrong with a string, and the nearest valid one; None: nothing is."""


class _Check:
    """Collects problems, and knows the lines."""

    def __init__(self, lines: Mapping[str, int]) -> None:
        self.lines = lines
        self.problems: list[Problem] = []

    def add(self, place: str, reason: str, near: str | None = None) -> None:
        line = self.lines.get(place)
        if line is None:  # of an inline table, or a key that is missing: the line of what it belongs to
            line = self.lines.get(place.rpartition(".")[0])
        self.problems.append(Problem(place=place, reason=reason, line=line, nearest=near))

    def unknown_tables(self, raw: Mapping[str, object]) -> None:
        for name, value in raw.items():
            if name in TABLES:
                continue
            if isinstance(value, dict):
                self.add(name, f"unknown table; there are {', '.join(TABLES)}", nearest(name, TABLES))
            else:
                self.add(name, "stands outside of any table; put it under its [table]")

    def table(
        self, raw: Mapping[str, object], name: str, kind: type[Any], extra: tuple[str, ...] = ()
    ) -> _Table:
        keys = (*(f.name for f in dataclasses.fields(kind)), *extra)
        value = raw.get(name, {})
        if not isinstance(value, dict):
            self.add(name, f"must be a table [{name}], is {_kind(value)}")
            return _Table(self, name, {}, broken=True)
        values = cast("dict[str, object]", value)
        for key in values:
            if key not in keys:
                reason = f"unknown key; [{name}] has {', '.join(keys)}"
                self.add(f"{name}.{key}", reason, nearest(key, keys))
        return _Table(self, name, values)


def _kind(value: object) -> str:
    names: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a table",
    }
    return names.get(type(value), "a date or time")


class _Table:
    """One table of the file. Its methods return a value of the right type even for a wrong one: the problem is noted."""

    def __init__(
        self, check: _Check, name: str, values: Mapping[str, object], *, broken: bool = False
    ) -> None:
        self.check, self.name, self.values, self.broken = check, name, values, broken

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def problem(self, key: str, reason: str, near: str | None = None) -> None:
        self.check.add(f"{self.name}.{key}", reason, near)

    def sub(self, key: str) -> _Table:
        """The table that stands under `key`, empty if there is none."""
        value = self.values.get(key, {})
        if isinstance(value, dict):
            return _Table(self.check, f"{self.name}.{key}", cast("dict[str, object]", value))
        self.problem(key, f"must be a table, is {_kind(value)}")
        return _Table(self.check, f"{self.name}.{key}", {}, broken=True)

    def integer(self, key: str, default: int | None, low: int, high: int | None = None, why: str = "") -> int:
        """An integer in low..high (inclusive); required where `default` is None. `why`: the reason for the bounds."""
        value = self._value(key, default)
        if value is None:
            return low
        if not isinstance(value, int) or isinstance(value, bool):
            self.problem(key, f"must be an integer, is {_kind(value)}")
            return default if default is not None else low
        if value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            self.problem(key, f"must be {limits}, is {value}" + (f": {why}" if why else ""))
            return default if default is not None else low
        return value

    def number(self, key: str, default: float, low: float, *, above: bool = False, why: str = "") -> float:
        """A finite number, at least `low` (`above`: greater than it)."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.problem(key, f"must be a number, is {_kind(value)}")
            return default
        if not math.isfinite(value) or value < low or (above and value == low):
            limit = f"greater than {low:g}" if above else f"at least {low:g}"
            self.problem(key, f"must be finite and {limit}, is {value}" + (f": {why}" if why else ""))
            return default
        return float(value)

    def text(self, key: str, check: Callable[[str], _Wrong]) -> str:
        """A required string."""
        value = self._value(key, None)
        if value is None:
            return ""
        if not isinstance(value, str):
            self.problem(key, f"must be a string, is {_kind(value)}")
            return ""
        if wrong := check(value):
            self.problem(key, *wrong)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.problem(key, f"must be true or false, is {_kind(value)}")
            return default
        return value

    def texts(self, key: str, check: Callable[[str], _Wrong]) -> tuple[str, ...]:
        """A list of strings, empty by default, without repetitions."""
        value = self._value(key, [])
        items = cast("list[object]", value) if isinstance(value, list) else [None]
        texts = [item for item in items if isinstance(item, str)]
        if len(texts) != len(items):
            self.problem(key, "must be a list of strings")
            return ()
        for text in texts:
            if wrong := check(text):
                self.problem(key, *wrong)
        for text in sorted({t for t in texts if texts.count(t) > 1}):
            self.problem(key, f"names {text!r} more than once")
        return tuple(texts)

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key, default)
        if value is None and not self.broken:
            self.problem(key, "is missing, and has no default")
        return value


# ---------------------------------------------------------------- one function per table

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FUNCTION = re.compile(rf"{_MODULE.pattern}:{_MODULE.pattern}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B", re.IGNORECASE)
_SCHEMES = ("file", "s3")


def _wrong_name(name: str) -> _Wrong:
    if _NAME.fullmatch(name):
        return None
    rule = "1 to 63 of letters, digits, '_', '.' and '-', the first a letter or digit"
    return f"{name!r} must be {rule}: it names keys and folders", None


def _wrong_function(name: str) -> _Wrong:
    if _FUNCTION.fullmatch(name):
        return None
    return f"{name!r} must have the form module:function, as in 'examples.gpt:train'", None


def _wrong_module(name: str) -> _Wrong:
    return None if _MODULE.fullmatch(name) else (f"{name!r} is not the name of a module", None)


def _wrong_root(root: str) -> _Wrong:
    scheme, colon, rest = root.partition("://")
    reason = near = None
    if not colon:
        if not root.startswith("/"):
            reason = f"{root!r} must be file:///path, /path or s3://bucket/prefix; a relative path means something else in every folder"
    elif scheme == "file":
        if not rest.startswith("/"):
            reason = f"{root!r} must be file:// and an absolute path, as in file:///data/gpt"
    elif scheme == "s3":
        if not _BUCKET.fullmatch(bucket := rest.partition("/")[0]):
            reason = f"{root!r} must be s3://bucket/prefix; {bucket!r} is no bucket's name"
    else:
        reason, near = f"unknown scheme {scheme!r}; there are file:// and s3://", nearest(scheme, _SCHEMES)
    return (reason, near) if reason else None


def _job(table: _Table) -> JobTable:
    return JobTable(
        name=table.text("name", _wrong_name),
        seed=table.integer("seed", 0, 0, 2**63 - 1),
        steps=table.integer("steps", None, 1),
        root=table.text("root", _wrong_root),
    )


def _program(table: _Table) -> ProgramTable:
    if "command" in table:
        also = [key for key in ("train", "data") if key in table]
        if also:
            table.problem(
                "command", f"excludes {' and '.join(also)}: a program is a command, or train and data"
            )
        else:
            table.problem("command", "running a script as it is comes later; for now use train and data")
    needed = "command" not in table
    return ProgramTable(
        train=table.text("train", _wrong_function) if needed or "train" in table else "",
        data=table.text("data", _wrong_function) if needed or "data" in table else "",
        preload=table.texts("preload", _wrong_module),
        params=_params(table.sub("params")),
    )


def _params(table: _Table) -> dict[str, Any]:
    for key, value in table.values.items():
        if reason := _not_json(value):
            table.problem(key, reason)
    return dict(table.values)


def _not_json(value: object) -> str | None:
    """What keeps a TOML value from being JSON, or None."""
    if isinstance(value, dict):
        return next(filter(None, map(_not_json, cast("dict[str, object]", value).values())), None)
    if isinstance(value, list):
        return next(filter(None, map(_not_json, cast("list[object]", value))), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} has no JSON form"
    if not isinstance(value, bool | int | float | str):
        return "a date or time has no JSON form; write it as a string"
    return None


def _layout(table: _Table) -> LayoutTable:
    nodes = table.integer("nodes", 1, 1)
    layout = LayoutTable(
        nodes=nodes,
        nodes_min=table.integer("nodes_min", nodes, 1, nodes, f"nodes is {nodes}"),
        standbys=table.integer("standbys", 0, 0),
        ranks_per_node=table.integer("ranks_per_node", 1, 1),
        mesh=_mesh(table.sub("mesh")),
        canonical=table.flag("canonical", False),
        virtual_shards=table.integer("virtual_shards", 12, 1),
    )
    if layout.canonical:
        table.problem("canonical", "the canonical reduction comes later; leave it false")
    return layout


def _mesh(table: _Table) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for axis in table.values:
        if axis not in AXES:
            table.problem(axis, f"unknown axis; there are {', '.join(AXES)}", nearest(axis, AXES))
        elif table.values[axis] == -1:
            sizes[axis] = -1
        else:
            sizes[axis] = table.integer(axis, 1, 1, why="or -1 for whatever the ranks leave")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        table.check.add(table.name, f"only one axis may be -1, not {' and '.join(free)}")
    if not free:
        sizes.setdefault("dp", -1)
    return {axis: sizes.get(axis, 1) for axis in AXES}


_CADENCES = ("every", "every_s", "every_steps")


def _checkpoint(table: _Table) -> CheckpointTable:
    given = [key for key in _CADENCES if key in table]
    for key in given:
        if len(given) > 1:
            table.problem(key, f"only one of {', '.join(_CADENCES)} may be given, not {' and '.join(given)}")
        elif key == "every" and table.values[key] != "auto":
            table.problem(key, "must be 'auto'; for a distance give every_steps or every_s")
    every_steps = table.integer("every_steps", 20, 1)
    every_s = table.number("every_s", 600.0, 0, above=True) if "every_s" in table else None
    keep_every = table.integer("keep_every_steps", 0, 1) if "keep_every_steps" in table else None
    if keep_every is not None and (every_s is not None or "every" in table):
        reason = "needs every_steps: checkpoints by time fall on any step"
        table.problem("keep_every_steps", reason)
    elif keep_every is not None and keep_every % every_steps:
        reason = f"must be a multiple of every_steps ({every_steps}), is {keep_every}: checkpoints exist only there"
        table.problem("keep_every_steps", reason)
    if table.integer("memory_every_steps", 1, 1) > 1:
        table.problem(
            "memory_every_steps", "snapshots less often than every step come later; for now it is 1"
        )
    return CheckpointTable(
        every_steps=every_steps,
        every="auto" if "every" in table else None,
        every_s=every_s,
        keep=table.integer("keep", 3, 2, why="while one is written, the one before it is all there is"),
        keep_every_steps=keep_every,
        memory_budget=_size(table, "memory_budget"),
    )


def _size(table: _Table, key: str) -> int | None:
    """A size in bytes: an integer, or a string such as "2GB" (powers of 1000) or "2GiB" (of 1024)."""
    if key not in table:
        return None
    value = table.values[key]
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        table.problem(key, f"must be a size such as '2GB' or '512MiB', is {value!r}")
        return None
    unit = (match[2] or "").lower()
    power = " kmgt".index(unit[0]) if unit else 0
    return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** power)


def _wrong_detector(name: str) -> _Wrong:
    if name in DETECTORS:
        return None
    return f"unknown detector {name!r}; there are {', '.join(DETECTORS)}", nearest(name, DETECTORS)


def _detect(table: _Table) -> DetectTable:
    return DetectTable(
        lease_ttl_s=table.integer(
            "lease_ttl_s", 10, LEASE_TTL_S_MIN, 3600, "a shorter lease ends with one slow moment of etcd"
        ),
        hang_floor_s=table.number("hang_floor_s", 5.0, 0, above=True),
        hang_factor=table.number(
            "hang_factor", 5.0, 1, above=True, why="a phase that takes as long as usual is no hang"
        ),
        warmup_steps=table.integer("warmup_steps", 3, 0),
        observe=table.texts("observe", _wrong_detector),
    )


def _policy(table: _Table) -> PolicyTable:
    restarts = table.sub("restarts")
    for cause in restarts.values:
        if cause not in CAUSES:
            restarts.problem(cause, f"unknown cause; there are {', '.join(CAUSES)}", nearest(cause, CAUSES))
    return PolicyTable(
        restarts={cause: restarts.integer(cause, default, 0) for cause, default in CAUSES.items()},
        wait_for_node_s=table.number("wait_for_node_s", 60.0, 0),
        grace_s=table.number("grace_s", 30.0, 0),
        spike_factor=table.number("spike_factor", 5.0, 1, above=True),
    )


def _fit(spec: JobSpec, check: _Check) -> None:
    """What several keys say together."""
    layout = spec.layout
    try:
        spec.mesh_at(spec.world_size)
    except ValueError as e:
        check.add("layout.mesh", f"{e} (nodes {layout.nodes} x ranks_per_node {layout.ranks_per_node})")
        return
    try:
        spec.mesh_at(layout.nodes_min * layout.ranks_per_node)
    except ValueError as e:
        check.add("layout.nodes_min", f"the job could not run on {layout.nodes_min} nodes: {e}")
