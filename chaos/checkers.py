"""Judging a run afterwards, from what was committed and what was traced, with parsers of its own.

Nothing here imports the code it judges: records, manifests, ledgers and safetensors are read as the JSON and bytes that
docs/protocol.md describes, so an error in the product's readers cannot hide itself. fsspec is the only door to storage.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np

from surefoot.chaos.trace import Event

Json = dict[str, Any]


class EvidenceError(Exception):
    """The committed evidence cannot be read or contradicts itself: the run is judged red."""


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects under a root URL, read directly."""

    root: str

    def _fs(self) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(self.root)
        fs.invalidate_cache()
        return fs, path.rstrip("/")

    def keys(self, prefix: str) -> list[str]:
        fs, base = self._fs()
        try:
            found = fs.find(base)
        except FileNotFoundError:
            return []
        keys = (str(path)[len(base) + 1 :] for path in found)
        return sorted(key for key in keys if key.startswith(prefix))

    def read(self, key: str) -> bytes:
        fs, base = self._fs()
        try:
            return fs.cat_file(f"{base}/{key}")
        except FileNotFoundError as e:
            raise EvidenceError(f"{self.root}/{key} is named by the evidence and does not exist") from e

    def json(self, key: str) -> Json:
        return json.loads(self.read(key))


# ---------------------------------------------------------------- the committed history


def records(objects: Objects) -> dict[int, Json]:
    """All records by generation."""
    found = {int(m[1]): k for k in objects.keys("generations/") if (m := re.search(r"/(\d+)\.json$", k))}
    return {generation: objects.json(key) for generation, key in sorted(found.items())}


def limits(recs: Mapping[int, Json]) -> dict[int, float]:
    """The generations on the lineage of the newest record, each with the last step of it that counts."""
    out: dict[int, float] = {}
    generation, limit = max(recs, default=0), math.inf
    while generation:
        out[generation] = limit
        start = recs[generation]["start"]
        generation, limit = start["generation"], min(limit, start["step"])
    return out


def newest_manifest(objects: Objects, recs: Mapping[int, Json]) -> Json:
    """The last manifest on the lineage.

    Raises:
        EvidenceError: there is none.
    """
    allowed = limits(recs)
    names = [
        (int(m[2]), int(m[1]), key)
        for key in objects.keys("gen-")
        if (m := re.fullmatch(r"gen-(\d+)/step-(\d+)/manifest\.json", key))
        and int(m[2]) <= allowed.get(int(m[1]), -1)
    ]
    if not names:
        raise EvidenceError(f"{objects.root} holds no manifest that is on the lineage")
    return objects.json(max(names)[2])


def committed_rows(objects: Objects, manifest: Json, recs: Mapping[int, Json]) -> list[Json]:
    """Every ledger row that the lineage up to `manifest` commits: the chain of ledgers, newest first, each taken for the
    steps after its predecessor. Rows of executions that are off the lineage do not count."""
    allowed = limits(recs)
    rows: list[Json] = []
    ref = manifest.get("ledger")
    while ref is not None:
        ledger = objects.json(ref["key"])
        previous: Json = ledger.get("previous") or {"step": 0}
        rows += [
            row
            for row in ledger.get("rows", ())
            if previous["step"] < row["step"] <= ledger["step"]
            and row["step"] <= allowed.get(row["generation"], -1)
        ]
        ref = previous.get("ledger")
        if ref is None and previous["step"] > 0:
            raise EvidenceError(
                f"the ledger chain of {objects.root} breaks off before step {previous['step']}"
            )
    return sorted(rows, key=lambda r: (r["step"], r["dp_rank"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleVerdict:
    """Counts of sample ids, with multiplicity. `misplaced`: steps whose committed samples are not those of that step."""

    expected: int
    committed: int
    missing: int
    repeated: int
    misplaced: tuple[int, ...]

    @property
    def exact(self) -> bool:
        return self.expected == self.committed and not (self.missing or self.repeated or self.misplaced)


def judge_samples(expected: Sequence[Sequence[str]], rows: Iterable[Json]) -> SampleVerdict:
    """Compare ids, never counts: `expected[t - 1]` are the ids of step t in the reference order."""
    by_step: dict[int, Counter[str]] = {}
    for row in rows:
        by_step.setdefault(row["step"], Counter()).update(row.get("samples", ()))
    wanted = Counter(sample for step in expected for sample in step)
    got = sum(by_step.values(), Counter[str]())
    steps = range(1, max(len(expected), *by_step, 0) + 1) if by_step else range(1, len(expected) + 1)
    misplaced = tuple(
        t
        for t in steps
        if by_step.get(t, Counter()) != Counter(expected[t - 1] if t <= len(expected) else ())
    )
    return SampleVerdict(
        expected=wanted.total(),
        committed=got.total(),
        missing=(wanted - got).total(),
        repeated=(got - wanted).total(),
        misplaced=misplaced,
    )


# ---------------------------------------------------------------- parameters

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "complex64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    "complex128": 16,
}


def _data_section(objects: Objects, obj: Json) -> bytes:
    """The data of a safetensors file: 8 bytes little-endian length, a JSON header of that length, then the data."""
    data = objects.read(obj["key"])
    (header,) = struct.unpack("<Q", data[:8])
    json.loads(data[8 : 8 + header])
    return data[8 + header :]


def tensors(objects: Objects, manifest: Json) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint as raw elements (void of the element's size), put together from their pieces.

    Raises:
        EvidenceError: an element is missing or stored twice.
    """
    metas = manifest["tensors"]
    out = {name: np.zeros(m.get("shape", ()), f"V{ITEM_BYTES[m['dtype']]}") for name, m in metas.items()}
    seen = {name: np.zeros(array.shape, np.uint8) for name, array in out.items()}
    for obj in manifest.get("objects", ()):
        data = _data_section(objects, obj)
        for piece in obj.get("pieces", ()):
            array, extent = out[piece["name"]], tuple(piece.get("extent", ()))
            box = tuple(slice(o, o + n) for o, n in zip(piece.get("offset", ()), extent, strict=True))
            count = math.prod(extent)
            flat = (
                np.frombuffer(data, array.dtype, count=count, offset=piece["at"])
                if count
                else np.zeros(0, array.dtype)
            )
            array[box] = flat.reshape(extent)
            seen[piece["name"]][box] += 1
    wrong = [name for name, times in seen.items() if not np.all(times == 1)]
    if wrong:
        raise EvidenceError(
            f"{objects.root}: not every element is stored exactly once: {', '.join(wrong[:3])}"
        )
    return out


def differing_tensors(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[str]:
    """Names whose bytes differ, or that only one side has."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a
        or name not in b
        or a[name].shape != b[name].shape
        or a[name].tobytes() != b[name].tobytes()
    )


# ---------------------------------------------------------------- the trace


def step_losses(trace: Iterable[Event]) -> dict[int, set[str]]:
    """Every loss that any rank of any generation reported for each step, repeated executions included."""
    losses: dict[int, set[str]] = {}
    for event in trace:
        if event["kind"] == "step_end":
            losses.setdefault(event["step"], set()).add(str(event["loss"]))
    return losses


def differing_losses(reference: Mapping[int, set[str]], other: Mapping[int, set[str]]) -> list[int]:
    """Steps in which some execution's loss is not the reference's to the last bit, or that one run did not execute."""
    return sorted(
        step
        for step in reference.keys() | other.keys()
        if len(reference.get(step, ())) != 1 or reference[step] != other.get(step)
    )


def committed_seconds(trace: Sequence[Event], recs: Mapping[int, Json]) -> float:
    """Time that counted: for each step the duration, on its slowest rank, of the execution that is on the lineage."""
    allowed = limits(recs)
    begun: dict[tuple[int, int, int], float] = {}
    took: dict[int, tuple[int, float]] = {}
    for event in trace:
        if event["kind"] not in ("step_begin", "step_end"):
            continue
        generation, rank, step = event["generation"], event["rank"], event["step"]
        if step > allowed.get(generation, -1):
            continue
        if event["kind"] == "step_begin":
            begun[generation, rank, step] = event["t"]
        elif (generation, rank, step) in begun:
            seconds = event["t"] - begun[generation, rank, step]
            before = took.get(step, (0, 0.0))
            took[step] = (generation, max(before[1], seconds) if before[0] == generation else seconds)
    return sum(seconds for _, seconds in took.values())
