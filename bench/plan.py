"""How long a rank plans a checkpoint: simulated worlds, no processes, no torch.

``bench/plan.py --json`` prints one JSON object. For 1,024 ranks and 1,024 tensors (a transformer under FSDP: a million boxes):

    plan_first_ms_1k_ranks_1k_tensors   a new layout: describe the own one, read all the others', prove the coverage, own share
    plan_ms_1k_ranks_1k_tensors         the same layout again: what the rank holds now, compared with what it planned for

each the median of `rounds` (5), with all of them beside it. `worst_first_ms` is the first plan where no two of the 1,024 tensors
have one shape, so that nothing can be shared. `prove_ms_1m_pieces` is the committer's proof, from the pieces of a manifest alone.
`curve` has a row for each layout and number of ranks: the time to plan, the bytes that a rank sends and receives, how many boxes
were looked at, and how even the written bytes are. ``--quick``: up to 1,024 ranks, 2 rounds.

Times are of one core, as processor time, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from plan_worlds import KINDS, World, descriptions, fsdp, transformer

from surefoot.ckpt.live.ranklayout import agree_on_layout
from surefoot.ckpt.manifest import TensorMeta
from surefoot.ckpt.planning.coverage import prove_coverage
from surefoot.ckpt.planning.layouts import Layouts, describe, exchange_layouts
from surefoot.ckpt.planning.plan import Plan, RankShare, nbytes_of

TENSORS = 1024
SIZES = (256, 1024, 4096, 16_384)
SAMPLED = 64
"""Ranks whose written bytes are counted."""


def ms(act: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    result = act()
    return 1e3 * (time.process_time() - begun), result


class Simulated:
    """One rank among all those of a world."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        everyone = descriptions(world)
        self.words = [d.word for d in everyone]
        first: dict[bytes, int] = {}
        for r, d in enumerate(everyone):
            first.setdefault(d.template, r)
        self._templates = [d.template if first[d.template] == r else b"" for r, d in enumerate(everyone)]
        self.mine = world.held(rank)
        self.received = 0
        self.calls = 0

    def exchange(self, data: bytes) -> list[bytes]:
        self.calls += 1
        heard = self.words if self.calls == 1 else self._templates
        self.received += sum(map(len, heard))
        return heard

    def agree(self) -> Layouts:
        self.calls = self.received = 0
        return exchange_layouts(self.mine, self.rank, self.exchange)

    def first(self) -> tuple[Plan, RankShare]:
        plan = Plan(self.agree())
        return plan, plan.share(self.rank)


def measure_1k(rounds: int) -> dict[str, Any]:
    simulated = Simulated(fsdp(1024, transformer(TENSORS)), rank=517)
    known = agree_on_layout(
        tuple(simulated.mine), {}, rank=simulated.rank, world_size=1024, exchange=simulated.exchange
    )
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        first, _plan = ms(simulated.first)
        again, same = ms(lambda: known.fits(tuple(simulated.world.held(simulated.rank)), {}))
        assert same
        found.append({"plan_first_ms_1k_ranks_1k_tensors": first, "plan_ms_1k_ranks_1k_tensors": again})
    keys = found[0].keys()
    return {**{k: statistics.median(r[k] for r in found) for k in keys}, "rounds": found}


def curve_row(world: World) -> dict[str, Any]:
    simulated = Simulated(world, rank=world.ranks // 2 + 5)
    first_ms, (plan, share) = ms(simulated.first)
    described_ms, mine = ms(lambda: describe(simulated.mine))
    step = max(1, world.ranks // SAMPLED)
    loads = [written_nbytes(world, plan.share(r)) for r in range(0, world.ranks, step)]
    return {
        "layout": world.name,
        "ranks": world.ranks,
        "tensors": len(world.tensors),
        "first_ms": round(first_ms, 1),
        "describe_ms": round(described_ms, 1),
        "boxes_looked_at": plan.touched,
        "pieces_of_a_rank": len(share.written),
        "sent_bytes": len(mine.word) + len(simulated._templates[simulated.rank]),
        "received_bytes": simulated.received,
        "exchanges": simulated.calls,
        "templates": len(set(simulated._templates) - {b""}),
        "max_over_mean": round(max(loads) * world.ranks / world.nbytes, 4),
    }


def written_nbytes(world: World, share: RankShare) -> int:
    metas = {name: TensorMeta(dtype="float32", shape=shape) for name, shape in world.tensors.items()}
    return sum(nbytes_of(metas[name], box) for name, box in share.written)


def prove_ms(ranks: int) -> float:
    world = fsdp(ranks, transformer(TENSORS))
    metas = {name: TensorMeta(dtype="float32", shape=shape) for name, shape in world.tensors.items()}
    pieces = [(t.name, box) for rank in range(ranks) for t in world.held(rank) for box in t.boxes]
    return ms(lambda: prove_coverage(metas, pieces))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="How long a rank plans a checkpoint.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="up to 1,024 ranks, 2 rounds")
    given = parser.parse_args()
    sizes = [n for n in SIZES if not given.quick or n <= 1024]
    result = measure_1k(2 if given.quick else 5)
    worst = Simulated(fsdp(256 if given.quick else 1024, transformer(TENSORS, alike=False)), rank=5)
    result["worst_first_ms"] = ms(worst.first)[0]
    if not given.quick:
        result["prove_ms_1m_pieces"] = prove_ms(1024)
    result["curve"] = []
    for kind in KINDS:
        for ranks in sizes:
            row = curve_row(kind(ranks, transformer(TENSORS)))
            result["curve"].append(row)
            if not given.json:
                print(row, flush=True)
    if given.json:
        print(json.dumps(result))
    else:
        print({k: v for k, v in result.items() if k not in ("curve", "rounds")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
