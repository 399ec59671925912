"""What becomes of a sealed snapshot: a copy on the peer, and every so often an upload and a commit.

Per snapshot: the snapshot server puts it aside if it is to be uploaded (the *pin*), copies it to the peer, and only then
the rank hears ``replicated``; by the pool's rules it does not overwrite the slot before. So an upload never holds a slot,
and at most `UPLOADS_MAX` attempts are pinned at once. A replication that fails is tried again until it succeeds or the
generation ends: if the peer is gone the controller replaces it, and the status says what is the matter meanwhile.

An attempt whose pins are complete lives on through changes of generation: it needs no rank any more, and whether its
manifest counts is decided by the lineage, not here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from surefoot.agent import decide
from surefoot.agent.errors import ChannelClosedError
from surefoot.agent.messages import (
    CommitAnswer,
    CommitMsg,
    FailedAnswer,
    GiveUpMsg,
    Image,
    PeerAddress,
    ReplicateMsg,
    UploadMsg,
)
from surefoot.agent.server import SnapshotServer
from surefoot.agent.slots import SlotFolder
from surefoot.controller import wire

log = logging.getLogger(__name__)

REPLICATE_DEADLINE_S = 30.0
"""One try. At the 0.5 GB/s of Flight on loopback that is 15 GB a rank."""

UPLOAD_DEADLINE_S = 300.0
"""One attempt of one node. Training does not wait for it, but the next attempt does."""

COMMIT_DEADLINE_S = 330.0
"""The committer waits for the slowest uploader, and a little longer for its word."""

GIVE_UP_DEADLINE_S = 30.0

SLOW_S = 15.0
"""An upload that takes longer is mentioned, and again and again after as long: the object store may be away."""

AttemptKey = tuple[int, int, str]


@dataclass(slots=True)
class _Attempt:
    """One checkpoint attempt on this node. `slot` numbers its pin files."""

    key: AttemptKey
    member: wire.Member
    writers: int
    slot: int
    facts: dict[str, str]
    pinned: dict[int, str] = field(default_factory=dict[int, str])
    task: asyncio.Task[None] | None = None

    @property
    def complete(self) -> bool:
        return set(decide.own_ranks(self.member)) <= set(self.pinned)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    """How the way to the peer ended: `safe` there (or no copy is wanted), and whether the pin stands."""

    safe: bool
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowHooks:
    """What the flow asks of the agent around it."""

    tell_rank: Callable[[int, msgspec.Struct], None]
    address_of: Callable[[str, bool], Awaitable[PeerAddress | None]]
    """A node's snapshot server by uid; with True, look again instead of trusting what was known."""
    committed: Callable[[wire.Committed], None]
    """The committer's result."""
    note: Callable[[str, str], None]
    """A standing trouble by topic; empty text: over."""


class SnapshotFlow:
    """See the module. Belongs to the event loop's thread."""

    def __init__(self, server: SnapshotServer, folder: SlotFolder, hooks: FlowHooks) -> None:
        self._server = server
        self._folder = folder
        self._hooks = hooks
        self._plan: wire.Plan | None = None
        self._member: wire.Member | None = None
        self._peer: str | None = None
        self._moves: set[asyncio.Task[None]] = set()
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._refused: set[AttemptKey] = set()
        self._background: set[asyncio.Task[None]] = set()
        self.cadence = ""
        """How often this generation commits and why, where rank 0 chooses that; manifests tell it."""
        self._last_commit: tuple[int, float] | None = None
        """Its step, and when it was told, on the monotonic clock."""

    def begin(self, plan: wire.Plan, launch: decide.Launch) -> None:
        """Another generation runs here from now on."""
        self.stop()
        self._plan, self._member, self._peer = plan, launch.member, launch.peer_uid
        self.cadence = ""
        self._hooks.note("cadence", "")

    def stop(self) -> None:
        """The generation is over: nobody waits for its copies; its attempts go on if they have all they need."""
        for task in self._moves:
            task.cancel()
        self._moves.clear()
        for attempt in [a for a in self._attempts.values() if a.task is None]:
            self._abandon(
                attempt.key, "its ranks were ended before all had sealed their snapshots", attempt.member
            )
            del self._attempts[attempt.key]
        self._refused.clear()
        self._plan = self._member = self._peer = None
        self._hooks.note("replication", "")

    async def finish(self, timeout_s: float) -> None:
        """Wait for attempts under way, at most so long; then drop everything."""
        tasks = [a.task for a in self._attempts.values() if a.task is not None]
        if tasks and timeout_s > 0:
            await asyncio.wait(tasks, timeout=timeout_s)
        everything = [*tasks, *self._moves, *self._background]
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)

    def sealed(self, image: Image, attempt: str | None) -> None:
        """A rank of the generation in force has sealed a snapshot."""
        if self._plan is None or image.generation != self._plan.generation:
            return
        pin = (
            self._admit((image.generation, image.step, attempt), image.rank) if attempt is not None else None
        )
        self._spawn(self._moves, self._settle(image, attempt, pin))

    def restored(self, image: Image) -> None:
        """A rank starts from this snapshot: after a change of members its peer may be another, which lacks a copy."""
        if self._plan is not None and self._peer is not None:
            self._spawn(self._moves, self._copy_start(image))

    # ------------------------------------------------------------ replication

    async def _copy_start(self, image: Image) -> None:
        await self._copy(image, None)

    async def _settle(self, image: Image, attempt: str | None, pin: Path | None) -> None:
        """Pin, copy, tell the rank, and let the upload begin."""
        copied = await self._copy(image, pin)
        if copied.safe:
            self._hooks.tell_rank(image.rank, wire.ReplicatedMsg(step=image.step))
        if attempt is None or pin is None:
            return
        key = (image.generation, image.step, attempt)
        if copied.pinned:
            self._note_pinned(key, image.rank, str(pin))
        else:
            self._fail_attempt(key, f"the snapshot of rank {image.rank} could not be put aside")

    async def _copy(self, image: Image, pin: Path | None) -> _Copied:
        """Until the copy is safe on the peer (or none is wanted), or newer snapshots have taken its slot."""
        pinned = False
        tries = 0
        while self._peer is not None or (pin is not None and not pinned):
            peer = await self._hooks.address_of(self._peer, tries > 0) if self._peer is not None else None
            wanted_pin = pin if not pinned else None
            trouble = f"the address of node {self._peer} is not known"
            if peer is not None or self._peer is None:
                answer = await self._try(image, peer, wanted_pin)
                if not isinstance(answer, FailedAnswer):
                    self._hooks.note("replication", "")
                    return _Copied(safe=True, pinned=pinned or wanted_pin is not None)
                pinned = pinned or answer.pinned
                trouble = answer.detail
                if wanted_pin is not None and not answer.pinned:
                    log.warning("no upload of rank %d's step %d: %s", image.rank, image.step, trouble)
                    pin = None  # the copy matters more than the upload
                    continue
                if answer.kind == "snapshot_missing":
                    log.warning("rank %d's step %d is copied no more: %s", image.rank, image.step, trouble)
                    return _Copied(safe=False, pinned=pinned)
            tries += 1
            name = f"rank {image.rank}'s snapshot of step {image.step}"
            self._hooks.note("replication", f"{name} is not safe yet ({tries} tries): {trouble}")
            await asyncio.sleep(decide.retry_delay_s(tries, max_s=2.0))
        return _Copied(safe=True, pinned=pinned)

    async def _try(self, image: Image, peer: PeerAddress | None, pin: Path | None) -> object:
        def job(serial: int) -> ReplicateMsg:
            pin_path = str(pin) if pin is not None else None
            return ReplicateMsg(
                serial=serial, image=image, peer=peer, pin_path=pin_path, deadline_s=REPLICATE_DEADLINE_S
            )

        while True:
            try:
                return await self._server.ask(job)
            except ChannelClosedError:
                log.warning(
                    "the snapshot server died with rank %d's step %d: once more", image.rank, image.step
                )

    # ------------------------------------------------------------ upload and commit

    def _admit(self, key: AttemptKey, rank: int) -> Path | None:
        """Where to pin a snapshot of this attempt; None if the attempt is given up."""
        assert self._plan is not None
        assert self._member is not None
        attempt = self._attempts.get(key)
        if attempt is None:
            if key in self._refused:
                return None
            if not decide.admit_upload(list(self._attempts), key):
                self._refused.add(key)
                self._abandon(key, "uploads before it are still under way on this node", self._member)
                return None
            taken = {a.slot for a in self._attempts.values()}
            slot = next(k for k in range(decide.UPLOADS_MAX) if k not in taken)
            attempt = _Attempt(
                key,
                self._member,
                len(self._plan.members),
                slot,
                _facts(self._plan, self._member, self.cadence),
            )
            self._attempts[key] = attempt
        return self._folder.upload_path(rank, attempt.slot)

    def _note_pinned(self, key: AttemptKey, rank: int, path: str) -> None:
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        attempt.pinned[rank] = path
        if attempt.complete and attempt.task is None:
            attempt.task = self._spawn(self._background, self._upload(attempt))

    def _fail_attempt(self, key: AttemptKey, reason: str) -> None:
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            self._refused.add(key)
            self._abandon(key, reason, attempt.member)

    async def _upload(self, attempt: _Attempt) -> None:
        generation, step, nonce = attempt.key
        paths = tuple(attempt.pinned[r] for r in sorted(attempt.pinned))
        commits = attempt.member.index == 0
        slow = self._spawn(self._background, self._tell_slow(step)) if commits else None
        try:
            failure = await self._ask_upload(attempt, paths)
            if failure:
                log.warning(
                    "upload of generation %d, step %d, attempt %s: %s", generation, step, nonce, failure
                )
            if commits:
                self._tell_commit(await self._commit(attempt, failure))
        finally:
            if slow is not None:
                slow.cancel()
            self._attempts.pop(attempt.key, None)

    async def _tell_slow(self, step: int) -> None:
        """Until it is cancelled, by the commit or its failure."""
        begun = time.monotonic()
        while True:
            await asyncio.sleep(SLOW_S)
            why = f"step {step} is not committed yet, after {time.monotonic() - begun:.0f} s, and still tried"
            self._hooks.note("commit", f"{why}; {self._age_of_last_commit()}")

    async def _ask_upload(self, attempt: _Attempt, paths: tuple[str, ...]) -> str:
        """Returns the failure; empty: uploaded."""
        generation, step, nonce = attempt.key

        def job(serial: int) -> UploadMsg:
            return UploadMsg(
                serial=serial,
                generation=generation,
                step=step,
                attempt=nonce,
                writer=attempt.member.index,
                paths=paths,
                deadline_s=UPLOAD_DEADLINE_S,
            )

        try:
            answer = await self._server.ask(job)
        except ChannelClosedError as e:
            await self._give_up(attempt.key, attempt.member.index, str(e))
            return str(e)
        return answer.detail if isinstance(answer, FailedAnswer) else ""

    async def _commit(self, attempt: _Attempt, failure: str) -> wire.Committed:
        """Commit, or say why not. Asking again after the server died is safe: it reads back what exists."""
        generation, step, nonce = attempt.key

        def job(serial: int) -> CommitMsg:
            return CommitMsg(
                serial=serial,
                generation=generation,
                step=step,
                attempt=nonce,
                writers=attempt.writers,
                deadline_s=COMMIT_DEADLINE_S,
                facts=attempt.facts,
            )

        while not failure:
            try:
                answer = await self._server.ask(job)
            except ChannelClosedError:
                continue
            assert isinstance(answer, CommitAnswer)
            return wire.Committed(
                generation=generation,
                step=step,
                attempt=nonce,
                fenced_by=answer.fenced_by,
                failure=answer.failure,
            )
        return wire.Committed(generation=generation, step=step, attempt=nonce, failure=failure)

    def _tell_commit(self, committed: wire.Committed) -> None:
        """To the ranks and into the status; a failure also into the log and, until a commit succeeds, for all to see."""
        why = ""
        if committed.failure:
            why = f"step {committed.step} is not committed: {committed.failure}; {self._age_of_last_commit()}"
            log.warning("generation %d, %s", committed.generation, why)
        elif not committed.fenced_by:
            self._last_commit = (committed.step, time.monotonic())
        self._hooks.note("commit", why)
        self._hooks.committed(committed)

    def _age_of_last_commit(self) -> str:
        if self._last_commit is None:
            return "nothing was committed before it"
        step, at = self._last_commit
        return f"the last commit, of step {step}, is {time.monotonic() - at:.0f} s old"

    def _abandon(self, key: AttemptKey, reason: str, member: wire.Member) -> None:
        """Leave word, so that the committer need not wait; the committer itself tells the ranks at once."""
        log.warning("generation %d, step %d, attempt %s is given up: %s", *key, reason)
        self._spawn(self._background, self._give_up(key, member.index, reason))
        if member.index == 0:
            self._tell_commit(wire.Committed(generation=key[0], step=key[1], attempt=key[2], failure=reason))

    async def _give_up(self, key: AttemptKey, writer: int, reason: str) -> None:
        generation, step, nonce = key

        def job(serial: int) -> GiveUpMsg:
            return GiveUpMsg(
                serial=serial,
                generation=generation,
                step=step,
                attempt=nonce,
                writer=writer,
                reason=reason,
                deadline_s=GIVE_UP_DEADLINE_S,
            )

        try:
            await self._server.ask(job)
        except ChannelClosedError as e:
            log.warning("could not leave word of it: %s", e)

    def _spawn(self, group: set[asyncio.Task[None]], work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        group.add(task)
        task.add_done_callback(lambda t: self._done(group, t))
        return task

    def _done(self, group: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        group.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a snapshot's way broke off: %r", error, exc_info=error)


def _facts(plan: wire.Plan, member: wire.Member, cadence: str) -> dict[str, str]:
    """What a manifest tells of its committer."""
    return {
        **({"interval": cadence} if cadence else {}),
        "run_id": plan.run_id,
        "node": member.uid,
        "spec_hash": plan.spec_hash,
        "code_version": plan.code_version,
    }


def newer(a: wire.Committed | None, b: wire.Committed) -> bool:
    """Whether `b` is news after `a`: in a status, an outcome is never replaced by that of an older step."""
    return a is None or (b.generation, b.step) >= (a.generation, a.step)


def told_to_ranks(committed: wire.Committed) -> wire.CommittedMsg:
    """What ranks hear of a commit; one that must not count itself is a failure to them."""
    return wire.CommittedMsg(generation=committed.generation, step=committed.step, failure=committed.failure)


def commit_news(
    before: wire.Committed | None, status: wire.NodeStatus, plan: wire.Plan
) -> wire.Committed | None:
    """What the committer's status tells of this generation's commits that was not known before."""
    now = status.committed
    if now is None or now == before or now.generation != plan.generation:
        return None
    return now
