"""Loads of a part: `skip`, and lenient loads that find nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot import ckpt
from surefoot.ckpt.errors import StateMismatchError
from surefoot.ckpt.format.names import stands_in


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def build(classes: int = 3, groups: int = 1) -> dict[str, Any]:
    """A body and a head; with two groups each has its own."""
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, classes), "head2": nn.Linear(2, 2)})
    of_head = [p for n, p in model.named_parameters() if n.startswith("head.")]
    others = [p for n, p in model.named_parameters() if not n.startswith("head.")]
    split = [{"params": others}, {"params": of_head}] if groups == 2 else [{"params": others + of_head}]
    return {"model": model, "optim": torch.optim.AdamW(split, lr=0.5), "epoch": 0}


def train(state: dict[str, Any]) -> None:
    for i, p in enumerate(state["model"].parameters()):
        p.grad = torch.full_like(p, i + 1.0)
    state["optim"].step()


def state_of(state: dict[str, Any], name: str) -> dict[str, Any]:
    return state["optim"].state.get(state["model"].get_parameter(name), {})


@pytest.fixture
def saved(root: str) -> dict[str, Any]:
    state = build() | {"epoch": 7}
    train(state)
    ckpt.save(root, 1, state)
    return state


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("place", ["model.head", "model.head."])
@pytest.mark.parametrize("trained", [True, False])
def test_a_head_of_another_shape_is_left_as_it_is_and_the_body_keeps_its_moments(
    root: str, saved: dict[str, Any], strict: bool, place: str, trained: bool
) -> None:
    live = build(classes=5)
    if trained:
        train(live)
    head = live["model"]["head"].weight.detach().clone()
    moments = {k: v.clone() for k, v in state_of(live, "head.weight").items()}
    loaded = ckpt.load(root, live, strict=strict, skip=[place])
    assert loaded is not None
    assert (loaded.missing, loaded.left_over) == ((), ())
    assert torch.equal(live["model"]["head"].weight, head)
    assert state_of(live, "head.weight").keys() == moments.keys()
    assert all(torch.equal(v, moments[k]) for k, v in state_of(live, "head.weight").items())
    for name in ("body.weight", "head2.bias"):  # whose name begins alike, and is another
        assert torch.equal(live["model"].get_parameter(name), saved["model"].get_parameter(name))
        theirs = state_of(saved, name)
        assert all(torch.equal(v, theirs[k]) for k, v in state_of(live, name).items())
        assert state_of(live, name).keys() == theirs.keys() != set()
    assert live["epoch"] == 7
    train(live)


def test_what_is_skipped_may_be_on_one_side_alone(root: str, saved: dict[str, Any]) -> None:
    """A head under a new name: strict for all the rest."""
    live = build()
    live["model"]["classifier"] = live["model"]["head"]
    del live["model"]["head"]
    ckpt.load(root, live, skip=["model.head", "model.classifier"])
    assert not state_of(live, "classifier.weight")
    assert torch.equal(live["model"]["body"].weight, saved["model"]["body"].weight)
    with pytest.raises(StateMismatchError, match=r"model\.classifier\.weight"):
        ckpt.load(root, live, skip=["model.head"])
    with pytest.raises(StateMismatchError, match=r"model\.head\.weight"):
        ckpt.load(root, live, skip=["model.classifier"])


def test_groups_of_their_own_get_their_settings_back(root: str) -> None:
    state = build(groups=2)
    train(state)
    state["optim"].param_groups[1]["lr"] = 0.25
    ckpt.save(root, 1, state)
    live = build(classes=5, groups=2)
    ckpt.load(root, live, skip=["model.head"])
    assert [g["lr"] for g in live["optim"].param_groups] == [0.5, 0.25]
    assert not state_of(live, "head.weight")
    assert state_of(live, "body.weight")


@pytest.mark.parametrize(
    ("skip", "untouched"),
    [(["epoch"], "epoch"), (["optim"], "optim"), (["model"], "model"), (("model", "optim", "epoch"), "")],
)
def test_values_optimizers_and_modules_are_skipped_whole(
    root: str, saved: dict[str, Any], skip: Any, untouched: str
) -> None:
    live = build()
    before = {n: p.detach().clone() for n, p in live["model"].named_parameters()}
    ckpt.load(root, live, skip=skip)
    everything = not untouched
    assert (live["epoch"] == 0) is (everything or untouched == "epoch")
    # An optimizer's state of parameters that are skipped is skipped with them.
    assert (not live["optim"].state) is (everything or untouched in ("optim", "model"))
    same = all(torch.equal(p, before[n]) for n, p in live["model"].named_parameters())
    assert same is (everything or untouched == "model")


def test_a_tied_tensor_is_filled_by_the_name_that_is_not_skipped(root: str) -> None:
    def tied() -> dict[str, Any]:
        model = nn.ModuleDict({"emb": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        model["head"].weight = model["emb"].weight
        return {"model": model, "optim": torch.optim.AdamW(model.parameters())}

    state, live, untied = tied(), tied(), tied()
    train(state)
    ckpt.save(root, 1, state)
    ckpt.load(root, live, skip=["model.head"])
    assert torch.equal(live["model"]["emb"].weight, state["model"]["emb"].weight)
    untied["model"]["head"] = nn.Linear(4, 9, bias=False)
    ckpt.load(root, untied, skip=["model.head"])
    assert torch.equal(untied["model"]["emb"].weight, state["model"]["emb"].weight)
    assert state_of(untied, "emb.weight")["step"] == 1


@pytest.mark.parametrize("skipped", ["emb", "head"])
@pytest.mark.parametrize("tied_there", [True, False])
def test_the_moments_of_a_tied_tensor_come_with_its_values(root: str, skipped: str, tied_there: bool) -> None:
    """Both are those of the name that is not skipped."""

    def build(tied: bool) -> dict[str, Any]:
        model = nn.ModuleDict({"emb": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        if tied:
            model["head"].weight = model["emb"].weight
        return {"model": model, "optim": torch.optim.AdamW(model.parameters())}

    state, live = build(tied_there), build(tied=True)
    train(state)
    ckpt.save(root, 1, state)
    ckpt.load(root, live, skip=[f"model.{skipped}"])
    wanted = "emb.weight" if skipped == "head" or tied_there else "head.weight"
    assert torch.equal(live["model"].get_parameter("emb.weight"), state["model"].get_parameter(wanted))
    assert torch.equal(state_of(live, "emb.weight")["exp_avg"], state_of(state, wanted)["exp_avg"])


@pytest.mark.parametrize(
    ("place", "lr", "momentum"),
    [("optim.param_groups", 0.1, 0.2), ("optim.param_groups.0.lr", 0.1, 0.9), ("model", 0.5, 0.9)],
)
def test_settings_of_optimizers_are_skipped_by_their_names(
    root: str, place: str, lr: float, momentum: float
) -> None:
    def build(lr: float, momentum: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)}

    state, live = build(0.5, 0.9), build(0.1, 0.2)
    train(state)
    ckpt.save(root, 1, state)
    ckpt.load(root, live, skip=[place])
    (group,) = live["optim"].param_groups
    assert (group["lr"], group["momentum"]) == (lr, momentum)
    assert bool(state_of(live, "weight")) is (place != "model")


def test_groups_that_are_skipped_may_be_other_groups(root: str, saved: dict[str, Any]) -> None:
    live = build(groups=2)
    ckpt.load(root, live, skip=["optim.param_groups"])
    assert torch.equal(state_of(live, "head.weight")["exp_avg"], state_of(saved, "head.weight")["exp_avg"])
    with pytest.raises(StateMismatchError, match="2 parameter groups here and 1 in the checkpoint"):
        ckpt.load(root, build(groups=2))


@pytest.mark.parametrize("place", ["mine", "mine.a", "mine@rank0", "mine@rank0.a"])
def test_what_belongs_to_one_rank_is_skipped_by_the_name_it_has_in_the_state(root: str, place: str) -> None:
    ckpt.save(root, 1, {"w": torch.ones(2), "mine": ckpt.PerRank({"a": 1})})
    live = {"w": torch.zeros(2), "mine": ckpt.PerRank({"a": 0})}
    ckpt.load(root, live, skip=[place])
    assert live["mine"].value == {"a": 0}
    assert torch.equal(live["w"], torch.ones(2))


@pytest.mark.parametrize("skip", ["model.head", [3], [""], ["."]])
def test_what_is_no_list_of_names(root: str, saved: dict[str, Any], skip: Any) -> None:
    with pytest.raises(ValueError, match="a list of names"):
        ckpt.load(root, build(), skip=skip)


def test_a_load_of_a_part_verifies_nothing(root: str, saved: dict[str, Any]) -> None:
    """What was not read is not known to be sound."""
    ckpt.load(root, build(), skip=["model.head"])
    assert not list(Path(root).rglob("verified.json"))
    ckpt.load(root, build())
    assert len(list(Path(root).rglob("verified.json"))) == 1


def test_names_below_a_name() -> None:
    assert stands_in("a.b", ["a.b"])
    assert stands_in("a.b.c", ["x", "a.b."])
    assert not stands_in("a.bc", ["a.b"])
    assert not stands_in("a", ["a.b"])
    assert not stands_in("a", [])
    assert stands_in("a.b@rank12.c", ["a.b"])
    assert stands_in("a.b@rank12.c", ["a.b.c"])
    assert stands_in("a.b@rank12.c", ["a.b@rank12"])
    assert not stands_in("a.b@rank12", ["a.b@rank1"])


# ---------------------------------------------------------------- nothing in common


def test_a_lenient_load_that_finds_no_tensor_is_refused(root: str, saved: dict[str, Any]) -> None:
    net = build()["model"]
    before = net["body"].weight.detach().clone()
    for state in ({"net": net}, {"net": net, "epoch": 0}, {"net": net, "model": {}}):
        with pytest.raises(
            StateMismatchError,
            match=r"it has net\.body\.bias, net\.body\.weight, net\.head\.bias and 3 more, and the checkpoint model\.body\.bias, ",
        ) as refused:
            ckpt.load(root, state, strict=False)
        assert "strict=False" not in str(refused.value), "it is what was said"
    assert torch.equal(net["body"].weight, before)


def test_a_lenient_load_of_values_alone_is_none_that_finds_nothing(root: str, saved: dict[str, Any]) -> None:
    state = {"epoch": 0, "age": 3}
    ckpt.load(root, state, strict=False)
    assert state == {"epoch": 7, "age": 3}
    assert ckpt.load(root, {"age": 3}, strict=False) is not None
    assert ckpt.load(root, {}, strict=False) is not None
