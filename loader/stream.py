"""The global batches of a run, one step after the other, without ranks and without torch.

Joins the parts: the draw says which source is next, its reader gives that source's next sample, the packer fills the step.
What a step holds is a pure function of mixture, packing, data and cursor.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.loader.cursor import (
    FILES_LISTED_MAX,
    Cursor,
    Fingerprint,
    PackPrint,
    SourcePrint,
    check_fingerprint,
    decode_cursor,
    encode_cursor,
)
from surefoot.loader.errors import LoaderClosedError, LoaderUsageError, MixtureError, SampleTooLongError
from surefoot.loader.mixture import Draw, MixState, Mixture, exact_weight
from surefoot.loader.order import ORDER_VERSION
from surefoot.loader.pack import Pack, label_tokens, pack_step, rank_part
from surefoot.loader.reader import Sample, SampleReader, SampleRef
from surefoot.loader.source import ParquetSource

log = logging.getLogger("surefoot.loader")

TOKENS = "bytes"
"""The one tokenizer so far: a token is a byte."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalStep:
    """One step over all ranks: its sequences in order, each the documents in it."""

    step: int
    sequences: tuple[tuple[Sample, ...], ...]

    @property
    def valid_tokens(self) -> int:
        """Labels that count, at least 1: where every document is too short to predict anything, loss and gradient are 0, not 0/0."""
        return max(1, sum(label_tokens(sample.tokens) for row in self.sequences for sample in row))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The sample ids of one step: per sequence, in order."""

    step: int
    sequences: tuple[tuple[str, ...], ...]

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """All ids of the step in order: those of the ranks one after the other, whatever their number."""
        return tuple(sample_id for row in self.sequences for sample_id in row)

    def rank_sample_ids(self, dp_rank: int, dp_size: int) -> tuple[str, ...]:
        """The ids that one rank of `dp_size` gets."""
        part = rank_part(len(self.sequences), dp_rank, dp_size)
        return tuple(sample_id for i in part for sample_id in self.sequences[i])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """After `step` steps: the draw, and the samples that wait."""

    step: int
    mix: MixState
    waiting: tuple[Sample, ...]


class Stream:
    """Iterates the steps. Files are opened by the first call that needs them, in the process that makes it."""

    def __init__(self, mixture: Mixture, pack: Pack) -> None:
        self.mixture = mixture
        self.pack = pack
        self._opened: _Opened | None = None
        self._closed = False

    def next_step(self) -> GlobalStep | None:
        """The next step; None when the data has ended. On an error the position is unchanged: the call may be tried again.

        Raises:
            SourceError: see `surefoot.loader.errors`.
            LoaderUsageError: closed, or opened in another process.
        """
        return self._open().next_step()

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last step that `next_step` gave: plain JSON values."""
        return encode_cursor(self._open().cursor())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor.

        Raises:
            CursorFormatError, CursorMismatchError: and the position is unchanged.
            SourceError: a sample that waits cannot be read.
        """
        self._open().seek(decode_cursor(state))

    def close(self) -> None:
        """Let go of files and memory. A second call does nothing."""
        self._closed = True
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _open(self) -> _Opened:
        if self._closed:
            raise LoaderClosedError("the loader is closed; make a new one, and load the cursor into it")
        if self._opened is None:
            self._opened = _Opened(self.mixture, self.pack)
        elif self._opened.pid != os.getpid():
            raise LoaderUsageError(
                "the loader was opened before a fork; make it in the process that uses it: neither files nor S3 clients are "
                "shared across a fork"
            )
        return self._opened


class _Opened:
    """A stream whose sources are open."""

    def __init__(self, mixture: Mixture, pack: Pack) -> None:
        self.pid = os.getpid()
        self._mixture = mixture
        self._pack = pack
        self._readers = {
            source.name: SampleReader(ParquetSource.open(source), seed=mixture.seed)
            for source in sorted(mixture.sources, key=lambda source: source.name)
        }
        self._rows = {name: reader.rows for name, reader in self._readers.items()}
        self._fingerprint = _fingerprint(mixture, pack, self._readers)
        self._report_empty()
        self._go_to(_Position(step=0, mix=Draw(mixture, self._rows).state, waiting=()))

    def next_step(self) -> GlobalStep | None:
        try:
            packed = pack_step(self._pack, self._position.waiting, self._peek, self._take)
        except BaseException:
            self._go_to(self._position)
            raise
        if packed.empty:
            return None
        step = self._position.step + 1
        self._position = _Position(step=step, mix=self._draw.state, waiting=packed.waiting)
        return GlobalStep(step=step, sequences=packed.sequences)

    def cursor(self) -> Cursor:
        position = self._position
        return Cursor(
            step=position.step,
            drawn=dict(position.mix.drawn),
            segment=dict(position.mix.segment),
            waiting=[(sample.ref.source, sample.ref.number) for sample in position.waiting],
            fingerprint=self._fingerprint,
        )

    def seek(self, cursor: Cursor) -> None:
        check_fingerprint(cursor.fingerprint, self._fingerprint)
        before = self._position
        try:
            self._go_to(
                _Position(
                    step=cursor.step, mix=MixState(drawn=cursor.drawn, segment=cursor.segment), waiting=()
                )
            )
            waiting = tuple(self._read(SampleRef(*pair)) for pair in cursor.waiting)
        except BaseException:
            self._go_to(before)
            raise
        self._position = _Position(step=cursor.step, mix=self._position.mix, waiting=waiting)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _go_to(self, position: _Position) -> None:
        self._position = position
        self._draw = Draw(self._mixture, self._rows, position.mix)
        self._peeked: Sample | None = None
        for reader in self._readers.values():
            reader.reset()

    def _peek(self) -> Sample | None:
        if self._peeked is None and (turn := self._draw.peek()) is not None:
            self._peeked = self._read(SampleRef(*turn))
        return self._peeked

    def _take(self) -> None:
        self._draw.take()
        self._peeked = None

    def _read(self, ref: SampleRef) -> Sample:
        sample = self._readers[ref.source].sample(ref.number)
        if sample.tokens > self._pack.seq_len:
            raise SampleTooLongError(
                sample_id=sample.id,
                tokens=sample.tokens,
                seq_len=self._pack.seq_len,
                source=ref.source,
                path=sample.path,
            )
        return sample

    def _report_empty(self) -> None:
        empty = sorted(name for name, rows in self._rows.items() if not rows)
        for name in empty:
            log.warning("source %r has no rows: it gives nothing, and the others take its share", name)
        if not any(self._rows[source.name] and source.weight for source in self._mixture.sources):
            raise MixtureError(
                f"nothing to draw from: no source with a weight above 0 has any rows (empty: {', '.join(empty)})"
            )


def plan(
    mixture: Mixture, pack: Pack, steps: int, cursor: Mapping[str, Any] | None = None
) -> list[PlannedStep]:
    """The sample ids of the next `steps` steps, fewer if the data ends; from the beginning, or from `cursor`.

    Reads the rows, for their lengths decide the packing. No torch, no ranks.

    Raises:
        LoaderError: see `surefoot.loader.errors`.
    """
    stream = Stream(mixture, pack)
    try:
        if cursor is not None:
            stream.load_state_dict(cursor)
        planned: list[PlannedStep] = []
        while len(planned) < steps and (step := stream.next_step()) is not None:
            ids = tuple(tuple(sample.id for sample in row) for row in step.sequences)
            planned.append(PlannedStep(step=step.step, sequences=ids))
        return planned
    finally:
        stream.close()


def _fingerprint(mixture: Mixture, pack: Pack, readers: Mapping[str, SampleReader]) -> Fingerprint:
    listed = sum(len(reader.opened.entries) for reader in readers.values()) <= FILES_LISTED_MAX
    return Fingerprint(
        order=ORDER_VERSION,
        seed=mixture.seed,
        pack=PackPrint(
            tokens=TOKENS,
            seq_len=pack.seq_len,
            step_tokens=pack.step_tokens,
            window=pack.window,
            pad_token=pack.pad_token,
        ),
        sources={name: _source_print(reader, listed) for name, reader in readers.items()},
    )


def _source_print(reader: SampleReader, listed: bool) -> SourcePrint:
    opened, source = reader.opened, reader.opened.source
    files = zip(opened.entries, opened.file_rows, opened.digests, strict=True)
    return SourcePrint(
        weight=str(exact_weight(source.weight)),
        column=source.column,
        when_used_up=source.when_used_up,
        block_rows=source.block_rows,
        window_blocks=opened.layout.window_blocks,
        rows=reader.rows,
        file_count=len(opened.entries),
        files=hashlib.blake2b(b"".join(opened.digests), digest_size=16).hexdigest(),
        listing={entry.name: f"{rows}:{digest.hex()}" for entry, rows, digest in files} if listed else None,
    )
