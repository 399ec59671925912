"""The step loop behind `run.steps`: restore, then per step seed, hand over, agree, stage, tell the agent.

The order at the end of a step is the protocol (docs/protocol.md, "A step, as a rank does it"):

1. wait until the own snapshot of the step before is safe on the peer;
2. one all-gather of a fixed word: loss, newest replicated step, rank 0's attempt;
3. copy the state into a free slot and seal it;
4. tell the agent.

So at any moment all ranks hold snapshots of one same step that is at most one finished step old, on two nodes. What is
random here (the attempt's nonce) and the clock are rank 0's alone, or only measure.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from surefoot.agent.attempts import Attempts, take_answer
from surefoot.agent.batches import StepData
from surefoot.agent.cadence import Cadence
from surefoot.agent.exchange import GatherWords, StepVerdict, StepWord, judge, unpack_word
from surefoot.agent.failures import Area, CommitGivenUpError, RanksDisagreeError
from surefoot.agent.link import AgentLink, AgentNews
from surefoot.agent.pool import SLOTS, SlotPool, choose_slot
from surefoot.agent.restoring import Restored, agree_on_start, require_cursor, require_start, restored_from
from surefoot.agent.seeding import seed_all, seed_of
from surefoot.agent.tracing import Tracer
from surefoot.ckpt.errors import SlotTooSmallError
from surefoot.ckpt.manifest import LedgerRow
from surefoot.controller.wire import Ended, Phase, Plan, PoolMsg, PoolReadyMsg, SnapshotMsg, StepMsg
from surefoot.failpoint import failpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a rank waits for its agent. All are last resorts, far beyond what a healthy node takes: it is the
    controller's detectors that judge slowness, and they end a rank that waits for something dead."""

    pool_s: float = 120.0
    """Making and touching the slot files: 0.6 GB/s at first touch, so room for some 70 GB a rank."""
    replicated_s: float = 600.0
    """Copying one snapshot to the peer, retries through a lost peer's lease included."""
    committed_s: float = 600.0
    """One attempt to upload and commit the last checkpoint."""
    retry_pauses_s: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 60.0, 60.0)
    """Between attempts to commit the last checkpoint: over four minutes of an object store that is away, of the ten that
    the hang detector gives the last save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """What a loop does not change."""

    plan: Plan
    rank: int
    dp_rank: int
    seed: int
    steps: int
    """The last step."""
    every_steps: int
    """Distance of commits."""
    every_s: float | None = None
    """Instead: seconds from one attempt to the next, by rank 0's clock."""
    auto: bool = False
    """Instead: as often as rank 0 chooses."""
    restore_path: str | None
    limits: Limits


class Stager(Protocol):
    """State to and from a slot (`ckpt.tiers.Stager`)."""

    def nbytes(self) -> int: ...

    def stage(
        self,
        buf: memoryview,
        /,
        *,
        generation: int,
        step: int,
        cursor: dict[str, Any],
        ledger: Sequence[LedgerRow],
    ) -> None: ...

    def restore(self, buf: memoryview, /) -> Restored: ...


class Shell(Protocol):
    """What the loop asks of the run around it."""

    def enter_phase(self, phase: Phase, step: int) -> None: ...

    def within(self, area: Area) -> AbstractContextManager[object]: ...

    def take_reports(self) -> tuple[float, int]:
        """The sum of this step's reported losses and their number; both start again at zero."""
        ...


class StepLoop:
    """One pass of `run.steps`, from the starting point to the last step."""

    def __init__(
        self,
        facts: LoopFacts,
        state: Mapping[str, Any],
        data: StepData,
        *,
        shell: Shell,
        link: AgentLink,
        stager: Stager,
        restore_committed: Callable[[int, int], Restored],
        gather_words: GatherWords,
        tracer: Tracer,
        nonce: Callable[[], int] = lambda: secrets.randbits(62) | 1,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self.state = state
        self.data = data
        self.shell = shell
        self.link = link
        self.stager = stager
        self.restore_committed = restore_committed
        self.gather_words = gather_words
        self.tracer = tracer
        self.nonce = nonce
        self.pause = pause
        self.pool = SlotPool()
        self.ledger: list[LedgerRow] = []
        self.staged: int | None = None
        """The newest step of which this life has staged a snapshot."""
        self.attempts = Attempts(
            facts.plan,
            steps=facts.steps,
            every_steps=facts.every_steps,
            every_s=facts.every_s,
            cadence=Cadence(facts.plan, clock=clock) if facts.auto and facts.rank == 0 else None,
            link=link,
            clock=clock,
        )
        self.finished = facts.plan.start.step
        """The last finished step."""
        self.ended: Ended | None = "steps" if self.finished >= facts.steps else None
        """The last step is behind, and which one that was: the spec's, the data's, or the one at which all were told to stop."""
        self._told = 0
        """How many ranks are known to be ended soon."""

    # ---- the loop

    def __iter__(self) -> Iterator[int]:
        self._restore()
        self.tracer.watch(self.state)
        if not self.ended and self._data_had_ended():
            self.ended = "data"
            return
        for step in range(self.facts.plan.start.step + 1, self.facts.steps + 1):
            begun = time.monotonic()
            self.tracer.step = step
            self.shell.enter_phase("step", step)
            seed_all(seed_of(self.facts.seed, step, self.facts.dp_rank))
            self.data.open(step)
            yield step
            self._finish(step, begun)
            if self.ended:
                return

    def _finish(self, step: int, begun: float) -> None:
        batch = self.data.require_taken()
        loss_sum, reports = self.shell.take_reports()
        self.shell.enter_phase("save", step)
        self._await_replication()
        verdict = self._agree(step, loss_sum, reports, batch.global_valid_tokens)
        loss = None if verdict.loss is None else verdict.loss.hex()
        self.tracer.note("step_end", loss=loss, samples=len(batch.sample_ids), ids=list(batch.sample_ids))
        self._extend_ledger(step, batch.sample_ids, loss)
        attempt = verdict.attempt
        ended = self._what_ended(step, verdict)
        if attempt is None and (ended is not None or self._more_will_leave(verdict)):
            attempt = self._agree(step, 0.0, 0, 1, insist=True).attempt
        slot = self._stage(step, verdict.replicated)
        self._announce(step, slot, attempt)
        self.link.send(StepMsg(step=step, loss=loss, step_s=time.monotonic() - begun))
        self.finished = step
        self.ended = ended
        if ended is not None:
            self._await_last_commit(step, slot)

    def _what_ended(self, step: int, verdict: StepVerdict) -> Ended | None:
        """Whether this was the last step, and of what: the same on all ranks."""
        if step == self.facts.steps:
            return "steps"
        if self.data.ended():
            return "data"
        return "stopped" if verdict.stop else None

    def _more_will_leave(self, verdict: StepVerdict) -> bool:
        """Ranks were told that they will be ended, more than were known of: what is done so far is committed now. The others
        train on, whether with those or without them is not theirs to say."""
        more = verdict.told > self._told
        self._told = max(self._told, verdict.told)
        if more:
            self.attempts.owe()
        return more

    # ---- beginning

    def _restore(self) -> None:
        start = self.facts.plan.start
        self.tracer.step = start.step
        self.shell.enter_phase("restore", start.step)
        if start.tier != "nothing":
            with self.shell.within("checkpoint"):
                restored = restored_from(
                    start,
                    path=self.facts.restore_path,
                    restore=self.stager.restore,
                    restore_committed=self.restore_committed,
                )
            require_start(restored, start)
            require_cursor(restored.cursor, start)
            self.data.load_state_dict(restored.cursor)
            self.ledger = list(restored.ledger) if start.tier == "memory" else []
        agree_on_start(start, self.gather_words)
        self.tracer.note(
            "restored", tier=start.tier, start_generation=start.generation, start_step=start.step
        )

    def _data_had_ended(self) -> bool:
        """Whether the starting point is the end of the data already. It is committed before the loop ends, if it was not."""
        start = self.facts.plan.start
        if start.tier == "nothing" or not self.data.ended():
            return False
        if start.tier == "memory":
            verdict = self._agree(start.step, 0.0, 0, 1, insist=True)
            slot = self._stage(start.step, verdict.replicated)
            self._announce(start.step, slot, verdict.attempt)
            self._await_last_commit(start.step, slot)
        return True

    # ---- the end of a step

    def _await_replication(self) -> None:
        if (staged := self.staged) is not None:
            self.link.wait(
                lambda news: True if news.replicated >= staged else None,
                deadline_s=self.facts.limits.replicated_s,
                what=f"the snapshot of step {staged} as replicated",
            )

    def _agree(
        self, step: int, loss_sum: float, reports: int, denominator: int, *, insist: bool = False
    ) -> StepVerdict:
        """The one collective. `insist`: rank 0 begins an attempt whether one is due or not."""
        generation = self.facts.plan.generation
        replicated, stop = self.link.peek(lambda news: (news.replicated, news.stop is not None))
        word = StepWord(
            generation=generation,
            step=step,
            loss_sum=loss_sum,
            reports=reports,
            replicated=max(replicated, self._safe_from_the_start()),
            attempt=self.nonce() if self.facts.rank == 0 and (insist or self.attempts.due(step)) else 0,
            stop=stop,
        )
        failpoint("step.before_exchange")
        words = [unpack_word(values) for values in self.gather_words(word.pack())]
        failpoint("step.after_exchange")
        return judge(
            words, mesh=self.facts.plan.axes, generation=generation, step=step, denominator=denominator
        )

    def _safe_from_the_start(self) -> int:
        """The starting point counts as replicated: all ranks have just restored it, from slots or the object store."""
        start = self.facts.plan.start
        return start.step if start.tier != "nothing" else -1

    def _extend_ledger(self, step: int, samples: Any, loss: str | None) -> None:
        committed = self.link.peek(lambda news: news.committed)
        self.ledger = [row for row in self.ledger if row.step > committed]
        self.ledger.append(
            LedgerRow(
                step=step,
                generation=self.facts.plan.generation,
                dp_rank=self.facts.dp_rank,
                samples=tuple(samples),
                loss=loss,
            )
        )

    def _stage(self, step: int, replicated: int) -> int:
        """Copy the state into a slot and seal it there."""
        with self.shell.within("checkpoint"):
            if self.pool.slot_bytes == 0:
                self._open_pool(self.stager.nbytes())
            try:
                return self._stage_into(self._free_slot(step, replicated), step)
            except SlotTooSmallError as e:
                # The state has grown, or the ledger while the object store is away.
                self._open_pool(max(e.needed, self.stager.nbytes()))
                return self._stage_into(self._free_slot(step, replicated), step)

    def _free_slot(self, step: int, replicated: int) -> int:
        slot = choose_slot(self.pool.held, replicated)
        if slot is None:
            raise RanksDisagreeError(
                f"no slot is free for step {step}: held {self.pool.held}, replicated for all {replicated}"
            )
        return slot

    def _stage_into(self, slot: int, step: int) -> int:
        self.pool.held[slot] = None  # from the first byte on the former snapshot is gone
        with self.pool.buffer(slot) as buffer:
            self.stager.stage(
                buffer,
                generation=self.facts.plan.generation,
                step=step,
                cursor=self.data.state_dict(),
                ledger=self.ledger,
            )
        self.pool.held[slot] = step
        self.staged = step
        return slot

    def _open_pool(self, slot_bytes: int) -> None:
        self.link.peek(_forget_pool)
        self.link.send(PoolMsg(slot_bytes=slot_bytes, slots=SLOTS))
        ready = self.link.wait(
            _take_pool,
            deadline_s=self.facts.limits.pool_s,
            what=f"{SLOTS} snapshot slots of {slot_bytes} bytes",
        )
        start = self.facts.plan.start
        self.pool.open(
            ready, slot_bytes=slot_bytes, start_step=start.step if start.tier == "memory" else None
        )

    def _announce(self, step: int, slot: int, attempt: str | None) -> None:
        if attempt is not None:
            self.attempts.begun(step)
        failpoint("snapshot.before_announce")
        self.link.send(SnapshotMsg(step=step, slot=slot, attempt=attempt))
        self.tracer.note("snapshot", slot=slot, attempt=attempt)

    # ---- the end of the loop

    def _await_last_commit(self, step: int, slot: int) -> None:
        """Wait for the commit of the last step; after a failure all ranks begin another attempt together.

        Raises:
            CommitGivenUpError: no attempt succeeded.
        """
        for pause_s in (*self.facts.limits.retry_pauses_s, None):
            answer = self.link.wait(
                take_answer(step),
                deadline_s=self.facts.limits.committed_s,
                what=f"the checkpoint of step {step} as committed",
            )
            self.attempts.answered()
            if not answer.failure:
                return
            self.tracer.note("commit_failed", failure=answer.failure)
            if pause_s is None:
                tries = len(self.facts.limits.retry_pauses_s) + 1
                raise CommitGivenUpError(
                    f"step {step} was not committed in {tries} attempts; the last said: {answer.failure}"
                )
            self.pause(pause_s)
            self._announce(step, slot, self._agree(step, 0.0, 0, 1, insist=True).attempt)


def _take_pool(news: AgentNews) -> PoolReadyMsg | None:
    ready, news.pool = news.pool, None
    return ready


def _forget_pool(news: AgentNews) -> None:
    news.pool = None
