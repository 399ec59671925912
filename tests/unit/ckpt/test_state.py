"""Live state to names and back, in one process: types, views, ties, optimizers, wrappers, and what is refused."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.ckpt import tiers
from surefoot.ckpt.errors import ImageError, SlotTooSmallError, StateError, StateMismatchError
from surefoot.ckpt.manifest import PAGE_NBYTES
from surefoot.ckpt.state import collect


def stager(state: Mapping[str, Any]) -> tiers.Stager:
    return tiers.Stager(state, rank=0, world_size=1, exchange=lambda b: [b])


def snapshot(state: Mapping[str, Any], **options: Any) -> memoryview:
    s = stager(state)
    buf = memoryview(mmap.mmap(-1, s.nbytes()))
    s.stage(buf, generation=1, step=7, cursor=options.get("cursor", {}), ledger=options.get("ledger", ()))
    return buf


def bits(t: torch.Tensor) -> bytes:
    return bytes(t.detach().contiguous().flatten().view(torch.uint8).tolist())


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.randn(3, 5),
    "nan and inf": lambda: torch.tensor([float("nan"), float("-inf"), -0.0]),
    "bfloat16": lambda: torch.randn(7).bfloat16(),
    "float16": lambda: torch.randn(7).half(),
    "float8": lambda: torch.randn(6).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False, True]),
    "int64": lambda: torch.tensor([2**62, -1]),
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "complex128": lambda: torch.randn(3, dtype=torch.complex128),
    "number": lambda: torch.tensor(3.5),
    "int number": lambda: torch.tensor(7),
    "bool number": lambda: torch.tensor(True),
    "empty": lambda: torch.empty(0, 4),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "strided": lambda: torch.arange(12.0)[::3],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "one of many": lambda: torch.arange(1e6)[500:501],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_come_back_bit_for_bit(kind: str) -> None:
    torch.manual_seed(0)
    original = TENSORS[kind]()
    buf = snapshot({"t": original})
    target = {"t": torch.zeros_like(original.contiguous())}
    stager(target).restore(buf)
    assert bits(target["t"]) == bits(original)
    assert target["t"].dtype == original.dtype
    assert target["t"].shape == original.shape


def test_a_view_of_one_element_is_small() -> None:
    info = tiers.read_image(snapshot({"t": torch.zeros(10**6)[5:6]}))
    assert info.meta.structure.written_nbytes == 4


def test_into_a_view() -> None:
    buf = snapshot({"t": torch.arange(6.0).view(2, 3)})
    base = torch.zeros(3, 4)
    stager({"t": base[:, 1:3].t()}).restore(buf)
    assert base[:, 1:3].t().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert base[:, 0].tolist() == [0, 0, 0]


def test_plain_values_keep_their_types_and_places() -> None:
    state: dict[str, Any] = {
        "step": 3,
        "nested": {"lr": 0.1, "betas": (0.9, 0.999), "name": None, "blob": b"\0\xff"},
        "list": [1, 2.0, True],
        "mixed": [torch.ones(2), "x"],
    }
    buf = snapshot(state)
    target: dict[str, Any] = {
        "step": 0,
        "nested": {"lr": 0, "betas": None, "name": "n", "blob": b""},
        "list": [],
        "mixed": [torch.zeros(2), ""],
    }
    inner = target["nested"]
    stager(target).restore(buf)
    assert target["nested"] is inner
    assert target["nested"] == state["nested"]
    assert [type(v) for v in target["list"]] == [int, float, bool]
    assert target["mixed"][0].tolist() == [1, 1]
    assert target["mixed"][1] == "x"
    assert target["step"] == 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.emb(x)))


def build(**options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Net()
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": weights, "lr": 0.1},
        {"params": biases, "lr": 0.2, "betas": (0.5, 0.6)},
        {"params": []},
    ]
    optim = torch.optim.AdamW(groups, **options)
    return {"model": model, "optim": optim, "sched": torch.optim.lr_scheduler.StepLR(optim, 2)}


def train(state: dict[str, Any], steps: int = 1) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        loss = state["model"](torch.arange(6)).square().mean()
        loss.backward()
        state["optim"].step()
        state["sched"].step()
        state["optim"].zero_grad()
        losses.append(loss.item())
    return losses


def test_names_are_canonical_and_ties_are_stored_once() -> None:
    state = build()
    train(state)
    found = collect(state)
    assert [n for n in found.leaves if n.startswith("model.")] == [
        "model.seen",
        "model.emb.weight",
        "model.inner.weight",
        "model.inner.bias",
    ]
    assert found.aliases == {"model.head.weight": "model.emb.weight"}
    assert "optim.params.model.inner.bias.exp_avg" in found.leaves
    assert {"optim.param_groups", "optim.params.model.emb.weight", "sched"} <= set(found.values)


def test_wrappers_leave_no_trace() -> None:
    plain = collect(build()).leaves.keys()
    wrapped = build()
    compiled: Any = torch.compile(wrapped["model"], backend="eager")  # not run: nothing is compiled
    wrapped["model"] = compiled
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    compiled._orig_mod.inner = checkpoint_wrapper(compiled._orig_mod.inner)
    assert collect(wrapped).leaves.keys() == plain


def test_a_users_own_attribute_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert list(collect({"m": Holder()}).leaves) == ["m.module.weight", "m.module.bias"]


def test_training_goes_on_bit_for_bit() -> None:
    """Into a fresh process's objects, whose optimizer has no state yet; no dummy step."""
    state = build()
    train(state, 3)
    buf = snapshot(state)
    expected = train(state, 3)
    fresh = build()
    stager(fresh).restore(buf)
    assert train(fresh, 3) == expected
    assert [g["lr"] for g in fresh["optim"].param_groups] == [g["lr"] for g in state["optim"].param_groups]
    assert fresh["optim"].param_groups[1]["betas"] == (0.5, 0.6)
    assert fresh["model"].head.weight is fresh["model"].emb.weight


def test_restoring_over_later_state() -> None:
    """What a later step added is gone again: what was absent stays absent."""
    state = build()
    buf = snapshot(state)
    train(state, 2)
    assert state["optim"].state
    stager(state).restore(buf)
    assert not state["optim"].state
    fresh = build()
    assert train(state, 3) == train(fresh, 3)


def test_a_parameter_that_never_had_a_gradient() -> None:
    state = build()
    state["model"].inner.bias.requires_grad_(False)
    train(state, 2)
    buf = snapshot(state)
    fresh = build()
    fresh["model"].inner.bias.requires_grad_(False)
    stager(fresh).restore(buf)
    assert fresh["model"].inner.bias not in fresh["optim"].state
    assert train(fresh, 2) == train(state, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.Adagrad(ps),
        lambda ps: torch.optim.AdamW(ps, amsgrad=True, lr=torch.tensor(0.01)),
        lambda ps: torch.optim.RMSprop(ps),
    ],
)
def test_other_optimizers(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def one() -> dict[str, Any]:
        state = build()
        state["optim"] = make(state["model"].parameters())
        state["sched"] = torch.optim.lr_scheduler.ConstantLR(state["optim"])
        return state

    state = one()
    train(state, 2)
    s = stager(state)
    assert s.nbytes() >= tiers.read_image(snapshot(state)).nbytes
    buf = snapshot(state)
    fresh = one()
    stager(fresh).restore(buf)
    assert train(fresh, 2) == train(state, 2)


def test_slots_are_large_enough_before_the_first_step() -> None:
    """Asked for before the optimizer has state, it counts what the first step will add."""
    state = build()
    s = stager(state)
    slot = memoryview(mmap.mmap(-1, s.nbytes()))
    s.stage(slot, generation=1, step=0, cursor={}, ledger=())
    train(state)
    s.stage(slot, generation=1, step=1, cursor={}, ledger=())
    assert tiers.verify_image(slot).step == 1
    assert s.nbytes() == len(slot), "and does not change from step to step"


def test_a_new_layout_is_exchanged_once() -> None:
    calls: list[int] = []

    def exchange(data: bytes) -> list[bytes]:
        calls.append(len(data))
        return [data, data]

    state = build()
    s = tiers.Stager(state, rank=0, world_size=2, exchange=exchange)
    slot = memoryview(mmap.mmap(-1, s.nbytes()))
    for step in range(4):
        s.stage(slot, generation=1, step=step, cursor={}, ledger=())
        train(state)
    assert len(calls) == 2, "at first, and when optimizer state appeared"


def test_the_ledger_and_cursor_travel() -> None:
    row = tiers.LedgerRow(step=7, generation=1, dp_rank=0, samples=("code:0:a.parquet:3",), loss=(0.1).hex())
    buf = snapshot({"t": torch.ones(1)}, cursor={"at": [1, 2]}, ledger=[row])
    restored = stager({"t": torch.zeros(1)}).restore(buf)
    assert (restored.generation, restored.step, restored.cursor, restored.ledger) == (
        1,
        7,
        {"at": [1, 2]},
        (row,),
    )


def test_staging_copies() -> None:
    """What training does after `stage` returns cannot change what was staged."""
    t = torch.zeros(1000)
    state = {"t": t}
    buf = snapshot(state)
    t.add_(1)
    stager(state).restore(buf)
    assert t.sum() == 0


def test_no_reference_to_the_slot_is_kept() -> None:
    state = build()
    train(state)
    s = stager(state)
    memory = mmap.mmap(-1, s.nbytes())
    with memoryview(memory) as slot:
        s.stage(slot, generation=1, step=1, cursor={}, ledger=())
        s.restore(slot)
    memory.close()  # raises BufferError where somebody still looks at it


def test_from_a_slot_that_is_read_only() -> None:
    state = build()
    train(state)
    image = bytes(snapshot(state))
    fresh = build()
    stager(fresh).restore(memoryview(image))
    assert torch.equal(fresh["model"].inner.weight, state["model"].inner.weight)


class Counter:
    """Anything with state_dict and load_state_dict."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def test_objects_with_state_dict() -> None:
    counter = Counter()
    counter.state = {
        "n": 3,
        "history": [(1, torch.arange(3)), None],
        5: {"rng": torch.tensor([1, 2], dtype=torch.uint8)},
    }
    buf = snapshot({"c": counter})
    fresh = Counter()
    stager({"c": fresh}).restore(buf)
    assert fresh.state["n"] == 3
    assert fresh.state["history"][0][0] == 1
    assert fresh.state["history"][0][1].tolist() == [0, 1, 2]
    assert fresh.state[5]["rng"].tolist() == [1, 2]


def test_a_modules_extra_state() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extra = {"scale": 1.0}

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    m = Extra()
    m.extra = {"scale": 0.25}
    fresh = Extra()
    stager({"m": fresh}).restore(snapshot({"m": m}))
    assert fresh.extra == {"scale": 0.25}


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"s": {1, object}}, "^s: .*cannot be stored as a key or in a set"),
        ({"a": {"b": object()}}, r"^a\.b: "),
        ({"a.b": 1, "a": {"b": 2}}, "two entries of the state are called a.b"),
        ({"t": torch.eye(3).to_sparse()}, "^t: .*sparse"),
        ({"t": torch.empty(3, device="meta")}, "^t: .*meta"),
        ({"o": torch.optim.SGD([nn.Parameter(torch.ones(2))])}, r"o\.param_groups\.0\.params\.0 .*no module"),
    ],
)
def test_what_cannot_be_stored_is_named(state: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        collect(state)


def changed(**changes: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(2, 3), "n": 1, "lr": 0.1} | changes
    return {k: v for k, v in state.items() if v is not ...}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (changed(w=torch.ones(3, 2)), r"w is float32\[3, 2\] here and float32\[2, 3\] in the checkpoint"),
        (changed(w=torch.ones(2, 3).double()), "float64"),
        (
            changed(w=..., weight=torch.ones(2, 3)),
            "weight is not in the checkpoint.*; w is in the checkpoint and not in the state .float32.2, 3., in",
        ),
        (changed(lr=...), "lr is in the checkpoint and not in the state"),
        (changed(learning=0), "learning is not in the checkpoint"),
        (changed(n=torch.ones(())), "n is not in the checkpoint"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_touched(target: dict[str, Any], words: str) -> None:
    buf = snapshot(changed())
    before = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in target.items()}
    with pytest.raises(StateMismatchError, match=words):
        stager(target).restore(buf)
    for key, value in before.items():
        assert torch.equal(target[key], value) if isinstance(value, torch.Tensor) else target[key] == value


def test_the_nearest_name_is_told() -> None:
    with pytest.raises(StateMismatchError, match=r"the nearest name there: model\.inner\.weight"):
        stager({"model": {"iner": {"weight": torch.ones(1)}}}).restore(snapshot(build()))


def test_groups_that_were_built_otherwise() -> None:
    buf = snapshot(build())
    other = build()
    other["optim"] = torch.optim.AdamW(other["model"].parameters())
    other["sched"] = torch.optim.lr_scheduler.StepLR(other["optim"], 2)
    with pytest.raises(StateMismatchError, match=r"optim: .*parameter group|1 parameter groups here and 3"):
        stager(other).restore(buf)


def test_of_several_entries_the_same_is_said_once() -> None:
    saved = {f"a{i}": torch.ones(2) for i in range(12)}
    buf = snapshot({**saved, "at": 1})
    with pytest.raises(StateMismatchError) as refused:
        stager({"at": 1}).restore(buf)
    said = str(refused.value)
    assert (
        "a0, a1, a10, a11, a2, a3, a4, a5 and 4 more are in the checkpoint and not in the state (float32[2], in that snapshot)"
        in said
    )
    assert said.count("not in the state") == 1
    buf = snapshot({"a": torch.ones(2), "b": torch.ones(3), "at": 1})
    with pytest.raises(
        StateMismatchError, match=r"a, b are in the checkpoint and not in the state \(in that snapshot\)"
    ):
        stager({"at": 1}).restore(buf)


def test_a_checkpoint_without_the_optimizer() -> None:
    buf = snapshot({"model": build()["model"]})
    with pytest.raises(
        StateMismatchError, match=r"optim is not in the checkpoint .an optimizer, of which nothing was saved"
    ):
        stager(build()).restore(buf)


def test_a_tuple_cannot_be_changed() -> None:
    buf = snapshot({"x": [torch.ones(1), 5]})
    same = {"x": (torch.zeros(1), 5)}
    stager(same).restore(buf)
    assert same["x"][0].item() == 1
    with pytest.raises(StateMismatchError, match=r"x\.1 is 5 in the checkpoint"):
        stager({"x": (torch.zeros(1), 6)}).restore(buf)


def test_tied_here_and_not_there_and_the_reverse() -> None:
    w = torch.arange(4.0)
    tied, untied = {"a": w, "b": w}, {"a": w.clone(), "b": w.clone()}
    for saved in (tied, untied):
        buf = snapshot(saved)
        target = {"a": torch.zeros(4), "b": torch.zeros(4)}
        stager(target).restore(buf)
        assert target["a"].tolist() == target["b"].tolist() == [0, 1, 2, 3]
        one = torch.zeros(4)
        stager({"a": one, "b": one}).restore(buf)
        assert one.tolist() == [0, 1, 2, 3]


def test_a_corrupt_image_changes_nothing() -> None:
    buf = snapshot({"t": torch.ones(5)})
    buf[PAGE_NBYTES + 2] ^= 1
    target = {"t": torch.zeros(5)}
    with pytest.raises(ImageError, match="corrupt"):
        stager(target).restore(buf)
    assert target["t"].sum() == 0


def test_an_image_of_another_rank() -> None:
    buf = snapshot({"t": torch.ones(5)})
    other = tiers.Stager({"t": torch.ones(5)}, rank=1, world_size=2, exchange=lambda b: [b, b])
    with pytest.raises(StateMismatchError, match="rank 0 of 1, and this is rank 1 of 2"):
        other.restore(buf)


def test_a_slot_too_small() -> None:
    s = stager({"t": torch.ones(10**5)})
    slot = memoryview(bytearray(PAGE_NBYTES * 2))
    with pytest.raises(SlotTooSmallError):
        s.stage(slot, generation=1, step=1, cursor={}, ledger=())
