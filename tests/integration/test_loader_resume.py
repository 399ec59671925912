"""`Loader` on real Parquet files, in one process: what it delivers, and that any cursor gives the same continuation."""

import json
import random
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot import failpoint
from surefoot.failpoint import Arming, FailpointError
from surefoot.loader import (
    CursorError,
    CursorMismatchError,
    Loader,
    LoaderUsageError,
    Mixture,
    Pack,
    Source,
    plan,
)
from surefoot.loader.errors import LoaderClosedError, MixtureError, PackError, SampleTooLongError
from surefoot.loader.source import ParquetSource

PACK = Pack(seq_len=64, step_tokens=512, window=6)


def write(folder: Path, name: str, texts, group_rows: int) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table({"text": texts}), folder / f"{name}.parquet", row_group_size=group_rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources: many row groups; one large row group, read as a stream; seven rows in all."""
    folder = tmp_path_factory.mktemp("sources")
    rng = random.Random(2)

    def texts(tag: str, rows: int) -> list[str]:
        return [f"{tag}{row}" + "é" * rng.randint(0, 25) for row in range(rows)]

    for file in range(3):
        write(folder / "many", f"m{file}", texts(f"m{file}-", 150), 20)
    write(folder / "large", "large", texts("l", 500), 500)
    write(folder / "few", "few", ["", "a", *texts("f", 5)], 3)
    return folder


def mixture(folder: Path, **policy) -> Mixture:
    return Mixture(
        [
            Source("many", str(folder / "many"), weight=0.5, window_blocks=3, **policy),
            Source(
                "large", str(folder / "large/*.parquet"), weight=0.4, block_rows=64, window_blocks=2, **policy
            ),
            Source("few", str(folder / "few/few.parquet"), weight=0.1, **policy),
        ],
        seed=5,
    )


def loaders(folder: Path, dp_size: int, cursor=None, **policy) -> list[Loader]:
    made = [Loader(mixture(folder, **policy), PACK, rank, dp_size) for rank in range(dp_size)]
    for loader in made if cursor is not None else ():
        loader.load_state_dict(cursor)
    return made


def global_step(batches) -> tuple:
    """What a step is over all ranks: ids in order, tokens and labels, whatever the number of ranks."""
    ids = tuple(sample_id for batch in batches for sample_id in batch.sample_ids)
    tokens = torch.cat([batch["tokens"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    (valid,) = {batch.global_valid_tokens for batch in batches}
    (step,) = {batch.step for batch in batches}
    return step, ids, tokens.numpy().tobytes(), labels.numpy().tobytes(), valid


def steps_of(ranks, count: int) -> list[tuple]:
    return [global_step([next(loader) for loader in ranks]) for _ in range(count)]


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[list[tuple], list[dict]]:
    """60 undisturbed steps, and the cursor before each of them."""
    (loader,) = loaders(folder, 1)
    cursors, steps = [], []
    for _ in range(60):
        cursors.append(loader.state_dict())
        steps.append(global_step([next(loader)]))
    return steps, cursors


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 52), st.sampled_from([1, 2, 3, 4, 8]))
def test_a_resume_at_any_step_goes_on_byte_for_byte(folder, reference, step, dp_size):
    steps, cursors = reference
    cursor = json.loads(json.dumps(cursors[step]))
    assert steps_of(loaders(folder, dp_size, cursor), 6) == steps[step : step + 6]


@pytest.mark.parametrize("dp_size", [2, 3, 4, 8])
def test_the_order_does_not_depend_on_the_number_of_ranks(folder, reference, dp_size):
    assert steps_of(loaders(folder, dp_size), 60) == reference[0]


def test_the_plan_tells_what_the_loader_delivers(folder, reference):
    steps, cursors = reference
    planned = plan(mixture(folder), PACK, 60)
    assert [(p.step, p.sample_ids) for p in planned] == [step[:2] for step in steps]
    assert plan(mixture(folder), PACK, 5, cursors[20]) == planned[20:25]
    for rank, loader in enumerate(loaders(folder, 3)):
        assert [b.sample_ids for b in islice(loader, 5)] == [p.rank_sample_ids(rank, 3) for p in planned[:5]]


def test_a_loaded_cursor_saved_again_is_the_same(folder, reference):
    for cursor in reference[1]:
        (loader,) = loaders(folder, 1, cursor)
        assert json.dumps(loader.state_dict()) == json.dumps(cursor)


def test_the_last_cursor_of_a_pass_and_those_around_it_keep_the_passes_whole(folder):
    """Cursors from every step of three passes, each loaded into a brand-new loader (as in LDR-04)."""
    (loader,) = loaders(folder, 1)
    few_rows, done = 7, 0
    while done < 3 * few_rows:
        cursor = loader.state_dict()
        expected = [next(loader).sample_ids for _ in range(2)]
        (again,) = loaders(folder, 1, cursor)
        assert [next(again).sample_ids for _ in range(2)] == expected
        loader.load_state_dict(cursor)
        done += sum(sample_id.startswith("few:") for sample_id in next(loader).sample_ids)


def test_every_pass_delivers_each_row_exactly_once(folder):
    (loader,) = loaders(folder, 1)
    rows = {"many": 450, "large": 500, "few": 7}
    seen: dict[tuple[str, str], Counter[str]] = {}
    for batch in islice(loader, 250):
        for sample_id in batch.sample_ids:
            source, pass_index, row = sample_id.split(":", 2)
            seen.setdefault((source, pass_index), Counter())[row] += 1
    assert ("many", "2") in seen
    assert ("few", "9") in seen
    for (source, pass_index), counts in seen.items():
        assert set(counts.values()) == {1}
        if (source, str(int(pass_index) + 2)) in seen:  # nothing of this pass waits any more
            assert len(counts) == rows[source]
    orders = [list(seen["few", str(p)]) for p in range(4)]
    assert len(set(map(tuple, orders))) > 1, "each pass has its own order"


def test_sources_that_stop_end_the_data_with_every_row_delivered(folder):
    for dp_size in (1, 3):
        ranks = loaders(folder, dp_size, when_used_up="stop")
        batches = [list(loader) for loader in ranks]
        assert len({len(own) for own in batches}) == 1, "all ranks do as many steps"
        ids = [sample_id for own in batches for batch in own for sample_id in batch.sample_ids]
        assert len(ids) == len(set(ids)) == 957
        assert all(next(loader, None) is None for loader in ranks), "the end stays the end"
        cursor = ranks[0].state_dict()
        assert [next(loader, None) for loader in loaders(folder, 2, cursor, when_used_up="stop")] == [
            None,
            None,
        ]


def test_tokens_are_the_bytes_of_the_row_the_id_names(folder):
    texts = {path.name: pq.read_table(path)["text"].to_pylist() for path in folder.glob("*/*.parquet")}
    for batch in islice(loaders(folder, 2)[1], 30):
        documents = []
        for tokens, ids in zip(batch["tokens"].numpy(), batch["document_ids"].numpy(), strict=True):
            documents += [tokens[ids == number].astype(np.uint8).tobytes() for number in range(ids.max() + 1)]
        for sample_id, document in zip(batch.sample_ids, documents, strict=True):
            _, _, file, row = sample_id.split(":")
            assert document == (texts[file][int(row)].encode() or bytes([PACK.pad_token]))


def test_labels_that_count_are_counted_over_all_ranks(folder):
    for batches in islice(zip(*loaders(folder, 4), strict=True), 20):
        counted = sum(int((b["labels"] >= 0).sum()) for b in batches)
        assert {b.global_valid_tokens for b in batches} == {counted}


def test_microbatches_are_as_many_on_every_rank_and_together_the_batch(folder):
    pack = Pack(seq_len=64, step_tokens=512, microbatch_tokens=64)
    for batches in islice(zip(*(Loader(mixture(folder), pack, r, 3) for r in range(3)), strict=True), 20):
        assert {len(batch.microbatches) for batch in batches} == {3}
        for batch in batches:
            assert all(mb["tokens"].shape == (1, 64) for mb in batch.microbatches)
            real = [mb for mb in batch.microbatches if mb.sample_ids]
            assert torch.equal(torch.cat([mb["tokens"] for mb in real]), batch["tokens"])
            assert sum((mb.sample_ids for mb in batch.microbatches), ()) == batch.sample_ids
        (padding,) = [mb for batch in batches for mb in batch.microbatches if not mb.sample_ids]
        assert (padding["labels"] == -100).all(), (
            "8 sequences on 3 ranks: one rank runs a sequence of weight zero"
        )


def test_tensors_are_what_training_code_expects(folder):
    batch = next(loaders(folder, 2)[0])
    (mb,) = batch.microbatches
    assert set(mb) == {"tokens", "labels", "document_ids", "position_ids", "cu_seqlens"}
    assert {mb[name].dtype for name in ("tokens", "labels", "document_ids", "position_ids")} == {torch.int64}
    assert mb["cu_seqlens"].dtype == torch.int32
    assert mb["tokens"].shape == mb["labels"].shape == (4, 64)


def test_each_row_group_is_decoded_once_a_pass(folder, monkeypatch):
    decoded: Counter[tuple[str, int]] = Counter()
    read, stream = ParquetSource.read_group, ParquetSource.stream_group

    def note(method):
        def noting(self, group):
            decoded[self.source.name, group] += 1
            return method(self, group)

        return noting

    monkeypatch.setattr(ParquetSource, "read_group", note(read))
    monkeypatch.setattr(ParquetSource, "stream_group", note(stream))
    list(loaders(folder, 1, when_used_up="stop")[0])
    assert set(decoded.values()) == {1}
    assert len([key for key in decoded if key[0] == "many"]) == 24


def test_the_first_batch_decodes_no_more_at_the_end_of_a_pass_than_at_its_start(folder, monkeypatch):
    decoded: list[int] = []
    read = ParquetSource.read_group
    monkeypatch.setattr(ParquetSource, "read_group", lambda self, g: decoded.append(g) or read(self, g))
    mix = Mixture([Source("many", str(folder / "many"), window_blocks=3)], seed=5)
    cursors = []
    with Loader(mix, PACK) as loader:
        for _ in range(25):
            cursors.append(loader.state_dict())
            next(loader)
    costs = []
    for cursor in cursors:
        decoded.clear()
        with Loader(mix, PACK) as loader:
            loader.load_state_dict(cursor)
            next(loader)
        costs.append(len(decoded))
    assert max(costs) <= 2 * 3, "the windows that a step and its waiting samples touch: two at most"


def test_the_cursor_is_small_and_taken_when_asked_for(folder):
    (loader,) = loaders(folder, 1)
    for _ in range(50):
        next(loader)
    assert len(json.dumps(loader.state_dict())) < 4096
    tracemalloc.start()
    loader.state_dict()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 10


def test_a_failed_read_leaves_the_position_where_it_was(folder, reference):
    steps, cursors = reference
    (loader,) = loaders(folder, 1)
    failures = 0
    for step in range(30):
        failpoint.arm({"loader.before_read": Arming(action="error")})
        try:
            got = global_step([next(loader)])
        except FailpointError:
            failures += 1
            assert loader.state_dict() == cursors[step]
            failpoint.arm(None)
            got = global_step([next(loader)])
        finally:
            failpoint.arm(None)
        assert got == steps[step]
    assert failures > 5


def test_a_cursor_of_other_data_or_settings_is_refused_and_changes_nothing(folder, reference, tmp_path):
    steps, cursors = reference
    (loader,) = loaders(folder, 1, cursors[3])
    write(tmp_path / "many", "m0", ["other"] * 10, 5)
    others = [
        (Loader(Mixture(mixture(folder).sources, seed=6), PACK), "seed was 5 and is 6"),
        (Loader(Mixture(mixture(folder).sources[1:], seed=5), PACK), "source 'many' is gone"),
        (
            Loader(mixture(folder), Pack(seq_len=64, step_tokens=1024, window=6)),
            "step_tokens was 512 and is 1024",
        ),
        (
            Loader(
                Mixture([Source("many", str(tmp_path / "many"), 0.5), *mixture(folder).sources[1:]], seed=5),
                PACK,
            ),
            "file m0.parquet had 150 rows and has 10",
        ),
    ]
    for other, says in others:
        with pytest.raises(CursorMismatchError, match=says):
            other.load_state_dict(cursors[3])
        assert other.state_dict()["step"] == 0
    with pytest.raises(CursorError, match="no loader cursor"):
        loader.load_state_dict({"position": 3})
    assert global_step([next(loader)]) == steps[3]


def test_the_same_files_elsewhere_are_the_same_data(folder, reference, tmp_path):
    steps, cursors = reference
    for path in folder.glob("*/*.parquet"):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        (tmp_path / path.parent.name / path.name).write_bytes(path.read_bytes())
    assert steps_of(loaders(tmp_path, 2, cursors[9]), 3) == steps[9:12]


def test_an_empty_source_is_reported_and_the_ids_of_the_others_stay(folder, tmp_path, caplog):
    write(tmp_path / "void", "void", pa.array([], pa.string()), 5)
    rest = mixture(folder).sources
    with_empty = Mixture([*rest, Source("void", str(tmp_path / "void"), weight=5)], seed=5)
    assert plan(with_empty, PACK, 20) == plan(Mixture(rest, seed=5), PACK, 20)
    assert "source 'void' has no rows" in caplog.text
    with pytest.raises(MixtureError, match=r"nothing to draw from.*empty: void"):
        plan(Mixture([Source("void", str(tmp_path / "void"))], seed=5), PACK, 1)


def test_a_sample_longer_than_a_sequence_is_refused_with_its_id(tmp_path):
    write(tmp_path / "s", "s", ["x" * 65], 5)
    with pytest.raises(
        SampleTooLongError, match=r"sample s:0:s.parquet:0 has 65 tokens and a sequence holds 64"
    ) as e:
        plan(Mixture([Source("s", str(tmp_path / "s"))], seed=1), PACK, 1)
    assert (e.value.sample_id, e.value.tokens, e.value.seq_len) == ("s:0:s.parquet:0", 65, 64)


def test_samples_without_tokens_end_a_step_all_the_same(tmp_path):
    write(tmp_path / "s", "s", [""] * 100, 50)
    batch = next(Loader(Mixture([Source("s", str(tmp_path / "s"))], seed=1), PACK))
    assert len(batch.sample_ids) == 512
    assert batch.global_valid_tokens == 1, "a divisor, though no label counts"
    assert (batch["labels"] == -100).all()


def test_too_many_ranks_are_refused_before_anything_is_read():
    with pytest.raises(PackError, match="9 ranks need one each"):
        Loader(Mixture([Source("a", "/nowhere")], seed=1), PACK, 0, 9)


def test_a_closed_loader_refuses(folder):
    (loader,) = loaders(folder, 1)
    with loader:
        next(loader)
    loader.close()
    with pytest.raises(LoaderClosedError, match="closed; make a new one"):
        next(loader)


def test_a_loader_opened_before_a_fork_refuses_in_the_child(folder, monkeypatch):
    (loader,) = loaders(folder, 1)
    next(loader)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(LoaderUsageError, match="opened before a fork"):
        next(loader)
