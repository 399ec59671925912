"""Idea 3, pure: which manifests count, and what a new generation would leave behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ckpt.errors import LineageError
from surefoot.ckpt.manifest import ManifestRef, manifest_key, manifest_refs
from surefoot.ckpt.record import Record, StartRef, beyond, lineage, on_lineage


def record(generation: int, start: tuple[int, int] = (0, 0), *, rollback: bool = False) -> Record:
    return Record(
        generation=generation,
        start=StartRef(generation=start[0], step=start[1]),
        rollback=rollback,
        reason="test",
        created_by="test",
    )


def records(*rs: Record) -> dict[int, Record]:
    return {r.generation: r for r in rs}


def refs(*pairs: tuple[int, int]) -> list[ManifestRef]:
    return [ManifestRef(generation=g, step=s, key=manifest_key(g, s)) for g, s in pairs]


def pairs(found: list[ManifestRef]) -> list[tuple[int, int]]:
    return [(m.generation, m.step) for m in found]


@pytest.mark.parametrize(
    ("rs", "manifests", "head", "expected"),
    [
        pytest.param([], [], None, [], id="nothing"),
        pytest.param([], [(1, 20)], None, [], id="a manifest without records counts for nothing"),
        pytest.param([record(1)], [(1, 20), (1, 40)], None, [(1, 20), (1, 40)], id="one generation"),
        pytest.param(
            [record(1), record(2, (1, 20))],
            [(1, 20), (1, 40), (2, 40), (2, 60)],
            None,
            [(1, 20), (2, 40), (2, 60)],
            id="what the replaced one created later is off",
        ),
        pytest.param(
            [record(1), record(2, (1, 20))],
            [(1, 20), (1, 40)],
            1,
            [(1, 20), (1, 40)],
            id="seen from an older head",
        ),
        pytest.param(
            [record(1), record(2, (1, 20)), record(3, (1, 40))],
            [(1, 20), (1, 40)],
            None,
            [(1, 20), (1, 40)],
            id="2 is burnt",
        ),
        pytest.param(
            [record(1), record(2, (1, 35)), record(3, (2, 47))],
            [(1, 20), (1, 40), (2, 40), (2, 60), (3, 60)],
            None,
            [(1, 20), (2, 40), (3, 60)],
            id="starting points in memory",
        ),
        pytest.param(
            [record(1), record(2, (1, 40)), record(3, (1, 20), rollback=True)],
            [(1, 20), (1, 40), (2, 60), (3, 40)],
            None,
            [(1, 20), (3, 40)],
            id="rollback past a generation",
        ),
        pytest.param(
            [record(1), record(2)],
            [(1, 20), (2, 20)],
            None,
            [(2, 20)],
            id="a second start from the initial state",
        ),
        pytest.param(
            [record(1), record(2, (1, 40)), record(3, (2, 30))],
            [(1, 20), (1, 40), (2, 50)],
            None,
            [(1, 20)],
            id="a limit is never wider than the one that follows",
        ),
        pytest.param(
            [record(9999), record(10000, (9999, 20))],
            [(9999, 20), (10000, 40)],
            None,
            [(9999, 20), (10000, 40)],
            id="more than four digits",
        ),
    ],
)
def test_lineage(
    rs: list[Record], manifests: list[tuple[int, int]], head: int | None, expected: list[tuple[int, int]]
) -> None:
    assert pairs(lineage(records(*rs), refs(*manifests), head)) == expected


def test_missing_record_is_named() -> None:
    with pytest.raises(LineageError, match=r"generation 2 is missing, and generation 3 descends"):
        lineage(records(record(3, (2, 20))), [])


@pytest.mark.parametrize("start", [(3, 20), (4, 20)])
def test_starting_point_must_be_older(start: tuple[int, int]) -> None:
    with pytest.raises(LineageError, match="not older than itself"):
        lineage(records(record(3, start)), [])


@pytest.mark.parametrize(
    ("head", "state", "expected"),
    [
        (3, (3, 99), True),
        (3, (2, 35), True),
        (3, (2, 36), False),
        (3, (1, 20), True),
        (3, (1, 21), False),
        (3, (0, 0), True),
        (3, (0, 1), False),
        (3, (4, 1), False),
        (2, (3, 36), False),
        (2, (2, 99), True),
    ],
)
def test_on_lineage(head: int, state: tuple[int, int], expected: bool) -> None:
    rs = records(record(1), record(2, (1, 20)), record(3, (2, 35)), record(4, (3, 50)))
    assert on_lineage(rs, head, *state) is expected


THREE = (record(1), record(2, (1, 10)), record(3, (2, 15)))


@pytest.mark.parametrize(
    ("rs", "manifests", "start", "expected"),
    [
        pytest.param([*THREE, record(4, (3, 20))], [(3, 20)], (3, 20), [], id="nothing appeared"),
        pytest.param(
            [*THREE, record(4, (3, 20))], [(3, 20), (3, 40)], (3, 20), [(3, 40)], id="the worked race"
        ),
        pytest.param(
            [*THREE, record(4, (3, 20)), record(5, (3, 40))],
            [(3, 20), (3, 40)],
            (3, 40),
            [],
            id="5 after burnt 4",
        ),
        pytest.param([*THREE], [(3, 20), (3, 40)], (3, 20), [(3, 40)], id="asked before the record"),
        pytest.param([record(1), record(2)], [(1, 20)], (0, 0), [(1, 20)], id="from the initial state"),
        pytest.param(
            [*THREE, record(4, (3, 20)), record(5, (3, 20))],
            [(3, 20), (3, 40)],
            (3, 20),
            [(3, 40)],
            id="4 was created, its listing never made",
        ),
        pytest.param(
            [*THREE, record(4, (3, 20)), record(5, (3, 20))],
            [(3, 20), (3, 40), (4, 40), (4, 60)],
            (3, 20),
            [(4, 40), (4, 60)],
            id="the newest that committed decides",
        ),
        pytest.param(
            [*THREE, record(4, (3, 35))],
            [(3, 20), (3, 40)],
            (3, 35),
            [(3, 40)],
            id="a starting point in memory",
        ),
        pytest.param(
            [*THREE, record(4, (3, 20), rollback=True), record(5, (3, 20))],
            [(3, 20), (3, 40)],
            (3, 20),
            [],
            id="what a rollback left behind stays there",
        ),
        pytest.param(
            [*THREE, record(4, (3, 20), rollback=True), record(5, (4, 30))],
            [(3, 20), (3, 40), (4, 40)],
            (4, 30),
            [(4, 40)],
            id="after a rollback the rule goes on",
        ),
        pytest.param(
            [*THREE, record(4, (3, 20))],
            [(2, 30), (3, 20)],
            (3, 20),
            [],
            id="not what was off the lineage before",
        ),
    ],
)
def test_beyond(
    rs: list[Record],
    manifests: list[tuple[int, int]],
    start: tuple[int, int],
    expected: list[tuple[int, int]],
) -> None:
    point = StartRef(generation=start[0], step=start[1])
    assert pairs(beyond(records(*rs), refs(*manifests), point)) == expected


def test_beyond_asks_the_plan_in_force_alone() -> None:
    """4 was in force, so manifest 40 of the fenced 3 cannot have been acknowledged, and stays off the lineage."""
    rs = records(*THREE, record(4, (3, 20)), record(5, (3, 20)))
    manifests = refs((3, 20), (3, 40))
    start = StartRef(generation=3, step=20)
    assert beyond(rs, manifests, start, in_force=4) == []
    assert pairs(beyond(rs, manifests, start, in_force=3)) == [(3, 40)]


def test_manifest_refs_pass_over_what_is_none() -> None:
    keys = ["gen-0003/step-0000000040/manifest.json", "gen-0003/step-0000000040/a1/n00000.part.json"]
    keys += [
        "gen-3/step-40/manifest.json",
        "x/gen-0003/step-0000000040/manifest.json",
        "generations/0003.json",
    ]
    assert pairs(manifest_refs(keys)) == [(3, 40)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[int, Record], list[ManifestRef]]:
    """Generations that each start somewhere on the lineage of an earlier one, and commit some steps after it."""
    rs: dict[int, Record] = {}
    found: list[tuple[int, int]] = []
    for g in range(1, draw(st.integers(1, 7)) + 1):
        points = [(0, 0), *found]
        start = points[draw(st.integers(0, len(points) - 1))]
        rs[g] = record(g, start)
        steps = draw(st.sets(st.integers(start[1] + 1, start[1] + 10), max_size=4))
        found += [(g, s) for s in sorted(steps)]
    return rs, refs(*found)


@given(histories())
def test_lineage_has_one_manifest_a_step_and_agrees_with_on_lineage(
    history: tuple[dict[int, Record], list[ManifestRef]],
) -> None:
    rs, manifests = history
    for head in rs:
        line = lineage(rs, manifests, head)
        steps = [m.step for m in line]
        assert steps == sorted(set(steps))
        assert {m for m in manifests if on_lineage(rs, head, m.generation, m.step)} == set(line)


@given(histories(), st.data())
def test_after_a_record_nothing_of_lower_generations_beyond_its_start_counts(
    history: tuple[dict[int, Record], list[ManifestRef]], data: st.DataObject
) -> None:
    rs, manifests = history
    head = max(rs)
    line = lineage(rs, manifests, head)
    start = data.draw(
        st.sampled_from([StartRef(), *(StartRef(generation=m.generation, step=m.step) for m in line)])
    )
    rs[head + 1] = record(head + 1, (start.generation, start.step))
    late = [(g, data.draw(st.integers(1, 99))) for g in range(1, head + 1)]
    after = lineage(rs, [*manifests, *refs(*late)])
    assert all(m.step <= start.step for m in after)
