"""The example's GPT, saved by a plain DDP script and by FSDP2 x TP, loads in the other; its export gives the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

RANKS = {"ddp": 2, "fsdp2 x tp": 4}


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("ddp", "fsdp2 x tp"), ("fsdp2 x tp", "ddp")])
def test_a_gpt_goes_from_one_layout_to_the_other(
    ranks: Any, tmp_path: Path, saved_by: str, loaded_by: str
) -> None:
    root = str(tmp_path / "root")
    saved = ranks(RANKS[saved_by], "ckpt_gpt:train_and_save", root, saved_by)
    loaded = ranks(RANKS[loaded_by], "ckpt_gpt:load_and_go_on", root, loaded_by)
    for here in (*saved[1:], *loaded):
        assert here["digests"] == saved[0]["digests"], "every bit of parameters and moments"
        assert here["lr"] == saved[0]["lr"]
        assert_close(here["logits"], saved[0]["logits"])
    again = ranks(RANKS[saved_by], "ckpt_gpt:load_and_go_on", root, saved_by)
    assert again[0]["digests"] != saved[0]["digests"]
    (exported,) = ranks(1, "ckpt_gpt:export_and_run", root, str(tmp_path / "out"))
    assert exported["files"] > 2
    assert exported["exported"] == exported["loaded"]


def test_a_ddp_script_and_its_export_give_the_very_same_logits(ranks: Any, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    saved = ranks(2, "ckpt_gpt:train_and_save", root, "ddp")
    (exported,) = ranks(1, "ckpt_gpt:export_and_run", root, str(tmp_path / "out"))
    assert exported["exported"] == saved[0]["logits"] == saved[1]["logits"]


def assert_close(a: list[Any], b: list[Any]) -> None:
    """Row-parallel sums are added in another order."""
    for x, y in zip(flat(a), flat(b), strict=True):
        assert x == pytest.approx(y, rel=1e-3, abs=1e-4)


def flat(nested: Any) -> list[float]:
    return [x for inner in nested for x in flat(inner)] if isinstance(nested, list) else [nested]


def test_a_folder_of_torch_dcp_goes_in_and_out_at_any_layout(ranks: Any, tmp_path: Path) -> None:
    """Shards that torch wrote become pieces; what is exported loads there at another layout. Bit for bit."""
    theirs, root, again = (str(tmp_path / name) for name in ("theirs", "root", "again"))
    saved = ranks(4, "ckpt_gpt:train_and_save_with_torch", theirs, "fsdp2 x tp")
    ranks(1, "ckpt_gpt:import_from_torch", theirs, root)
    assert ranks(2, "ckpt_gpt:load_model_and_optimizer", root, "ddp") == saved[:2]
    ranks(1, "ckpt_gpt:export_to_torch", root, again)
    assert ranks(2, "ckpt_gpt:load_with_torch", again, "ddp") == saved[:2]
