"""A small GPT as a job of any mesh, and as a plain DDP script; ranks import this module by its name.

What a rank finds and ends with goes into ``g<generation>-rank<rank>.json`` in the folder ``params.notes``, for the test to compare.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from surefoot import agent, ckpt, loader
from surefoot.examples.gpt import GPT, Config, sum_of_token_losses

CONFIG = Config(vocab=256, seq_len=64, width=24, heads=4, hidden=40, layers=2)
CPU = torch.device("cpu")


def data(params: Mapping[str, Any]) -> tuple[loader.Mixture, loader.Pack]:
    """Four sequences a step."""
    sources = [loader.Source(name, f"{params['data_root']}/{name}", weight=1) for name in ("code", "prose")]
    return loader.Mixture(sources, seed=3), loader.Pack(seq_len=64, step_tokens=256)


# ---------------------------------------------------------------- the model, cut up


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """TP in the blocks, embedding and head, FSDP2 over it; norms are left whole by TP. In place.

    Heads of one matrix stand beside each other (qkv), so column shards are gathered before they are taken apart.
    """
    blocks = dict(model.named_modules())
    blocks = {name: m for name, m in blocks.items() if name.startswith("blocks.") and name.count(".") == 1}
    if mesh["tp"].size() > 1:
        whole = {"output_layouts": Replicate()}
        in_blocks = {
            "qkv": ColwiseParallel(**whole),
            "out": RowwiseParallel(input_layouts=Replicate()),
            "up": ColwiseParallel(**whole),
            "down": RowwiseParallel(input_layouts=Replicate()),
        }
        plan: dict[str, Any] = {f"{name}.{n}": p for name in blocks for n, p in in_blocks.items()}
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
        plan["head"] = ColwiseParallel(**whole)
        parallelize_module(model, mesh["tp"], plan)
    for block in blocks.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


class Stage(nn.Module):
    """One of two pipeline stages. What it holds has the names that it has in the whole model."""

    rotations: torch.Tensor

    def __init__(self, model: GPT, stage: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(stage): model.blocks[stage]})
        if stage == 0:
            self.embedding = model.embedding
        else:
            self.norm, self.head = model.norm, model.head
        self.stage = stage
        self.register_buffer("rotations", model.rotations, persistent=False)

    def forward(self, x: torch.Tensor, documents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
        if self.stage == 0:
            x = self.embedding(x)
        x = self.blocks[str(self.stage)](x, mask, self.rotations[positions][:, None])
        return x if self.stage == 0 else self.head(self.norm(x))


def build(model: nn.Module) -> dict[str, Any]:
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: min(1.0, (step + 1) / 4))
    return {"model": model, "optim": optim, "sched": sched}


# ---------------------------------------------------------------- as a job


def train(run: agent.Run) -> None:
    model: nn.Module = GPT(CONFIG)
    if run.mesh["pp"].size() > 1:
        model = Stage(model, run.mesh.get_local_rank("pp"))
    state = build(shard(model, run.mesh))
    if run.params.get("begin_with") and run.plan.start.step == 0:
        ckpt.load(run.params["begin_with"], state, strict=False)
    folder = run.params.get("notes")
    notes: dict[str, Any] = {}
    data = run.data()
    for _ in run.steps(state, data):
        batch = next(data)
        if folder and not notes:
            notes["found"] = digests(state)
        for mb in batch.microbatches:
            loss = backward(run, model, mb, run.dp_size / batch.global_valid_tokens)
            if loss is not None:
                run.report(loss=loss)
        norm = run.clip_grad_norm_(model, 0.5)
        print(f"norm {float(norm).hex()}", flush=True)
        advance(state)
    if folder:
        notes["left"] = digests(state)
        (Path(folder) / f"g{run.generation}-rank{run.rank}.json").write_text(json.dumps(notes))


def backward(
    run: agent.Run, model: nn.Module, mb: Mapping[str, torch.Tensor], scale: float
) -> torch.Tensor | None:
    """Forward and backward of one microbatch; the loss, where this rank has it."""
    if not isinstance(model, Stage):
        loss = sum_of_token_losses(model, mb, run.device)  # pyright: ignore[reportArgumentType]  (sharded, a GPT still)
        (loss * scale).backward()
        return loss.detach()
    group, place = run.mesh.get_group("pp"), (mb["document_ids"], mb["position_ids"])
    if model.stage == 0:
        x = model(mb["tokens"], *place)
        dist.send(x.detach(), group=group, group_dst=1)
        grad = torch.empty_like(x)
        dist.recv(grad, group=group, group_src=1)
        x.backward(grad)
        return None
    x = torch.empty(*mb["tokens"].shape, CONFIG.width)
    dist.recv(x, group=group, group_src=0)
    x.requires_grad_()
    loss = F.cross_entropy(model(x, *place).flatten(0, 1), mb["labels"].flatten(), reduction="sum")
    (loss * scale).backward()
    assert x.grad is not None
    dist.send(x.grad, group=group, group_dst=0)
    return loss.detach()


def advance(state: Mapping[str, Any]) -> None:
    state["optim"].step()
    state["sched"].step()
    state["optim"].zero_grad()


# ---------------------------------------------------------------- as a script


def script(root: str, data_root: str, steps: int, with_cursor: bool = True) -> dict[str, Any]:
    """Plain DDP: goes on from what the root holds, up to step `steps`, and saves there. What it found, and what it left."""
    torch.manual_seed(11 + dist.get_rank())
    model = DistributedDataParallel(GPT(CONFIG))
    state = build(model)
    mix, pack = data({"data_root": data_root})
    batches = loader.Loader(mix, pack, dist.get_rank(), dist.get_world_size())
    with batches, ckpt.Checkpointer(root) as c:
        if loaded := c.load(state):
            batches.load_state_dict(loaded.cursor)
        notes: dict[str, Any] = {"found": digests(state), "samples": []}
        while batches.state_dict()["step"] < steps:
            batch = next(batches)
            notes["samples"].append(list(batch.sample_ids))
            for mb in batch.microbatches:
                loss = sum_of_token_losses(model, mb, CPU)  # pyright: ignore[reportArgumentType]  (wrapped, a GPT still)
                (loss * dist.get_world_size() / batch.global_valid_tokens).backward()
            advance(state)
        c.save(steps, state, cursor=batches.state_dict() if with_cursor else None).wait()
    return notes | {"left": digests(state)}


def run_exported(root: str, folder: str) -> tuple[list[Any], list[Any]]:
    """Logits of a plain model that was given the exported files, and of one that loaded the newest checkpoint."""
    given, loaded = GPT(CONFIG), GPT(CONFIG)
    weights: dict[str, torch.Tensor] = {}
    for path in Path(folder).glob("*.safetensors"):
        weights |= load_file(path)
    given.load_state_dict(weights)
    ckpt.load(root, {"model": loaded}, strict=False)
    tokens = torch.arange(64).reshape(1, 64) * 3
    places = torch.zeros_like(tokens), torch.arange(64).reshape(1, 64)
    with torch.no_grad():
        return given(tokens, *places).tolist(), loaded(tokens, *places).tolist()


# ---------------------------------------------------------------- what a state is


def digests(state: Mapping[str, Any]) -> dict[str, str]:
    """A hash of every whole parameter and of its moments, by plain names. Collective."""
    found: dict[str, str] = {}
    for name, p in state["model"].named_parameters():
        for key, t in {"": p, **state["optim"].state[p]}.items():
            whole = t.full_tensor() if isinstance(t, DTensor) else t
            raw = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[f"{name.removeprefix('module.')} {key}"] = hashlib.sha256(raw).hexdigest()
    return found
