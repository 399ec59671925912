"""What a save does with memory, processes and live tensors: one process, on files."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from surefoot import ckpt
from surefoot.ckpt.errors import ImageError
from surefoot.ckpt.live.copying import BOUNCE_NBYTES, LiveChunks
from surefoot.ckpt.live.leaves import leaf_of
from surefoot.ckpt.live.pool import StagingBuffer
from surefoot.ckpt.live.ranklayout import agree_on_layout
from surefoot.ckpt.manifest import PAGE_NBYTES, object_key
from surefoot.ckpt.store import MemoryObjectStore, Upload, open_store
from surefoot.ckpt.tiers import Stager, upload_images


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


@pytest.fixture(params=["file", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow])])
def anywhere(request: pytest.FixtureRequest, root: str) -> str:
    return request.getfixturevalue("s3_url") if request.param == "s3" else root


def test_what_changes_after_save_returns_is_not_saved(anywhere: str) -> None:
    """CKP-20."""
    root = anywhere
    p = torch.nn.Parameter(torch.zeros(100_000))
    with ckpt.Checkpointer(root, keep=2) as c, torch.no_grad():
        for step in range(1, 11):
            before = p.detach().clone()
            handle = c.save(step, {"p": p})
            for _ in range(10):
                p.add_(1)
            handle.wait()
            assert torch.equal(ckpt.read(root, step, "p"), before)
    assert p[0] == 100, "it was changed 100 times"


# ---------------------------------------------------------------- nothing grows


def _own_nbytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def held(uploader: int) -> dict[str, int]:
    """Of this process and its uploader: bytes of their own memory and of memory files (each once), threads, descriptors, memory
    files. (Of libraries they have in common with other processes their share would grow with each of those that ends.)"""
    gc.collect()
    both = [psutil.Process(), psutil.Process(uploader)]
    files = [f for p in both for f in Path(f"/proc/{p.pid}/fd").iterdir() if f.is_symlink()]
    links = [os.readlink(f) for f in files]
    staged = {
        (s := f.stat()).st_ino: s for f, link in zip(files, links, strict=True) if "surefoot-staging" in link
    }
    return {
        "nbytes": sum(_own_nbytes(p.pid) for p in both) + sum(512 * s.st_blocks for s in staged.values()),
        "threads": sum(p.num_threads() for p in both),
        "fds": len(links),
        "memory files": sum("surefoot-staging" in link for link in links),
    }


@pytest.mark.parametrize(
    ("mib", "saves"), [(20, 12), pytest.param(200, 50, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_nothing_grows_from_save_to_save(mib: int, saves: int, anywhere: str) -> None:
    """CKP-25. On S3 the client keeps as many connections as it had parts under way at once."""
    root, kept_open = anywhere, 8 if anywhere.startswith("s3:") else 0
    state = {f"w{i}": torch.ones(mib * 2**20 // 16 // 4) for i in range(16)}
    with ckpt.Checkpointer(root, keep=2) as c:
        found: list[dict[str, int]] = []
        for step in range(1, saves + 1):
            c.save(step, state).wait()
            assert c._equipment is not None
            found.append(held(c._equipment.uploader().pid))
        second, last = found[1], found[-1]
        for what in ("threads", "fds", "memory files"):
            # The thread of a save that has just ended may still be there.
            slack = 1 + (kept_open if what == "fds" else 0)
            assert last[what] <= second[what] + slack, (what, [f[what] for f in found])
        assert last["nbytes"] < second["nbytes"] + mib * 2**20 * 0.15, [f["nbytes"] for f in found]
        assert c._equipment is not None
        uploader = c._equipment.uploader().pid
    own = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    assert not [link for link in own if "surefoot-staging" in link]
    assert not psutil.pid_exists(uploader)


def test_growth_replaces_the_buffer(root: str) -> None:
    with ckpt.Checkpointer(root) as c:
        for step, n in ((1, 1000), (2, 3_000_000), (3, 10)):
            c.save(step, {"w": torch.full((n,), float(step))}).wait()
            assert torch.equal(ckpt.read(root, step, "w"), torch.full((n,), float(step)))


def test_room_for_optimizer_state_is_there_before_the_first_step(root: str) -> None:
    model = torch.nn.Linear(1000, 500)
    optim = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optim": optim}
    with ckpt.Checkpointer(root) as c:
        assert c.load(state) is None
        assert c._equipment is not None
        buffer = c._equipment._buffer
        model(torch.ones(1, 1000)).sum().backward()
        optim.step()
        c.save(1, state).wait()
        assert buffer is not None
        assert c._equipment._buffer is buffer
        assert buffer.nbytes < 1.2 * 3 * 4 * 501_000, "and not much more"


# ---------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.parametrize("times", [3, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_the_uploader_never_starts_by_a_fork(times: int, anywhere: str) -> None:
    """CKP-27: threads run, a client of the object store is alive, and a stand-in for a device fails where it is forked."""
    root = anywhere
    forks: list[int] = []
    guard = [True]
    os.register_at_fork(before=lambda: forks.append(1) if guard[0] else None)
    stop = threading.Event()
    busy = [threading.Thread(target=stop.wait) for _ in range(4)]
    for thread in busy:
        thread.start()
    store = open_store(root)
    store.list("")
    if root.startswith("s3:"):
        assert any("fsspec" in t.name for t in threading.enumerate()), "the loop of a live S3 client"
    try:
        for step in range(1, times + 1):
            with ckpt.Checkpointer(root) as c:
                c.load({"w": torch.zeros(10)})
                c.save(step, {"w": torch.full((10,), float(step))}).wait()
            assert [o for o in store.list("") if o.key.endswith("manifest.json")]
        assert forks == []
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert forks == [1], "the guard sees forks"
    finally:
        guard[0] = False
        stop.set()
        for thread in busy:
            thread.join()


# ---------------------------------------------------------------- straight from live memory


def test_live_memory_is_given_as_it_lies_or_through_a_small_buffer() -> None:
    torch.manual_seed(0)
    large = BOUNCE_NBYTES // 4 + 1000
    tensors = {
        "0d": torch.tensor(5.0),
        "bool": torch.tensor([True, False, True]),
        "cut": torch.randn(50, large // 50 + 7)[:, 3:],
        "empty": torch.empty(0, 3),
        "flat": torch.randn(large),
        "half": torch.randn(33).to(torch.bfloat16),
        "one row": torch.randn(3, large).t()[:, 1:2].t(),
        "turned": torch.randn(300, 700, 20).permute(2, 1, 0),
    }
    leaves = {name: leaf_of(name, t) for name, t in tensors.items()}
    held_ = tuple(leaf.layout() for leaf in leaves.values())
    layout = agree_on_layout(held_, {}, rank=0, world_size=1, exchange=lambda b: [b])
    expected = b"".join(
        tensors[c.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for c in layout.written
    )
    drained: list[int] = []
    given = b"".join(bytes(v) for v in LiveChunks(layout.written, leaves)(lambda: drained.append(1)))
    assert given == expected
    assert drained, "the small buffer was used more than once"


def test_a_buffer_is_touched_and_goes() -> None:
    before = psutil.Process().memory_full_info().pss
    buffer = StagingBuffer(30 * 2**20)
    buffer.ready()
    assert psutil.Process().memory_full_info().pss > before + 29 * 2**20
    buffer.close()
    fd, buffer = buffer.fd, None
    gc.collect()
    assert psutil.Process().memory_full_info().pss < before + 5 * 2**20
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# ---------------------------------------------------------------- slots that are overwritten


class Overwriting(MemoryObjectStore):
    """The slot is taken by the next snapshot while this store is given its bytes."""

    def __init__(self, overwrite: Any) -> None:
        super().__init__()
        self._overwrite = overwrite

    def upload(self, key: str, size: int, *, deadline_s: float) -> Upload:
        upload = super().upload(key, size, deadline_s=deadline_s)
        put, calls = upload.put, []

        def counting(data: memoryview) -> None:
            put(data)
            calls.append(1)
            if len(calls) == 3:
                self._overwrite()

        upload.put = counting  # type: ignore[method-assign]
        return upload


@pytest.mark.parametrize("how", ["its successor stages", "a bit flips"])
def test_a_slot_that_changes_while_it_is_uploaded_stores_nothing(how: str) -> None:
    """CKP-29: the successor of a dead rank stages into the slot that the node uploads."""
    state = {"w": torch.arange(3_000_000.0)}
    stager = Stager(state, rank=0, world_size=1, exchange=lambda b: [b])
    slot = memoryview(bytearray(stager.nbytes()))
    stager.stage(slot, generation=1, step=20, cursor={}, ledger=())
    happened: list[str] = []

    def overwrite() -> None:
        happened.append(how)
        if how == "a bit flips":
            slot[PAGE_NBYTES + 9_000_000] ^= 1
        else:
            state["w"].add_(1)
            stager.stage(slot, generation=1, step=21, cursor={}, ledger=())

    store = Overwriting(overwrite)
    with pytest.raises(ImageError) as caught:
        upload_images(store, [slot], generation=1, step=20, attempt="a", writer=0, deadline_s=30)
    assert caught.value.kind == ("corrupt" if how == "a bit flips" else "unsealed")
    assert happened == [how]
    assert store.list("") == []
    assert store.unfinished("") == []


def test_an_upload_holds_no_object_a_second_time(tmp_path: Path) -> None:
    state = {"w": torch.ones(8 * 2**20)}
    stager = Stager(state, rank=0, world_size=1, exchange=lambda b: [b])
    slot = memoryview(bytearray(stager.nbytes()))
    stager.stage(slot, generation=1, step=20, cursor={}, ledger=())
    store = open_store(str(tmp_path))
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], psutil.Process().memory_full_info().uss)
            time.sleep(0.002)  # the pace of sampling

    before = psutil.Process().memory_full_info().uss
    watcher = threading.Thread(target=watch)
    watcher.start()
    upload_images(store, [slot], generation=1, step=20, attempt="a", writer=0, deadline_s=30)
    stop.set()
    watcher.join()
    assert store.list("")[-1].key == object_key(1, 20, "a", 0)
    assert peak[0] - before < 8 * 2**20, "the object has 32 MiB"


# ---------------------------------------------------------------- devices


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_memory_is_copied_on_a_side_stream(root: str) -> None:
    w = torch.zeros(64 * 2**20, device="cuda")
    state = {"w": w, "host": torch.ones(3), "turned": torch.ones(100, 200, device="cuda").t()}
    with ckpt.Checkpointer(root) as c:
        c.load(state)
        for step in range(1, 6):
            expected = float(w[0].item())
            handle = c.save(step, state)
            for _ in range(20):
                w.add_(1)  # launched at once; the stream waits for the copy by itself
            handle.wait()
            assert handle.staged()
            found = ckpt.read(root, step, "w")
            assert found.min().item() == found.max().item() == expected
        assert c._equipment is not None
        assert c._equipment._locked is not None, "the buffer is page-locked"
        c.save(6, state, blocking=True)
    assert torch.equal(ckpt.read(root, 6, "turned"), torch.ones(200, 100))
