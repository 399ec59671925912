"""Part records of one attempt to a manifest, or a reason why not. PURE.

Nothing is believed: every rank must be there once, agree with the others on shapes, values, cursor and the content of
what they hold together, and the pieces must make up every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.coverage import prove_coverage
from surefoot.ckpt.errors import CommitError, StateError
from surefoot.ckpt.manifest import DataObject, LedgerRow, Manifest, PartRecord, RankPart, TensorMeta
from surefoot.ckpt.plan import ITEMSIZES


def merge_parts(
    parts: Sequence[PartRecord],
    sizes: Mapping[str, int],
    *,
    generation: int,
    step: int,
    attempt: str,
    facts: Mapping[str, Any],
) -> tuple[Manifest, tuple[LedgerRow, ...]]:
    """The manifest (without its ledger) and the ledger's rows.

    Args:
        sizes: what the object store lists under the attempt, in bytes by key.

    Raises:
        CommitError: a writer failed, ranks are missing or disagree, an object is not there in full.
        CoverageError: some element is stored never or twice.
    """
    where = f"step {step} of generation {generation}, attempt {attempt}"
    for p in parts:
        if (p.generation, p.step, p.attempt) != (generation, step, attempt):
            raise CommitError(f"{where}: the part of writer {p.writer} belongs to another attempt")
        if p.failure:
            raise CommitError(f"{where}: writer {p.writer} failed: {p.failure}")
    ranks = _complete([r for p in parts for r in p.ranks], where)
    _require_equal_replicas(ranks, where)
    tensors = _merged_tensors(ranks)
    objects = [r.data for r in ranks if r.data is not None]
    _require_stored(objects, sizes, where)
    require_inside(objects, tensors, where)
    prove_coverage(tensors, ((p.name, Box(p.offset, p.extent)) for o in objects for p in o.pieces))
    manifest = Manifest(
        generation=generation,
        step=step,
        attempt=attempt,
        world_size=len(ranks),
        tensors=tensors,
        aliases=_merged(ranks, "aliases", where),
        objects=tuple(objects),
        values=_merged(ranks, "values", where),
        cursor=_equal_cursor(ranks, where),
        extras={str(r.rank): r.extra for r in ranks if r.extra is not None},
        facts=dict(facts),
    )
    return manifest, _merged_ledger(ranks, where)


def _complete(ranks: list[RankPart], where: str) -> list[RankPart]:
    """All ranks of one world, in order."""
    if not ranks:
        raise CommitError(f"{where}: no rank took part")
    world_size = ranks[0].world_size
    found = sorted(r.rank for r in ranks)
    if found != list(range(world_size)) or any(r.world_size != world_size for r in ranks):
        missing = sorted(set(range(world_size)) - set(found))
        raise CommitError(
            f"{where}: ranks {found} of world sizes {sorted({r.world_size for r in ranks})} took part"
            + (f"; missing: {missing}" if missing else "")
        )
    return sorted(ranks, key=lambda r: r.rank)


def _merged_tensors(ranks: Iterable[RankPart]) -> dict[str, TensorMeta]:
    merged: dict[str, tuple[TensorMeta, int]] = {}
    for r in ranks:
        for name, meta in r.tensors.items():
            known, where = merged.setdefault(name, (meta, r.rank))
            if known != meta:
                raise StateError(
                    f"{name} is {meta.dtype}{list(meta.shape)} on rank {r.rank} and {known.dtype}{list(known.shape)} on rank {where}"
                )
    return {name: meta for name, (meta, _) in sorted(merged.items())}


def _merged(ranks: Iterable[RankPart], field: str, where: str) -> dict[str, Any]:
    """The union of a mapping over all ranks, who must agree where they have the same name."""
    merged: dict[str, tuple[Any, int]] = {}
    for r in ranks:
        for name, value in getattr(r, field).items():
            known, first = merged.setdefault(name, (value, r.rank))
            if known != value:
                raise CommitError(
                    f"{where}: {name} is {_short(value)} on rank {r.rank} and {_short(known)} on rank {first}; a value must be the "
                    f"same on all ranks that have it: give what differs a name of its own on each rank"
                )
    return {name: value for name, (value, _) in sorted(merged.items())}


def _merged_ledger(ranks: Iterable[RankPart], where: str) -> tuple[LedgerRow, ...]:
    """Every execution once; ranks of one data-parallel rank must tell the same of it."""
    merged: dict[tuple[int, int, int], LedgerRow] = {}
    for r in ranks:
        for row in r.ledger:
            known = merged.setdefault((row.step, row.generation, row.dp_rank), row)
            if known != row:
                raise CommitError(
                    f"{where}: rank {r.rank} has another ledger for step {row.step}, data-parallel rank {row.dp_rank}, than others"
                )
    return tuple(row for _, row in sorted(merged.items(), key=lambda item: item[0]))


def _equal_cursor(ranks: Sequence[RankPart], where: str) -> dict[str, Any] | None:
    for r in ranks[1:]:
        if r.cursor != ranks[0].cursor:
            raise CommitError(f"{where}: the loader's cursor of rank {r.rank} differs from that of rank 0")
    return ranks[0].cursor


def _require_equal_replicas(ranks: Iterable[RankPart], where: str) -> None:
    """What several ranks hold must be the same; the odd ones are named."""
    by_box: dict[str, dict[str, list[int]]] = {}
    for r in ranks:
        for box, checksum in r.replicas.items():
            by_box.setdefault(box, {}).setdefault(checksum, []).append(r.rank)
    for box, groups in sorted(by_box.items()):
        if len(groups) > 1:
            held = "; ".join(
                f"ranks {found}: {checksum}"
                for checksum, found in sorted(groups.items(), key=lambda g: -len(g[1]))
            )
            raise CommitError(
                f"{where}: replicas differ: {box} has other content on some ranks ({held}); if these are shards of one tensor make it a "
                f"DTensor, if they are meant to differ give each a name of its own, otherwise suspect the odd rank's memory"
            )


def _require_stored(objects: Iterable[DataObject], sizes: Mapping[str, int], where: str) -> None:
    for o in objects:
        if sizes.get(o.key) != o.size:
            raise CommitError(
                f"{where}: {o.key} should have {o.size} bytes, and the object store lists {sizes.get(o.key)}"
            )


def require_inside(objects: Iterable[DataObject], tensors: Mapping[str, TensorMeta], where: str) -> None:
    """Every piece lies within its object, and has a type that we know."""
    for o in objects:
        for p in o.pieces:
            meta = tensors.get(p.name)
            if meta is None or meta.dtype not in ITEMSIZES:
                raise CommitError(f"{where}: {o.key} holds a piece of {p.name}, a tensor nobody describes")
            end = p.at + Box(p.offset, p.extent).numel * ITEMSIZES[meta.dtype]
            if p.at < 0 or end > o.data_nbytes:
                raise CommitError(
                    f"{where}: {p.name} reaches to byte {end} of {o.key}, whose data ends at {o.data_nbytes}"
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
