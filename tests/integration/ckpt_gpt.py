"""Ranks for test_ckpt_gpt.py: the example's GPT trained, saved and loaded by plain scripts of several layouts.

Each act builds the model anew, from another seed than the one that was saved, so that what it finds came from the checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt_jobs import digests, shard
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from surefoot import ckpt
from surefoot.ckpt.store import open_store
from surefoot.ckpt.tools.dcp.exporting import export_dcp
from surefoot.ckpt.tools.dcp.importing import open_dcp
from surefoot.ckpt.tools.importing import write_foreign
from surefoot.examples.gpt import GPT, Config, sum_of_token_losses

CONFIG = Config(vocab=48, seq_len=16, width=24, heads=4, hidden=40, layers=2)
CPU = torch.device("cpu")


def ddp(model: GPT) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp_and_tp(model: GPT) -> nn.Module:
    return shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


LAYOUTS = {"ddp": ddp, "fsdp2 x tp": fsdp_and_tp}


def build(layout: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = LAYOUTS[layout](GPT(CONFIG))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (step + 1))
    return {"model": model, "optim": optim, "sched": sched}


def batch(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, CONFIG.vocab, (2, CONFIG.seq_len), generator=draw)
    return {
        "tokens": tokens,
        "document_ids": torch.zeros_like(tokens),
        "position_ids": torch.arange(CONFIG.seq_len).expand_as(tokens),
        "labels": tokens.roll(-1, 1),
    }


def train(state: dict[str, Any], steps: int) -> None:
    for seed in range(steps):
        sum_of_token_losses(state["model"], batch(seed), CPU).backward()
        state["optim"].step()
        state["sched"].step()
        state["optim"].zero_grad()


def logits(model: nn.Module) -> torch.Tensor:
    b = batch(99)
    with torch.no_grad():
        return model(b["tokens"], b["document_ids"], b["position_ids"])


def train_and_save(root: str, layout: str) -> dict[str, Any]:
    state = build(layout, seed=1)
    train(state, 2)
    ckpt.save(root, 2, state)
    return {"digests": digests(state), "logits": logits(state["model"]).tolist(), "lr": lr_of(state)}


def load_and_go_on(root: str, layout: str) -> dict[str, Any]:
    """What it finds; then two steps more, saved as well."""
    state = build(layout, seed=7 + dist.get_rank())
    with ckpt.Checkpointer(root) as c:
        loaded = c.load(state)
        assert loaded is not None
        found = {"digests": digests(state), "logits": logits(state["model"]).tolist(), "lr": lr_of(state)}
        train(state, 2)
        c.save(loaded.step + 2, state).wait()
    return found


def lr_of(state: dict[str, Any]) -> float:
    return state["optim"].param_groups[0]["lr"]


def export_and_run(root: str, dest: str) -> dict[str, Any]:
    """The logits of a plain model that was given the exported files, and of one that loaded the checkpoint."""
    ckpt.export(root, None, dest, shard_nbytes=20_000)
    weights: dict[str, torch.Tensor] = {}
    files = sorted(Path(dest).glob("*.safetensors"))
    for path in files:
        weights |= load_file(path)
    torch.manual_seed(31)
    exported, loaded = GPT(CONFIG), GPT(CONFIG)
    exported.load_state_dict(weights)
    ckpt.load(root, {"model": loaded}, strict=False)
    return {"files": len(files), "exported": logits(exported).tolist(), "loaded": logits(loaded).tolist()}


# ---------------------------------------------------------------- torch DCP


def train_and_save_with_torch(folder: str, layout: str) -> dict[str, str]:
    state = build(layout, seed=1)
    train(state, 2)
    model, optim = get_state_dict(state["model"], state["optim"])
    dcp_save({"model": model, "optim": optim}, storage_writer=FileSystemWriter(folder))
    return digests(state)


def load_with_torch(folder: str, layout: str) -> dict[str, str]:
    state = build(layout, seed=7)
    train(state, 1)  # so that the optimizer has state to be filled
    model, optim = get_state_dict(state["model"], state["optim"])
    dcp_load({"model": model, "optim": optim}, storage_reader=FileSystemReader(folder))
    set_state_dict(state["model"], state["optim"], model_state_dict=model, optim_state_dict=optim)
    return digests(state)


def import_from_torch(folder: str, root: str) -> None:
    write_foreign(open_store(root), open_dcp(folder), step=2)


def export_to_torch(root: str, folder: str) -> None:
    export_dcp(root, None, folder)


def load_model_and_optimizer(root: str, layout: str) -> dict[str, str]:
    state = build(layout, seed=7 + dist.get_rank())
    ckpt.load(root, {"model": state["model"], "optim": state["optim"]})
    return digests(state)
