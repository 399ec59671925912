"""Part records of one attempt to a manifest, or a reason why not. PURE.

Nothing is believed: every rank must be there once, agree with the others on shapes, values, cursor and the content of
what they hold together, and the pieces must make up every tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from surefoot.ckpt.errors import CommitError, CoverageError, ReplicasDifferError, StateError
from surefoot.ckpt.format.sound import require_sound_contents
from surefoot.ckpt.format.values import first_difference, tensor_names
from surefoot.ckpt.manifest import (
    DataObject,
    LedgerRow,
    Manifest,
    PartRecord,
    RankPart,
    TensorMeta,
    attempt_prefix,
)
from surefoot.ckpt.planning.replicas import odd_of, require_equal

NAMED_MAX = 16
"""Ranks that a message lists."""


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
        CommitError: a writer failed, ranks are missing or disagree, an object is not there in full or contradicts itself;
            ReplicasDifferError: ranks hold other content, values or ties where they should hold the same, or give other cursors.
        CoverageError: some element is stored never or twice.
    """
    where = f"step {step} of generation {generation}, attempt {attempt}"
    for p in parts:
        if (p.generation, p.step, p.attempt) != (generation, step, attempt):
            raise CommitError(f"{where}: the part of writer {p.writer} belongs to another attempt")
        if p.failure:
            raise CommitError(f"{where}: writer {p.writer} failed: {p.failure}")
    ranks = _complete([r for p in parts for r in p.ranks], where)
    require_equal({r.rank: r.replicas for r in ranks}, where)
    tensors = _merged_tensors(ranks)
    objects = [r.data for r in ranks if r.data is not None]
    _require_stored(objects, sizes, where)
    _require_whole(objects, tensors, attempt_prefix(generation, step, attempt), where)
    manifest = Manifest(
        generation=generation,
        step=step,
        attempt=attempt,
        world_size=len(ranks),
        tensors=tensors,
        aliases=_merged_aliases(ranks, tensors, where),
        objects=tuple(objects),
        values=_merged_values(ranks, where),
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
    sizes = sorted({r.world_size for r in ranks})
    # How many ranks there are is a writer's word: it is compared, never counted up to.
    if sizes != [len(found)] or found != list(range(len(found))):
        there = set(found)
        missing = list(itertools.islice((r for r in range(world_size) if r not in there), NAMED_MAX))
        named = f"{found[:NAMED_MAX]}{' and more' if len(found) > NAMED_MAX else ''}"
        raise CommitError(
            f"{where}: ranks {named} of world sizes {sizes[:NAMED_MAX]} took part"
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


def _merged_aliases(
    ranks: Sequence[RankPart], tensors: Mapping[str, TensorMeta], where: str
) -> dict[str, str]:
    """Second names of what is stored. Where a rank holds one of two tied names alone it is stored there, and needs no alias;
    where ranks tie a name to different ones, those hold the same, and the lowest rank's word is taken.

    Raises ReplicasDifferError where a rank has two tensors that are one on another: their contents could differ unseen.
    """
    merged: dict[str, str] = {}
    for r in ranks:
        for name, target in r.aliases.items():
            if name not in tensors:
                if target in tensors:
                    merged.setdefault(name, target)
            elif apart := [o.rank for o in ranks if name in o.tensors and target in o.tensors]:
                raise _differ(
                    f"{where}: replicas differ: {name} is tied to {target} on rank {r.rank} and a tensor of its own on ranks "
                    f"{apart[:NAMED_MAX]}; tie it on all of them or on none",
                    name,
                    {
                        f"tied to {target}": [o.rank for o in ranks if o.aliases.get(name) == target],
                        "a tensor of its own": apart,
                    },
                )
    return dict(sorted(merged.items()))


def _alike(value: Any) -> bytes:
    """The same for two values that are the same to the last bit. For `==` 1 is True, and 0.0 is -0.0."""
    return msgspec.json.encode(value, order="deterministic")


def _merged_values(ranks: Sequence[RankPart], where: str) -> dict[str, Any]:
    """The union over all ranks, who must agree where they have the same name."""
    merged: dict[str, Any] = {}
    encoded: dict[str, bytes] = {}
    seen: set[bytes] = set()
    for r in ranks:
        if (mine := _alike(r.values)) in seen:
            continue  # most ranks have all the same
        seen.add(mine)
        for name, value in r.values.items():
            merged.setdefault(name, value)
            if encoded.setdefault(name, this := _alike(value)) != this:
                raise _values_differ(ranks, name, where)
    _require_one_kind(ranks, merged, where)
    return dict(sorted(merged.items()))


def _differ(message: str, name: str, ranks: Mapping[str, Sequence[int]]) -> ReplicasDifferError:
    """Of something that is no tensor's content: `ranks` that hold what."""
    held = {what: tuple(some) for what, some in ranks.items()}
    return ReplicasDifferError(
        message, name=name, box=None, ranks_by_checksum=held, odd=odd_of(held.values())
    )


def _values_differ(ranks: Sequence[RankPart], name: str, where: str) -> ReplicasDifferError:
    """Who has what, where two of the values begin to differ."""
    holders: dict[bytes, tuple[Any, list[int]]] = {}
    for r in ranks:
        if name in r.values:
            holders.setdefault(_alike(r.values[name]), (r.values[name], []))[1].append(r.rank)
    (one, some), (other, others) = list(holders.values())[:2]
    held = {xxhash.xxh3_64_hexdigest(value): found for value, (_, found) in holders.items()}
    at, a, b = first_difference(one, other, name)
    more = f", and {len(holders) - 2} other values on further ranks" if len(holders) > 2 else ""
    return _differ(
        f"{where}: replicas differ: {at} is {_short(a)} on ranks {some[:NAMED_MAX]} and {_short(b)} on ranks {others[:NAMED_MAX]}{more}; "
        f"a value must be the same on all ranks that have it: where each rank has its own, wrap it in ckpt.PerRank",
        name,
        held,
    )


def _require_one_kind(ranks: Sequence[RankPart], values: Mapping[str, Any], where: str) -> None:
    """A name is a tensor's or a value's on all ranks, unless the value is that tensor."""
    tensors = {name for r in ranks for names in (r.tensors, r.aliases) for name in names}
    for name in sorted(tensors & values.keys()):
        if name not in tensor_names(values[name]):
            some = [r.rank for r in ranks if name in r.tensors or name in r.aliases]
            others = [r.rank for r in ranks if name in r.values]
            raise _differ(
                f"{where}: replicas differ: {name} is a tensor on ranks {some[:NAMED_MAX]} and {_short(values[name])} on ranks "
                f"{others[:NAMED_MAX]}; where each rank has its own, wrap it in ckpt.PerRank or give it another name",
                name,
                {"a tensor": some, "a value": others},
            )


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
    held: dict[str, list[int]] = {}
    for r in ranks:
        held.setdefault(xxhash.xxh3_64_hexdigest(_alike(r.cursor)), []).append(r.rank)
    if len(held) > 1:
        (first, *_), (other, *_) = list(held.values())[:2]
        raise _differ(
            f"{where}: replicas differ: the loader's cursor of rank {other} differs from that of rank {first}; give the same on all "
            f"ranks, and what each has of its own as extra=",
            "cursor",
            held,
        )
    return ranks[0].cursor


def _require_stored(objects: Iterable[DataObject], sizes: Mapping[str, int], where: str) -> None:
    for o in objects:
        if sizes.get(o.key) != o.size:
            raise CommitError(
                f"{where}: {o.key} should have {o.size} bytes, and the object store lists {sizes.get(o.key)}"
            )


_OURS = (
    "That the ranks hold all of it was proved before, so this is a bug of Surefoot and not of the state, and nothing was committed: please "
    "report this message with the number of ranks, how the model is sharded over them, and the version of Surefoot"
)


def _require_whole(
    objects: Sequence[DataObject], tensors: Mapping[str, TensorMeta], prefix: str, where: str
) -> None:
    try:
        require_sound_contents(tensors, objects, prefix)
    except CommitError as e:
        raise CommitError(f"{where}: {e}") from e
    except CoverageError as e:
        raise CoverageError(f"{where}: {e}. {_OURS}") from e


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
