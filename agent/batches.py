"""`run.data()`: the loader's batches, handed out exactly once per step.

The step loop opens a step, the training code takes its batch, the loop asks what was taken. Anything else is refused
with the step and the remedy: a batch too few or too many would silently shift every later step's samples.

One batch is fetched ahead, at the end of the step before, so that a step knows whether it is the last that the data gives.
The cursor is taken before that: it always stands behind the batch that was handed out last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from surefoot.agent.failures import BatchCountError, DataEndedError, RanksDisagreeError


class Batch(Protocol):
    """What the session needs of the loader's batch; training code sees the whole of it."""

    @property
    def step(self) -> int: ...

    @property
    def sample_ids(self) -> Sequence[str]: ...

    @property
    def global_valid_tokens(self) -> int: ...


class Batches(Protocol):
    """What the session needs of `surefoot.loader.Loader`."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...

    def close(self) -> None: ...


class StepData:
    """An iterator over batches, for use inside `run.steps`: one `next` per step.

    Args:
        loader: where batches come from.
        fetching: entered while the loader works; the session tells phases and areas by it.
        taken: called with each batch when it is handed out.
    """

    def __init__(
        self,
        loader: Batches,
        *,
        fetching: Callable[[], AbstractContextManager[object]],
        taken: Callable[[Any], None],
    ) -> None:
        self._loader = loader
        self._fetching = fetching
        self._taken = taken
        self._batches: Iterator[Any] | None = None
        self._step: int | None = None
        self._batch: Batch | None = None
        self._looked = False
        self._ahead: Any = None
        """Once looked: the next batch, the exception that its reading raised, or None where the data has ended."""
        self._cursor: dict[str, Any] = {}
        """Once looked: where the loader stood before it."""

    def __iter__(self) -> StepData:
        return self

    def __next__(self) -> Any:
        step = self._step
        if step is None:
            raise BatchCountError("next(data) was called outside of a step: call it in the body of run.steps")
        if self._batch is not None:
            raise BatchCountError(
                f"next(data) was called a second time in step {step}: one batch is one step; "
                "for gradient accumulation go through batch.microbatches"
            )
        batch = self._next_batch(step)
        self._batch = batch
        self._taken(batch)
        return batch

    def _next_batch(self, step: int) -> Any:
        self._look_ahead()
        if isinstance(self._ahead, Exception):
            raise self._ahead
        if self._ahead is None:
            raise DataEndedError(
                f"the data ended after step {step - 1}: let a source repeat (when_used_up), or take fewer steps"
            )
        if self._ahead.step != step:
            raise RanksDisagreeError(f"the loader gave the batch of step {self._ahead.step} in step {step}")
        batch, self._ahead, self._looked = self._ahead, None, False
        return batch

    def ended(self) -> bool:
        """Whether the data has no batch after the one handed out last; all ranks find the same. Reads the next batch.

        What goes wrong in that is raised where the batch is taken.
        """
        self._look_ahead()
        return self._ahead is None

    def _look_ahead(self) -> None:
        if self._looked:
            return
        self._cursor = self._loader.state_dict()
        if self._batches is None:
            self._batches = iter(self._loader)
        try:
            with self._fetching():
                self._ahead = next(self._batches, None)
        except Exception as e:
            self._ahead = e
        self._looked = True

    def open(self, step: int) -> None:
        """Step `step` begins: one batch may be taken."""
        self._step, self._batch = step, None

    def require_taken(self) -> Batch:
        """The batch of the open step, which ends here.

        Raises:
            BatchCountError: none was taken.
        """
        if self._batch is None:
            raise BatchCountError(
                f"step {self._step} ended without next(data): take exactly one batch in each step"
            )
        batch, self._batch, self._step = self._batch, None, None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the batch taken last."""
        return self._cursor if self._looked else self._loader.state_dict()

    def load_state_dict(self, cursor: Mapping[str, Any]) -> None:
        """Go to `cursor`; before the first batch only."""
        self._loader.load_state_dict(cursor)

    def close(self) -> None:
        self._loader.close()
