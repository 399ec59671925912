"""Random states in random layouts, saved by virtual ranks and loaded by others in other layouts, against a model in memory.

The model is the state as one process would hold it. Whatever the layouts: the same bits come back in their places, gaps in
flat buffers stay as they are, every distinct element is stored once; and where elements are held by nobody, twice over or
with different content, nothing is committed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any, Literal

import ckpt_virtual as virtual
import numpy as np
import pytest
import torch
from ckpt_virtual import Part, Placing
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from surefoot.ckpt.boxes import Box, Sharding, held_boxes, slab, whole
from surefoot.ckpt.errors import CkptError, CoverageError
from surefoot.ckpt.planning.plan import ITEMSIZES
from surefoot.ckpt.store import MemoryObjectStore

WORLD_MAX = 8
DTYPES = sorted(ITEMSIZES)
Draw = st.DrawFn

# ---------------------------------------------------------------- states


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A module and its optimizer: per parameter its shape, its group, and whether it ever had a gradient."""

    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]
    stepped: tuple[bool, ...]
    rates: tuple[float, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The state as one process holds it: `tensors` and plain `values` by path, and `ties`: second paths of tensors.

    Where all ranks hold all of a tensor it stands in their states under both paths; elsewhere each path has parts of its own, so
    that what was tied when it was saved is loaded untied, and the reverse.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    ties: dict[str, str]
    net: Net | None = None

    def full(self, name: str) -> torch.Tensor:
        return self.tensors[self.ties.get(name, name)]


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
paths = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3).map(".".join)


@st.composite
def full_tensors(draw: Draw) -> torch.Tensor:
    """Random bits, so that an element in a wrong place or of a wrong type shows."""
    dtype: torch.dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8]), max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    nbytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    bits = torch.from_numpy(rng.integers(0, 2 if dtype is torch.bool else 256, nbytes, dtype=np.uint8))
    return bits.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


@st.composite
def nets(draw: Draw) -> Net:
    n, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return Net(
        shapes=tuple(tuple(draw(st.lists(st.integers(1, 4), max_size=2))) for _ in range(n)),
        groups=tuple(draw(st.integers(0, groups - 1)) for _ in range(n)),
        stepped=tuple(draw(st.booleans()) for _ in range(n)),
        rates=tuple(draw(st.sampled_from([0.1, 0.2, 0.3])) for _ in range(groups)),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def models(draw: Draw) -> Model:
    names = draw(st.lists(paths, min_size=1, max_size=8, unique=True))
    # A path that leads through another would make that one a mapping and a leaf at once.
    names = [n for n in names if not any(other.startswith(f"{n}.") for other in names)]
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    ties: dict[str, str] = {}
    for name in names:
        kind = draw(st.sampled_from(["tensor", "tensor", "tensor", "value", "tie"]))
        if kind == "tie" and tensors:
            ties[name] = draw(st.sampled_from(sorted(tensors)))
        elif kind == "value":
            values[name] = draw(
                plain_values.filter(lambda v: not isinstance(v, dict))
            )  # a mapping is no leaf
        else:
            tensors[name] = draw(full_tensors())
    return Model(tensors=tensors, values=values, ties=ties, net=draw(st.none() | nets()))


# ---------------------------------------------------------------- layouts


def factors(n: int) -> list[list[int]]:
    """All mesh shapes of n ranks, with dimensions of 2 and more."""
    found = [[n]] if n > 1 else [[]]
    for first in range(2, n):
        if n % first == 0:
            found += [[first, *rest] for rest in factors(n // first)]
    return found


@st.composite
def by_mesh(draw: Draw, shape: tuple[int, ...], world: int) -> tuple[tuple[Box, ...], ...]:
    """As a DTensor: each dimension of a mesh of ranks in any order replicates, or shards some dimension, strided perhaps."""
    mesh = np.array(draw(st.permutations(range(world)))).reshape(draw(st.sampled_from(factors(world))))
    placements: list[tuple[int, int] | None] = [
        draw(st.none() | st.tuples(st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 1, 2, 3])))
        if shape
        else None
        for _ in range(mesh.ndim)
    ]
    held: list[tuple[Box, ...]] = [()] * world
    for at, rank in np.ndenumerate(mesh):
        shardings = [
            Sharding(p[0], mesh.shape[i], at[i], p[1]) for i, p in enumerate(placements) if p is not None
        ]
        held[rank] = tuple(h.box for h in held_boxes(shape, shardings))
    return tuple(held)


@st.composite
def by_hand(draw: Draw, shape: tuple[int, ...], world: int) -> tuple[tuple[Box, ...], ...]:
    """As a caller declares it: the tensor is cut in two again and again, and each box is given to some ranks."""
    boxes = [whole(shape)] if 0 not in shape else []
    for _ in range(draw(st.integers(0, 6))):
        box = draw(st.sampled_from(boxes)) if boxes else None
        axes = [i for i, e in enumerate(box.extent) if e > 1] if box else []
        if box is None or not axes:
            continue
        axis = draw(st.sampled_from(axes))
        cut = draw(st.integers(1, box.extent[axis] - 1))
        boxes.remove(box)
        boxes += [slab(box, axis, 0, cut), slab(box, axis, cut, box.extent[axis])]
    held: list[list[Box]] = [[] for _ in range(world)]
    for box in boxes:
        for rank in draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=3)):
            held[rank].append(box)
    return tuple(map(tuple, held))


@st.composite
def by_stretch(draw: Draw, numel: int, world: int) -> tuple[tuple[int, int], ...]:
    """As a flat optimizer does: each rank has a stretch of the flattened tensor, of any length."""
    cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=world - 1, max_size=world - 1)))
    edges = [0, *cuts, numel]
    return tuple((edges[r], edges[r + 1]) for r in draw(st.permutations(range(world))))


@st.composite
def placings(draw: Draw, full: torch.Tensor, world: int) -> Placing:
    shape = tuple(full.shape)
    memory = draw(st.sampled_from(virtual.MEMORIES))
    absent = draw(st.booleans()) and full.numel() > 0
    match draw(st.sampled_from(["replicated", "mesh", "mesh", "hand", "flat"])):
        case "mesh":
            return Placing(boxes=draw(by_mesh(shape, world)), memory=memory, absent=absent)
        case "hand":
            return Placing(boxes=draw(by_hand(shape, world)), memory=memory, absent=absent)
        case "flat" if shape:
            return Placing(flat=draw(by_stretch(full.numel(), world)), memory=memory, absent=absent)
    return Placing(boxes=((whole(shape),),) * world, memory=memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`order`: what each rank fills its mappings by; ranks do not do it alike."""

    world: int
    placings: dict[str, Placing]
    order: int = 0

    def ties(self, model: Model) -> dict[str, str]:
        """Those of the model's that are tied here."""
        return {n: first for n, first in model.ties.items() if n not in self.placings}


@st.composite
def layouts(draw: Draw, model: Model) -> Layout:
    world = draw(st.integers(1, WORLD_MAX))
    found = {name: draw(placings(t, world)) for name, t in model.tensors.items()}
    for name, first in model.ties.items():
        full = model.tensors[first]
        if draw(st.booleans()):
            found[first] = Placing(boxes=((whole(full.shape),),) * world, memory=found[first].memory)
        else:
            found[name] = draw(placings(full, world))
    return Layout(world=world, placings=found, order=draw(st.integers(0, 2**16)))


# ---------------------------------------------------------------- live states of ranks


class LiveNet:
    """A module whose parameters every rank has, and an AdamW that some of them have taken steps with."""

    def __init__(self, net: Net) -> None:
        rng = np.random.default_rng(net.seed)
        self.module = torch.nn.Module()
        self.parameters = [torch.nn.Parameter(torch.from_numpy(rng.random(s))) for s in net.shapes]
        for k, p in enumerate(self.parameters):
            self.module.register_parameter(f"p{k}", p)
        groups = [
            {"params": [p for p, g in zip(self.parameters, net.groups, strict=True) if g == k], "lr": rate}
            for k, rate in enumerate(net.rates)
        ]
        self.optimizer = torch.optim.AdamW(groups)
        for p, stepped in zip(self.parameters, net.stepped, strict=True):
            if stepped:
                self.optimizer.state[p] = self._state(p, rng)

    def nbytes(self) -> int:
        state = [t for s in self.optimizer.state.values() for t in s.values()]
        return sum(t.numel() * t.element_size() for t in (*self.parameters, *state))

    def spoil(self) -> None:
        """Other values, and state where there was none and none where there was."""
        rng = np.random.default_rng(0)
        for group in self.optimizer.param_groups:
            group["lr"] = 9.0
        for p in self.parameters:
            p.data.fill_(-7)
            if self.optimizer.state.pop(p, None) is None:
                self.optimizer.state[p] = self._state(p, rng)

    def differs(self, other: LiveNet) -> str:
        if [g["lr"] for g in self.optimizer.param_groups] != [g["lr"] for g in other.optimizer.param_groups]:
            return "a learning rate"
        for k, (p, q) in enumerate(zip(self.parameters, other.parameters, strict=True)):
            mine, its = self.optimizer.state.get(p, {}), other.optimizer.state.get(q, {})
            if not torch.equal(p, q) or mine.keys() != its.keys():
                return f"p{k}, or which state it has"
            if any(not torch.equal(mine[key], its[key]) for key in mine):
                return f"the state of p{k}"
        return ""

    def _state(self, p: torch.Tensor, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        moments = {key: torch.from_numpy(rng.random(tuple(p.shape))) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(float(rng.integers(100))), **moments}


class RankState:
    """One rank's nested state, and its parts by path."""

    def __init__(self, model: Model, layout: Layout, rank: int) -> None:
        self.tree: dict[str, Any] = {}
        self.parts: dict[str, Part] = {}
        self._model = model
        for name, placing in layout.placings.items():
            if placing.is_here(rank):
                self.parts[name] = Part(model.full(name), placing, rank)
        live: dict[str, Any] = {name: part.live for name, part in self.parts.items()}
        live |= {name: live[first] for name, first in layout.ties(model).items()} | model.values
        self.net = None if model.net is None else LiveNet(model.net)
        if self.net is not None:
            live |= {"net": self.net.module, "optim": self.net.optimizer}
        for name in random.Random(f"{layout.order} {rank}").sample(sorted(live), len(live)):
            self._put(name, live[name])

    def nbytes(self) -> int:
        """Of what does not come from `placings`."""
        return 0 if self.net is None else self.net.nbytes()

    def spoil(self) -> None:
        for part in self.parts.values():
            part.spoil()
        for name in self._model.values:
            self._put(name, "spoiled")
        if self.net is not None:
            self.net.spoil()

    def check(self) -> None:
        for name, part in self.parts.items():
            assert not part.wrong(), f"{name}: {part.wrong()}"
        for name, value in self._model.values.items():
            found = self._container(name)[name.rpartition(".")[2]]
            assert repr(found) == repr(value), name  # repr tells 1 from True and 1.0
        if self.net is not None and self._model.net is not None:
            assert not (wrong := self.net.differs(LiveNet(self._model.net))), wrong

    def _put(self, name: str, value: Any) -> None:
        self._container(name)[name.rpartition(".")[2]] = value

    def _container(self, name: str) -> dict[str, Any]:
        at = self.tree
        for key in name.split(".")[:-1]:
            at = at.setdefault(key, {})
        return at


def states_of(model: Model, layout: Layout) -> list[RankState]:
    return [RankState(model, layout, rank) for rank in range(layout.world)]


# ---------------------------------------------------------------- the properties


def reshard(model: Model, layouts: list[Layout]) -> None:
    """Save in the first layout, load in all the others and in the first."""
    store = MemoryObjectStore()
    distinct = sum(t.numel() * t.element_size() for t in map(model.full, layouts[0].placings))
    ranks = states_of(model, layouts[0])
    manifest = virtual.save([r.tree for r in ranks], store)
    assert sum(o.data_nbytes for o in manifest.objects) == distinct + ranks[0].nbytes(), (
        "every distinct element once"
    )
    for layout in layouts:
        ranks = states_of(model, layout)
        for r in ranks:
            r.spoil()
        virtual.load([r.tree for r in ranks], store)
        for r in ranks:
            r.check()


NO_CHECKS: list[HealthCheck] = [*HealthCheck]  # pyright: ignore[reportAssignmentType]
QUICK = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=NO_CHECKS)
LONG = settings(max_examples=2000, deadline=None, suppress_health_check=NO_CHECKS)


@st.composite
def reshards(draw: Draw) -> tuple[Model, list[Layout]]:
    model = draw(models())
    return model, [draw(layouts(model)) for _ in range(draw(st.integers(1, 3)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with tensor `name` at `rank`, which holds box number `at` of it."""

    kind: Literal["hole", "overlap", "replica"]
    name: str
    rank: int
    at: int

    def box(self, layout: Layout) -> Box:
        return layout.placings[self.name].boxes[self.rank][self.at]


@st.composite
def faults(draw: Draw) -> tuple[Model, Layout, Fault]:
    model = replace(draw(models()), ties={})
    layout = draw(layouts(model))
    found: list[Fault] = []
    for name, placing in layout.placings.items():
        for rank, boxes in enumerate(placing.boxes):
            for at, box in enumerate(boxes):
                if box.numel == 0:
                    continue
                found.append(Fault(kind="hole", name=name, rank=rank, at=at))
                if box.numel > 1 and layout.world > 1:
                    found.append(Fault(kind="overlap", name=name, rank=rank, at=at))
                if sum(box in other for other in placing.boxes) > 1:
                    found.append(Fault(kind="replica", name=name, rank=rank, at=at))
    assume(found)
    kinds = sorted({f.kind for f in found})
    kind = draw(st.sampled_from(kinds))
    return model, layout, draw(st.sampled_from([f for f in found if f.kind == kind]))


def broken(layout: Layout, fault: Fault) -> Layout:
    """The layout with a box held by nobody, or with half of it held by the next rank as well."""
    placing, box = layout.placings[fault.name], fault.box(layout)
    if fault.kind == "hole":
        boxes = tuple(tuple(b for b in mine if b != box) for mine in placing.boxes)
    else:
        axis = next(i for i, e in enumerate(box.extent) if e > 1)
        half, other = slab(box, axis, 0, 1), (fault.rank + 1) % layout.world
        boxes = tuple((*mine, half) if r == other else mine for r, mine in enumerate(placing.boxes))
    return replace(
        layout, placings=layout.placings | {fault.name: replace(placing, boxes=boxes, absent=False)}
    )


def require_refusal(model: Model, layout: Layout, fault: Fault) -> None:
    store = MemoryObjectStore()
    if fault.kind == "replica":
        ranks = states_of(model, layout)
        ranks[fault.rank].parts[fault.name].spoil(fault.at)
        with pytest.raises(CkptError, match="replicas differ") as caught:
            virtual.save([r.tree for r in ranks], store)
    else:
        ranks = states_of(model, broken(layout, fault))
        with pytest.raises(CoverageError, match=r"is covered [02] times") as caught:
            virtual.save([r.tree for r in ranks], store)
    assert fault.name in str(caught.value), "the error names the tensor"
    assert "manifest" not in "".join(o.key for o in store.list("")), "nothing is committed"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@QUICK
@given(reshards())
def test_any_state_survives_any_reshard(drawn: tuple[Model, list[Layout]]) -> None:
    """CKP-01, CKP-03, CKP-04, CKP-08."""
    reshard(*drawn)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@QUICK
@given(faults())
def test_holes_overlaps_and_replicas_that_differ_are_refused(drawn: tuple[Model, Layout, Fault]) -> None:
    """CKP-01, CKP-05."""
    require_refusal(*drawn)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@LONG
@given(reshards())
def test_any_state_survives_any_reshard_at_length(drawn: tuple[Model, list[Layout]]) -> None:
    reshard(*drawn)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@LONG
@given(faults())
def test_what_is_wrong_is_refused_at_length(drawn: tuple[Model, Layout, Fault]) -> None:
    require_refusal(*drawn)


def test_the_check_sees_one_wrong_element() -> None:
    """A negative control: what the properties above rely on."""
    whole_thing = ((whole((2, 3)),),)
    model = Model(tensors={"a": torch.arange(6.0).view(2, 3)}, values={"b": 1}, ties={})
    (rank,) = states_of(model, Layout(world=1, placings={"a": Placing(boxes=whole_thing, memory="padded")}))
    rank.check()
    rank.tree["a"][1, 2] = 4.0
    assert "holds" in rank.parts["a"].wrong()
    rank.tree["a"][1, 2] = 5.0
    rank.tree["b"] = True
    with pytest.raises(AssertionError, match="b"):
        rank.check()
