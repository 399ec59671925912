"""State of several ranks: what each keeps for itself, and what should be the same and is not. (CKP-05)"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot import ckpt

pytestmark = pytest.mark.slow

Ranks = Callable[..., list[Any]]

WORDS = {
    "tensor": r"replicas differ.* t\[0:5\].*rank 1",
    "one bit": r"replicas differ.* t\[0:2\].*rank 1",
    "number": r"replicas differ.* t\[\].*rank 1",
    "in a value": r"replicas differ.* h\.0\.t\[0:2\].*rank 1",
    "shape": r"t is float32\[.\] on rank . and float32\[.\] on rank",
    "type": r"t is (b?float16)\[2\] on rank . and b?float16\[2\] on rank",
    "value": r"replicas differ: n\.a\.1 is False on ranks \[0, 2\] and True on ranks \[1\].*PerRank",
    "value's type": r"replicas differ: n is .*tuple.* on ranks \[0, 2\] and 1\.0 on ranks \[1\]",
    "state_dict": r"replicas differ: h\.deep\.1\.seed is 7 on ranks \[0, 2\] and 8 on ranks \[1\]",
    "generator": r"replicas differ.* rng\[0:\d+\].*rank 1",
    "group": r"replicas differ: optim\.param_groups\.0\.lr is 0\.1 on ranks \[0, 2\] and 1\.1 on ranks \[1\]",
    "kind": "",
    "tie": r"replicas differ: b is tied to a on rank 1 and a tensor of its own on ranks \[0, 2\]",
}
"""What the error says. Empty: it need not be one, if nothing is lost."""


def require_refused(ranks: Ranks, root: str, kinds: list[str]) -> None:
    for told in ranks(3, "state_acts:save_different", root, kinds):
        for i, kind in enumerate(kinds):
            if WORDS[kind]:
                assert re.search(WORDS[kind], told[kind]), (kind, told[kind])
                assert ckpt.steps(f"{root}/{i}") == [], "nothing was committed"


def test_what_differs_between_ranks_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """CKP-05: in every form in which content can differ under one key; never silently rank 0's."""
    require_refused(ranks, str(tmp_path), list(WORDS))


@pytest.mark.s3
def test_what_differs_between_ranks_is_refused_on_s3(ranks: Ranks, s3_url: str) -> None:
    """CKP-05: what is found before anything is stored, and what only the parts tell."""
    require_refused(ranks, s3_url, ["tensor", "shape", "value", "tie"])


@pytest.mark.parametrize("where", ["files", pytest.param("s3", marks=pytest.mark.s3)])
def test_each_rank_has_its_own_back(
    ranks: Ranks, tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    """CKP-05, stored per rank where the caller asked for that: 3 ranks, and then 3, 2, and 4."""
    root = str(tmp_path) if where == "files" else request.getfixturevalue("s3_url")
    drawn = ranks(3, "state_acts:save_own", root)
    assert len({tuple(d) for d in drawn}) == 3, "they do differ"
    for world in (3, 2):
        for rank, told in enumerate(ranks(world, "state_acts:load_own", root, True)):
            assert told["error"] == ""
            assert told["drawn"] == drawn[rank]
            assert told["ids"] == 10 + rank
            assert told["t"] == [10.0 + rank] * (10 + rank)
    refused = ranks(4, "state_acts:load_own", root, True)
    assert re.search(r"rng@rank3.* are not in the checkpoint \(rank 3's own", refused[3]["error"])
    assert all("rank 3" in told["error"] for told in refused), "all ranks, or none"
    assert all(told["error"].startswith("StateMismatchError: ") for told in refused), "and all for one reason"
    lenient = ranks(4, "state_acts:load_own", root, False)
    assert [told["ids"] for told in lenient] == [10, 11, 12, 10]
    assert lenient[3]["t"] == [0.0] * 13, "left as it was"
    assert lenient[3]["drawn"] == torch.rand(3, generator=torch.Generator().manual_seed(10)).tolist()
    assert lenient[0]["missing"] == ()
    missing = sorted(n.split(" ")[0] for n in lenient[3]["missing"])
    assert missing == ["rng@rank3", "seen@rank3.ids", "seen@rank3.t"]
    assert [told["left_over"] for told in lenient] == [()] * 4


def test_names_are_the_same_behind_ddp_and_compile(ranks: Ranks, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ckpt.save(str(tmp_path), 1, {"model": model})
    expected = [p.sum().item() for p in model.parameters()]
    assert ranks(2, "state_acts:load_into_ddp", str(tmp_path)) == [expected] * 2
