"""Ranks for test_ckpt_saving.py: what happens to a save while it is under way."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from surefoot import ckpt, failpoint
from surefoot.ckpt import channel, opening
from surefoot.ckpt.channel import ChannelError, StoreChannel
from surefoot.ckpt.errors import CkptError, CkptUserError, CommitError
from surefoot.ckpt.objects.s3 import PART_NBYTES
from surefoot.ckpt.saving import calls, flight
from surefoot.ckpt.saving.upload import report_failure
from surefoot.ckpt.store import ObjectStoreError, open_store

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "isend",
    "irecv",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)


@contextmanager
def counted(only_background: bool = False) -> Iterator[list[str]]:
    """Collects the names of torch.distributed's calls, by whatever thread, or by others than the main one."""
    found: list[str] = []

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not only_background or threading.current_thread() is not threading.main_thread():
                found.append(name)
            return call(*args, **kwargs)

        return wrapped

    before = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, call in before.items():
        setattr(dist, name, counting(name, call))
        setattr(distributed_c10d, name, getattr(dist, name))
    try:
        yield found
    finally:
        for name, call in before.items():
            setattr(dist, name, call)
            setattr(distributed_c10d, name, call)


def sharded(rows: int = 8, fill: float = 1.0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((rows, 4), fill), mesh, [Shard(0)]), "b": torch.ones(3)}


def quick() -> None:
    """The same in less time."""
    flight.BEAT_S = 0.1
    channel.SILENT_S = 1.5
    channel.GOODBYE_S = 0.2


def save_a_step_again(root: str) -> list[str]:
    """What this rank is told, and goes on."""
    told: list[str] = []
    with ckpt.Checkpointer(root) as c:
        c.save(2, sharded())
        for _ in range(2):
            with pytest.raises(CkptUserError) as caught:
                c.save(2, sharded(fill=2.0))
            told.append(str(caught.value))
        c.save(1, sharded()).wait()
    return told


def uploader_of(c: ckpt.Checkpointer) -> int:
    assert c._equipment is not None
    return c._equipment.uploader().pid


# ---------------------------------------------------------------- acts


def one_rank_closes(root: str, leaver: int) -> None:
    state = sharded(9)
    c = ckpt.Checkpointer(root)
    c.save(1, state).wait()
    if dist.get_rank() == leaver:
        c.close()
        return
    with pytest.raises(ChannelError, match=f"rank {leaver} has closed its Checkpointer"):
        c.save(2, state)
    c.close()
    assert ckpt.steps(root) == [1]


def save_at_every_step(root: str, rounds: int) -> None:
    state = sharded()
    dist.all_reduce(torch.ones(1))
    with ckpt.Checkpointer(root, keep=2) as c:
        with counted(only_background=True) as in_background, counted() as in_all:
            for step in range(1, rounds + 1):
                c.save(step, state)
                dist.barrier()
            c._settle()
            if dist.get_rank() == 0:
                own = c._calls.channel()
                assert isinstance(own, StoreChannel)
                assert own._fore.store.num_keys() < 8 * dist.get_world_size(), "words are forgotten"
        assert in_background == []
        assert in_all == ["barrier"] * rounds, "the count counts"
    dist.barrier()
    assert ckpt.steps(root)[-1] == rounds


def uploader_is_killed(root: str) -> float:
    """Returns after how many seconds this rank heard of it."""
    rank, state = dist.get_rank(), sharded()
    c = ckpt.Checkpointer(root, deadline_s=60)
    c.save(10, state).wait()
    if rank == 1:
        failpoint.arm(failpoint.parse("upload.before_finish=delay:30"))
    handle = c.save(20, state)
    dist.barrier()
    begun = time.monotonic()
    if rank == 1:
        os.kill(uploader_of(c), signal.SIGKILL)
    with pytest.raises(CommitError, match=r"rank 1 .*SIGKILL") as caught:
        handle.wait(20)
    took = time.monotonic() - begun
    failpoint.arm(None)
    assert "uploader" in str(caught.value)
    assert ckpt.steps(root) == [10], "nothing is committed"
    c.save(30, state).wait()
    dist.barrier()
    c.close()
    assert ckpt.steps(root) == [10, 30]
    return took


def rank_is_killed(root: str, victim: int) -> str:
    """Every other rank names it."""
    quick()
    rank, state = dist.get_rank(), sharded()
    c = ckpt.Checkpointer(root, deadline_s=60)
    c.save(10, state).wait()
    if rank == victim:
        failpoint.arm(failpoint.parse("save.before_stage=crash"))
    with pytest.raises(CkptError) as caught:
        c.save(20, state).wait(20)
    c._close_after(caught.value)
    assert ckpt.steps(root) == [10]
    os._exit(0 if f"rank {victim}" in str(caught.value) else 3)


def rank_0_is_stopped(root: str, when: str) -> None:
    """Rank 0, which hosts the words, is stopped: before a save that the others begin, or when it has begun one."""
    quick()
    state = sharded()
    c = ckpt.Checkpointer(root, deadline_s=60)
    c.save(10, state).wait()
    failpoint.arm(failpoint.parse("upload.before_objects=delay:1") if dist.get_rank() == 1 else None)
    dist.barrier()
    handle = c.save(20, state) if when == "during" else None
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(
        CkptError, match=r"rank 0 has not answered for \d+ s: its process is stopped"
    ) as caught:
        (handle or c.save(20, state)).wait()
    c._close_after(caught.value)
    print("named", flush=True)
    os._exit(0)


def save_that_is_never_answered(root: str, deadline_s: float) -> tuple[int, str]:
    """Train beside a save of two parts a rank until it has failed; then save again. Returns the steps meanwhile, and the error."""
    mesh = init_device_mesh("cpu", (2,))
    rows = 2 * (PART_NBYTES + 2**20) // 4096
    state = {"w": distribute_tensor(torch.ones(rows, 1024), mesh, [Shard(0)])}
    c = ckpt.Checkpointer(root, deadline_s=deadline_s)
    handle = c.save(1, state)
    steps = 0
    ended = torch.zeros(1)
    while ended.item() < 2:
        time.sleep(0.005)  # the step's work
        ended = torch.tensor([float(handle.done())])
        dist.all_reduce(ended)
        steps += 1
    with pytest.raises((CkptError, ObjectStoreError)) as caught:
        handle.wait()
    c._close_after(caught.value)
    assert ckpt.steps(root) == []
    return steps, str(caught.value)


def late_words(root: str) -> None:
    """Everything of attempt 1 arrives while attempt 2 waits for rank 1."""
    rank, state = dist.get_rank(), sharded()
    with ckpt.Checkpointer(root, deadline_s=60) as c:
        c.save(10, state).wait()
        if rank == 1:
            failpoint.arm(failpoint.parse("upload.before_objects=error"))
        with pytest.raises(CommitError, match=r"rank 1 failed|FailpointError"):
            c.save(20, state).wait()
        first = c._takeoff.last_attempt
        dist.barrier()
        failpoint.arm(failpoint.parse("upload.before_finish=delay:0.7") if rank == 1 else None)
        handle = c.save(20, state)
        dist.barrier()
        assert c._takeoff.last_attempt != first
        if rank == 1:
            own = c._calls.channel()
            assert isinstance(own, channel.StoreChannel)
            late = opening._client(os.environ["MASTER_ADDR"], port_of(c), 10.0)
            for _ in range(2):
                late.add(f"c/{first}", 1)
            late.set(f"w/{first}/end", b"ok")
            late.set(f"w/{first}/out", b"{}")
            report_failure(
                open_store(root), generation=1, step=20, attempt=first, writer=1, reason="late news"
            )
        assert not handle.done(), "attempt 2 is not finished by what belongs to attempt 1"
        manifest = handle.wait()
        assert manifest is not None
        assert manifest.attempt == c._takeoff.last_attempt
        failpoint.arm(None)
    dist.barrier()
    assert ckpt.verify(root, 20).ok


def port_of(c: ckpt.Checkpointer) -> int:
    store, key = opening._meeting_place(None)
    number = int(key.rpartition("/")[2]) - 1  # asking has counted as an opening
    return int(store.get(f"{key.rpartition('/')[0]}/{number}").decode().split()[1])


def no_collective_and_no_device(root: str) -> None:
    """A default device that holds no data stands for one that is full: whatever is made there cannot be used."""
    state = sharded()
    state["b"] = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (4,)), [Shard(0)])
    with torch.device("meta"), ckpt.Checkpointer(root) as c:
        with counted() as found:
            c.prepare(state)
            for step in (1, 2):
                c.save(step, state).wait()
            c.save(3, state, blocking=True)
        assert found == [], found
        # A load passes bytes on over the group; what to read, and who reads it, it plans without.
        loaded = c.load(state)
        assert loaded is not None
        assert torch.empty(1).device.type == "meta", "the fault is there"
    dist.barrier()
    assert ckpt.steps(root) == [1, 2, 3]


def hsdp_and_tp(root: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    whole = torch.arange(7.0 * 6).view(7, 6)
    state: dict[str, Any] = {"w": distribute_tensor(whole, mesh, [Replicate(), Shard(0), Shard(1)])}
    c = ckpt.Checkpointer(root, deadline_s=30)
    c.save(1, state).wait()
    if rank == 5:
        failpoint.arm(failpoint.parse("ckpt.before_part=error"))
    with pytest.raises(CommitError, match="FailpointError" if rank == 5 else "rank 5 failed"):
        c.save(2, state).wait()
    failpoint.arm(None)
    dist.barrier()
    c.save(3, state).wait()
    assert isinstance(state["w"], DTensor)
    # A sub-group alone: its tensors make up no whole, and the others never come.
    calls.CHANNEL_TIMEOUT_S = 2.0
    half = dist.new_group([0, 1, 2, 3])
    if rank < 2:
        with pytest.raises(CkptError, match=r"ranks 2, 3|rank 0"):
            ckpt.Checkpointer(root, half, start_over=True).save(4, {"w": torch.ones(2)})
    dist.barrier()
    c.close()
    assert ckpt.steps(root) == [1, 3]


# ---------------------------------------------------------------- one failure, one class


class BrokenStateDict:
    """A caller's mistake that only rank 1 makes."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise KeyError("lost")
        return {"a": 1}

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


def told_by_all(root: str, blocking: bool) -> list[tuple[str, str, str]]:
    """What this rank is told of saves that fail in all ways, by name: the class, and that of the cause."""
    rank, told = dist.get_rank(), list[tuple[str, str, str]]()
    folder = Path(root.removeprefix("file://"))
    one = torch.ones(30)

    def hear(name: str, save: Callable[[], object]) -> None:
        dist.barrier()
        try:
            save()
        except Exception as e:
            told.append((name, type(e).__name__, type(e.__cause__).__name__))
        else:
            told.append((name, "", ""))

    def saves(name: str, step: int, state: dict[str, Any], **more: Any) -> None:
        hear(name, lambda: c.save(step, state, blocking=blocking, **more).wait())

    def in_the_way(step: int) -> None:
        if rank == 0:
            (folder / "gen-0001" / f"step-{step:010d}").write_text("in the way")

    with ckpt.Checkpointer(root, deadline_s=30) as c:
        saves("the first", 1, {"w": one})
        saves("tensors differ", 2, {"w": one + rank})
        saves("values differ", 3, {"w": one, "n": rank})
        saves("a tensor or a value", 4, {"w": one, "n": torch.ones(2) if rank else 1})
        saves("cursors differ", 5, {"w": one}, cursor={"at": rank})
        saves("shapes differ", 6, {"w": torch.ones(30 + rank)})
        saves("one rank's state", 7, {"w": one, "x": object() if rank else 1})
        saves("one rank's cursor", 8, {"w": one}, cursor={"at": one} if rank else {"at": 1})
        saves("one rank's state_dict", 9, {"w": one, "x": BrokenStateDict()})
        saves("steps differ", 10 + rank, {"w": one})
        saves("committed already", 1, {"w": one})
        if rank == 1:
            failpoint.arm(failpoint.parse("upload.before_objects=error"))
        saves("one rank's upload", 20, {"w": one})
        failpoint.arm(None)
        in_the_way(21)
        saves("the object store", 21, {"w": one})
        saves("the last", 22, {"w": one})
    hear("stale", lambda: ckpt.Checkpointer(root).save(30, {"w": one}))
    with ckpt.Checkpointer(root) as other:
        other.load({"w": torch.ones(30)})
        hear("not newer", lambda: other.save(22, {"w": one}))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / "probes", ignore_errors=True)
            (folder / "probes").write_text("in the way")
        hear("no generation", lambda: other.save(31, {"w": one}))
    return told
