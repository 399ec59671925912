from contextlib import AbstractContextManager, nullcontext

import pytest
from loop_bench import FakeBatch, FakeLoader

from surefoot.agent.batches import StepData
from surefoot.agent.failures import BatchCountError, DataEndedError, RanksDisagreeError


def _no_phase() -> AbstractContextManager[object]:
    return nullcontext()


def _data(loader: FakeLoader | None = None) -> tuple[StepData, list[int]]:
    taken: list[int] = []
    return StepData(loader or FakeLoader(), fetching=_no_phase, taken=lambda b: taken.append(b.step)), taken


def test_one_batch_a_step() -> None:
    data, taken = _data()
    for step in (1, 2, 3):
        data.open(step)
        assert next(data).step == step
        assert data.require_taken().step == step
    assert taken == [1, 2, 3]
    assert data.state_dict() == {"step": 3}


def test_a_second_batch_in_a_step_is_refused() -> None:
    data, taken = _data()
    data.open(1)
    next(data)
    with pytest.raises(BatchCountError, match=r"a second time in step 1.*microbatches"):
        next(data)
    assert taken == [1]


def test_no_batch_in_a_step_is_refused() -> None:
    data, _ = _data()
    data.open(4)
    with pytest.raises(BatchCountError, match="step 4 ended without next"):
        data.require_taken()


def test_a_batch_outside_of_a_step_is_refused() -> None:
    data, _ = _data()
    with pytest.raises(BatchCountError, match="outside of a step"):
        next(data)
    data.open(1)
    next(data)
    data.require_taken()
    with pytest.raises(BatchCountError, match="outside of a step"):
        next(data)


def test_data_that_ends_says_at_which_step() -> None:
    """StopIteration would end the caller's loop as if all were well."""
    data, _ = _data(FakeLoader(last=0))
    data.open(1)
    with pytest.raises(DataEndedError, match=r"after step 0.*take fewer steps"):
        next(data)


def test_a_loader_that_is_elsewhere_is_refused() -> None:
    data, _ = _data()
    data.load_state_dict({"step": 7})
    data.open(7)
    with pytest.raises(RanksDisagreeError, match="batch of step 8 in step 7"):
        next(data)


def test_a_step_knows_whether_it_is_the_datas_last_and_the_cursor_stands_before_what_was_looked_at() -> None:
    data, taken = _data(FakeLoader(last=2))
    data.open(1)
    next(data)
    assert not data.ended()
    assert data.state_dict() == {"step": 1}
    data.require_taken()
    data.open(2)
    next(data)
    assert data.ended()
    assert data.state_dict() == {"step": 2}
    assert taken == [1, 2]


def test_what_goes_wrong_in_looking_ahead_is_raised_where_the_batch_is_taken() -> None:
    class Damaged(FakeLoader):
        def __next__(self) -> FakeBatch:
            if self.step == 1:
                raise OSError("a damaged file")
            return super().__next__()

    data, _ = _data(Damaged())
    data.open(1)
    next(data)
    assert not data.ended()
    data.require_taken()
    data.open(2)
    with pytest.raises(OSError, match="damaged"):
        next(data)
