"""Worlds to plan for without running them: a transformer's tensors on thousands of ranks, in the usual layouts.

A world says what any one rank holds. What all ranks send is made as they would make it, with one saving: tensors of one shape are
cut alike, so each rank describes one tensor of each shape, and all of them only the first time that a description is new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefoot.ckpt.boxes import Sharding, held_boxes
from surefoot.ckpt.planning.layouts import Description, HeldTensor, describe

HASH_NBYTES = 16
WIDTH, VOCABULARY = 8192, 128_256
LAYER = {
    "attn.k.weight": (WIDTH // 8, WIDTH),
    "attn.norm.weight": (WIDTH,),
    "attn.out.weight": (WIDTH, WIDTH),
    "attn.q.weight": (WIDTH, WIDTH),
    "attn.v.weight": (WIDTH // 8, WIDTH),
    "mlp.down.weight": (WIDTH, 28_672),
    "mlp.gate.weight": (28_672, WIDTH),
    "mlp.norm.weight": (WIDTH,),
    "mlp.up.weight": (28_672, WIDTH),
}
"""A layer of a 70B model."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """`ranks` ranks hold `tensors` (shape by name, float32), each cut by the mesh dimensions that `shardings` gives for a
    rank and a shape."""

    name: str
    ranks: int
    tensors: dict[str, Shape]
    shardings: Callable[[int, Shape], Sequence[Sharding]]

    def held(self, rank: int, names: Sequence[str] | None = None) -> list[HeldTensor]:
        """What one rank holds of all tensors, or of some."""
        return [
            HeldTensor(
                name=name,
                dtype="float32",
                shape=self.tensors[name],
                boxes=tuple(
                    h.box for h in held_boxes(self.tensors[name], self.shardings(rank, self.tensors[name]))
                ),
            )
            for name in (names or self.tensors)
        ]

    @property
    def nbytes(self) -> int:
        total = 0
        for shape in self.tensors.values():
            numel = 1
            for n in shape:
                numel *= n
            total += 4 * numel
        return total


def transformer(tensors: int, *, alike: bool = True) -> dict[str, Shape]:
    """So many tensors: embedding, head, layers. With `alike` false no two of them have one shape."""
    found: dict[str, Shape] = {"embed.weight": (VOCABULARY, WIDTH), "head.weight": (VOCABULARY, WIDTH)}
    layer = 0
    while len(found) < tensors:
        for name, shape in LAYER.items():
            if len(found) < tensors:
                n = shape[0] if alike else shape[0] + len(found)
                found[f"layers.{layer}.{name}"] = (n, *shape[1:])
        layer += 1
    return found


def fsdp(ranks: int, tensors: dict[str, Shape]) -> World:
    """Everything cut along dimension 0 by all ranks."""
    return World(name="fsdp", ranks=ranks, tensors=tensors, shardings=lambda r, _: [Sharding(0, ranks, r)])


def hsdp(ranks: int, tensors: dict[str, Shape]) -> World:
    """Replicas, each cut by 128 ranks."""
    return World(
        name="hsdp", ranks=ranks, tensors=tensors, shardings=lambda r, _: [Sharding(0, 128, r % 128)]
    )


def replicated(ranks: int, tensors: dict[str, Shape]) -> World:
    """DDP: everybody holds everything."""
    return World(name="replicated", ranks=ranks, tensors=tensors, shardings=lambda r, _: [])


def tp_dp(ranks: int, tensors: dict[str, Shape]) -> World:
    """TP 8 over DP: matrices are cut in eight, vectors are the same everywhere."""

    def shardings(rank: int, shape: Shape) -> Sequence[Sharding]:
        return [Sharding(int(shape[1] == 28_672), 8, rank % 8)] if len(shape) == 2 else []

    return World(name="tp_dp", ranks=ranks, tensors=tensors, shardings=shardings)


def fsdp_tp(ranks: int, tensors: dict[str, Shape]) -> World:
    """TP 8, and FSDP within each of its shards."""

    def shardings(rank: int, shape: Shape) -> Sequence[Sharding]:
        tp = [Sharding(int(shape[1] == 28_672), 8, rank % 8)] if len(shape) == 2 else []
        return [*tp, Sharding(0, ranks // 8, rank // 8)]

    return World(name="fsdp_tp", ranks=ranks, tensors=tensors, shardings=shardings)


KINDS = (fsdp, hsdp, replicated, tp_dp, fsdp_tp)


def descriptions(world: World) -> list[Description]:
    """What each rank would say."""
    of_shape = {world.tensors[name]: name for name in sorted(world.tensors, reverse=True)}
    some = sorted(of_shape.values())
    known: dict[bytes, Description] = {}
    found: list[Description] = []
    for rank in range(world.ranks):
        word = describe(world.held(rank, some)).word
        if word[:HASH_NBYTES] not in known:
            known[word[:HASH_NBYTES]] = describe(world.held(rank))
        full = known[word[:HASH_NBYTES]]
        found.append(Description(word=full.word[:HASH_NBYTES] + word[HASH_NBYTES:], template=full.template))
    return found
