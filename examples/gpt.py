"""A byte-level decoder of about a million parameters, sharded with FSDP2: training code to start from.

Surefoot asks for two functions. `data(params)` says what is read and how it is packed; `train(run)` is called in every
rank, after every restart anew. All that training changes stands in `state`: `run.steps` restores it, snapshots it after
each step and commits it now and then. The rest is plain PyTorch.

The job file names them::

    [program]
    train = "surefoot.examples.gpt:train"
    data = "surefoot.examples.gpt:data"
    preload = ["surefoot.examples.gpt"]
    params = { data_root = "/data/text" }           # holds the folders code/ and prose/ of Parquet files
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from surefoot import agent, loader

# ---------------------------------------------------------------- the two functions of the job


def data(params: Mapping[str, Any]) -> tuple[loader.Mixture, loader.Pack]:
    """Three bytes of code for two of prose; a step is eight sequences of 256 bytes."""
    root = params["data_root"]
    mix = loader.Mixture(
        [
            loader.Source("code", f"{root}/code", weight=0.6),
            loader.Source("prose", f"{root}/prose", weight=0.4),
        ],
        seed=params.get("data_seed", 7),
    )
    return mix, loader.Pack(seq_len=256, step_tokens=2048)


def train(run: agent.Run) -> None:
    """Called once per generation in every rank."""
    model, optim, sched = build(run.mesh["dp"], run.device)
    state = {"model": model, "optim": optim, "sched": sched}
    data = run.data()
    for step in run.steps(state, data):
        batch = next(data)
        for mb in batch.microbatches:
            loss = sum_of_token_losses(model, mb, run.device)
            # FSDP averages over the ranks; with this the gradient is that of the global mean at any number of them.
            (loss * run.dp_size / batch.global_valid_tokens).backward()
            run.report(loss=loss.detach())
        run.clip_grad_norm_(model, 1.0)
        optim.step()
        sched.step()
        optim.zero_grad()
        if run.rank == 0:
            print(f"step {step}: {len(batch.sample_ids)} samples here, lr {sched.get_last_lr()[0]:.1e}")


def build(
    mesh: DeviceMesh, device: torch.device
) -> tuple[GPT, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The model, cut into shards over `mesh`, with AdamW and a warm-up of ten steps.

    The weights are drawn before the cut, from the generator that the run has seeded alike on all ranks: the initial
    model does not depend on how many there are.
    """
    model = GPT(Config()).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: min(1.0, (step + 1) / 10))
    return model, optim, sched


def sum_of_token_losses(model: GPT, mb: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """The cross-entropy summed over the labels that count (the others are -100, torch's own mark)."""
    mb = {name: tensor.to(device) for name, tensor in mb.items()}
    logits = model(mb["tokens"], mb["document_ids"], mb["position_ids"])
    return F.cross_entropy(logits.flatten(0, 1), mb["labels"].flatten(), reduction="sum")


# ---------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """About 920,000 parameters."""

    vocab: int = 256
    """One token for each byte."""
    seq_len: int = 256
    width: int = 128
    heads: int = 4
    hidden: int = 384
    layers: int = 4


class GPT(nn.Module):
    """Pre-norm decoder: rotary positions, SwiGLU, RMSNorm. Attention stays within a document."""

    rotations: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        rotations = rotary_table(config.seq_len, config.width // config.heads)
        self.register_buffer("rotations", rotations, persistent=False)
        self.apply(_init)

    def forward(self, tokens: torch.Tensor, documents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, vocab) for tokens, document ids and positions within the document, all (B, T)."""
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        mask = (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
        rotations = self.rotations[positions][:, None]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask, rotations)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.RMSNorm(config.width)
        self.up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """x (B, T, width), mask (B, 1, T, T) true where attention may look, rotations (B, 1, T, 2, head/2)."""
        x = x + self.attention(self.norm_attention(x), mask, rotations)
        up, gate = self.up(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.down(up * F.silu(gate))

    def attention(self, x: torch.Tensor, mask: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, rotations), rotate(k, rotations), v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(-2))


def rotary_table(seq_len: int, head: int) -> torch.Tensor:
    """Cosines and sines of each position's angles: (seq_len, 2, head / 2)."""
    angles = torch.outer(torch.arange(seq_len), 10_000.0 ** (-torch.arange(0, head, 2) / head))
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + head/2]) by its position's angle."""
    cos, sin = rotations.unbind(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
