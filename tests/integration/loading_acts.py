"""What the ranks of test_ckpt_loading.py do: save in one layout, load in another, and count what is read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from surefoot import ckpt
from surefoot.ckpt import tiers
from surefoot.ckpt.errors import CkptError, DamagedError
from surefoot.ckpt.loading import carrying, fetching, nodememory
from surefoot.ckpt.loading.together import load_agreed
from surefoot.ckpt.objects import files
from surefoot.ckpt.opening import open_channel
from surefoot.ckpt.store import ObjectStoreUnavailableError, open_store
from surefoot.ckpt.tools.inspect import find

SHAPES = {"w": (1030, 2050), "v": (700, 11, 7), "b": (4099,), "s": ()}
"""8.5 MB of float32: three blocks, none of whose borders falls between two rows; sizes that nothing divides."""
TYPES = {"w": torch.float32, "v": torch.bfloat16, "b": torch.float8_e4m3fn, "s": torch.int64}


class Counting:
    """A store that counts the bytes it gives out, by key, and fails when it is told to."""

    def __init__(self, root: str, fail_after: int | None = None) -> None:
        self._store = open_store(root)
        self._counting = threading.Lock()
        self._left = fail_after
        self.read_nbytes: dict[str, int] = {}
        self.ranges: set[tuple[str, int, int]] = set()
        """What was read: key, start, bytes. What several on a machine read of a file the kernel reads once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = self._store.read(key, start, length)
        self._count(key, len(data))
        return data

    def _may_fail(self, key: str) -> None:
        with self._counting:
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    raise ObjectStoreUnavailableError(f"{key}: the cable is out")

    def read_into(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        self._may_fail(key)
        nbytes = self._store.read_into(key, start, views)
        self.ranges.add((key, start, nbytes))
        self._count(key, nbytes)
        return nbytes

    def look(self, key: str, start: int, nbytes: int) -> memoryview | None:
        if self._left is not None:
            return None
        if (found := self._store.look(key, start, nbytes)) is not None:
            self.ranges.add((key, start, nbytes))
            self._count(key, nbytes)
        return found

    def _count(self, key: str, nbytes: int) -> None:
        with self._counting:
            self.read_nbytes[key] = self.read_nbytes.get(key, 0) + nbytes


def value_of(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel()).view(shape).to(torch.float32).to(TYPES[name])


def state_of(layout: str, *, filled: bool) -> dict[str, Any]:
    """Every element its own global index (as far as its type can say), or zero."""
    world = dist.get_world_size()
    state: dict[str, Any] = {"epoch": 3 if filled else 0}
    for name in SHAPES:
        value = value_of(name) if filled else torch.zeros_like(value_of(name))
        state[name] = _placed(value, layout, world)
    return state


def _placed(value: torch.Tensor, layout: str, world: int) -> torch.Tensor:
    if layout == "ddp" or not value.ndim:
        return value
    bits = value.view(torch.uint8) if value.element_size() == 1 else value
    if layout == "hsdp":
        mesh, placements = init_device_mesh("cpu", (2, world // 2)), [Replicate(), Shard(0)]
    else:
        dim = min({"fsdp": 0, "tp": 1}[layout], value.ndim - 1)
        mesh, placements = init_device_mesh("cpu", (world,)), [Shard(dim)]
    placed = distribute_tensor(bits, mesh, placements)
    if bits is value:
        return placed
    local = placed.to_local().view(value.dtype)
    return DTensor.from_local(local, mesh, placements, shape=value.shape, stride=value.stride())


def whole_of(t: torch.Tensor) -> torch.Tensor:
    if not isinstance(t, DTensor):
        return t.detach()
    if t.dtype.itemsize > 1:
        return t.full_tensor()
    local = t.to_local().view(torch.uint8)
    bits = DTensor.from_local(local, t.device_mesh, t.placements, shape=t.shape, stride=t.stride())
    return bits.full_tensor().view(t.dtype)


def require_exact(state: dict[str, Any]) -> None:
    for name in SHAPES:
        found, expected = whole_of(state[name]).contiguous(), value_of(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name
    assert state["epoch"] == 3


def save(root: str, layout: str, *steps: int) -> None:
    with ckpt.Checkpointer(root, start_over=True) as c:
        for step in steps:
            c.save(step, state_of(layout, filled=True)).wait()


def _failing(*_: Any) -> Any:
    raise ObjectStoreUnavailableError("the cable is out")


def load(root: str, layout: str, by: str = "", fail_rank: int = -1, fail_after: int = 0) -> dict[str, Any]:
    """Returns what was read by this rank, and how the load ended. `by`: how ranks share it: a machine's "pages" (or "memory fs"); as
    if each had a machine of its own, the "memory" of the one that reads, or messages of the "group". `fail_after`: so many reads of
    `fail_rank`; -1: before the first, when it works out what to read."""
    fetching.NEARBY = fetching.NEARBY._replace(round_nbytes=2**20)  # every block is a round of its own
    nodememory.ENABLED = by != "group"
    fails = dist.get_rank() == fail_rank
    if fails and fail_after < 0:
        carrier: Any = carrying.Carrier
        carrier._errand = _failing
    if by in ("memory", "group"):
        fetching.machine = lambda: f"machine {dist.get_rank()}"
    store: Any = Counting(root, fail_after if fails and fail_after >= 0 else None)
    state = state_of(layout, filled=False)
    channel = open_channel(None, 30.0)
    told: dict[str, Any] = {"error": "", "step": None}
    try:
        loaded = load_agreed(store, channel, state, step=None, strict=True)
        assert loaded is not None
        told["step"] = loaded.step
        told["passed_over"] = loaded.passed_over
        require_exact(state)
    except (CkptError, ObjectStoreUnavailableError) as e:
        told["error"] = f"{type(e).__name__}: {e}"
    finally:
        channel.close()
    told["read"] = store.read_nbytes
    told["ranges"] = sorted(store.ranges)
    return told


def restore(root: str, layout: str, step: int) -> dict[str, Any]:
    """As ranks under an agent do it."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def exchange(data: bytes) -> list[bytes]:
        found: list[Any] = [None] * world
        dist.all_gather_object(found, data)
        return found

    store: Any = Counting(root)
    state = state_of(layout, filled=False)
    manifest, _ = find(open_store(root), step)
    told: dict[str, Any] = {"error": ""}
    try:
        restored = tiers.restore_committed(
            store,
            state,
            generation=manifest.generation,
            step=step,
            rank=rank,
            world_size=world,
            exchange=exchange,
        )
        assert (restored.generation, restored.step) == (manifest.generation, step)
        require_exact(state)
    except DamagedError as e:
        told["error"] = f"{e.key} {e}"
    told["read"] = store.read_nbytes
    told["ranges"] = sorted(store.ranges)
    return told


def load_plainly(root: str, layout: str) -> int:
    """From any store; returns the step."""
    state = state_of(layout, filled=False)
    loaded = ckpt.load(root, state)
    assert loaded is not None
    require_exact(state)
    return loaded.step


def load_each(roots: list[str], steps: list[int | None]) -> str:
    """Every rank from its own root, and with its own wish; returns how it ended."""
    rank = dist.get_rank()
    state = state_of("fsdp", filled=False)
    try:
        loaded = ckpt.load(roots[rank], state, step=steps[rank])
        return f"step {loaded.step if loaded else None}"
    except CkptError as e:
        return f"{type(e).__name__}: {e}"


def save_each(roots: list[str]) -> str:
    try:
        ckpt.save(roots[dist.get_rank()], 1, state_of("fsdp", filled=True))
    except CkptError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def load_without_mount(root: str, blind: int) -> str:
    """One rank sees no data objects under the root that all are given: the storage is not mounted on its machine."""
    if dist.get_rank() == blind:
        files.FileObjectStore._path = lambda self, key: Path("/nowhere") / key  # pyright: ignore[reportAttributeAccessIssue]
    state = state_of("fsdp", filled=False)
    try:
        loaded = ckpt.load(root, state)
        return f"step {loaded.step if loaded else None}"
    except CkptError as e:
        return f"{type(e).__name__}: {e}"
