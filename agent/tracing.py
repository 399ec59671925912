"""What a rank notes in its history, and the hooks that see forward and optimizer without a word from the training code.

The events of a step, in order: ``step_begin`` (the batch is taken), ``forward_end`` (once per microbatch), ``reported``,
``optimizer_begin``, ``step_end`` (the global loss is known), ``snapshot`` (staged and sealed). Before the first:
``launched``, ``joined`` (all ranks have met), ``restored``. Each carries generation, rank and step. Without an open history nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from surefoot import history
from surefoot.failpoint import failpoint


class Tracer:
    """Notes a rank's events, and knows the step they belong to."""

    def __init__(self, *, generation: int, rank: int) -> None:
        self.generation = generation
        self.rank = rank
        self.step = 0
        self._optimizer_begun = 0

    def note(self, kind: str, **fields: Any) -> None:
        history.note(kind, step=self.step, generation=self.generation, rank=self.rank, **fields)

    def watch(self, state: Mapping[str, Any]) -> None:
        """Hook the modules and optimizers of `state`. Nested mappings and lists are searched."""
        for value in leaves(state):
            if isinstance(value, torch.nn.Module):
                value.register_forward_hook(self._forward_end)
            elif isinstance(value, torch.optim.Optimizer):
                value.register_step_pre_hook(self._optimizer_begin)

    def _forward_end(self, *_: Any) -> None:
        self.note("forward_end")
        failpoint("step.after_forward")

    def _optimizer_begin(self, *_: Any) -> None:
        if self._optimizer_begun != self.step:  # the first of several optimizers
            self._optimizer_begun = self.step
            self.note("optimizer_begin")
            failpoint("step.before_optimizer")


def leaves(state: Any) -> Iterator[Any]:
    """The values of nested mappings, lists and tuples, depth first."""
    if isinstance(state, Mapping):
        for value in state.values():
            yield from leaves(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from leaves(value)
    else:
        yield state
