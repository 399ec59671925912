"""What the ranks tell each other: one fixed word per step, and now and then a few bytes.

Both go over a gloo group of the session's own, never over a group of the training code: what the user does to his
groups cannot disturb it, and it works the same beside NCCL.

The word of a step is `WORD` int64 values per rank, gathered by one all-gather. From it every rank computes the same
global loss (summed in rank order, in float64), the same newest step replicated everywhere, and reads rank 0's attempt.

Ranks that differ in the tensor parallel axis alone compute one and the same loss together, so it counts once; along every
other axis of the mesh what ranks report are parts of the whole (of the data, or of the model's stages).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.agent.failures import RanksDisagreeError

if TYPE_CHECKING:
    import torch.distributed as dist

WORD = 7
GatherWords = Callable[[Sequence[int]], list[list[int]]]
"""All-gather of WORD int64 values per rank; (ranks, WORD)."""
GatherBytes = Callable[[bytes], list[bytes]]
AXES_OF_ONE_LOSS = frozenset({"tp"})
"""Along these all ranks report the same loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWord:
    """One rank's word at the end of a step."""

    generation: int
    step: int
    loss_sum: float = 0.0
    reports: int = 0
    """How many times the rank reported a loss; 0: it has none to add."""
    replicated: int = -1
    """The newest step of which its own snapshot is safe on the peer; -1: none yet."""
    attempt: int = 0
    """Rank 0 only: the nonce of the attempt to commit this step; 0: not this step."""
    stop: bool = False
    """Its agent will end it soon."""

    def pack(self) -> list[int]:
        (bits,) = struct.unpack("<q", struct.pack("<d", self.loss_sum))
        return [
            self.generation,
            self.step,
            bits,
            self.reports,
            self.replicated,
            self.attempt,
            int(self.stop),
        ]


def unpack_word(values: Sequence[int]) -> StepWord:
    """The inverse of `StepWord.pack`."""
    generation, step, bits, reports, replicated, attempt, stop = values
    (loss_sum,) = struct.unpack("<d", struct.pack("<q", bits))
    return StepWord(
        generation=generation,
        step=step,
        loss_sum=loss_sum,
        reports=reports,
        replicated=replicated,
        attempt=attempt,
        stop=bool(stop),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """What all ranks' words say together: the same on every rank."""

    loss: float | None
    """Mean over the global batch's valid tokens; None where no rank reported."""
    replicated: int
    """The newest step replicated for all ranks; -1: none."""
    attempt: str | None
    told: int = 0
    """How many ranks were told that they will be ended."""
    stop: bool = False
    """All were: this is the last step. Where only some were, the others are not ended by that."""


def judge(
    words: Sequence[StepWord], *, mesh: Mapping[str, int], generation: int, step: int, denominator: int
) -> StepVerdict:
    """Fold the words of all ranks, in rank order.

    Args:
        mesh: axis to size, outermost first: of whose losses there is only one, of which the first reported counts.
        denominator: by what the summed loss is divided, the same on all ranks; at least 1.

    Raises:
        RanksDisagreeError: a word is of another generation or step.
    """
    for rank, word in enumerate(words):
        if (word.generation, word.step) != (generation, step):
            raise RanksDisagreeError(
                f"rank {rank} ended step {word.step} of generation {word.generation}, "
                f"this rank step {step} of generation {generation}: do all ranks run the same loop?"
            )
    total, counted = 0.0, set[tuple[int, ...]]()
    for word, part in zip(words, loss_parts(mesh), strict=True):
        if word.reports and part not in counted:
            counted.add(part)
            total += word.loss_sum
    attempt = words[0].attempt
    told = sum(word.stop for word in words)
    return StepVerdict(
        loss=total / denominator if any(word.reports for word in words) else None,
        replicated=min(word.replicated for word in words),
        attempt=attempt_name(attempt) if attempt else None,
        told=told,
        stop=told == len(words),
    )


def loss_parts(mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    """For each rank which part of the global loss it reports: its coordinates, but for `AXES_OF_ONE_LOSS`."""
    ranges = [[0] * size if axis in AXES_OF_ONE_LOSS else range(size) for axis, size in mesh.items()]
    return list(itertools.product(*ranges))


def attempt_name(nonce: int) -> str:
    """A nonce as it stands in keys: 16 hexadecimal digits."""
    return f"{nonce:016x}"


def gloo_words(group: dist.ProcessGroup) -> GatherWords:
    """`GatherWords` over a gloo group. The tensors are made once: a step allocates nothing here."""
    import torch
    import torch.distributed as dist

    mine = torch.zeros(WORD, dtype=torch.int64, device="cpu")
    theirs = [torch.zeros(WORD, dtype=torch.int64, device="cpu") for _ in range(group.size())]

    def gather(values: Sequence[int]) -> list[list[int]]:
        mine.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))
        dist.all_gather(theirs, mine, group=group)
        return [word.tolist() for word in theirs]

    return gather


def gloo_bytes(group: dist.ProcessGroup) -> GatherBytes:
    """`GatherBytes` over a gloo group: the lengths first, then all padded to the longest."""
    import torch
    import torch.distributed as dist

    def gather(data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(group.size())]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device="cpu"), group=group)
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(max(longest, 1), dtype=torch.uint8, device="cpu")
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        theirs = [torch.zeros_like(mine) for _ in range(group.size())]
        dist.all_gather(theirs, mine, group=group)
        return [bytes(t[: int(size)].numpy()) for t, size in zip(theirs, sizes, strict=True)]

    return gather
