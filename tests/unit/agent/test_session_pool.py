from pathlib import Path

import pytest

from surefoot.agent.failures import StartupError
from surefoot.agent.pool import SLOTS, SlotPool, choose_slot, holdings
from surefoot.controller.wire import PoolReadyMsg


@pytest.mark.parametrize(
    ("held", "replicated", "slot"),
    [
        ([None, None, None], -1, 0),
        ([1, None, None], -1, 1),
        ([4, 2, 3], 3, 1),  # 2 is older than what all have twice
        ([4, 3, 3], 3, None),  # 3 is the job's way back until 4 is safe
        ([3, 4, 5], 5, 0),  # the oldest first
        ([7, None, 6], 3, 1),
    ],
)
def test_choose_slot(held: list[int | None], replicated: int, slot: int | None) -> None:
    assert choose_slot(held, replicated) == slot


def test_three_slots_are_enough_and_never_lose_the_way_back() -> None:
    """Replication of t-1 is awaited before t is staged: at every moment the newest replicated step is still held."""
    held: list[int | None] = [None] * SLOTS
    for step in range(1, 50):
        replicated = step - 1 if step > 1 else -1
        slot = choose_slot(held, replicated)
        assert slot is not None
        held[slot] = None
        assert replicated <= 0 or replicated in held
        held[slot] = step


def _ready(held: dict[int, int]) -> PoolReadyMsg:
    return PoolReadyMsg(paths=("a", "b", "c"), held=held)


def test_after_a_start_only_the_starting_point_counts() -> None:
    assert holdings(_ready({0: 4, 1: 5, 2: 6}), {}, 5) == [None, 5, None]
    assert holdings(_ready({0: 4, 1: 5, 2: 6}), {}, None) == [None, None, None]
    assert holdings(_ready({}), {}, 5) == [None, None, None]


def test_a_slot_that_has_grown_holds_what_it_held() -> None:
    """The starting point, which the agent still names, may have been overwritten since."""
    assert holdings(_ready({1: 5}), {"a": 6, "b": 7, "c": None}, 5) == [6, 7, None]
    assert holdings(_ready({1: 5}), {"x": 6}, 5) == [None, 5, None]


def _files(folder: Path, size: int) -> tuple[str, ...]:
    paths = [folder / f"slot-{i}" for i in range(2)]
    for path in paths:
        path.write_bytes(bytes(size))
    return tuple(map(str, paths))


def test_slots_are_written_through_to_their_files(tmp_path: Path) -> None:
    pool = SlotPool()
    ready = PoolReadyMsg(paths=_files(tmp_path, 64))
    pool.open(ready, slot_bytes=60, start_step=None)
    buffer = pool.buffer(1)
    assert len(buffer) == 64
    buffer[:4] = b"word"
    assert (tmp_path / "slot-1").read_bytes()[:4] == b"word"
    buffer.release()
    pool.open(ready, slot_bytes=64, start_step=None)
    pool.close()


def test_files_that_do_not_do_are_refused(tmp_path: Path) -> None:
    pool = SlotPool()
    with pytest.raises(StartupError, match="has 64 bytes, 65 were asked for"):
        pool.open(PoolReadyMsg(paths=_files(tmp_path, 64)), slot_bytes=65, start_step=None)
    with pytest.raises(StartupError, match="No such file"):
        pool.open(PoolReadyMsg(paths=(str(tmp_path / "none"),)), slot_bytes=1, start_step=None)
