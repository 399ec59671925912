"""Every kind of tensor through a committed checkpoint: types, views, declared boxes, tensor subclasses. Bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot import ckpt
from surefoot.ckpt.errors import CoverageError, StateError, StateMismatchError
from surefoot.ckpt.manifest import PAGE_NBYTES
from surefoot.ckpt.state import collect

BYTE_TYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.int8,
    torch.uint8,
)
WIDE_TYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
)


def bits(t: torch.Tensor) -> list[int]:
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()


def other_bits(t: torch.Tensor) -> torch.Tensor:
    changed = t.clone()
    changed.reshape(-1).view(torch.uint8).bitwise_xor_(1)
    return changed


def every_byte(dtype: torch.dtype) -> torch.Tensor:
    """Every byte there is, so every value of a small type, its NaNs included."""
    return torch.arange(256).to(torch.uint8).view(dtype)


@pytest.fixture(params=["files", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "root") if request.param == "files" else request.getfixturevalue("s3_url")


@pytest.fixture
def files(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def nbytes(manifest: ckpt.Manifest | None) -> int:
    assert manifest is not None
    return manifest.nbytes


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_raw_bits_of_every_type(root: str) -> None:
    """CKP-18 (float8, bf16), CKP-15 (0-d: float, int64, bool, complex): exact, never by way of another type."""
    state: dict[str, Any] = {str(t): every_byte(t) for t in (*BYTE_TYPES, *WIDE_TYPES)}
    state["bools"] = torch.tensor([[True, False], [False, True]])
    state["chalf"] = every_byte(torch.float16).view(torch.complex32)
    numbers = {
        "float": torch.tensor(-0.0),
        "nan": torch.tensor(float("nan")),
        "step": torch.tensor(2**62 + 1),
        "bool": torch.tensor(True),
        "complex": torch.tensor(1 - 2j),
        "f8": torch.tensor(3.0).to(torch.float8_e5m2),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "no rows": torch.empty(3, 0, 2, dtype=torch.complex64),
    }
    state["numbers"] = numbers
    with ckpt.Checkpointer(root) as c:
        c.save(1, state)  # asynchronously: `close` waits
    target = {k: other_bits(v) for k, v in state.items() if k != "numbers"}
    zeros = {k: other_bits(v) for k, v in numbers.items()}
    ckpt.load(root, target | {"numbers": zeros})
    for name, tensor in (*target.items(), *zeros.items()):
        original = state[name] if name in state else numbers[name]
        assert (tensor.dtype, tensor.shape) == (original.dtype, original.shape), name
        assert bits(tensor) == bits(original), name


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "rows": lambda t: t[1:3],
    "columns": lambda t: t[:, 1:3],
    "stepped": lambda t: t[::2, ::3],
    "flipped copy of a diagonal": lambda t: t.diagonal(),
    "expanded": lambda t: t[0].expand(5, 6),
    "expanded in the middle": lambda t: t[:, None, :2].expand(4, 3, 2),
    "expanded number": lambda t: t[0, 0].expand(7),
    "channels last": lambda t: t.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "overlapping windows": lambda t: t.reshape(-1).unfold(0, 5, 2),
    "conjugated": lambda t: torch.complex(t, -t).conj(),
    "imaginary part of a conjugate": lambda t: torch.complex(t, -t).conj().imag,
    "real part": lambda t: torch.complex(t, -t).real,
    "a number": lambda t: t[2, 3],
}


def test_views_by_value(root: str) -> None:
    """CKP-16: views of every kind, saved by value; and loaded into contiguous tensors and into such views."""
    state = {k: view(torch.arange(24.0).view(4, 6)) for k, view in VIEWS.items()}
    expected = {k: v.clone().contiguous() for k, v in state.items()}
    manifest = ckpt.save(root, 1, state)
    assert nbytes(manifest) == sum(v.numel() * v.element_size() for v in state.values())
    plain = {k: torch.zeros_like(v) for k, v in expected.items()}
    views = {k: view(torch.zeros(4, 6)) for k, view in VIEWS.items()}
    for target in (plain, views):
        ckpt.load(root, target)
        for name, tensor in target.items():
            assert torch.equal(tensor, expected[name]), name


def test_what_lies_beside_a_view_is_left_alone(files: str) -> None:
    ckpt.save(files, 1, {"t": torch.ones(2, 2)})
    base = torch.zeros(3, 4)
    ckpt.load(files, {"t": base[1:, ::2].t()})
    assert base.tolist() == [[0, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 0]]


def test_one_element_of_a_gigabyte(root: str) -> None:
    """CKP-16: the view alone is written. The buffer is never touched, so it takes no memory here either."""
    buffer = torch.empty(2**28)
    buffer[12345] = 7
    manifest = ckpt.save(root, 1, {"t": buffer[12345:12346]})
    assert manifest.nbytes == 4
    assert sum(o.size for o in manifest.objects) <= 2 * PAGE_NBYTES, "its data, after a header of a page"
    target = {"t": torch.zeros(1)}
    ckpt.load(root, target)
    assert target["t"].item() == 7


def test_an_expanded_tensor_cannot_take_different_values(files: str) -> None:
    ckpt.save(files, 1, {"t": torch.arange(6.0).view(2, 3)})
    with pytest.raises(StateMismatchError, match=r"^t is expanded here"):
        ckpt.load(files, {"t": torch.zeros(3).expand(2, 3)})


# ---------------------------------------------------------------- declared boxes


def test_boxes_in_a_padded_buffer(root: str) -> None:
    """CKP-03 in one process: boxes of unequal length that are views into a flat, padded buffer. No padding is written."""
    whole = torch.arange(21.0).view(7, 3)
    buffer = torch.full((40,), -1.0)
    views = [
        ((0, 0), buffer[2:11].view(3, 3)),
        ((3, 0), buffer[12:16].view(4, 1)),
        ((3, 1), buffer[20:28].view(4, 2)),
    ]
    for (row, column), view in views:
        view.copy_(whole[row : row + view.shape[0], column : column + view.shape[1]])
    manifest = ckpt.save(root, 1, {"w": ckpt.Boxes((7, 3), views)})
    assert manifest.nbytes == 21 * 4
    plain = {"w": torch.zeros(7, 3)}
    ckpt.load(root, plain)
    assert torch.equal(plain["w"], whole)
    other = torch.full((30,), -1.0)
    ckpt.load(root, {"w": ckpt.Boxes.flat((7, 3), 0, other[4:25])})
    assert torch.equal(other[4:25], whole.flatten())
    assert set(other[:4].tolist() + other[25:].tolist()) == {-1}, "padding is left alone"


@pytest.mark.parametrize("shape", [(4, 3, 5), (60,), (3, 4, 5, 1), ()])
def test_flat_ranges_are_boxes(shape: tuple[int, ...]) -> None:
    """A stretch of the flattened tensor, cut into boxes, has each element in its place."""
    numel = torch.Size(shape).numel()
    index = torch.arange(float(numel))
    for start in range(0, numel, 7):
        for stop in range(start, numel + 1, 3):
            boxes = ckpt.Boxes.flat(shape, start, index[start:stop])
            again = torch.full((numel,), -1.0).view(shape)
            for box, part in boxes.parts:
                again[tuple(slice(o, o + e) for o, e in zip(*box, strict=True))] = part
            assert again.flatten()[start:stop].tolist() == index[start:stop].tolist()
            assert sum(box.numel for box, _ in boxes.parts) == stop - start


def test_boxes_whose_parts_are_parameters(files: str) -> None:
    """The optimizer's state follows the boxes, and loads into other boxes, or a plain parameter."""

    def parts(*cuts: int) -> dict[str, Any]:
        edges = [0, *cuts, 6]
        ps = [nn.Parameter(torch.zeros(b - a, 2)) for a, b in itertools.pairwise(edges)]
        optim = torch.optim.AdamW(ps, lr=0.1)
        w = ckpt.Boxes((6, 2), [((a, 0), p) for a, p in zip(edges, ps, strict=False)])
        return {"w": w, "optim": optim}

    def step(state: dict[str, Any]) -> None:
        for box, p in state["w"].parts:
            p.grad = torch.arange(12.0).view(6, 2)[box.offset[0] : box.offset[0] + box.extent[0]].clone()
        state["optim"].step()

    def told(state: dict[str, Any]) -> Any:
        w, optim = state["w"], state["optim"]
        ps = [p for _, p in w.parts] if isinstance(w, ckpt.Boxes) else [w]
        return [
            torch.cat([get(p).detach() for p in ps]).tolist()
            for get in (
                lambda p: p,
                lambda p: optim.state[p]["exp_avg"],
                lambda p: optim.state[p]["exp_avg_sq"],
            )
        ] + [{optim.state[p]["step"].item() for p in ps}]

    saved = parts(2, 3)
    step(saved)
    ckpt.save(files, 1, saved)
    names = ckpt.verify(files)
    assert names.ok
    w = nn.Parameter(torch.zeros(6, 2))
    targets = (parts(2, 3), parts(4), parts(), {"w": w, "optim": torch.optim.AdamW([w], lr=1.0)})
    for target in targets:
        ckpt.load(files, target)
        assert told(target) == told(saved)
        assert target["optim"].param_groups[0]["lr"] == 0.1
    again = parts(4)
    step(again)
    ckpt.load(files, again)  # over live state, in place
    assert told(again) == told(saved)


def test_parts_of_one_tensor_whose_state_differs_are_refused(files: str) -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optim = torch.optim.AdamW([p, q])
    p.grad = torch.ones(2)
    optim.step()
    q.grad = torch.ones(2)
    optim.step()
    state = {"w": ckpt.Boxes((4,), [((0,), p), ((2,), q)]), "optim": optim}
    with pytest.raises(StateError, match=r"optim\.params\.w\.step differs between the parts"):
        ckpt.save(files, 1, state)


def test_a_rank_may_hold_no_part() -> None:
    found = collect(
        {"w": ckpt.Boxes((4, 2), dtype=torch.float16), "e": ckpt.Boxes((3,), [((1,), torch.empty(0))])}
    )
    assert {n: (leaf.held, leaf.meta.shape) for n, leaf in found.leaves.items()} == {
        "w": ((), (4, 2)),
        "e": ((), (3,)),
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ckpt.Boxes((4,), [((3,), torch.ones(2))]), r"\[3:5\] is no box of a tensor of shape \[4\]"),
        (lambda: ckpt.Boxes((4,), [((-1,), torch.ones(2))]), r"no box"),
        (lambda: ckpt.Boxes((4, 1), [((0,), torch.ones(2))]), r"no box"),
        (lambda: ckpt.Boxes((4,), [((0,), torch.ones(2)), ((0,), torch.ones(2))]), "given twice"),
        (lambda: ckpt.Boxes((4,), [((0,), torch.ones(2)), ((2,), torch.ones(2).half())]), "one type"),
        (lambda: ckpt.Boxes((4,)), "must give the dtype"),
        (lambda: ckpt.Boxes.flat((4,), 3, torch.ones(2)), "no stretch of 4 elements"),
        (lambda: ckpt.Boxes.flat((4,), 0, torch.ones(2, 2)), "no stretch"),
    ],
)
def test_boxes_that_cannot_be(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_boxes_that_overlap_or_leave_a_hole(files: str) -> None:
    """CKP-01: refused before the commit, naming tensor and box."""
    overlap = ckpt.Boxes((4,), [((0,), torch.ones(3)), ((2,), torch.ones(2))])
    hole = ckpt.Boxes((4,), [((0,), torch.ones(1)), ((2,), torch.ones(2))])
    for boxes, words in ((overlap, r"w .*\[2\] is covered 2 times"), (hole, r"w .*\[1\] is covered 0 times")):
        with pytest.raises(CoverageError, match=words):
            ckpt.save(files, 1, {"w": boxes})
    assert ckpt.steps(files) == []


# ---------------------------------------------------------------- tensor subclasses


class Quantised(torch.Tensor):
    """(data, scale) pretending to be a float tensor, as torchao's do. Counts what would dequantise it."""

    dequantised = 0
    data_: torch.Tensor
    scale: torch.Tensor
    block: int

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> None:
        self.data_, self.scale, self.block = data, scale, block

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], {"block": self.block, "dtype": self.dtype, "layout": Layout(self.block)}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            t = args[0]
            return cls(t.data_, t.scale, t.block, t.dtype)
        Quantised.dequantised += 1
        raise NotImplementedError(f"{func} would dequantise")


class Layout:
    def __init__(self, block: int) -> None:
        self.block = block

    def __repr__(self) -> str:
        return f"Layout({self.block})"


class Other(Quantised):
    pass


def quantised(seed: int = 1, block: int = 4, kind: type[Quantised] = Quantised) -> Quantised:
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (8, 6), dtype=torch.uint8, generator=g).view(torch.float8_e4m3fn)
    return kind(data, torch.rand(8, 1, generator=g), block, torch.bfloat16)


def inner(t: Any) -> list[list[int]]:
    return [bits(t.data_), bits(t.scale)]


class Layer(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.tied = self.weight


def test_quantised_tensors_keep_their_bits(root: str) -> None:
    """CKP-18, CKP-19: stored as data, scale and what they are; saved, loaded and saved again, identical bits each time."""
    state = {"model": Layer(quantised()), "plain": quantised(2), "list": [1, quantised(3)]}
    first = ckpt.save(root, 1, state)
    assert {n: m.dtype for n, m in first.tensors.items() if n.startswith("model")} == {
        "model.tied.data_": "float8_e4m3fn",
        "model.tied.scale": "float32",
    }
    assert first.nbytes == 3 * (48 + 32), "the tied one is stored once"
    target = {"model": Layer(quantised(7)), "plain": quantised(8), "list": [1, quantised(9)]}
    held, before = target["model"].weight, target["model"].weight.data_.data_ptr()
    ckpt.load(root, target)
    assert target["model"].weight is held
    assert target["model"].tied is held
    assert held.data_.data_ptr() == before, "in place"
    second = ckpt.save(root, 2, target)
    assert [o.checksums for o in second.objects] == [o.checksums for o in first.objects]
    for a, b in ((state, target), (target, state)):
        assert inner(a["model"].weight) == inner(b["model"].weight)
        assert inner(a["plain"]) == inner(b["plain"])
        assert inner(a["list"][1]) == inner(b["list"][1])
    assert Quantised.dequantised == 0


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (quantised(block=8), r"^.*w is .*Quantised.bfloat16.8, 6.. with .*'block', 8.* in the checkpoint"),
        (quantised(kind=Other), r"w is .*\.Other"),
        (Quantised(torch.zeros(2, 6), torch.zeros(8, 1), 4, torch.bfloat16), "w is .*2, 6.* here"),
        (torch.zeros(8, 6, dtype=torch.bfloat16), r"w is a plain bfloat16\[8, 6\] here and .*Quantised"),
    ],
)
def test_into_another_kind_of_tensor_is_refused(files: str, target: torch.Tensor, words: str) -> None:
    ckpt.save(files, 1, {"w": quantised()})
    with pytest.raises(StateMismatchError, match=words):
        ckpt.load(files, {"w": target})


def test_a_plain_tensor_does_not_become_quantised(files: str) -> None:
    ckpt.save(files, 1, {"w": torch.zeros(8, 6, dtype=torch.bfloat16)})
    with pytest.raises(
        StateMismatchError, match=r"w is .*Quantised.* here and a plain tensor in the checkpoint"
    ):
        ckpt.load(files, {"w": quantised()})


def test_classes_come_from_the_live_state_alone(files: str) -> None:
    """What a checkpoint says of classes is compared, never looked up."""

    class Holder:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"m": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["m"]

    ckpt.save(files, 1, {"h": Holder(quantised())})
    live = Holder(quantised(5))
    ckpt.load(files, {"h": live})
    assert inner(live.value) == inner(quantised())
    with pytest.raises(StateMismatchError, match=r"h\.m is a?.*Quantised.* no live tensor of that class"):
        ckpt.load(files, {"h": Holder(None)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: nn.LazyLinear(2).weight, "lazy parameter"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (
            lambda: torch.masked.masked_tensor(torch.ones(3), torch.ones(3) > 0),
            "MaskedTensor .*store what it wraps",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning")
def test_tensors_that_cannot_be_stored(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(StateError, match=rf"^t.*{words}"):
        collect({"t": make()})
    with pytest.raises(StateError, match=rf"^o\.0.*{words}"):
        collect({"o": Keeper(make())})


class Keeper:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> list[Any]:
        return [self.value]

    def load_state_dict(self, state: list[Any]) -> None:
        self.value = state[0]


def test_a_nested_tensor_is_replaced_by_what_was_stored(files: str) -> None:
    ckpt.save(files, 1, {"o": Keeper(torch.ones(3))})
    live = Keeper(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
    ckpt.load(files, {"o": live})
    assert torch.equal(live.value, torch.ones(3))


def test_memory_that_was_given_back_is_refused() -> None:
    t = torch.ones(4)
    t.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"^t: .*no memory of its own"):
        collect({"t": t})
