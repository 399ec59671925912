"""Training functions for the tests of a rank's session; ranks import this module by its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from surefoot import agent, loader


def data(params: Mapping[str, Any]) -> tuple[loader.Mixture, loader.Pack]:
    sources = [loader.Source(name, f"{params['data_root']}/{name}", weight=1) for name in ("code", "prose")]
    return loader.Mixture(sources, seed=3), loader.Pack(seq_len=64, step_tokens=512, microbatch_tokens=128)


class Tiny(nn.Module):
    """Two dozen thousand parameters and a dropout, so that the seeding of steps is part of the proof."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.hidden = nn.Linear(32, 64)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(F.gelu(self.hidden(self.embedding(tokens)))))


def build(run: agent.Run) -> tuple[dict[str, Any], nn.Module, torch.optim.Optimizer, Any]:
    model = Tiny()
    fully_shard(model, mesh=run.mesh["dp"])
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: min(1.0, (step + 1) / 4))
    return {"model": model, "optim": optim, "sched": sched}, model, optim, sched


def train(run: agent.Run) -> None:
    state, model, optim, sched = build(run)
    data = run.data()
    for _ in run.steps(state, data):
        batch = next(data)
        for mb in batch.microbatches:
            logits = model(mb["tokens"])
            loss = F.cross_entropy(logits.flatten(0, 1), mb["labels"].flatten(), reduction="sum")
            (loss * run.dp_size / batch.global_valid_tokens).backward()
            run.report(loss=loss.detach())
        run.clip_grad_norm_(model, 1.0)
        optim.step()
        sched.step()
        optim.zero_grad()
    with run.phase("eval"):
        total = torch.zeros((), dtype=torch.float64)
        for parameter in model.parameters():
            total += parameter.detach().full_tensor().double().sum()  # pyright: ignore[reportAttributeAccessIssue]  (a DTensor after fully_shard)
    print(f"parameters {float(total).hex()}", flush=True)


def _loop_with(run: agent.Run, body: Any) -> None:
    """The loop without a model worth the name; `body` is called with (step, data, batch)."""
    value = torch.zeros(1)
    data = run.data()
    for step in run.steps({"value": value}, data):
        batch = next(data)
        value += 1  # the same on all ranks, as everything that is not sharded must be
        run.report(loss=float(step))
        body(step, data, batch)


def quiet(run: agent.Run) -> None:
    _loop_with(run, lambda *_: None)


def slow(run: agent.Run) -> None:
    """Each step waits for the others in a collective, and rank 0 for a file that a test makes."""

    def body(step: int, *_: Any) -> None:
        gate = run.params.get("gate")
        if gate and step == int(run.params["gate_step"]):
            while not os.path.exists(gate):
                os.sched_yield()
        dist.barrier()

    _loop_with(run, body)


def raises(run: agent.Run) -> None:
    def body(step: int, *_: Any) -> None:
        if step == 2 and run.rank == 1:
            raise ValueError("the training code is unhappy")

    _loop_with(run, body)


def raises_early(_: agent.Run) -> None:
    raise ValueError("unhappy before the first step")


def takes_two(run: agent.Run) -> None:
    _loop_with(run, lambda _step, data, _batch: next(data))


def takes_none(run: agent.Run) -> None:
    data = run.data()
    for _ in run.steps({"value": torch.zeros(1)}, data):
        pass


def leaves_early(run: agent.Run) -> None:
    data = run.data()
    for _ in run.steps({"value": torch.zeros(1)}, data):
        next(data)
        if run.params.get("leave"):
            return


def clips(run: agent.Run) -> None:
    """Clips sharded and plain gradients together and prints what it did beside the sum by hand."""
    model = Tiny()
    fully_shard(model, mesh=run.mesh["dp"])
    plain = nn.Linear(8, 8)  # the same on all ranks: DP keeps it so
    both = nn.ModuleList([model, plain])
    tokens = torch.arange(64).reshape(1, 64)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) + plain(torch.ones(8)).sum()
    loss.backward()
    grads = [p.grad for p in both.parameters() if p.grad is not None]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    expected = sum(float(g.double().square().sum()) for g in whole) ** 0.5
    norm = run.clip_grad_norm_(both, 0.5)
    after = [p.grad for p in both.parameters() if p.grad is not None]
    clipped = [g.full_tensor() if isinstance(g, DTensor) else g for g in after]
    left = sum(float(g.double().square().sum()) for g in clipped) ** 0.5
    print(f"clipped {float(norm).hex()} {expected!r} {left!r}", flush=True)
    quiet(run)
