"""The controller process: one thread takes events, calls `advance`, and has its decisions carried out.

::

    election, lease    ─┐                                        ┌─ effects: records, lineage, plan, outcome, incidents
    world: list, watch ─┼─> inbox ─> advance(state, events, t) ──┼─ probes
    effects' answers   ─┘            (core/, pure)               └─ journal

The loop never blocks on a store. A status that tells of a death is on its way to the core the moment the watch delivers it;
otherwise time is told ten times a second. Leadership is looked at before each batch: a process that was stopped for longer
than its lease finds that out here, before it decides anything.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from surefoot import history
from surefoot.ckpt.store import ObjectStore
from surefoot.controller import wire
from surefoot.controller.core import decisions as dec
from surefoot.controller.core import events as ev
from surefoot.controller.core import invariants
from surefoot.controller.core.advance import advance
from surefoot.controller.core.settings import Settings
from surefoot.controller.core.state import State
from surefoot.controller.effects import Effects, Means, Records, Trial
from surefoot.controller.election import Election, Leadership
from surefoot.controller.errors import CoreBrokenError
from surefoot.controller.inbox import Inbox
from surefoot.controller.journal import Journal, line_of
from surefoot.controller.keys import Keys
from surefoot.controller.store import CoordStore
from surefoot.controller.world import WorldFollower, WorldReader
from surefoot.exitcodes import ExitCode

log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often time is told to the core; a hang is found at most this much late."""

SLOW_S = 0.5
"""A loop that comes round later than this was held up (a busy machine, a stop): said, for it explains late decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """What a controller is started with."""

    settings: Settings
    token: str
    """The job's token."""
    state_dir: Path
    lease_ttl_s: int
    seed: int
    """Of the randomness of pauses and renewals."""


class Controller:
    """One controller of a job. `run` returns its exit code."""

    def __init__(
        self,
        config: ControllerConfig,
        store: CoordStore,
        objects: ObjectStore,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._store, self._objects, self._clock = config, store, objects, clock
        settings = config.settings
        self._keys = Keys(settings.job)
        self._reader = WorldReader(settings.job)
        self._inbox = Inbox()
        self._records = Records(objects)
        self._trial = Trial(objects)
        self._journal = Journal(config.state_dir / "journal", objects, settings.controller)
        self._state = State(settings=settings)
        self._lock = threading.Lock()
        """Guards what the election's thread hands over: the leadership of the present term."""
        self._leadership: Leadership | None = None
        self._leads: Leadership | None = None
        """The leadership that this term's effects act under."""
        self._effects: Effects | None = None
        self._follower: WorldFollower | None = None
        self._exit: int | None = None
        self._ticked_s = 0.0
        rng = random.Random(config.seed)
        self._election = Election(
            store,
            self._keys,
            name=settings.controller,
            ttl_s=config.lease_ttl_s,
            on_elected=self._elected,
            on_deposed=self._deposed,
            on_outcome=self._job_ended,
            is_ours=lambda outcome: outcome.run_id in ("", settings.run_id),
            rng=rng,
        )

    # ---- called from other threads

    def interrupt(self) -> None:
        """Leave in good order: SIGTERM, Ctrl-C."""
        self._leave(int(ExitCode.INTERRUPTED))

    def _leave(self, code: int) -> None:
        if self._exit is None:
            self._exit = code
        self._inbox.wake()

    def _elected(self, leadership: Leadership) -> None:
        with self._lock:
            self._leadership = leadership
            self._inbox.begin_term(ev.Elected(token=leadership.token))

    def _deposed(self, reason: str) -> None:
        self._inbox.post([ev.Deposed(reason=reason)])

    def _job_ended(self, outcome: wire.Outcome) -> None:
        log.info("the job has ended: %s (%s)", outcome.state, outcome.reason)
        self._leave(outcome.exit_code)

    # ---- the loop

    def run(self) -> int:
        """Until the job ends or this controller is told to leave."""
        self._journal.start()
        self._election.start()
        last_s = self._clock()
        try:
            while self._exit is None:
                events = self._inbox.take(TICK_S)
                now_s = self._clock()
                if now_s - last_s > TICK_S + SLOW_S:
                    log.warning("this controller was held up for %.1f s", now_s - last_s)
                last_s = now_s
                self._turn(events, now_s)
        finally:
            self._shut_down()
        return self._exit

    def _turn(self, events: list[ev.Event], now_s: float) -> None:
        """One round: events and time into the core, decisions out of it."""
        batch: list[ev.Event] = [*self._mind_the_lease(), *events]
        if now_s - self._ticked_s >= TICK_S or not events:
            self._ticked_s = now_s
            batch.append(ev.Ticked())
        before = self._state
        try:
            self._state, decided = advance(before, batch, now_s)
        except Exception as e:
            raise CoreBrokenError(f"the core raised {e!r}; the journal has what led there") from e
        line = line_of(self._state, batch, decided, now_s)
        if line is not None:
            self._journal.add(line)
        if decided:
            self._check(before, decided)
        for decision in decided:
            self._perform(decision)
        end = self._state.the_end
        if end is not None and end.written:
            self._leave(end.outcome.exit_code)

    def _mind_the_lease(self) -> list[ev.Event]:
        """Who was stopped for longer than the lease learns it here, whatever its other threads have had time for."""
        leadership = self._leadership
        if self._state.token is None or leadership is None or leadership.token != self._state.token:
            return []
        if leadership.alive():
            return []
        return [ev.Deposed(reason="the lease may have ended")]

    def _check(self, before: State, decided: tuple[dec.Decision, ...]) -> None:
        """The invariants, in production too: decisions are rare and this is cheap. A broken one is said, not acted on."""
        for broken in invariants.check(before, self._state, decided):
            log.warning("an invariant does not hold, please report it: %s", broken)
            history.note("invariant_broken", what=broken)

    # ---- decisions

    def _perform(self, decision: dec.Decision) -> None:
        match decision:
            case dec.FollowWorld():
                self._begin_term()
            case dec.StepDown():
                history.note("stepped_down", reason=decision.reason)
            case dec.Report():
                log.info("%s: %s", decision.topic, decision.text)
                history.note("report", topic=decision.topic, text=decision.text, cause=decision.cause_id)
                if decision.topic == "leadership":
                    # Whatever made the core give up, the key must not stay with one who decides nothing. The election's
                    # thread may have won again since: only the leadership that was given up ends here.
                    given_up = self._leads
                    self._end_term()
                    if given_up is not None:
                        given_up.resign()
            case dec.OpenIncident():
                incident = decision.incident
                history.note("incident", **wire_facts(incident))
                log.info("incident %s: %s; %s", incident.id, incident.fault, "; ".join(incident.evidence[:3]))
                self._act(decision)
            case _:
                self._note(decision)
                self._act(decision)

    def _act(self, decision: dec.Decision) -> None:
        if self._effects is not None:
            self._effects.perform(decision)

    def _note(self, decision: dec.Decision) -> None:
        if isinstance(decision, dec.CreateRecord):
            start = decision.record.start
            log.info(
                "generation %d: from step %d of generation %d (%s)",
                decision.record.generation,
                start.step,
                start.generation,
                decision.record.reason,
            )
        elif isinstance(decision, dec.SetAside):
            log.warning(
                "step %d of generation %d is set aside: %s",
                *(decision.step, decision.generation, decision.reason),
            )
        elif isinstance(decision, dec.WriteOutcome):
            log.info("the job is %s: %s", decision.outcome.state, decision.outcome.reason)

    def _begin_term(self) -> None:
        self._end_term()
        with self._lock:
            leadership, term = self._leadership, self._inbox.term
        if leadership is None or leadership.token != self._state.token:
            return  # another election has come since; its own event follows
        self._leads = leadership
        self._effects = Effects(
            Means(
                store=self._store,
                objects=self._objects,
                keys=self._keys,
                job=self._config.settings.job,
                token=self._config.token,
                journal=self._journal,
            ),
            self._records,
            self._trial,
            leadership,
            lambda events: self._inbox.post(events, term=term),
        )
        self._follower = WorldFollower(
            self._store,
            self._reader,
            lambda events: self._inbox.post(events, term=term),
            relist_s=self._config.settings.times.relist_s,
        )
        self._follower.start()

    def _end_term(self) -> None:
        if self._follower is not None:
            self._follower.stop()
        if self._effects is not None:
            self._effects.stop()
        self._follower = self._effects = self._leads = None

    def _shut_down(self) -> None:
        if self._follower is not None:
            self._follower.stop()
        if self._effects is not None:
            self._effects.finish()
        self._election.stop()
        self._journal.stop()


def wire_facts(incident: wire.Incident) -> dict[str, object]:
    """An incident for the history: which, what, where."""
    return {
        "id": incident.id,
        "fault": incident.fault,
        "generation": incident.generation,
        "step": incident.step,
        "node": incident.node,
        "rank": incident.rank,
    }
