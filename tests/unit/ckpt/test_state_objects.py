"""Objects, plain values and per-rank values through a committed checkpoint; names through wrappers. In one process."""

from __future__ import annotations

import collections
import enum
import random
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from surefoot import ckpt
from surefoot.ckpt.errors import StateError, StateMismatchError
from surefoot.ckpt.state import collect


@pytest.fixture(params=["files", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "root") if request.param == "files" else request.getfixturevalue("s3_url")


@pytest.fixture
def files(tmp_path: Path) -> str:
    return str(tmp_path / "root")


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = object()


class Bits(enum.Flag):
    A = 1
    B = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: Any
    y: Any


VALUES: dict[str, Any] = {
    "none": None,
    "numbers": [True, 1, 1.0, -0.0, 2**200, -(2**63), float("inf"), 1 + 2j, complex(float("-inf"), 0)],
    "text": ["", "a.b", "ü", "\udcff", "x" * 5000],
    "bytes": [b"", b"\0\xff", bytearray(b"ab"), b"\1" * 5000, bytearray(b"\2" * 5000)],
    "tuple": (1, (2, [3]), ()),
    "set": {3, 1, "b", (1, 2), None},
    "frozenset": frozenset({1.5, b"x"}),
    "keys": {1: "int", "1": "text", (1, "a"): "tuple", None: 0, 2.5: {}, True if False else b"k": []},
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "deque": collections.deque([1, (2,)], maxlen=3),
    "counter": collections.Counter("abca"),
    "torch": [
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.strided,
        torch.channels_last,
    ],
    "numpy": [np.float32(0.1), np.int64(-3), np.bool_(True), np.complex128(1j), np.float64(0.25)],
    "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3), np.arange(3000.0)[::-1], np.zeros((0, 2))],
    "members": [Mode.FAST, Mode.SLOW, Bits.A | Bits.B, Level.HIGH],
    "point": Point(1, Point(torch.arange(3.0), [2])),
}


def typed(value: Any) -> Any:
    """A value spelt out with its types, all the way down."""
    name = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return name, value.dtype, value.tolist()
    if isinstance(value, np.ndarray):
        return name, value.dtype.str, value.tolist()
    if isinstance(value, dict):
        return name, [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return name, sorted(repr(typed(v)) for v in value)
    if isinstance(value, collections.deque):
        return name, value.maxlen, [typed(v) for v in value]
    if isinstance(value, (list, tuple)):
        return name, [typed(v) for v in value]
    return name, repr(value)


class Holder:
    """Anything with state_dict and load_state_dict."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_plain_values_keep_their_types(root: str) -> None:
    """Inside of an object, and as entries of the state; classes of enums and namedtuples are taken from the live ones."""
    entries = {k: v for k, v in VALUES.items() if k not in ("keys", "ordered", "point")}
    ckpt.save(root, 1, {"h": Holder(VALUES), "nan": Holder([float("nan")]), "entries": entries})
    live = {"members": [Mode.SLOW, Mode.FAST, Bits.A, Level.LOW], "point": Point(0, Point(None, []))}
    target = {
        "h": Holder(live),
        "nan": Holder(None),
        "entries": {k: live.get(k) for k in entries},
    }
    ckpt.load(root, target)
    assert typed(target["h"].state) == typed(VALUES)
    assert repr(target["nan"].state) == "[nan]"
    assert typed(target["entries"]) == typed(entries)


def test_large_arrays_and_bytes_are_tensors_in_the_checkpoint(files: str) -> None:
    """Not text in the manifest; and arrays that fit are filled in place."""
    array = np.arange(4096.0).reshape(64, 64)
    manifest = ckpt.save(files, 1, {"a": array, "f": np.asfortranarray(array), "b": b"x" * 10**5})
    assert manifest.nbytes == 2 * array.nbytes + 10**5
    assert len(msgspec.json.encode(manifest.values)) < 500
    held = np.zeros((64, 64))
    target: dict[str, Any] = {"a": held, "f": None, "b": b""}
    ckpt.load(files, target)
    assert target["a"] is held
    assert np.array_equal(held, array)
    assert np.array_equal(target["f"], array)
    assert target["b"] == b"x" * 10**5


def test_a_class_is_taken_from_the_live_value_or_refused(files: str) -> None:
    ckpt.save(files, 1, {"m": Mode.FAST, "p": Holder([Point(1, 2)])})
    with pytest.raises(
        StateMismatchError, match=r"m is a .*\.Mode in the checkpoint and a builtins\.str here"
    ) as caught:
        ckpt.load(files, {"m": "fast", "p": Holder([None])})
    assert "p.0 is a" in str(caught.value)
    assert ".Point in the checkpoint and a builtins.NoneType here" in str(caught.value)


def test_values_that_cannot_be_stored_are_named() -> None:
    itself: list[Any] = []
    itself.append(itself)
    loop: dict[str, Any] = {"t": torch.ones(1)}
    loop["loop"] = loop
    for value, words in (
        (print, r"v: a value of type builtins\.builtin_function_or_method"),
        ([1, {"a": object()}], r"v\.1\.a: a value of type builtins\.object"),
        (Holder({"a": {1: nn.Module}}), r"v\.a\.1: a value of type builtins\.type"),
        (Holder({"k": {Mode.FAST: 1}}), r"v.*cannot be stored"),
        (np.array(["text"]), r"v: a value of type numpy\.ndarray"),
        (collections.UserDict(a=print), r"v\.a: "),
        (Holder(collections.UserDict(a=1)), r"v: a value of type collections\.UserDict"),
        (itself, "v.*contains itself"),
        (loop, "v.*contains itself"),
        (Holder({"a": ckpt.PerRank(1)}), r"v\.a: ckpt\.PerRank cannot stand inside"),
        (ckpt.PerRank(ckpt.PerRank(1)), r"v@rank0: ckpt\.PerRank within"),
        ({"x@rank1": 1}, r"v\.x@rank1: keys with '@rank'"),
    ):
        with pytest.raises(StateError, match=f"^{words}"):
            collect({"v": value})
    with pytest.raises(StateError, match="__metadata__"):
        collect({"__metadata__": torch.ones(1)})


# ---------------------------------------------------------------- objects


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def schedulers(optim: torch.optim.Optimizer) -> dict[str, Any]:
    lr = torch.optim.lr_scheduler
    return {
        "step": lr.StepLR(optim, 2),
        "lambda": lr.LambdaLR(optim, lambda e: 0.9**e),
        "plateau": lr.ReduceLROnPlateau(optim, patience=0),
        "one cycle": lr.OneCycleLR(optim, 0.5, total_steps=20),
        "warm restarts": lr.CosineAnnealingWarmRestarts(optim, 3),
        "chain": lr.SequentialLR(optim, [lr.ConstantLR(optim), lr.ExponentialLR(optim, 0.5)], [2]),
    }


def test_schedulers_scalers_averages_and_generators(root: str) -> None:
    """What training scripts keep beside model and optimizer; and each goes on as if nothing had happened."""

    def build() -> dict[str, Any]:
        model, optim = model_and_optimizer()
        return {
            "model": model,
            "optim": optim,
            "sched": schedulers(optim),
            "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2),
            "ema": torch.optim.swa_utils.AveragedModel(model),
            "rng": [torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)],
            "best": Holder({"loss": torch.tensor(9.0), "at": 0}),
        }

    def go_on(state: dict[str, Any]) -> list[Any]:
        told: list[Any] = []
        for _ in range(3):
            loss = state["model"](torch.ones(1, 3)).square().sum()
            state["scaler"].scale(loss).backward()
            state["scaler"].step(state["optim"])
            state["scaler"].update()
            state["optim"].zero_grad()
            state["ema"].update_parameters(state["model"])
            for name, sched in state["sched"].items():
                sched.step(*([loss.item()] if name == "plateau" else []))
            torch_rng, python_rng, numpy_rng = state["rng"]
            told += [loss.item(), state["scaler"].get_scale(), [g["lr"] for g in state["optim"].param_groups]]
            told += [torch.rand(1, generator=torch_rng).item(), python_rng.random(), numpy_rng.random()]
            told += [[p.tolist() for p in state["ema"].parameters()]]
        state["best"].state["at"] += 1
        return told

    state = build()
    go_on(state)
    ckpt.save(root, 1, state)
    fresh = build()
    ckpt.load(root, fresh)
    assert go_on(fresh) == go_on(state)
    assert fresh["best"].state == {"loss": torch.tensor(9.0), "at": 2}


class Extra(nn.Module):
    """Keeps more than tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_of_modules(files: str) -> None:
    ckpt.save(files, 1, {"m": nn.Sequential(Extra({"scale": 0.5}), Extra(torch.arange(3)), Extra(b"raw"))})
    fresh = nn.Sequential(Extra(None), Extra(None), Extra(None))
    ckpt.load(files, {"m": fresh})
    extras: list[Any] = [m.extra for m in fresh]
    assert extras[0] == {"scale": 0.5}
    assert extras[1].tolist() == [0, 1, 2]
    assert extras[2] == b"raw"


# ---------------------------------------------------------------- names


def wrapped_in_everything() -> dict[str, Any]:
    """Compile around checkpointing around compile; inside, again."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner[0] = checkpoint_wrapper(torch.compile(inner[0], backend="eager"))  # pyright: ignore[reportArgumentType]
    modules = nn.ModuleDict({"a": torch.compile(checkpoint_wrapper(inner), backend="eager")})  # pyright: ignore[reportArgumentType]
    model: Any = torch.compile(nn.DataParallel(checkpoint_wrapper(modules)), backend="eager")
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


class Fsdp1(nn.Module):
    """Has the attribute under which FSDP1 keeps what it wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def test_wrappers_leave_no_trace_in_any_nesting(files: str) -> None:
    plain = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    state = {"model": plain, "optim": torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)}
    for p in plain.parameters():
        p.grad = torch.ones_like(p)
    state["optim"].step()
    ckpt.save(files, 1, state)
    target = wrapped_in_everything()
    target["model"] = Fsdp1(target["model"])
    assert collect(target).leaves.keys() == {n for n in collect(state).leaves if "momentum" not in n}
    ckpt.load(files, target)
    for a, b in zip(plain.parameters(), target["model"].parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(
            state["optim"].state[a]["momentum_buffer"], target["optim"].state[b]["momentum_buffer"]
        )


def test_names_with_dots_and_other_characters(files: str) -> None:
    names = ("a.b.c", "a/b", "../up", "sp ace", "ü", "", "w[0:1]", "manifest.json", "\n")
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(names)} | {"deep": {"x.y": 1, 2: 3}}
    ckpt.save(files, 1, state)
    target: dict[str, Any] = {name: torch.zeros(2) for name in names} | {"deep": {"x.y": 0, 2: 0}}
    ckpt.load(files, target)
    assert [target[n][0].item() for n in names] == list(range(len(names)))
    assert target["deep"] == {"x.y": 1, 2: 3}
    assert sorted(p.name for p in Path(files).parent.iterdir()) == ["root"], "nothing outside of the root"


# ---------------------------------------------------------------- per rank


def test_values_per_rank_in_one_process(root: str) -> None:
    """Every kind of value; between ranks: tests/integration."""

    def build(seed: int) -> dict[str, Any]:
        return {
            "rng": ckpt.PerRank(torch.Generator().manual_seed(seed)),
            "tensor": ckpt.PerRank(torch.full((3,), float(seed))),
            "plain": ckpt.PerRank((seed, "x")),
            "nested": {"list": [ckpt.PerRank({"seen": [seed], "t": torch.tensor(seed)}), torch.ones(1)]},
        }

    state = build(1)
    drawn = torch.rand(2, generator=state["rng"].value)
    manifest = ckpt.save(root, 1, state)
    assert set(manifest.tensors) == {
        "rng@rank0",
        "tensor@rank0",
        "nested.list.0@rank0.t",
        "nested.list.1",
    }
    fresh = build(2)
    held = fresh["tensor"].value
    ckpt.load(root, fresh)
    assert fresh["tensor"].value is held
    assert held.tolist() == [1, 1, 1]
    assert fresh["plain"].value == (1, "x")
    assert fresh["nested"]["list"][0].value["seen"] == [1]
    assert fresh["nested"]["list"][0].value["t"] == 1
    assert torch.equal(
        torch.rand(2, generator=fresh["rng"].value), torch.rand(2, generator=state["rng"].value)
    )
    assert not torch.equal(drawn, torch.rand(2, generator=fresh["rng"].value))


def test_what_one_rank_kept_is_not_for_all(files: str) -> None:
    """Saved per rank and wanted by all, and the reverse: two different things, and the error says so."""
    ckpt.save(files, 1, {"seed": ckpt.PerRank(1)})
    with pytest.raises(StateMismatchError, match=r"seed is not in the checkpoint.*seed@rank0"):
        ckpt.load(files, {"seed": 0})
    ckpt.save(files, 2, {"seed": 1})
    live = {"seed": ckpt.PerRank(5)}
    with pytest.raises(StateMismatchError, match=r"seed@rank0 is not in the checkpoint \(rank 0's own"):
        ckpt.load(files, live)
    loaded = ckpt.load(files, live, strict=False)
    assert loaded is not None
    assert live["seed"].value == 5


@pytest.mark.parametrize("value", [torch.ones(2), 5, {"x": torch.ones(2)}])
def test_a_name_that_is_no_text_is_refused(files: str, value: Any) -> None:
    no_text = pytest.raises(StateError, match=r"^'a\\ud800': this name is no Unicode text")
    with no_text:
        ckpt.save(files, 1, {"ok": 1, "a\ud800": value})
    ckpt.save(files, 1, {"ok": 1})
    with no_text:
        ckpt.load(files, {"ok": 1, "a\ud800": value})
