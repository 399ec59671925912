"""Packing: samples of one step into sequences, sequences to ranks and microbatches.

Theory. A step has a fixed number of sequences, `step_tokens // seq_len`. Samples are offered in the order of the draw and kept
whole: each goes into the fullest sequence it fits in (best fit, ties to the first). One that fits nowhere waits, and is the
first to be offered in the next step; at most `window` samples wait. When one more would have to, the step is full, and that
sample stays undrawn. A waiting sample finds the sequences empty, so at least `sequences` of those that wait are placed in each
step: none waits longer than ``ceil(window / sequences)`` steps. None of this knows of ranks.

The sequences of a step go to the ranks in order, rank r getting a contiguous part, and the parts differ by one sequence at
most: put together in rank order they are the step, at every number of ranks.

PURE: sizes and ids in, arrays out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from surefoot.loader.errors import PackError

IGNORED_LABEL = -100
"""A label that does not count: torch's cross_entropy ignores it by default."""

PADDING_DOCUMENT = -1
"""The document id of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """How samples become the tokens of a step.

    Attributes:
        seq_len: tokens of a sequence. A longer sample is refused.
        step_tokens: tokens of a step over all ranks, padding included; a multiple of `seq_len`.
        microbatch_tokens: tokens of a microbatch of one rank at most; None: a rank's whole share is one microbatch.
        window: samples that may wait for the next step because they do not fit in this one.
        pad_token: what fills the rest of a sequence. Its label never counts.
    """

    seq_len: int
    step_tokens: int
    microbatch_tokens: int | None = None
    window: int = 16
    pad_token: int = 0

    def __post_init__(self) -> None:
        for what, value, least in (
            ("seq_len", self.seq_len, 2),
            ("step_tokens", self.step_tokens, 1),
            ("microbatch_tokens", 1 if self.microbatch_tokens is None else self.microbatch_tokens, 1),
            ("window", self.window, 0),
            ("pad_token", self.pad_token, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise PackError(f"{what} must be a whole number, {least} or more, not {value!r}")
        if self.step_tokens % self.seq_len:
            below = self.step_tokens // self.seq_len * self.seq_len
            near = f"{below} or {below + self.seq_len}" if below else str(self.seq_len)
            raise PackError(
                f"step_tokens is {self.step_tokens}, no multiple of seq_len {self.seq_len}: a step is whole sequences; "
                f"take {near}"
            )
        if self.microbatch_tokens is not None and self.microbatch_tokens < self.seq_len:
            raise PackError(
                f"microbatch_tokens is {self.microbatch_tokens}, less than one sequence of {self.seq_len} tokens"
            )

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.step_tokens // self.seq_len


class Sized(Protocol):
    """What the packer needs to know of a sample."""

    @property
    def tokens(self) -> int:
        """Its length. An empty sample still takes one place, so that every sample is a document of its sequence."""
        ...


S = TypeVar("S", bound=Sized)


@dataclass(frozen=True, slots=True)
class Packed(Generic[S]):
    """One step: its sequences, and the samples that wait for the next one."""

    sequences: tuple[tuple[S, ...], ...]
    waiting: tuple[S, ...]

    @property
    def empty(self) -> bool:
        """Whether no sample was placed: the data has ended."""
        return not any(self.sequences)


def places(tokens: int) -> int:
    """Places in a sequence that a sample of so many tokens takes."""
    return max(1, tokens)


def pack_step(
    pack: Pack, waiting: Iterable[S], peek: Callable[[], S | None], take: Callable[[], None]
) -> Packed[S]:
    """Fill one step (see the module).

    Args:
        waiting: what the step before left, in order.
        peek: the next sample of the draw, or None when the data has ended. No sample is longer than `pack.seq_len`.
        take: draws what `peek` shows.
    """
    free = [
        (pack.seq_len, index) for index in range(pack.sequences)
    ]  # (room left, sequence), sorted; full ones are out
    sequences: list[list[S]] = [[] for _ in free]
    left: list[S] = []

    def place(sample: S) -> bool:
        size = places(sample.tokens)
        best = bisect_left(free, (size, 0))
        if best == len(free):
            return False
        room, index = free.pop(best)
        if room > size:
            insort(free, (room - size, index))
        sequences[index].append(sample)
        return True

    left.extend(sample for sample in waiting if not place(sample))
    while free and (sample := peek()) is not None:
        if not place(sample):
            if len(left) >= pack.window:
                break
            left.append(sample)
        take()
    return Packed(tuple(map(tuple, sequences)), tuple(left))


def rank_part(count: int, dp_rank: int, dp_size: int) -> range:
    """Which of `count` sequences belong to `dp_rank`: contiguous, even to one."""
    return range(dp_rank * count // dp_size, (dp_rank + 1) * count // dp_size)


def check_ranks(pack: Pack, dp_rank: int, dp_size: int) -> None:
    """Refuse what does not give every rank a sequence.

    Raises:
        PackError: so few sequences, or a rank that is none.
    """
    if dp_size < 1 or not 0 <= dp_rank < dp_size:
        raise PackError(f"dp_rank must be 0 .. dp_size - 1 and is {dp_rank} of {dp_size}")
    if pack.sequences < dp_size:
        raise PackError(
            f"step_tokens {pack.step_tokens} is {pack.sequences} sequences of {pack.seq_len} tokens, and {dp_size} ranks "
            f"need one each: take at least {dp_size * pack.seq_len} step_tokens, a smaller seq_len, or fewer ranks"
        )


def microbatch_sizes(pack: Pack, dp_rank: int, dp_size: int) -> list[int]:
    """Sequences of each microbatch of a rank: as many microbatches on every rank, within `microbatch_tokens`.

    A rank may have one sequence less than the others, and with one sequence to a microbatch none for its last one. That entry
    is 0: the rank runs a sequence of padding there, of weight zero, so that collectives match.
    """
    own = len(rank_part(pack.sequences, dp_rank, dp_size))
    most = -(-pack.sequences // dp_size)
    limit = most if pack.microbatch_tokens is None else pack.microbatch_tokens // pack.seq_len
    count = -(-most // limit)
    return [len(rank_part(own, count - 1 - i, count)) for i in range(count)]


def label_tokens(tokens: int) -> int:
    """Labels of a document that count: every token but the first is predicted."""
    return max(0, tokens - 1)


Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrays:
    """The tensors of a microbatch, as arrays. B sequences of L = seq_len tokens.

    Attributes:
        tokens: (B, L) int64.
        labels: (B, L) int64: the next token of the same document, or `IGNORED_LABEL`.
        document_ids: (B, L) int64: from 0 within each sequence, `PADDING_DOCUMENT` for padding. Attention stays within one id.
        position_ids: (B, L) int64: from 0 within each document, and within the padding.
        cu_seqlens: (segments + 1,) int32: borders of the documents in the B * L flattened tokens, as attention kernels for
            variable lengths take them; the padding of a sequence is a segment of its own.
    """

    tokens: Int64Array
    labels: Int64Array
    document_ids: Int64Array
    position_ids: Int64Array
    cu_seqlens: npt.NDArray[np.int32]


def assemble(pack: Pack, sequences: Sequence[Sequence[npt.NDArray[np.uint8]]]) -> Arrays:
    """Lay the documents of each sequence out one after the other, padding last.

    Args:
        sequences: per sequence the tokens of its documents, in order.
    """
    shape = (len(sequences), pack.seq_len)
    tokens = np.full(shape, pack.pad_token, np.int64)
    labels = np.full(shape, IGNORED_LABEL, np.int64)
    documents = np.full(shape, PADDING_DOCUMENT, np.int64)
    positions = np.zeros(shape, np.int64)
    borders = [0]
    for row, sequence in enumerate(sequences):
        at = 0
        for number, document in enumerate(sequence):
            size, end = len(document), at + places(len(document))
            tokens[row, at : at + size] = document
            labels[row, at : at + label_tokens(size)] = document[1:]
            documents[row, at:end] = number
            positions[row, at:end] = np.arange(end - at)
            at = end
            borders.append(row * pack.seq_len + at)
        if at < pack.seq_len:
            positions[row, at:] = np.arange(pack.seq_len - at)
            borders.append((row + 1) * pack.seq_len)
    return Arrays(
        tokens=tokens,
        labels=labels,
        document_ids=documents,
        position_ids=positions,
        cu_seqlens=np.array(borders, np.int32),
    )
