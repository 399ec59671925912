"""Saving on one's own: `Checkpointer`, in one process or under plain torch.distributed. (torch)

A save copies what this rank writes into the checkpointer's own memory and returns. A process of its own uploads it, rank 0's
also commits; a thread waits for them and hears the outcome over the checkpointer's TCPStore (ckpt/saving/flight.py). One save is in
flight at most: the next one waits for it, and raises what went wrong with it. A `blocking` save, and one that does not fit
the memory budget, is written straight from live memory instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist

from surefoot.ckpt.errors import (
    CkptError,
    FencedError,
)
from surefoot.ckpt.keeping.retention import Retention
from surefoot.ckpt.live.livestate import no_collection
from surefoot.ckpt.loading.aside import RESUME_TRIES, Resume
from surefoot.ckpt.loading.reading import ADVICE
from surefoot.ckpt.loading.together import Loaded, find_line, load_agreed, note_start
from surefoot.ckpt.record import StartRef, read_records
from surefoot.ckpt.saving.agreement import Agreement
from surefoot.ckpt.saving.cadence import Cadence
from surefoot.ckpt.saving.calls import Calls, name_of
from surefoot.ckpt.saving.equipment import Equipment
from surefoot.ckpt.saving.generation import OwnGeneration
from surefoot.ckpt.saving.handles import GRACE_S, SaveHandle
from surefoot.ckpt.saving.options import require_mapping, require_names, require_sensible, whole_step
from surefoot.ckpt.saving.takeoff import Takeoff
from surefoot.ckpt.saving.writer import KILL_AFTER_S
from surefoot.ckpt.store import ObjectStore, Root, open_store

__all__ = ["Checkpointer", "SaveHandle"]

_log = logging.getLogger(__name__)

TIDY_S = 60.0
"""How long `close` waits for what is being deleted."""
WAITED_S = 0.1
"""A save that waited longer for the one before it says so."""


class Checkpointer:
    """Saves and loads one training state under one root. All calls are collective over the group, in the same order.

    Args:
        root: ``file:///path``, a path, or ``s3://bucket/prefix``.
        group: the ranks that hold the state; None: the default group, or this process alone.
        keep: how many of the newest checkpoints to keep (at least 2); None: all.
        keep_every: keep those of every so many steps as well.
        every: save only at steps divisible by this; at others `save` returns a handle that is done. ``"auto"``: as often as is
            worth it, from what saves cost and how often the job was interrupted (ckpt/planning/interval.py); then call `save` after each step.
        every_s: save as soon as so many seconds have passed since the last save, by rank 0's clock.
        memory_budget: bytes of host memory that a staged state of one rank may take; None: no limit. A larger state is written
            straight from live memory, and `save` returns when this rank's part is stored.
        deadline_s: how long one save may take until it is given up.
        start_over: the first save may leave behind what the root holds, although nothing was loaded.
        busy: what `save` does while the one before it is still under way: ``"wait"`` for it, or ``"skip"`` this step on all ranks, with
            a warning, so that training goes on while the object store is slow or away; the next save that is due is tried again.
        resume_tries: how many starts may die after resuming from the newest step until a load takes the one before it (see
            ckpt/loading/aside.py); None: any number.
    """

    def __init__(
        self,
        root: Root,
        group: dist.ProcessGroup | None = None,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        every: int | Literal["auto"] | None = None,
        every_s: float | None = None,
        memory_budget: int | None = None,
        deadline_s: float = 600.0,
        start_over: bool = False,
        busy: Literal["wait", "skip"] = "wait",
        resume_tries: int | None = RESUME_TRIES,
    ) -> None:
        require_sensible(keep, keep_every, memory_budget, deadline_s, busy)
        self._cadence = Cadence(every, every_s)
        self._store: ObjectStore = open_store(root)
        self._group = group
        self._memory_budget = memory_budget
        self._skips = busy == "skip"
        self._resume_tries = resume_tries
        self._resume: Resume | None = None
        self._calls = Calls(group)
        self._equipment: Equipment | None = None
        self._own = OwnGeneration(self._store, start_over=start_over)
        self._agreement = Agreement(self._store.root, self._own)
        self._takeoff = Takeoff(
            self._store,
            self._own,
            self._agreement,
            self._cadence,
            deadline_s=deadline_s,
            retention=None if keep is None else Retention(newest=keep, every_steps=keep_every),
            committed=self._note_commit,
        )
        self._in_flight: SaveHandle | None = None
        self._latest: SaveHandle | None = None
        """Of the newest step that was saved, in flight or not."""
        self._last_commit: tuple[int, float] | None = None
        """On rank 0: its step, and when, on the monotonic clock."""
        self._fenced: FencedError | None = None

    # ---- public

    def load(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        strict: bool = True,
        skip: Sequence[str] = (),
        wait_s: float = 0.0,
    ) -> Loaded | None:
        """Fill `state` in place from the newest readable step (or from `step`); None where the root holds nothing.

        The next save then continues from there: it opens a generation of its own, and steps beyond leave the lineage. Memory
        for saves is made ready in the background (see `prepare`); who only loads takes `ckpt.load`.

        Settings of optimizers (lr, betas) come back as they were saved: set others after the load.

        Args:
            strict: refuse names that only the state or only the checkpoint has. Otherwise the former keep their values, and
                `Loaded` lists both. Another shape or type is refused either way, and so is a state none of whose tensors is there.
            skip: names to leave as they are, with all below them and with the optimizers' state of such parameters: nothing is read
                for them, and in neither mode is anything said of them. The same on all ranks.
            wait_s: how long to wait for `step`, where it is not committed yet.

        Raises: StepMissingError, DamagedError, StateMismatchError, ObjectStore…Error.
        """
        with self._calls.one(name_of("load", step)):
            loaded = self._load(state, step, strict=strict, skip=skip, wait_s=wait_s)
            if loaded is not None and self._resume is None:
                self._resume = note_start(self._store, self._calls.channel(), loaded)
            self._prepare(state)
            return loaded

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Get ready to save `state`: agree on its layout, start the uploader, and touch memory, with room for what optimizers will
        add. The first save is then as quick as the others. Collective; `load` does it, and `save` where nobody did.

        A state that cannot be saved is no error here, but for one that is no mapping; and who has saved already is ready.
        """
        with self._calls.one("prepare()"):
            self._prepare(state)

    def _prepare(self, state: Mapping[str, Any]) -> None:
        require_mapping(state)
        equipment = self._equipped()
        if equipment.live.known:
            return
        verdict, _ = self._agreement.ask(0, state, {}, equipment.live, self._calls.channel())
        if not verdict.failure and not verdict.roots:
            try:
                if verdict.fresh:
                    equipment.live.agree()
                equipment.get_ready()
            except CkptError as e:
                _log.debug("not ready to save: %s", e)
        equipment.live.forget()

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        cursor: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        blocking: bool = False,
        force: bool = False,
    ) -> SaveHandle:
        """Stage `state` as the state after `step` steps and let it be uploaded and committed. Blocks while copying only, and
        while an earlier save is under way; `state` may change once it returns.

        Args:
            cursor: the loader's position, the same on all ranks.
            force: save whether `step` is due or not, as after the last step of a run; where it was saved just before, that is it.
            extra: what this rank wants back beside the state. Both are mappings of names to numbers (nan and the infinities as well),
                text, lists, tuples and mappings, and come back equal; all else belongs into the state.
            blocking: write straight from live memory, without a copy, and return when the step is committed.

        Raises what went wrong with the earlier save; of this one: StateError, CoverageError, StaleStartError (the root has moved
        on since the load), ObjectStore…Error; if blocking, what `SaveHandle.wait` raises.
        """
        self._calls.require_mine()
        require_mapping(state)
        with self._calls.one(name_of("save", step)):
            return self._save(whole_step(step), state, cursor, extra, blocking=blocking, force=force)

    def _save(
        self,
        step: int,
        state: Mapping[str, Any],
        cursor: dict[str, Any] | None,
        extra: dict[str, Any] | None,
        *,
        blocking: bool,
        force: bool,
    ) -> SaveHandle:
        begun = time.monotonic()
        if force and self._latest is not None and self._latest.step == step:
            return self._latest
        handle = SaveHandle(step)
        uploading = self._in_flight is not None and not self._in_flight.done()
        due = self._cadence.due(
            step, self._calls.channel, lambda: read_records(self._store), uploading=uploading
        )
        if not due and not force:
            handle.finish(None)
            return handle
        if self._skips and not blocking and not force and self._under_way(step):
            handle.finish(None)
            return handle
        self._settle()
        if self._fenced is not None:
            raise self._fenced
        equipment, plain = self._equipped(), {"cursor": cursor, "extra": extra}
        with no_collection():
            try:
                self._takeoff.begin(handle, state, plain, equipment, self._calls.channel(), blocking=blocking)
            finally:
                equipment.live.forget()
        self._in_flight = self._latest = handle
        self._cadence.saved(time.monotonic() - begun)
        if blocking or handle.alone:
            self._settle()
        return handle

    def continue_from_newest(self) -> None:
        """Let the first save continue from the newest step in the root, as if that had been loaded. For a caller who knows that
        the state he holds came after it."""
        with self._calls.one("opening the Checkpointer"):
            if self._calls.channel().rank != 0:
                return
            self._own.look_around()
            line = find_line(self._store)
            if line:
                self._own.goes_on_from(StartRef(generation=line[-1].generation, step=line[-1].step))

    def close(self) -> None:
        """Wait for the save in flight and let go of everything. Collective. Raises what went wrong with that save.

        What retention lets go is deleted by rank 0, and gone when its `close` returns; others do not wait for it. In a process
        that was forked from this one it does nothing.
        """
        if not self._calls.mine:
            return
        with self._calls.one("close()"):
            try:
                self._settle()
                self._settle_resume()
            except Exception:
                self._release(TIDY_S)
                raise
            except BaseException as e:
                self._close_after(e)
                raise
            self._release(TIDY_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if error is None or not self._calls.mine:
            self.close()
            return
        if isinstance(error, Exception):
            self._resume = None  # its marker stays: perhaps the checkpoint is to blame
        self._settle_resume()  # somebody who interrupts it has nothing against the checkpoint
        self._close_after(error)

    # ---- between saves

    def _load(
        self,
        state: Mapping[str, Any],
        step: int | None,
        *,
        strict: bool,
        skip: Sequence[str],
        wait_s: float = 0.0,
    ) -> Loaded | None:
        """`load` without a resume marker, and without getting ready."""
        require_mapping(state)
        require_names(skip)
        channel = self._calls.channel()
        self._settle()
        if channel.rank == 0:
            self._own.look_around()
        loaded = load_agreed(
            self._store,
            channel,
            state,
            step=step,
            strict=strict,
            skip=skip,
            group=self._group,
            resume_tries=self._resume_tries,
            wait_s=wait_s,
        )
        if loaded is not None:
            self._own.goes_on_from(StartRef(generation=loaded.generation, step=loaded.step))
            self._cadence.loaded(loaded.facts)
            if channel.rank == 0:
                for passed, why in loaded.passed_over:
                    _log.warning("step %d was passed over: %s", passed, why.removesuffix(ADVICE))
        return loaded

    def _equipped(self) -> Equipment:
        if self._equipment is None:
            self._equipment = Equipment(self._store, self._calls.channel(), self._memory_budget)
        return self._equipment

    def _under_way(self, step: int) -> bool:
        """Is the save before this one still under way on any rank? All hear the same."""
        before = self._in_flight
        mine = b"1" if before is not None and not before.done() else b""
        channel = self._calls.channel()
        busy = bool(channel.decide(mine, lambda words: b"1" if any(words) else b""))
        if busy and channel.rank == 0 and before is not None:
            age = "nothing is committed yet"
            if self._last_commit is not None:
                committed, at = self._last_commit
                age = f"the last commit, of step {committed}, is {time.monotonic() - at:.0f} s old"
            _log.warning(
                "step %d is not saved: step %d is still on its way to %s; %s",
                step,
                before.step,
                self._store.root,
                age,
            )
        return busy

    def _settle(self) -> None:
        """Wait for the save in flight, and raise its error unless somebody has heard it from the handle."""
        handle, self._in_flight = self._in_flight, None
        if handle is None:
            return
        begun, told = time.monotonic(), handle.told
        try:
            handle.settle()
            self._own.note_committed(handle.step)
        except Exception as e:
            if isinstance(e, FencedError):
                self._fenced = e
            if not told:
                raise
        except BaseException:  # Ctrl-C ends the waiting, and not the save
            self._in_flight = handle
            raise
        finally:
            waited_s = time.monotonic() - begun
            if waited_s > WAITED_S:
                _log.info("waited %.2f s for the save of step %d", waited_s, handle.step)

    def _settle_resume(self) -> None:
        """This start has got further than what it resumed from, or ends in peace."""
        resume, self._resume = self._resume, None
        if resume is not None:
            resume.settle()

    def _close_after(self, error: BaseException) -> None:
        """Close, but hold up an error (or Ctrl-C) for no longer than a save that is nearly done is worth."""
        handle, self._in_flight = self._in_flight, None
        try:
            if handle is None or handle.told:
                return
            if handle.ended_within(GRACE_S):
                handle.settle()
            else:
                handle.drop()
                _log.error("step %d was still being saved after %g s, and is given up", handle.step, GRACE_S)
        except Exception as e:
            _log.error("%s ends this, and the last save has failed as well: %s", type(error).__name__, e)
        finally:
            self._release(KILL_AFTER_S)

    def _note_commit(self, step: int) -> None:
        """On rank 0, by the flight: the step is committed."""
        self._last_commit = (step, time.monotonic())
        self._settle_resume()

    def _release(self, wait_s: float) -> None:
        self._takeoff.join(wait_s)
        if self._equipment is not None:
            self._equipment.close(wait_s)
            self._equipment = None
        self._calls.close()
