"""Optimizer state through a committed checkpoint: what was saved comes back, what was absent stays absent. (CKP-11 to 14)"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from surefoot import ckpt
from surefoot.ckpt.errors import StateError, StateMismatchError
from surefoot.ckpt.live.optimizer_load import like_parameter
from surefoot.ckpt.live.optimizers import settings_of
from surefoot.ckpt.manifest import Manifest, decode, encode, manifest_key
from surefoot.ckpt.state import collect
from surefoot.ckpt.store import open_store

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


@pytest.fixture(params=["files", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "root") if request.param == "files" else request.getfixturevalue("s3_url")


@pytest.fixture
def files(tmp_path: Path) -> str:
    return str(tmp_path / "root")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)  # never used: no gradient
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.emb(x)))


def adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Three groups that differ in everything, the last one empty."""
    ps = list(params)
    groups = [
        {"params": [p for p in ps if p.ndim > 1], "lr": 0.1, "weight_decay": 0.5},
        {
            "params": [p for p in ps if p.ndim == 1],
            "lr": 0.2,
            "betas": (0.5, 0.6),
            "eps": 1e-3,
            "amsgrad": True,
        },
        {"params": [], "lr": 0.3, "betas": (0.1, 0.2), "note": "mine"},
    ]
    return torch.optim.AdamW(groups)


def build(make: Make = adamw) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Net()
    return {"model": model, "optim": make(model.parameters())}


def loss_of(state: dict[str, Any]) -> torch.Tensor:
    return state["model"](torch.arange(6)).square().mean()


def train(state: dict[str, Any], steps: int = 1) -> list[float]:
    losses: list[float] = []

    def closure() -> float:
        state["optim"].zero_grad()
        loss = loss_of(state)
        loss.backward()
        losses.append(loss.item())
        return losses[-1]

    for _ in range(steps):
        state["optim"].step(closure)
    return losses


def typed(value: Any) -> Any:
    """A value spelt out with types and bits, to be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().reshape(-1).tolist()
    if isinstance(value, dict):
        return {k: typed(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [typed(v) for v in value]
    return type(value), value


def told(optim: torch.optim.Optimizer) -> Any:
    return typed(optim.state_dict())


def through(root: str, state: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    ckpt.save(root, 1, state)
    ckpt.load(root, fresh)
    return fresh


def test_groups_have_their_own_settings_back(root: str) -> None:
    """CKP-11 (another DP size: tests/integration): three groups, one of them empty."""
    state = build()
    train(state, 2)
    state["optim"].param_groups[2]["lr"] = 0.7
    other = build()
    for group in other["optim"].param_groups:
        group.update(lr=9.0, betas=(0.0, 0.0), eps=1.0)
    fresh = through(root, state, other)
    assert told(fresh["optim"]) == told(state["optim"])
    assert [g["lr"] for g in fresh["optim"].param_groups] == [0.1, 0.2, 0.7]
    assert [g["betas"] for g in fresh["optim"].param_groups] == [(0.9, 0.999), (0.5, 0.6), (0.1, 0.2)]
    assert fresh["optim"].param_groups[2]["note"] == "mine"
    assert train(fresh, 3) == train(state, 3)


def test_a_new_rate_is_set_after_the_load(files: str) -> None:
    """As docs/checkpoint.md says: a constructor's settings give way to the saved ones, and what is set afterwards counts."""

    def scheduled(rate: float) -> dict[str, Any]:
        state = build(lambda ps: torch.optim.AdamW(ps, lr=rate, weight_decay=rate))
        return state | {"sched": torch.optim.lr_scheduler.LambdaLR(state["optim"], lambda n: 0.5**n)}

    state = scheduled(0.8)
    train(state)
    state["sched"].step()
    fresh = through(files, state, scheduled(0.1))
    optim, sched = fresh["optim"], fresh["sched"]
    assert [(g["lr"], g["weight_decay"]) for g in optim.param_groups] == [(0.4, 0.8)]
    for group in optim.param_groups:
        group["lr"] = 0.1
    sched.base_lrs = [0.4] * len(optim.param_groups)
    before = fresh["model"].head.weight.detach().clone()
    optim.param_groups[0]["weight_decay"] = 0.0
    train(fresh)
    moved = (fresh["model"].head.weight - before).abs().max().item()
    assert 0 < moved < 0.2, "a step of Adam is as long as the rate, about"
    sched.step()
    assert optim.param_groups[0]["lr"] == 0.1, "0.4, halved twice"


def test_absent_state_stays_absent(root: str) -> None:
    """CKP-12: a parameter that never had a gradient, one frozen later, one with partial state; and training goes on."""
    state = build()
    train(state, 2)
    model, optim = state["model"], state["optim"]
    model.inner.bias.requires_grad_(False)  # frozen: keeps its state, which ages no more
    train(state)
    del optim.state[model.emb.weight]["exp_avg_sq"]  # partial
    fresh = build()
    train(fresh, 1)
    fresh["model"].inner.bias.requires_grad_(False)
    through(root, state, fresh)
    for name, p in fresh["model"].named_parameters():
        there = optim.state.get(dict(model.named_parameters())[name], {})
        assert typed(fresh["optim"].state.get(p, {})) == typed(there), name
    assert fresh["model"].spare.weight not in fresh["optim"].state
    assert fresh["optim"].state[fresh["model"].inner.bias]["step"] == 2
    assert set(fresh["optim"].state[fresh["model"].emb.weight]) == {"step", "exp_avg"}
    for s in (state, fresh):
        del s["optim"].state[s["model"].emb.weight]  # what is partial here cannot be stepped with
        s["optim"].param_groups[0]["params"].pop(0)
    assert train(fresh, 2) == train(state, 2)
    assert fresh["model"].spare.weight not in fresh["optim"].state


def test_a_checkpoint_without_the_optimizer(root: str) -> None:
    """CKP-13: an error that says so; or, where asked for, new state whose first step is 1."""
    state = build()
    train(state, 3)
    ckpt.save(root, 1, {"model": state["model"]})
    fresh = build()
    with pytest.raises(
        StateMismatchError,
        match=r"optim is not in the checkpoint \(an optimizer, of which nothing was saved\)",
    ):
        ckpt.load(root, fresh)
    assert not fresh["optim"].state
    for live in (fresh, state):  # without state, and with state of steps that do not count any more
        loaded = ckpt.load(root, live, strict=False)
        assert loaded is not None
        assert loaded.missing == ("optim (an optimizer, of which nothing was saved)",)
        assert not live["optim"].state, "no step was taken"
        train(live)
        assert {float(s["step"]) for s in live["optim"].state.values()} == {1.0}


def test_a_key_missing_in_the_second_group(files: str) -> None:
    """CKP-14: the error names key, group and object; a lenient load keeps the live value and tells the same."""
    state = build()
    del state["optim"].param_groups[1]["betas"]
    ckpt.save(files, 1, state)
    fresh = build()
    words = (
        r"optim\.param_groups\.1\.betas.*a setting of parameter group 1 of optim, an AdamW; the groups are in "
        r"gen-0001/step-0000000001/manifest\.json"
    )
    with pytest.raises(StateMismatchError, match=words):
        ckpt.load(files, fresh)
    loaded = ckpt.load(files, fresh, strict=False)
    assert loaded is not None
    assert len(loaded.missing) == 1
    assert "optim.param_groups.1.betas" in loaded.missing[0]
    assert fresh["optim"].param_groups[1]["betas"] == (0.5, 0.6)


@pytest.mark.parametrize("stepped", [False, True])
def test_an_optimizer_of_another_kind_is_said_to_be_one_once(files: str, stepped: bool) -> None:
    """By what it keeps, and not of every setting of every group."""
    saved = build(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
    train(saved)
    ckpt.save(files, 1, saved)
    live = build(torch.optim.AdamW)
    if stepped:
        train(live)
    with pytest.raises(StateMismatchError) as refused:
        ckpt.load(files, live)
    said = str(refused.value)
    assert (
        "optim, an AdamW, is of another kind than the optimizer that was saved: the checkpoint's optimizer state has {momentum_buffer}"
        in said
    )
    assert (", and here it has {exp_avg, exp_avg_sq, step}" in said) is stepped
    assert "; settings there are dampening, momentum, nesterov and no amsgrad, betas," in said
    assert "a setting of parameter group" not in said


@pytest.mark.parametrize("stepped", [False, True])
def test_of_another_kind_a_lenient_load_takes_nothing(files: str, stepped: bool) -> None:
    """Neither settings nor state that it could not use; its own state is of other parameters now, and goes."""
    saved = build(lambda ps: torch.optim.AdamW(ps, lr=0.5))
    train(saved)
    ckpt.save(files, 1, saved)
    live = build(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
    settings = typed([settings_of(g) for g in live["optim"].param_groups])
    if stepped:
        train(live)
    loaded = ckpt.load(files, live, strict=False)
    assert loaded is not None
    assert typed([settings_of(g) for g in live["optim"].param_groups]) == settings
    assert not live["optim"].state
    (missing,) = loaded.missing
    assert missing.startswith("optim (a SGD, of another kind than the optimizer that was saved: ")
    left = {n.split(" ")[0] for n in loaded.left_over}
    assert {"optim.param_groups", "optim.params.model.head.weight"} <= left
    assert torch.equal(live["model"].head.weight, saved["model"].head.weight)
    train(live)
    assert {key for s in live["optim"].state.values() for key in s} == {"momentum_buffer"}


def test_what_somebody_added_to_a_group_is_no_other_kind(files: str) -> None:
    saved, live = build(torch.optim.AdamW), build(torch.optim.AdamW)
    train(saved)
    saved["optim"].param_groups[0]["mine"] = 1
    live["optim"].param_groups[0]["yours"] = 2
    ckpt.save(files, 1, saved)
    loaded = ckpt.load(files, live, strict=False)
    assert loaded is not None
    assert [n.split(" ")[0] for n in loaded.missing] == ["optim.param_groups.0.yours"]
    assert live["optim"].param_groups[0]["mine"] == 1
    assert typed(list(live["optim"].state.values())) == typed(list(saved["optim"].state.values()))


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": state["model"], "optim": state["optim"].state_dict()}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("stepped", [True, False])
def test_parameters_by_number_go_into_no_optimizer(
    files: str, strict: bool, rate: Any, stepped: bool
) -> None:
    """What torch's state_dict() gives was saved: refused in both modes, and the optimizer still has its parameters."""
    state = build(lambda ps: torch.optim.AdamW(ps, lr=rate))
    if stepped:
        train(state)
    ckpt.save(files, 1, numbered(state))
    live = build(torch.optim.AdamW)
    before, parameters = told(live["optim"]), live["optim"].param_groups[0]["params"]
    with pytest.raises(
        StateMismatchError, match=r"optim was saved as the mapping that optimizer\.state_dict\(\) gives"
    ) as no:
        ckpt.load(files, live, strict=strict)
    assert "optim.param" not in str(no.value), "one thing is said of it"
    assert told(live["optim"]) == before
    assert live["optim"].param_groups[0]["params"] is parameters


def test_parameters_by_number_come_back_as_the_refusal_says(files: str) -> None:
    state = build(torch.optim.AdamW)
    for p in state["model"].parameters():
        p.grad = torch.ones_like(p)
    state["optim"].step()
    ckpt.save(files, 1, numbered(state))
    live = build(torch.optim.AdamW)
    for p in live["model"].parameters():
        p.grad = torch.zeros_like(p)
    live["optim"].step()
    through_it = numbered(live)
    ckpt.load(files, through_it)
    live["optim"].load_state_dict(through_it["optim"])
    assert told(live["optim"]) == told(state["optim"])
    assert train(live, 2) == train(state, 2)


def test_a_mapping_by_name_is_handed_on_to_torch(files: str) -> None:
    state, live = build(torch.optim.AdamW), build(torch.optim.AdamW)
    train(state)
    ckpt.save(
        files, 1, {"model": state["model"], "optim": get_optimizer_state_dict(state["model"], state["optim"])}
    )
    with pytest.raises(StateMismatchError, match="hand that to set_optimizer_state_dict"):
        ckpt.load(files, live, strict=False)


def test_parameters_by_number_are_warned_of_once(files: str, caplog: pytest.LogCaptureFixture) -> None:
    state = build(torch.optim.AdamW)
    fresh = {"model": state["model"], "fresh_optim": state["optim"].state_dict()}
    for step in (1, 2):
        ckpt.save(files, step, fresh)
    ckpt.save(files, 3, {"model": state["model"], "optim": state["optim"]})
    said = [r.getMessage() for r in caplog.records if "state_dict" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("fresh_optim is what optimizer.state_dict() gives: parameters are numbered")


def tamper(root: str, change: Callable[[Manifest], Manifest]) -> None:
    store = open_store(root)
    key = manifest_key(1, 1)
    manifest = decode(Manifest, store.read(key), key=key)
    store.delete(key)
    store.create(key, encode(change(manifest)))


def test_state_missing_for_a_parameter_of_the_second_group(files: str) -> None:
    """CKP-14: the whole state of one parameter."""
    state = build()
    train(state)
    ckpt.save(files, 1, state)
    gone = "optim.params.model.inner.bias"
    kept = lambda m: {k: v for k, v in m.items() if not k.startswith(gone)}  # noqa: E731
    tamper(files, lambda m: msgspec.structs.replace(m, values=kept(m.values)))
    fresh = build()
    with pytest.raises(
        StateMismatchError,
        match=rf"{gone} is not in the checkpoint \(the state of a parameter of group 1 of optim, an AdamW",
    ):
        ckpt.load(files, fresh)
    train(fresh)
    loaded = ckpt.load(files, fresh, strict=False)
    assert loaded is not None
    assert loaded.missing == (f"{gone} (the state of a parameter of group 1 of optim, an AdamW)",)
    assert fresh["model"].inner.bias not in fresh["optim"].state, "of other steps than its parameter"
    assert any(n.startswith(f"{gone}.exp_avg (float32[4], in gen-0001/") for n in loaded.left_over)


def test_a_lenient_load_tells_all(files: str) -> None:
    """Keys, groups and files of what was missing or left over."""
    state = build()
    train(state)
    ckpt.save(files, 1, state | {"ema": {"w": torch.ones(2)}, "note": "x"})
    fresh = build()
    fresh["model"].more = nn.Linear(1, 1)
    fresh["optim"].param_groups[0]["params"].append(fresh["model"].more.weight)
    loaded = ckpt.load(files, fresh, strict=False)
    assert loaded is not None
    assert loaded.missing == (
        "model.more.weight",
        "model.more.bias",
        "optim.params.model.more.weight (the state of a parameter of group 0 of optim, an AdamW)",
    )
    assert [n.split(", in")[0] for n in loaded.left_over] == ["ema.w (float32[2]", "note (a value"]
    assert loaded.left_over[0].endswith(".safetensors)")
    assert loaded.left_over[1].endswith("manifest.json)")
    assert fresh["model"].more.weight not in fresh["optim"].state
    assert len(fresh["optim"].state) == len(state["optim"].state)


def test_groups_built_otherwise_are_named(files: str) -> None:
    ckpt.save(files, 1, build())
    with pytest.raises(
        StateMismatchError, match=r"optim: model\.inner\.bias is in parameter group 1 of the checkpoint"
    ):
        ckpt.load(
            files, build(lambda ps: torch.optim.AdamW([{"params": list(ps)}, {"params": []}, {"params": []}]))
        )
    with pytest.raises(
        StateMismatchError,
        match=r"optim has 1 parameter groups here and 3 in the checkpoint: build the .* or leave",
    ):
        ckpt.load(files, build(torch.optim.AdamW))


# ---------------------------------------------------------------- every kind of optimizer


class Nested(torch.optim.Optimizer):
    """State of all kinds: lists and dicts of tensors, None, numbers, one tensor for all, and keys that are no parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.05), "schedule": {"warmup": [1, 2], 7: (None, "x")}})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        states: Any = self.state
        general = states.setdefault(
            "global", {"seen": torch.zeros(()), "log": [len(self.param_groups), None]}
        )
        general["seen"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                history = state.setdefault("history", [])
                history.append(p.grad.clone())
                state["stats"] = {
                    "norm": p.grad.norm(),
                    "factored": [p.grad.mean(0), None],
                    "count": len(history),
                }
                state["clock"] = general["seen"]
                p.data.sub_(group["lr"] * (1 + general["seen"]) * sum(history))
        return loss


class Bare(torch.optim.Optimizer):
    """Its state of a parameter is the tensor itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p] = p.grad + self.state[p] if p in self.state else p.grad.clone()
                p.data.sub_(self.param_groups[0]["lr"] * self.state[p])
        return loss


OPTIMIZERS: dict[str, Make] = {
    "adam, fused": lambda ps: torch.optim.Adam(ps, fused=True),
    "adam, foreach": lambda ps: torch.optim.Adam(ps, foreach=True),
    "adamw, lr a tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), amsgrad=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd, momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda ps: torch.optim.LBFGS(
        ps, lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
    ),
    "nested": Nested,
    "bare": Bare,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(files: str, kind: str) -> None:
    """Into objects without state, and over those of a later step."""
    state = build(OPTIMIZERS[kind])
    train(state, 3)
    saved = told(state["optim"])
    fresh = through(files, state, build(OPTIMIZERS[kind]))
    assert told(fresh["optim"]) == saved
    expected = train(state, 2)
    assert train(fresh, 2) == expected
    ckpt.load(files, state)
    assert told(state["optim"]) == saved
    assert train(state, 2) == expected


def test_a_capturable_step_lies_beside_its_parameter(files: str) -> None:
    """It cannot be stepped on the CPU; what it keeps is the same. Meta stands for a device that is not the CPU."""
    state = build(lambda ps: torch.optim.Adam(ps))
    train(state)
    state["optim"].param_groups[0]["capturable"] = True
    fresh = through(files, state, build(lambda ps: torch.optim.Adam(ps, capturable=True)))
    assert told(fresh["optim"]) == told(state["optim"])
    like = like_parameter(torch.empty(3, device="meta"), (), torch.float32, torch.device("meta"))
    assert like.device.type == "meta"


def test_one_tensor_for_all_parameters_is_one_again(files: str) -> None:
    """Sharing inside of optimizer state is kept, and stored once."""
    state = build(Nested)
    train(state)
    found = collect(state)
    assert [n for n in found.leaves if n.endswith((".clock", ".seen"))] == [
        "optim.params.model.emb.weight.clock"
    ]
    fresh = through(files, state, build(Nested))
    clocks = [s["clock"] for k, s in fresh["optim"].state.items() if k != "global"]
    assert {id(c) for c in clocks} == {id(fresh["optim"].state["global"]["seen"])}


def test_a_parameter_taken_out_of_its_group_keeps_its_state(files: str) -> None:
    state = build(lambda ps: torch.optim.AdamW([{"params": [p]} for p in ps]))
    train(state)
    for s in (state, fresh := build(lambda ps: torch.optim.AdamW([{"params": [p]} for p in ps]))):
        s["optim"].param_groups[0]["params"].clear()
    through(files, state, fresh)
    for s in (state, fresh):
        s["optim"].param_groups[0]["params"].append(s["model"].emb.weight)
    assert told(fresh["optim"]) == told(state["optim"])
    assert fresh["optim"].state[fresh["model"].emb.weight]["step"] == 1


def test_several_optimizers_of_one_model(files: str) -> None:
    def two() -> dict[str, Any]:
        state = build(lambda ps: torch.optim.AdamW(list(ps)[:2]))
        state["second"] = torch.optim.SGD(state["model"].inner.parameters(), lr=0.5, momentum=0.9)
        return state

    def step(state: dict[str, Any]) -> None:
        train(state)
        state["second"].step()

    state = two()
    step(state)
    fresh = through(files, state, two())
    assert told(fresh["second"]) == told(state["second"])
    assert told(fresh["optim"]) == told(state["optim"])


def test_settings_that_cannot_be_stored_are_named() -> None:
    state = build()
    state["optim"].param_groups[1]["lr_of"] = lambda step: 0.1
    with pytest.raises(
        StateError, match=r"^optim\.param_groups\.1\.lr_of: a value of type builtins\.function"
    ):
        collect(state)


def test_a_parameter_of_no_module_is_named() -> None:
    optim = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(StateError, match=r"o\.param_groups\.0\.params\.0 .*belongs to no module"):
        collect({"o": optim})


def test_state_from_a_load_in_inference_mode_can_be_trained(files: str) -> None:
    """As where a trainer loads in the middle of an evaluation."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, fresh = adamw(model.parameters()), adamw(other.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        ckpt.save(files, 1, {"model": model, "optim": optimizer})
        ckpt.load(files, {"model": other, "optim": fresh})
    for m, o in ((model, optimizer), (other, fresh)):
        o.zero_grad()
        m(torch.ones(1, 3)).sum().backward()
        o.step()
    assert torch.equal(model.weight, other.weight)
    assert fresh.state[other.weight]["step"] == 2
