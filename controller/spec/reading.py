"""From a job file to its `JobSpec`: one function per table, and what several keys say together."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any, cast

from surefoot.controller.spec.checking import Check, RawTable, Wrong, nearest
from surefoot.controller.spec.problems import Problem, SpecError
from surefoot.controller.spec.tables import (
    AXES,
    AXES_LATER,
    CAUSES,
    DETECTORS,
    LEASE_TTL_S_MIN,
    CheckpointTable,
    DetectTable,
    JobSpec,
    JobTable,
    LayoutTable,
    PolicyTable,
    ProgramTable,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FUNCTION = re.compile(rf"{_MODULE.pattern}:{_MODULE.pattern}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B", re.IGNORECASE)
_SCHEMES = ("file", "s3")


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
    check = Check(_lines(text))
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


def _wrong_name(name: str) -> Wrong:
    if _NAME.fullmatch(name):
        return None
    rule = "1 to 63 of letters, digits, '_', '.' and '-', the first a letter or digit"
    return f"{name!r} must be {rule}: it names keys and folders", None


def _wrong_function(name: str) -> Wrong:
    if _FUNCTION.fullmatch(name):
        return None
    return f"{name!r} must have the form module:function, as in 'examples.gpt:train'", None


def _wrong_module(name: str) -> Wrong:
    return None if _MODULE.fullmatch(name) else (f"{name!r} is not the name of a module", None)


def _wrong_root(root: str) -> Wrong:
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


def _job(table: RawTable) -> JobTable:
    return JobTable(
        name=table.text("name", _wrong_name),
        seed=table.integer("seed", 0, 0, 2**63 - 1),
        steps=table.integer("steps", None, 1),
        root=table.text("root", _wrong_root),
    )


def _program(table: RawTable) -> ProgramTable:
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


def _params(table: RawTable) -> dict[str, Any]:
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


def _layout(table: RawTable) -> LayoutTable:
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


def _mesh(table: RawTable) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for axis in table.values:
        if axis in AXES_LATER:
            table.problem(axis, f"comes later; for now a mesh has {', '.join(AXES)}")
        elif axis not in AXES:
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


def _checkpoint(table: RawTable) -> CheckpointTable:
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


def _size(table: RawTable, key: str) -> int | None:
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


def _wrong_detector(name: str) -> Wrong:
    if name in DETECTORS:
        return None
    return f"unknown detector {name!r}; there are {', '.join(DETECTORS)}", nearest(name, DETECTORS)


def _detect(table: RawTable) -> DetectTable:
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


def _policy(table: RawTable) -> PolicyTable:
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


def _fit(spec: JobSpec, check: Check) -> None:
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
