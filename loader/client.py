"""`Loader`: what a rank iterates. The only module of the loader that imports torch.

In one process it reads everything itself: the whole step is packed, as on every other rank, and this rank's part becomes
tensors. So the loader needs no word from the others, and what a step holds does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from surefoot.loader.mixture import Mixture
from surefoot.loader.pack import Arrays, Pack, assemble, check_ranks, microbatch_sizes, rank_part
from surefoot.loader.reader import Sample
from surefoot.loader.stream import GlobalStep, Stream


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of some sequences, by name: ``tokens``, ``labels``, ``document_ids``, ``position_ids`` (int64, (B, seq_len))
    and ``cu_seqlens`` (int32, (segments + 1,)); `pack.Arrays` tells what each holds."""

    def __init__(self, arrays: Arrays) -> None:
        self._tensors = {
            name: torch.from_numpy(getattr(arrays, name)) for name in Arrays.__dataclass_fields__
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Microbatch(Tensors):
    """What one forward and backward takes.

    Attributes:
        sample_ids: of the samples in it, in order. Empty where a rank has nothing for its last microbatch: that one is a
            sequence of padding, no label counts, and it is there so that all ranks run as many.
    """

    def __init__(self, pack: Pack, sequences: Sequence[Sequence[Sample]]) -> None:
        documents = [[sample.data for sample in row] for row in sequences]
        super().__init__(assemble(pack, documents or [[]]))
        self.sample_ids = _ids(sequences)


class Batch(Tensors):
    """One rank's part of one optimizer step. As a mapping it gives the tensors of all its sequences together.

    Attributes:
        step: from 1.
        sample_ids: of this rank's samples, ``<source>:<pass>:<file name>:<row>``, in order; those of all ranks one after the
            other are the step's.
        microbatches: as many on every rank, none without a sequence.
        global_valid_tokens: labels that count over all ranks, the same number on each; at least 1.
    """

    def __init__(self, pack: Pack, step: GlobalStep, dp_rank: int, dp_size: int) -> None:
        part = rank_part(len(step.sequences), dp_rank, dp_size)
        own = step.sequences[part.start : part.stop]
        super().__init__(assemble(pack, [[sample.data for sample in row] for row in own]))
        self.step = step.step
        self.sample_ids = _ids(own)
        self.global_valid_tokens = step.valid_tokens
        self.microbatches: tuple[Microbatch, ...] = tuple(_split(pack, own, dp_rank, dp_size))


class Loader(Iterator[Batch]):
    """The batches of one rank, from the first step or from a cursor on.

    It is its own iterator: a second ``for`` goes on where the first one stopped. `state_dict` is the cursor after the last batch
    handed out, the same on every rank; whether that batch counts is decided by whoever commits the cursor.
    Nothing is opened before the first batch, cursor or `load_state_dict`, and then in the process that asks.
    """

    def __init__(self, mixture: Mixture, pack: Pack, dp_rank: int = 0, dp_size: int = 1) -> None:
        """
        Raises:
            PackError: the step does not give every rank a sequence, or there is no such rank.
        """
        check_ranks(pack, dp_rank, dp_size)
        self.pack = pack
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self._stream = Stream(mixture, pack)

    def __next__(self) -> Batch:
        """The next step's batch.

        Raises:
            StopIteration: the data has ended (only where sources stop when used up).
            SourceError: the position is unchanged, and the call may be tried again.
        """
        step = self._stream.next_step()
        if step is None:
            raise StopIteration
        return Batch(self.pack, step, self.dp_rank, self.dp_size)

    def state_dict(self) -> dict[str, Any]:
        """The cursor: plain JSON values, small, good at any number of ranks."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the cursor's step. Raises: CursorError, SourceError."""
        self._stream.load_state_dict(state)

    def close(self) -> None:
        """Let go of files and memory; further batches are refused."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _split(pack: Pack, own: Sequence[Sequence[Sample]], dp_rank: int, dp_size: int) -> Iterator[Microbatch]:
    at = 0
    for size in microbatch_sizes(pack, dp_rank, dp_size):
        yield Microbatch(pack, own[at : at + size])
        at += size


def _ids(sequences: Sequence[Sequence[Sample]]) -> tuple[str, ...]:
    return tuple(sample.id for row in sequences for sample in row)
