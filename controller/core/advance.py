"""`advance`: the one entry to the core. (state, events, now) -> (state, decisions). PURE.

A batch of events is taken one by one into a draft (facts first, answers to the stage that waits for them), and then the
draft is considered once: detectors, inquiry, forming, the end. An exception, which is a bug of ours, leaves the former
state as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from surefoot.controller.core import closing, ending, faults, forming, incidents, observe, takeover
from surefoot.controller.core.decisions import Decision
from surefoot.controller.core.draft import Draft
from surefoot.controller.core.events import (
    CoordStoreUnavailable,
    Deposed,
    Elected,
    Event,
    LineageDamaged,
    LineageListed,
    NodeAppeared,
    NodeVanished,
    ObjectStoreDenied,
    ObjectStoreUnavailable,
    OutcomeRefused,
    OutcomeUnknown,
    OutcomeWritten,
    PlanPublished,
    PlanRead,
    PlanRefused,
    PlanUnknown,
    PointerSeen,
    ProbeAnswered,
    ProbeBroken,
    ProbeRefused,
    ProbeTimedOut,
    RecordCreated,
    RecordTaken,
    RecordUnknown,
    StatusReported,
    Ticked,
    WorldListed,
)
from surefoot.controller.core.moves import FINAL, Mind, Turn
from surefoot.controller.core.state import (
    AwaitingNodes,
    CheckingRecord,
    ComingUp,
    Consulting,
    Reviewing,
    State,
    TakingOver,
    Truth,
)
from surefoot.exitcodes import ExitCode


def advance(state: State, events: Iterable[Event], now_s: float) -> tuple[State, tuple[Decision, ...]]:
    """Take what happened, and say what is to be done.

    Args:
        state: what this function returned last, or a fresh `State`.
        events: in the order in which they happened; `Ticked` among them at least four times a second.
        now_s: the controller's monotonic clock; never goes back.

    Raises:
        IllegalMoveError: a bug of ours; `state` is still good.
    """
    d = Draft(state, now_s)
    for event in events:
        d.cause = event.cause_id
        _take(d, event)
    if d.s.leads:
        _consider(d)
    return d.freeze(), tuple(d.decisions)


# ---------------------------------------------------------------- events


def _take(d: Draft, event: Event) -> None:
    if isinstance(event, Elected):
        takeover.elected(d, event)
    elif isinstance(event, Ticked):
        d.ticked = True
    elif d.s.leads:  # who does not lead has no view: it looks afresh when elected
        _take_as_leader(d, event)


def _take_as_leader(d: Draft, event: Event) -> None:
    match event:
        case Deposed():
            closing.depose(d, event.reason)
        case NodeAppeared():
            observe.node_appeared(d, event)
        case NodeVanished():
            observe.node_vanished(d, event)
        case StatusReported():
            observe.status_reported(d, event.status)
        case PointerSeen():
            takeover.pointer_seen(d, event)
        case WorldListed():
            takeover.world_seen(d, event)
        case ProbeAnswered() | ProbeRefused() | ProbeBroken() | ProbeTimedOut():
            observe.probe_ended(d, event)
        case Elected() | Ticked():
            pass
        case _:
            _take_answer(d, event)


def _take_answer(
    d: Draft,
    event: RecordCreated
    | RecordTaken
    | RecordUnknown
    | LineageListed
    | LineageDamaged
    | ObjectStoreUnavailable
    | ObjectStoreDenied
    | PlanPublished
    | PlanRefused
    | PlanUnknown
    | PlanRead
    | OutcomeWritten
    | OutcomeRefused
    | OutcomeUnknown
    | CoordStoreUnavailable,
) -> None:
    match event:
        case RecordCreated():
            forming.record_created(d, event)
        case RecordTaken():
            forming.record_taken(d, event)
        case RecordUnknown():
            forming.record_unknown(d, event)
        case LineageListed():
            _listed(d, event)
        case LineageDamaged():
            _damaged(d, event)
        case ObjectStoreUnavailable() | ObjectStoreDenied():
            _object_store_failed(d, event)
        case PlanPublished():
            forming.plan_published(d, event)
        case PlanRefused():
            forming.plan_refused(d, event)
        case PlanUnknown():
            forming.plan_unknown(d, event)
        case PlanRead():
            forming.plan_read(d, event)
        case OutcomeWritten():
            if _is_the_end(d, event.op):
                closing.outcome_written(d)
        case OutcomeRefused():
            if _is_the_end(d, event.op):
                closing.step_down(d, "writing the outcome was refused: the leader key is not ours")
        case OutcomeUnknown():
            if _is_the_end(d, event.op):
                closing.outcome_failed(d)
        case CoordStoreUnavailable():
            if _is_the_end(d, event.op):
                closing.outcome_failed(d)
            else:
                forming.store_failed(d, event)
        case _:
            assert_never(event)


def _is_the_end(d: Draft, op: int) -> bool:
    return d.s.the_end is not None and d.s.the_end.op == op


# ---------------------------------------------------------------- the object store answers


def _listed(d: Draft, event: LineageListed) -> None:
    asked_s = d.s.listings.get(event.op)
    if asked_s is None:
        return
    old = d.s.truth
    d.set(
        listings={op: t for op, t in d.s.listings.items() if op != event.op},
        truth=Truth(
            # Records never go away: one of ours that was created while this listing was under way stays known.
            records={**(old.records if old is not None else {}), **event.records},
            hashes={**(old.hashes if old is not None else {}), **event.hashes},
            manifests=event.manifests if old is None or asked_s >= old.listed_s else old.manifests,
            aside=event.aside if old is None or asked_s >= old.listed_s else old.aside,
            listed_s=asked_s if old is None else max(asked_s, old.listed_s),
            lacks=event.lacks,
        ),
    )
    if old is None and event.lacks:
        d.report("store", f"records and checkpoints are created without conditions: {event.lacks}")
    _see_to_damage(d, event)
    if d.s.mind is Mind.HOLD_COMMITS:
        d.turn(Turn.STORE_BACK)
    _after_listing(d, event.op)


def _see_to_damage(d: Draft, event: LineageListed) -> None:
    """What is flagged by now, or gone, need not be remembered; of the rest the flag is wanted again."""
    there = {(m.generation, m.step) for m in event.manifests}
    left = {at: why for at, why in d.s.damaged.items() if at in there and at not in event.aside}
    d.set(damaged=left)
    for at in left:
        faults.set_aside(d, at)


def _after_listing(d: Draft, op: int) -> None:
    stage = d.s.forming.stage if d.s.forming is not None else None
    match stage:
        case _ if d.s.mind in FINAL:
            pass
        case TakingOver():  # an outcome of this run, which may stand in etcd, comes first
            if stage.op == op:
                takeover.listed(d)
        case _ if takeover.taken_over(d):
            pass
        case Reviewing() if stage.op == op:
            faults.answer(d, stage.fault)
        case Consulting() if stage.op == op:
            forming.choose(d)
        case CheckingRecord() if stage.op == op:
            forming.checked(d, stage)
        case _ if d.s.listing == op:
            _periodic(d)
        case _:
            ending.listed(d, op)


def _periodic(d: Draft) -> None:
    """A look at records and manifests that no stage waits for: does a record stand above the plan, does all fit?"""
    d.set(listing=None, next_listing_s=d.now + d.s.settings.times.relist_s)
    truth = d.s.truth
    assert truth is not None
    coming_up = d.s.forming is not None and isinstance(d.s.forming.stage, ComingUp)
    if d.s.mind in (Mind.HELD, Mind.RUNNING) or coming_up:
        why_not = takeover.contradiction(d, truth)
        if why_not is not None:
            closing.hold(d, why_not)
        elif d.s.mind is Mind.HELD:
            _cleared_up(d)
        elif d.plan is not None and truth.top > d.plan.generation:
            d.turn(Turn.SUPERSEDED)
            forming.begin(d, takeover.superseded(d, truth))


def _cleared_up(d: Draft) -> None:
    closing.release(d)
    d.set(
        in_force=None,
        forming=forming.Forming(
            why=takeover.LOOKING, stage=TakingOver(op=0, world=True, listed=True), since_s=d.now
        ),
    )


def _damaged(d: Draft, event: LineageDamaged) -> None:
    """Records cannot be read: nothing is decided until they can."""
    if event.op not in d.s.listings:
        return
    _forget(d, event.op)
    if d.s.mind not in FINAL:
        closing.hold(d, event.detail)


def _object_store_failed(d: Draft, event: ObjectStoreUnavailable | ObjectStoreDenied) -> None:
    periodic = d.s.listing == event.op
    _forget(d, event.op)
    if periodic and d.s.mind is Mind.RUNNING:
        d.turn(Turn.STORE_LOST)
        d.report("store", f"commits are on hold, ranks go on: {event.detail}")
    if _is_the_end(d, event.op):
        closing.outcome_failed(d)
    ending.store_failed(d, event.op)
    forming.store_failed(d, event)


def _forget(d: Draft, op: int) -> None:
    """A listing came to nothing."""
    d.set(listings={o: t for o, t in d.s.listings.items() if o != op})
    if d.s.listing == op:
        retry_s = d.now + d.s.settings.times.store_retry_max_s
        d.set(listing=None, next_listing_s=retry_s)


# ---------------------------------------------------------------- considering


def _consider(d: Draft) -> None:
    """What follows from all that was taken."""
    if d.s.mind in FINAL:
        closing.pursue_end(d)
        return
    if _patience_is_over(d):
        closing.finish(d, Turn.GAVE_UP, ExitCode.ENVIRONMENT, d.s.held_why, step=forming.committed_step(d))
        return
    takeover.pursue(d)
    if takeover.pointer_astray(d):
        takeover.look_again(d)
    if faults.watching(d):
        faults.suspect(d)
        faults.pursue(d)
    if d.s.leads and d.s.mind not in FINAL:
        forming.pursue(d)
        ending.pursue(d)
        incidents.follow(d)
        _list_when_due(d)


def _patience_is_over(d: Draft) -> bool:
    """Is the job held for longer than anybody will wait for it?"""
    patience_s = d.s.settings.held_patience_s
    return d.s.mind is Mind.HELD and patience_s is not None and d.now - d.s.held_since_s >= patience_s


def _list_when_due(d: Draft) -> None:
    """Look at the object store every so often, and at once where an agent tells of a generation that has no known record."""
    waits = d.s.forming is not None and isinstance(d.s.forming.stage, ComingUp | AwaitingNodes)
    if d.s.mind is Mind.FORMING and not waits:
        return
    if d.s.listing is None and (d.now >= d.s.next_listing_s or _told_of_more(d)):
        d.set(listing=d.list_lineage())


def _told_of_more(d: Draft) -> bool:
    truth = d.s.truth
    if truth is None or not d.touched:
        return False
    for uid in d.touched:
        status = d.nodes[uid].present_status
        if status is None:
            continue
        fenced_by = status.committed.fenced_by if status.committed is not None else None
        if max(fenced_by or 0, status.generation) > truth.top:
            return True
    return False
