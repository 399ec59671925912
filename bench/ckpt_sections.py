"""What bench/ckpt.py measures, section by section (paired.py says which key comes from which). Each returns its rows."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paired
from ckpt_world import BenchError, Relay, Watch, World, pss, s3_server, scratch

SHM = Path("/dev/shm")
RANKS = 2
FIRST_SAVE_AFTER_STEPS = 100
"""A job trains for a while before its first save; here for some seconds."""
MIB = 2**20
Rows = list[dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of everything."""

    state_nbytes: int
    replicated_nbytes: int
    rounds: int
    saves: int
    """How many saves the memory is watched for."""


FULL = Size(state_nbytes=2400 * MIB, replicated_nbytes=96 * MIB, rounds=5, saves=50)
QUICK = Size(state_nbytes=96 * MIB, replicated_nbytes=24 * MIB, rounds=2, saves=6)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all sections need."""

    size: Size
    say: Callable[[str], None]
    beside: dict[str, Any] = field(default_factory=dict[str, Any])
    """What goes into the result beside the keys."""

    @contextmanager
    def world(self, *, layout: str = "fsdp", nbytes: int = 0, **words: Any) -> Iterator[tuple[World, int]]:
        """Ranks that hold the state, and its bytes over all ranks."""
        with World(words.pop("ranks", RANKS), **words) as world:
            held = world.call("build", layout=layout, nbytes=nbytes or self.size.state_nbytes)
            yield world, sum(held)

    def rounds(self, section: str, one: Callable[[int], dict[str, float]], warm_up: bool = True) -> Rows:
        """`one(i)` for every round; the first of all warms up and does not count."""
        rows = []
        for i in range(self.size.rounds + warm_up):
            row = one(i)
            if i >= warm_up:
                rows.append(row)
            told = ", ".join(f"{k} {v:.3g}" for k, v in row.items())
            self.say(f"{section}, round {i + 1 - warm_up} of {self.size.rounds}: {told}")
        return rows


def in_turn(i: int, *acts: Callable[[], dict[str, float]]) -> dict[str, float]:
    """All acts one after the other; in every round another one is first."""
    row: dict[str, float] = {}
    for act in (*acts[i % len(acts) :], *acts[: i % len(acts)]):
        row |= act()
    return row


def empty(folder: Path) -> None:
    """Take the checkpoints away, as disk space is memory here; the records of generations stay."""
    for path in folder.iterdir():
        if path.name != "generations":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


# ---------------------------------------------------------------- sections


def stall(bench: Bench) -> Rows:
    """A step that holds a save: ours, DCP's two ways, and a plain copy."""
    with bench.world() as (world, _), scratch(SHM) as folder:
        ours = folder / "ours"
        world.call("open", root=str(ours), prepare=True)

        def memcpy() -> dict[str, float]:
            return {"memcpy_s": statistics.median(max(world.call("memcpy")) for _ in range(3))}

        def mine() -> dict[str, float]:
            found = paired.slowest(world.call("stall", of="ours"))
            empty(ours)
            return found

        def dcp(kind: str) -> dict[str, float]:
            found = paired.slowest(world.call("stall", of=kind, to=str(folder / kind)))
            shutil.rmtree(folder / kind)
            return {f"{kind}_{k}": v for k, v in found.items()}

        acts = (memcpy, mine, lambda: dcp("dcp_thread"), lambda: dcp("dcp_process"))
        return bench.rounds("stall", lambda i: in_turn(i, *acts))


def files(bench: Bench) -> Rows:
    """Blocking saves and loads on tmpfs."""
    with bench.world() as (world, _), scratch(SHM) as folder:
        ours, theirs = folder / "ours", folder / "dcp"
        world.call("open", root=str(ours))

        def raw_writes() -> dict[str, float]:
            ways = ("raw_write_s", "raw_mmap_s", "raw_pwrite2_s")
            return {how: max(world.call("raw_write", how=how, folder=str(folder))) for how in ways}

        def raw_reads() -> dict[str, float]:
            # Like ours and DCP's, each reads what nobody has read since it was written: the first reading of a page takes half as
            # long again as the next ones, for which the kernel has it on its lists.
            row = {}
            for how in ("raw_read_s", "raw_mmap_read_s", "raw_pread2_s"):
                world.call("raw_write", how="raw_write_s", folder=str(folder))
                row[how] = max(world.call("raw_read", how=how, folder=str(folder)))
            return row

        # Every writer's last files are taken away right before its turn, by the ranks: all write into memory that was free for a
        # moment only, and lies at hand for these very processes. A virtual machine gives memory that is free for seconds back to
        # its host; getting that again costs several times what writing does.
        def save() -> dict[str, float]:
            world.call("clear", folder=str(ours))
            return {"save_s": max(world.call("save"))}

        def dcp_save() -> dict[str, float]:
            world.call("clear", folder=str(theirs))
            return {"dcp_save_s": max(world.call("dcp_save", to=str(theirs)))}

        def one(i: int) -> dict[str, float]:
            row = in_turn(i, raw_writes, save, dcp_save)
            return row | in_turn(
                i,
                raw_reads,
                lambda: {"load_s": max(world.call("load", checked=i < 2))},
                lambda: {"dcp_load_s": max(world.call("dcp_load", source=str(theirs), checked=i < 2))},
            )

        return bench.rounds("files", one)


def reshard(bench: Bench) -> Rows:
    """Saved under FSDP2, loaded under tensor parallelism: rows against columns."""
    with scratch(SHM) as folder:
        ours, theirs = folder / "ours", folder / "dcp"
        with bench.world() as (world, _):
            world.call("open", root=str(ours))
            world.call("save")
            world.call("dcp_save", to=str(theirs))
        with bench.world(layout="tp") as (world, _):
            world.call("open", root=str(ours))
            return bench.rounds(
                "reshard",
                lambda i: in_turn(
                    i,
                    lambda: {"load_s": max(world.call("load", checked=i < 2))},
                    lambda: {"dcp_load_s": max(world.call("dcp_load", source=str(theirs), checked=i < 2))},
                ),
            )


def first(bench: Bench) -> Rows:
    """What a new checkpointer's first save costs more than its second."""
    with bench.world() as (world, _), scratch(SHM) as folder:

        def twice(name: str, act: Callable[[], float]) -> dict[str, float]:
            root = folder / "ours"
            world.call("open", root=str(root), prepare=True)
            world.call("train", steps=FIRST_SAVE_AFTER_STEPS)
            row = {}
            for entry in (f"first_{name}", name):
                row[entry] = act()
                empty(root)
            world.call("end")
            shutil.rmtree(root)
            return row

        return bench.rounds(
            "first",
            lambda i: in_turn(
                i,
                lambda: twice("save_s", lambda: max(world.call("save"))),
                lambda: twice("stall_s", lambda: paired.slowest(world.call("stall", of="ours"))["stall_s"]),
            ),
        )


def memory(bench: Bench) -> Rows:
    """Memory of all processes over many saves in the background."""
    with bench.world() as (world, held), scratch(SHM) as folder:
        world.call("train", steps=20)
        before = pss(world.pids())
        world.call("open", root=str(folder / "ours"), prepare=True)
        rows: Rows = []
        for i in range(bench.size.saves):
            with Watch(world) as watch:
                took_s = max(world.call("save_in_background"))
            settled = pss(world.pids()) - before
            grown = max(watch.peak - before, settled)
            rows.append(
                {"grown_nbytes": grown, "settled_nbytes": settled, "staged_nbytes": held, "save_s": took_s}
            )
            empty(folder / "ours")
            bench.say(
                f"memory, save {i + 1} of {bench.size.saves}: peak {grown / held:.3f}, settled {settled / held:.3f} of the bytes staged"
            )
        return rows


def dp8(bench: Bench) -> Rows:
    """Eight ranks load what each of them holds whole; a relay before the S3 server counts what is fetched."""
    with ExitStack() as stack:
        server = stack.enter_context(s3_server(stack.enter_context(scratch(SHM)), "bench"))
        relay = stack.enter_context(Relay("127.0.0.1", int(server.endpoint.rpartition(":")[2])))
        env = server.env() | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}"}
        world, held = stack.enter_context(
            bench.world(layout="plain", nbytes=bench.size.replicated_nbytes, ranks=8, env=env)
        )
        world.call("open", root="s3://bench/dp8")
        world.call("save")

        def one(i: int) -> dict[str, float]:
            before = relay.back_nbytes
            load_s = max(world.call("load", checked=i == 0))
            return {
                "got_nbytes": relay.back_nbytes - before,
                "unique_nbytes": held // 8,
                "load_s": load_s,
            }

        return bench.rounds("dp8", one, warm_up=False)


def plan(bench: Bench) -> Rows:
    """Planning in simulated worlds of up to 16,384 ranks, by bench/plan.py."""
    command = [sys.executable, str(Path(__file__).with_name("plan.py")), "--json"]
    command += ["--quick"] if bench.size is QUICK else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"plan.py ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    bench.beside["plan_curve"] = found["curve"]
    bench.beside["plan_worst_first_ms"] = found["worst_first_ms"]
    return found["rounds"]


def s3(bench: Bench) -> Rows:
    """Blocking saves and loads over S3 against boto3's managed transfers of the same bytes and part size."""
    from surefoot.ckpt.objects.s3 import PART_NBYTES

    part = {"part_nbytes": PART_NBYTES}
    with s3_world(bench, bench.size.state_nbytes) as (world, buckets):

        def one(i: int) -> dict[str, float]:
            with buckets(f"ours{i}") as ours, buckets(f"boto3{i}") as theirs:
                world.call("open", root=f"s3://{ours}/root")
                row = in_turn(
                    i,
                    lambda: {"save_s": max(world.call("save"))},
                    lambda: {"boto3_put_s": max(world.call("boto3_put", bucket=theirs, **part))},
                )
                checked = i == 0
                row |= in_turn(
                    i,
                    lambda: {"load_s": max(world.call("load", checked=checked))},
                    lambda: {
                        "boto3_get_s": max(world.call("boto3_get", bucket=theirs, checked=checked, **part))
                    },
                )
                world.call("end")
            return row

        return bench.rounds("s3", one, warm_up=False)


def s3_dcp(bench: Bench) -> Rows:
    """The same against DCP's FsspecWriter and FsspecReader, on a quarter of the state: they are slow."""
    with s3_world(bench, bench.size.state_nbytes // 4) as (world, buckets):

        def one(i: int) -> dict[str, float]:
            with buckets(f"ours{i}") as ours, buckets(f"dcp{i}") as theirs:
                world.call("open", root=f"s3://{ours}/root")
                there = f"s3://{theirs}/dcp"
                row = in_turn(
                    i,
                    lambda: {"save_s": max(world.call("save"))},
                    lambda: {"dcp_save_s": max(world.call("dcp_save", to=there))},
                )
                row |= in_turn(
                    i,
                    lambda: {"load_s": max(world.call("load", checked=i == 0))},
                    lambda: {"dcp_load_s": max(world.call("dcp_load", source=there, checked=i == 0))},
                )
                world.call("end")
            return row

        return bench.rounds("s3_dcp", one, warm_up=False)


@contextmanager
def s3_world(bench: Bench, nbytes: int) -> Iterator[tuple[World, Callable[[str], Any]]]:
    """Ranks whose AWS variables lead to a server of their own, and buckets that go away with their blocks.

    A bucket that is deleted gives its memory back at once; deleted objects would keep theirs until they are vacuumed.
    """
    import boto3

    with scratch(SHM) as folder, s3_server(folder, "bench") as server:
        env = server.env()
        client = boto3.client(
            "s3",
            endpoint_url=env["AWS_ENDPOINT_URL"],
            aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
            region_name=env["AWS_DEFAULT_REGION"],
        )

        @contextmanager
        def bucket(name: str) -> Iterator[str]:
            client.create_bucket(Bucket=name)
            try:
                yield name
            finally:
                client.delete_bucket(Bucket=name)

        with bench.world(nbytes=nbytes, env=env) as (world, _):
            yield world, bucket


MEASURE: dict[str, Callable[[Bench], Rows]] = {
    f.__name__: f for f in (stall, files, reshard, first, memory, dp8, plan, s3, s3_dcp)
}
