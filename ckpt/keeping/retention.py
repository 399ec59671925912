"""Which checkpoints may go. PURE; ckpt/keeping/cleaning.py carries it out after a commit.

A rule says of each checkpoint of a lineage whether it wants to keep it, and why; what no rule wants may go. Rules are values
and compose by naming several. Beside a job they count and judge only what its own writer left there (`of_one_writer`): a job,
known by its name, or scripts. Who goes on from another's checkpoints did not ask for their end, and has a default of its own. Whatever they say, these stay: the newest committed checkpoint, the newest *verified* one
(the newest may turn out damaged, and then it is all there is), what was exempted by name (`ckpt keep`), and what was set
aside as damaged, as evidence. What is not committed, off the lineage or of another attempt is not retention's to judge: it
may be somebody's who still works on it (ckpt/keeping/orphans.py knows what nobody can be working on any more).

A manifest goes first, so that a kill in between leaves data without a manifest, never a manifest without its data. Ledgers
stay: they are the evidence of what was trained on, and small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from surefoot.ckpt.manifest import Manifest, ManifestRef, attempt_prefix
from surefoot.ckpt.record import Record

NEWEST_MIN = 2
"""A single one could turn out damaged when it is needed."""


class HeldStep(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint on the lineage, and what is known of it."""

    ref: ManifestRef
    committed_at: float | None = None
    """Seconds since 1970, by the committer's clock; None where its manifest does not say or was not read."""
    verified: bool = False
    exempt: bool = False
    aside: bool = False
    """Set aside: a load found it damaged."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """May it go, and why (not)?"""

    ref: ManifestRef
    keep: bool
    why: str


# ---------------------------------------------------------------- rules


class Newest(msgspec.Struct, frozen=True, kw_only=True):
    """The newest `count` that are not known to be damaged."""

    count: int

    def __post_init__(self) -> None:
        if self.count < NEWEST_MIN:
            raise ValueError(
                f"keep = {self.count}: at least {NEWEST_MIN} have to be kept, since the newest may turn out damaged"
            )

    def wanted(self, line: Sequence[HeldStep]) -> Iterator[tuple[ManifestRef, str]]:
        for h in [h for h in line if not h.aside][-self.count :]:
            yield h.ref, f"one of the newest {self.count}"


class EverySteps(msgspec.Struct, frozen=True, kw_only=True):
    """Those whose step is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"keep every {self.steps} steps: the number must be at least 1, or left out")

    def wanted(self, line: Sequence[HeldStep]) -> Iterator[tuple[ManifestRef, str]]:
        for h in line:
            if h.ref.step % self.steps == 0:
                yield h.ref, f"every {self.steps} steps"


class EveryHours(msgspec.Struct, frozen=True, kw_only=True):
    """The first of each span of `hours` hours (spans count from 1970, so that the choice does not depend on what is left).

    One whose time is not known is kept.
    """

    hours: float

    def __post_init__(self) -> None:
        if self.hours <= 0:
            raise ValueError(f"keep one every {self.hours} hours: the number must be positive, or left out")

    def wanted(self, line: Sequence[HeldStep]) -> Iterator[tuple[ManifestRef, str]]:
        seen: set[int] = set()
        for h in line:
            if h.committed_at is None:
                yield h.ref, "its time is not known"
            elif (span := int(h.committed_at // (3600 * self.hours))) not in seen:
                seen.add(span)
                yield h.ref, f"one every {self.hours:g} h"


class Exempt(msgspec.Struct, frozen=True, kw_only=True):
    """These steps."""

    steps: frozenset[int]

    def wanted(self, line: Sequence[HeldStep]) -> Iterator[tuple[ManifestRef, str]]:
        for h in line:
            if h.ref.step in self.steps:
                yield h.ref, "exempt by its step"


Rule: TypeAlias = Newest | EverySteps | EveryHours | Exempt


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """What a job keeps: the `newest` N, those whose step is a multiple of `every_steps`, the first of every `every_hours` hours,
    and the steps in `exempt`."""

    newest: int
    every_steps: int | None = None
    every_hours: float | None = None
    exempt: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.rules()

    def rules(self) -> tuple[Rule, ...]:
        """Raises ValueError with the reason."""
        found: list[Rule] = [Newest(count=self.newest)]
        if self.every_steps is not None:
            found.append(EverySteps(steps=self.every_steps))
        if self.every_hours is not None:
            found.append(EveryHours(hours=self.every_hours))
        if self.exempt:
            found.append(Exempt(steps=frozenset(self.exempt)))
        return tuple(found)

    @property
    def needs_times(self) -> bool:
        """Whether manifests have to be read for it."""
        return self.every_hours is not None


# ---------------------------------------------------------------- verdicts


def judge(line: Sequence[HeldStep], rules: Iterable[Rule]) -> list[Verdict]:
    """One verdict for each checkpoint of a lineage (ascending), in its order. PURE."""
    reasons: dict[ManifestRef, list[str]] = {h.ref: [] for h in line}
    for ref, why in _always(line):
        reasons[ref].append(why)
    for rule in rules:
        for ref, why in rule.wanted(line):
            reasons[ref].append(why)
    return [
        Verdict(ref=ref, keep=bool(why), why=", ".join(why) or "no rule keeps it")
        for ref, why in reasons.items()
    ]


def _always(line: Sequence[HeldStep]) -> Iterator[tuple[ManifestRef, str]]:
    if line:
        yield line[-1].ref, "the newest committed"
    if verified := [h for h in line if h.verified and not h.aside]:
        yield verified[-1].ref, "the newest verified"
    for h in line:
        if h.exempt:
            yield h.ref, "exempt (ckpt keep)"
        if h.aside:
            yield h.ref, "set aside as damaged"


def of_one_writer(
    line: Iterable[ManifestRef], records: Mapping[int, Record], generation: int
) -> list[ManifestRef]:
    """What on a lineage was left by the writer of `generation`. PURE."""
    mine = _writer(records[generation])
    return [ref for ref in line if _writer(records[ref.generation]) == mine]


def _writer(record: Record) -> str | None:
    """The name of the job, which outlives its starts and its runs; None: a script, whichever, since those have no names."""
    return None if record.plan is None else record.plan.get("job")


def held_of(
    line: Iterable[ManifestRef],
    flags: Mapping[tuple[int, int], frozenset[str]],
    times: Mapping[ManifestRef, float] | None = None,
) -> list[HeldStep]:
    """A lineage with what its flags say. PURE."""
    found: list[HeldStep] = []
    for ref in line:
        mine = flags.get((ref.generation, ref.step), frozenset())
        found.append(
            HeldStep(
                ref=ref,
                committed_at=(times or {}).get(ref),
                verified="verified" in mine,
                exempt="kept" in mine,
                aside="aside" in mine,
            )
        )
    return found


def objects_of(manifest: Manifest, stored: Iterable[str]) -> list[str]:
    """The keys that go with a manifest: its data objects and its attempt's part records, without the ledger. PURE.

    Args:
        stored: what is listed under the manifest's attempt; nothing outside of it is ever returned.
    """
    prefix = attempt_prefix(manifest.generation, manifest.step, manifest.attempt)
    ledger = manifest.ledger.key if manifest.ledger is not None else None
    return sorted(key for key in stored if key.startswith(prefix) and key != ledger)
