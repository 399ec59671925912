"""The judge goes red for what it is there to catch, on evidence written by hand."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from surefoot.chaos import checkers as ck


def put(root: Path, key: str, value: object) -> None:
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())


def safetensors(data: bytes) -> bytes:
    header = json.dumps({"x": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Generation 1 committed steps 2 and 4; generation 2 started from (1, 3) and committed 4. So (1, 4) does not count."""
    put(tmp_path, "generations/0001.json", {"generation": 1, "start": {"generation": 0, "step": 0}})
    put(tmp_path, "generations/0002.json", {"generation": 2, "start": {"generation": 1, "step": 3}})
    row = [
        {"step": s, "generation": g, "dp_rank": 0, "samples": [f"s{s}"]}
        for g, s in ((1, 1), (1, 2), (1, 3), (2, 4), (1, 4))
    ]
    first = {"key": "gen-0001/step-0000000002/a/ledger.json"}
    put(tmp_path, first["key"], {"step": 2, "rows": row[:2]})
    last = {"key": "gen-0002/step-0000000004/b/ledger.json"}
    put(tmp_path, last["key"], {"step": 4, "previous": {"step": 2, "ledger": first}, "rows": row[1:]})
    put(tmp_path, "gen-0001/step-0000000002/manifest.json", {"step": 2, "ledger": first})
    put(tmp_path, "gen-0001/step-0000000004/manifest.json", {"step": 4, "generation": 1})
    put(tmp_path, "gen-0002/step-0000000004/manifest.json", {"step": 4, "generation": 2, "ledger": last})
    return tmp_path


def rows(root: Path) -> list[ck.Json]:
    objects = ck.Objects(str(root))
    recs = ck.records(objects)
    return ck.committed_rows(objects, ck.newest_manifest(objects, recs), recs)


def test_only_the_lineage_counts(root: Path):
    objects = ck.Objects(str(root))
    recs = ck.records(objects)
    assert ck.newest_manifest(objects, recs)["generation"] == 2
    assert [(r["generation"], r["step"]) for r in rows(root)] == [(1, 1), (1, 2), (1, 3), (2, 4)]


def test_a_broken_ledger_chain_is_no_evidence(root: Path):
    put(root, "gen-0002/step-0000000004/b/ledger.json", {"step": 4, "previous": {"step": 2}, "rows": []})
    with pytest.raises(ck.EvidenceError, match="breaks off"):
        rows(root)


EXPECTED = [["s1"], ["s2"], ["s3"], ["s4"]]


def test_exactly_once_is_exact(root: Path):
    verdict = ck.judge_samples(EXPECTED, rows(root))
    assert verdict.exact
    assert (verdict.expected, verdict.committed) == (4, 4)


@pytest.mark.parametrize(
    ("change", "missing", "repeated", "misplaced"),
    [
        (lambda r: r[:2] + r[3:], 1, 0, (3,)),
        (lambda r: [*r, r[1]], 0, 1, (2,)),
        (lambda r: [{**r[0], "samples": ["s2"]}, {**r[1], "samples": ["s1"]}, *r[2:]], 0, 0, (1, 2)),
        (lambda r: [*r, {**r[3], "step": 5, "samples": ["s5"]}], 0, 1, (5,)),
        (lambda r: [], 4, 0, (1, 2, 3, 4)),
    ],
    ids=["lost", "twice", "swapped", "beyond", "none"],
)
def test_what_is_not_exactly_once_is_red(
    root: Path, change, missing: int, repeated: int, misplaced: tuple[int, ...]
):
    verdict = ck.judge_samples(EXPECTED, change(rows(root)))
    assert not verdict.exact
    assert (verdict.missing, verdict.repeated, verdict.misplaced) == (missing, repeated, misplaced)


def stored(root: Path, pieces: list[ck.Json], data: bytes) -> dict[str, np.ndarray]:
    put(root, "d.safetensors", safetensors(data))
    manifest = {
        "tensors": {"w": {"dtype": "int32", "shape": [2, 2]}},
        "objects": [{"key": "d.safetensors", "pieces": pieces}],
    }
    return ck.tensors(ck.Objects(str(root)), manifest)


def test_tensors_are_put_together_from_pieces_whatever_the_layout(tmp_path: Path):
    whole = np.arange(4, dtype="<i4").reshape(2, 2)
    one = stored(tmp_path, [{"name": "w", "offset": [0, 0], "extent": [2, 2], "at": 0}], whole.tobytes())
    columns = whole.T.copy().tobytes()
    two = stored(
        tmp_path, [{"name": "w", "offset": [0, i], "extent": [2, 1], "at": 8 * i} for i in range(2)], columns
    )
    assert ck.differing_tensors(one, two) == []
    assert ck.differing_tensors(one, {"w": two["w"].T}) == ["w"]
    assert ck.differing_tensors(one, {}) == ["w"]


def test_a_hole_and_an_overlap_are_found(tmp_path: Path):
    piece = {"name": "w", "offset": [0, 0], "extent": [1, 2], "at": 0}
    with pytest.raises(ck.EvidenceError, match="exactly once"):
        stored(tmp_path, [piece], bytes(16))
    with pytest.raises(ck.EvidenceError, match="exactly once"):
        stored(tmp_path, [piece, piece], bytes(16))


def end(step: int, loss: str, generation: int = 1, rank: int = 0, t: float = 0.0) -> ck.Event:
    return {"kind": "step_end", "step": step, "loss": loss, "generation": generation, "rank": rank, "t": t}


def test_every_execution_of_every_step_is_compared():
    reference = ck.step_losses([end(1, "0x1p0"), end(2, "0x1p1")])
    assert (
        ck.differing_losses(reference, ck.step_losses([end(1, "0x1p0"), end(2, "0x1p1"), end(2, "0x1p1", 2)]))
        == []
    )
    assert ck.differing_losses(
        reference, ck.step_losses([end(1, "0x1p0"), end(2, "0x1p1"), end(2, "0x1.8p1", 2)])
    ) == [2]
    assert ck.differing_losses(reference, ck.step_losses([end(1, "0x1p0")])) == [2]
    assert ck.differing_losses({}, ck.step_losses([end(1, "0x1p0")])) == [1]


def test_a_recomputed_step_counts_once_and_off_the_lineage_not_at_all(root: Path):
    def both(step: int, generation: int, begin: float, finish: float) -> list[ck.Event]:
        return [
            {**end(step, "x", generation, t=begin), "kind": "step_begin"},
            end(step, "x", generation, t=finish),
        ]

    trace = [*both(3, 1, 0.0, 1.0), *both(4, 1, 1.0, 3.0), *both(4, 2, 10.0, 10.5)]
    assert ck.committed_seconds(trace, ck.records(ck.Objects(str(root)))) == pytest.approx(1.5)
