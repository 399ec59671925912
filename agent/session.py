"""A rank's session: `main`, which the zygote calls in the forked child, and `Run`, which training code is given.

A rank connects to its agent, learns its plan, joins the other ranks, calls the job's ``train(run)`` and ends the process
itself: with `os._exit`, because destructors of a broken process group may wait for the dead. Every way out is one of:
0 after `wire.DoneMsg`; 1 after `wire.FailedMsg`, with the traceback in the log; 77 when the agent is gone.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

# Imported here so that the zygote imports it: fully_shard would on its first call, 0.4 s of it (torch 2.13).
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from surefoot import history
from surefoot.agent import clip, entry, exits, failures
from surefoot.agent.batches import Batch, StepData
from surefoot.agent.exchange import gloo_bytes, gloo_words
from surefoot.agent.link import AgentLink
from surefoot.agent.seeding import BUILD_STEP, seed_all, seed_of
from surefoot.agent.steps import Limits, LoopFacts, StepLoop
from surefoot.agent.tracing import Tracer
from surefoot.ckpt.tiers import Restored, Stager, restore_committed
from surefoot.controller.spec.reading import load_spec
from surefoot.controller.spec.tables import JobSpec
from surefoot.controller.wire import DoneMsg, Ended, FailedMsg, HelloMsg, Phase, PhaseMsg, Plan
from surefoot.failpoint import failpoint
from surefoot.loader.client import Loader

FAILED_CODE = 1

CONNECT_S = 30.0
"""The agent forked this rank a moment ago and serves the socket with a thread of its own."""

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""torch's own default for gloo. A hung collective is found by the controller within seconds; this only bounds a rank that
nobody watches."""

PARTING_TIMEOUT = timedelta(seconds=10)
"""Ranks leave together, so that none sees another's closed socket in its last collective. It is a courtesy."""

CALLERS_PHASES = ("eval", "compile", "data", "save")
"""Phases that training code may enter; the others are the session's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """What the launcher says to a rank through its environment."""

    rank: int
    local_rank: int
    world_size: int
    generation: int
    socket: Path
    token_file: Path
    history: Path | None
    job: Path

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RankEnv:
        """Raises: StartupError: a variable is missing or is no number."""
        try:
            noted = environ.get("SUREFOOT_HISTORY")
            return cls(
                rank=int(environ["RANK"]),
                local_rank=int(environ["LOCAL_RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                generation=int(environ["SUREFOOT_GENERATION"]),
                socket=Path(environ["SUREFOOT_AGENT_SOCKET"]),
                token_file=Path(environ["SUREFOOT_TOKEN_FILE"]),
                history=Path(noted) if noted else None,
                job=Path(environ["SUREFOOT_JOB"]),
            )
        except (KeyError, ValueError) as e:
            raise failures.StartupError(f"a rank is started by its agent; its environment lacks {e}") from e


class Run:
    """What training code knows of the run it is part of, and the few calls it makes. Made by `main`."""

    def __init__(
        self,
        *,
        spec: JobSpec,
        plan: Plan,
        rank: int,
        device: torch.device,
        mesh: DeviceMesh,
        link: AgentLink,
        tracer: Tracer,
        group: dist.ProcessGroup,
        limits: Limits,
    ) -> None:
        self.spec = spec
        """The whole JobSpec."""
        self.plan = plan
        self.rank = rank
        self.world_size = plan.world_size
        self.generation = plan.generation
        self.device = device
        """Where this rank computes."""
        self.mesh = mesh
        """The plan's mesh, with all its axes (pp, dp, tp), those of size 1 too: `run.mesh["dp"]` is what `fully_shard` takes,
        `run.mesh["tp"]` what `parallelize_module` takes."""
        self.dp_rank: int = mesh.get_local_rank("dp")
        self.dp_size: int = mesh["dp"].size()
        self.seed = spec.job.seed
        self.params: Mapping[str, Any] = spec.program.params
        """The table ``[program.params]``: the job's own settings."""
        self._link = link
        self._tracer = tracer
        self._group = group
        self._limits = limits
        self._loop: StepLoop | None = None
        self._phase: tuple[Phase, int] = ("start", plan.start.step)
        self._blamed: tuple[BaseException, failures.Area] | None = None
        self._first_step_begun = False
        self._reports: list[torch.Tensor] = []

    # ---- the public calls

    def data(self, split: str = "train") -> StepData:
        """The job's data at this rank's place: an iterator for `steps`, one `next` per step.

        They are dealt over dp alone: ranks that differ in another axis only get the same batches.

        Raises:
            MisuseError: another split than "train"; they come later.
        """
        if split != "train":
            raise failures.MisuseError(
                f'run.data("{split}") comes later; for now build a surefoot.loader.Loader of your own for it'
            )
        with self.within("data"):
            make = entry.resolve(self.spec.program.data, key="program.data")
            mix, pack = make(dict(self.params))
            loader = Loader(mix, pack, dp_rank=self.dp_rank, dp_size=self.dp_size)
        return StepData(loader, fetching=self._fetching, taken=self._taken)

    def steps(self, state: Mapping[str, Any], data: StepData) -> Iterator[int]:
        """Restore the plan's starting point into `state` and `data`, then yield each step to run, from 1 to job.steps.

        What happens at the end of a body (snapshot, commit) belongs to its step; the iteration ends when the last
        checkpoint is committed, or, after it committed, when the agent asked to stop. Collective.

        Args:
            state: nested mapping of tensors, plain values and objects with state_dict/load_state_dict. All that
                training changes must be in it.
            data: what `data()` returned.
        """
        if self._loop is not None:
            raise failures.MisuseError("run.steps was called twice: one loop is one run")
        if not isinstance(data, StepData):
            raise failures.MisuseError(
                f"run.steps takes what run.data() returned, not a {type(data).__name__}"
            )
        exchange = gloo_bytes(self._group)

        def restore(generation: int, step: int) -> Restored:
            return restore_committed(
                self.spec.job.root,
                state,
                generation=generation,
                step=step,
                rank=self.rank,
                world_size=self.world_size,
                exchange=exchange,
            )

        self._loop = StepLoop(
            LoopFacts(
                plan=self.plan,
                rank=self.rank,
                dp_rank=self.dp_rank,
                seed=self.seed,
                steps=self.spec.job.steps,
                every_steps=self.spec.checkpoint.every_steps,
                every_s=self.spec.checkpoint.every_s,
                auto=self.spec.checkpoint.every == "auto",
                restore_path=self._link.start_msg.restore_path,
                limits=self._limits,
            ),
            state,
            data,
            shell=self,
            link=self._link,
            stager=Stager(state, rank=self.rank, world_size=self.world_size, exchange=exchange),
            restore_committed=restore,
            gather_words=gloo_words(self._group),
            tracer=self._tracer,
        )
        return iter(self._loop)

    def report(self, *, loss: torch.Tensor | float) -> None:
        """Add a local sum of token losses to the step's loss; call it once per microbatch.

        The global loss of the step is the sum of all ranks' reports, in rank order and float64, divided by
        `batch.global_valid_tokens`; of ranks that differ in tp alone it is the first one's, since they report the same. A
        rank that has no loss (a pipeline stage before the last) reports nothing. Does not wait for the device.
        """
        value = torch.as_tensor(loss).detach().to(torch.float64)
        self._reports.append(value)
        self._tracer.note("reported")

    def clip_grad_norm_(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Scale the model's gradients so that their total norm, over all shards on all ranks and all pipeline stages, is at
        most `max_norm`. `model`: what of it this rank holds.

        Returns the norm before. Collective; see `clip.clip_grad_norm_`.
        """
        stages = self.mesh.get_group("pp") if self.mesh["pp"].size() > 1 else None
        return clip.clip_grad_norm_(model.parameters(), max_norm, stages=stages, device=self.device)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Tell the agent that the body is another phase, e.g. ``with run.phase("eval")``: each has its own deadline."""
        if name not in CALLERS_PHASES:
            raise failures.MisuseError(f"there is no phase {name!r}; a run knows {', '.join(CALLERS_PHASES)}")
        phase, step = self._phase
        self.enter_phase(cast("Phase", name), step)
        try:
            yield
        finally:
            self.enter_phase(phase, step)

    # ---- what the loop and the data ask of the run

    def enter_phase(self, phase: Phase, step: int) -> None:
        self._phase = (phase, step)
        self._link.send(PhaseMsg(phase=phase, step=step))

    @contextmanager
    def within(self, area: failures.Area) -> Generator[None]:
        """While our own code works for the rank; what it raises is classified by `area`."""
        try:
            yield
        except Exception as e:
            self._blamed = (e, area)
            raise

    def take_reports(self) -> tuple[float, int]:
        reports, self._reports = self._reports, []
        total = 0.0
        for value in reports:
            total += value.item()
        return total, len(reports)

    @contextmanager
    def _fetching(self) -> Generator[None]:
        phase, step = self._phase
        self.enter_phase("data", step)
        with self.within("data"):
            yield
        self.enter_phase(phase, step)

    def _taken(self, batch: Batch) -> None:
        self._first_step_begun = True
        self._tracer.note("step_begin", samples=len(batch.sample_ids))
        failpoint("step.after_batch")

    # ---- for main

    @property
    def finished_step(self) -> int:
        """The last finished step; before the first, that of the starting point."""
        return self._loop.finished if self._loop is not None else self.plan.start.step

    @property
    def ended(self) -> Ended:
        """What ended the loop; after `require_end`."""
        assert self._loop is not None
        assert self._loop.ended is not None
        return self._loop.ended

    def part(self) -> None:
        """Leave together with the other ranks (see `PARTING_TIMEOUT`)."""
        try:
            work = dist.barrier(group=self._group, async_op=True)
            if work is not None:
                work.wait(PARTING_TIMEOUT)
        except RuntimeError as e:
            self._tracer.note("parted_alone", error=repr(e))

    def require_end(self) -> None:
        """Raises: MisuseError: train() returned before the loop had ended."""
        if self._loop is None:
            raise failures.MisuseError("train() returned without having gone through run.steps")
        if not self._loop.ended:
            raise failures.MisuseError(
                f"train() returned after step {self._loop.finished} of {self.spec.job.steps}: "
                "go through run.steps to its end, or lower job.steps"
            )

    def report_of(self, error: BaseException) -> FailedMsg:
        """What the agent is told of an exception that came out of train()."""
        area = self._blamed[1] if self._blamed is not None and self._blamed[0] is error else None
        report = failures.report(error, area=area, first_step_begun=self._first_step_begun)
        return FailedMsg(step=self._phase[1], error=report)


# ---------------------------------------------------------------- the life of a rank


def main() -> NoReturn:
    """Live as the rank that the environment describes; never returns, and runs no destructor."""
    code = FAILED_CODE
    try:
        code = _live(dict(os.environ))
    except BaseException:  # the last line of defence: whatever it is, the process must end
        traceback.print_exc()
    finally:
        _leave(code)


def _live(environ: Mapping[str, str]) -> int:
    try:
        env = RankEnv.read(environ)
    except failures.StartupError as e:
        print(f"surefoot: {e}", file=sys.stderr)
        return FAILED_CODE
    if env.history is not None:
        history.open_history(env.history, f"rank-{env.rank}")
    tracer = Tracer(generation=env.generation, rank=env.rank)
    tracer.note("launched", world_size=env.world_size)
    try:
        link = _connect(env)
    except failures.SessionError as e:
        print(f"surefoot: {e}", file=sys.stderr)
        return FAILED_CODE
    link.start()
    return _serve(env, link, tracer)


def _connect(env: RankEnv) -> AgentLink:
    hello = HelloMsg(
        token=env.token_file.read_text().strip(),
        generation=env.generation,
        rank=env.rank,
        pid=os.getpid(),
    )
    return AgentLink.connect(env.socket, hello, deadline_s=CONNECT_S, on_lost=_agent_lost)


def _serve(env: RankEnv, link: AgentLink, tracer: Tracer) -> int:
    """Everything that has an agent to tell. Returns the exit code."""
    run: Run | None = None
    try:
        run = _join(env, link, tracer)
        tracer.note("joined")
        train = entry.resolve(run.spec.program.train, key="program.train")
        seed_all(seed_of(run.seed, BUILD_STEP, 0))
        train(run)
        run.require_end()
    except BaseException as e:  # sys.exit() in training code is a failure like any other
        tracer.note("failed", error=repr(e))
        if run is not None:
            message = run.report_of(e)
        else:
            message = FailedMsg(step=0, error=failures.report(e, area=None, first_step_begun=False))
        _print_failure(e, message)
        link.send(message)
        link.closing()
        return FAILED_CODE
    run.part()
    link.closing()
    link.send(DoneMsg(step=run.finished_step, ended=run.ended))
    tracer.note("finished")
    return 0


def _join(env: RankEnv, link: AgentLink, tracer: Tracer) -> Run:
    """Meet the other ranks. Collective; the TCPStore that MASTER_ADDR and MASTER_PORT name is the generation's own."""
    plan = link.start_msg.plan
    link.send(PhaseMsg(phase="start", step=plan.start.step))
    spec = load_spec(env.job)
    if torch.cuda.is_available():
        device = torch.device("cuda", env.local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=COLLECTIVE_TIMEOUT, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    mesh = init_device_mesh(device.type, tuple(plan.axes.values()), mesh_dim_names=tuple(plan.axes))
    group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return Run(
        spec=spec,
        plan=plan,
        rank=env.rank,
        device=device,
        mesh=mesh,
        link=link,
        tracer=tracer,
        group=group,
        limits=Limits(),
    )


def _print_failure(error: BaseException, message: FailedMsg) -> None:
    """The traceback, then the one line that a reader of the log's end should see."""
    traceback.print_exception(error)
    report = message.error
    print(
        f"surefoot: failed in step {message.step} ({report.kind}): {report.type}: {report.message}",
        file=sys.stderr,
    )


def _agent_lost(reason: str) -> NoReturn:
    history.note("agent_lost", reason=reason)
    print(f"surefoot: the agent is gone ({reason}); this rank ends", file=sys.stderr)
    _leave(exits.AGENT_LOST_CODE)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # a full disk or a closed stream does not keep a rank alive
    os._exit(code)


if __name__ == "__main__":
    # Run as a script this file is the module __main__; the job's code imports the other one, and there is one Run.
    from surefoot.agent.session import main as session_main

    session_main()
