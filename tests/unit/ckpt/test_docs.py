"""What docs/checkpoint.md shows is run: each section's blocks of Python in their order, on two ranks, in an empty folder.

A section takes for granted what a reader has already (a model, a root that holds something); that stands here, and so does what
has to be true afterwards.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

PAGE = Path(__file__).parents[3] / "docs" / "checkpoint.md"
RANKS = 2
TIMEOUT_S = 110.0

START = """
import os
import torch
import torch.distributed as dist
from torch import nn
from surefoot import ckpt

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("rendezvous"), rank=rank, world_size=ranks)
torch.manual_seed(0)
root = "checkpoints"


def fresh():
    model = nn.Sequential(nn.Linear(4, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


model, optim = fresh()
trained = 0


def train_one_step():
    global trained
    trained += 1
    model(torch.full((2, 4), trained / 1000)).sum().backward()
    optim.step()
    optim.zero_grad()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
"""
END = "\ndist.destroy_process_group()\n"

# What there is before a section begins.
BEFORE = {
    "State": "\nbuffer = torch.zeros(32)\n",
    "Saving": '\nstate, losses = {"model": model}, [0.5, 0.25]\n',
    "Fine-tuning": """
train_one_step()
ckpt.save(root, 500, {"model": model, "optim": optim})
weights, (model, optim), trained = model, fresh(), 0
""",
    "From torch.save": """
train_one_step()
if rank == 0:
    torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "epoch": 3, "step": 700}, "old.pt")
dist.barrier()
before, (model, optim) = (model, optim), fresh()
""",
    "With the loader": """
if rank == 0:
    import pyarrow
    import pyarrow.parquet
    os.mkdir("data")
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"this is document {i}" for i in range(999)]}), "data/a.parquet")
dist.barrier()
state, seen = {"model": model}, []
train_on = lambda batch: seen.append(batch.sample_ids)
""",
    "Single calls": '\nmodel = nn.Linear(4, 3)\nstate = {"model": model}\n',
}

# Between two blocks of a section.
BETWEEN = {
    ("Fine-tuning", 1): """
assert loaded is None and trained == 200 and ckpt.steps("checkpoints/tuned") == [100, 200] and ckpt.steps(root) == [500]
assert not same(model, weights) and optim.state[model[0].weight]["step"] == 200

def headed(classes):
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, classes)})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

before, optim = headed(2)
for p in before.parameters():
    p.grad = torch.ones_like(p)
optim.step()
ckpt.save(root, 501, {"model": before, "optim": optim})
model, optim = headed(3)
""",
    ("Fine-tuning", 2): """
assert torch.equal(model["body"].weight, before["body"].weight) and old.shape == (2, 4)
assert set(optim.state) == set(model["body"].parameters()) and optim.state[model["body"].weight]["step"] == 1
model = headed(2)[0].bfloat16()
""",
    ("Fine-tuning", 3): """
assert all(p.dtype == torch.bfloat16 for p in model.parameters())
assert same(model, before.bfloat16())

def scheduled(rate):
    model = nn.Linear(4, 4)
    optim = torch.optim.AdamW(model.parameters(), lr=rate)
    return {"model": model, "optim": optim, "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optim, 100)}

state = scheduled(1e-3)
for _ in range(50):
    state["optim"].step()
    state["scheduler"].step()
ckpt.save(root, 502, state)
state = scheduled(1e-3)
optim, scheduler, c = state["optim"], state["scheduler"], ckpt.Checkpointer(root)
""",
    ("State", 1): """
state["seen"]["a"] = state["epoch"] = 1
ckpt.save("grown", 1, state)
state = {"model": model, "epoch": 0, "seen": Seen()}
ckpt.load("grown", state)
assert state["seen"] == {"a": 1} and state["epoch"] == 1

history, state = ["kept"], {"seen": [{"a": 1}]}
ckpt.save("listed", 1, state)
state = {"seen": [{}]}
ckpt.load("listed", state)
assert state["seen"] == [{"a": 1}]

ckpt.save("by key", 1, {"seen": {"a": 1}})
try:
    ckpt.load("by key", {"seen": {}})
    raise AssertionError("a mapping that grew was loaded")
except (ckpt.StateMismatchError, ckpt.CkptWorldError) as e:
    assert "seen.a" in str(e)
""",
    ("State", 2): """
state["drawn"].value += rank
torch.rand(rank)
drawn_next = (ckpt.save("own", 1, state), torch.rand(1))[1]
state["drawn"].value = -1
ckpt.load("own", state)
assert state["drawn"].value == 1 + rank and torch.equal(torch.rand(1), drawn_next)
""",
}

# What has to be true when a section has ended.
AFTER = {
    "Checkpoints": """
assert loaded is None and state["epoch"] == 4 and trained == 1000
assert ckpt.steps(root) == [800, 900, 1000]
before, (model, optim) = model, fresh()
""",
    "State": """
buffer[: stop - start] = torch.arange(start, stop)
ckpt.save("cut", 1, state)
whole = torch.zeros(7, 3)
ckpt.load("cut", {"w": whole})
assert whole.flatten().tolist() == list(range(21))
""",
    "Saving": """
loaded = ckpt.load(root, state)
assert loaded.step == 100 and loaded.cursor == {"file": 3, "row": 1200} and loaded.extra == {"losses": losses}
""",
    "Fine-tuning": """
c.close()
assert abs(optim.param_groups[0]["lr"] - 5e-5) < 1e-9, "halfway through a cosine from 1e-4"
""",
    "From torch.save": """
(model, optim), saved = fresh(), before
state = {"model": model, "optim": optim, "epoch": 0}
assert ckpt.load(root, state).step == 700 and state["epoch"] == 3 and same(model, saved[0])
assert torch.equal(optim.state[model[0].weight]["exp_avg"], saved[1].state[saved[0][0].weight]["exp_avg"])
""",
    "With the loader": """
assert len(seen) == 300 and batch.step == 300
with loader.Loader(mix, pack, dp_rank=rank, dp_size=ranks) as batches:
    batches.load_state_dict(ckpt.load(root, state, 200).cursor)
    assert next(batches).sample_ids == seen[200]
    ckpt.save("in the state", 201, {"data": batches})
    following = next(batches).sample_ids
with loader.Loader(mix, pack, dp_rank=rank, dp_size=ranks) as batches:
    ckpt.load("in the state", {"data": batches})
    assert next(batches).sample_ids == following == seen[201]
""",
    "Single calls": """
assert loaded.step == 5000
if rank == 0:
    assert found == [5000] and torch.equal(rows, model.weight[:2]) and sound and os.listdir("weights")
""",
}

# Run once more: the second start resumes.
AGAIN = {
    "Checkpoints": '\nassert loaded.step == 1000 and state["epoch"] == 4 and trained == 1000 and same(model, before)\n'
}


def sections() -> dict[str, list[str]]:
    """The blocks of Python on the page, by the heading they stand under."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"(?m)^##? ", PAGE.read_text())[1:]:
        blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", section)
        if blocks:
            found[section.splitlines()[0]] = blocks
    return found


SCHEDULES: dict[str, Callable[[Any, float], Any]] = {
    "StepLR": lambda o, _: lr_scheduler.StepLR(o, 10),
    "MultiStepLR": lambda o, _: lr_scheduler.MultiStepLR(o, [20, 60]),
    "ExponentialLR": lambda o, _: lr_scheduler.ExponentialLR(o, 0.97),
    "LinearLR": lambda o, _: lr_scheduler.LinearLR(o, total_iters=80),
    "ConstantLR": lambda o, _: lr_scheduler.ConstantLR(o, total_iters=60),
    "PolynomialLR": lambda o, _: lr_scheduler.PolynomialLR(o, 100),
    "LambdaLR": lambda o, _: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "CosineAnnealingLR": lambda o, _: lr_scheduler.CosineAnnealingLR(o, 100),
    "a cosine that ends above 0": lambda o, s: lr_scheduler.CosineAnnealingLR(o, 100, eta_min=1e-5 * s),
    "CosineAnnealingWarmRestarts": lambda o, s: lr_scheduler.CosineAnnealingWarmRestarts(
        o, 30, eta_min=1e-5 * s
    ),
    "OneCycleLR": lambda o, s: lr_scheduler.OneCycleLR(o, [1e-3 * s, 5e-3 * s], total_steps=100),
    "CyclicLR": lambda o, s: lr_scheduler.CyclicLR(o, 1e-4 * s, 1e-3 * s, step_size_up=20),
    "SequentialLR": lambda o, s: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o, 0.1, total_iters=60),
            lr_scheduler.CosineAnnealingLR(o, 40, eta_min=1e-5 * s),
        ],
        [60],
    ),
    "ChainedScheduler": lambda o, _: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=60), lr_scheduler.ExponentialLR(o, 0.99)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_recipe_for_other_rates_is_right_for_schedulers_of_torch(name: str) -> None:
    """After it the rates of all groups are, step for step, those of a run that had the other rates from its beginning."""

    def scheduled(scale: float) -> tuple[Any, Any]:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate * scale} for rate in (1e-3, 5e-3)]
        optim = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
        return optim, SCHEDULES[name](optim, scale)

    (recipe,) = (block for block in sections()["Fine-tuning"] if "scale" in block)
    optim, scheduler = scheduled(1.0)
    other, others = scheduled(0.1)
    for at in range(98):
        if at == 40:
            rescaled = recipe.replace("1e-4", repr(other.param_groups[0]["initial_lr"]))
            loaded = SimpleNamespace(load=lambda state: None)
            exec(rescaled, {"c": loaded, "state": {}, "optim": optim, "scheduler": scheduler})
        if at >= 40:
            rates = [g["lr"] for g in optim.param_groups]
            assert rates == pytest.approx([g["lr"] for g in other.param_groups], rel=1e-9)
        for o, s in ((optim, scheduler), (other, others)):
            o.step()
            s.step()


def test_what_missed_its_mark_is_named_with_its_figure() -> None:
    """What docs/benchmarks.md calls missed stands under "What was measured", and nothing else does."""
    table = (PAGE.parent / "benchmarks.md").read_text().partition("\n## Checkpoints")[2].partition("\n## ")[0]
    missed = re.findall(r"(?m)^\| `(\w+)`.* \| ([\d.]+) .* missed\*\* \|$", table)
    said = PAGE.read_text().partition("\n## What was measured")[2]
    assert re.findall(r"(?m)^- `(\w+)` ([\d.]+),", said) == missed
    assert table.count("missed**") == len(missed)


def script_of(name: str, blocks: list[str]) -> str:
    lines = [START, BEFORE.get(name, "")]
    for i, block in enumerate(blocks, start=1):
        lines += [block, BETWEEN.get((name, i), "")]
    lines.append(AFTER.get(name, ""))
    if name in AGAIN:
        lines += [*blocks, AGAIN[name]]
    return "".join([*lines, END])


def test_what_is_known_of_sections_names_sections() -> None:
    known = {*BEFORE, *AFTER, *AGAIN, *(name for name, _ in BETWEEN)}
    assert known == set(sections())


@pytest.mark.slow
@pytest.mark.parametrize("name", sections())
def test_what_the_page_shows_runs(name: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(script_of(name, sections()[name]))
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error::UserWarning", script],
            cwd=tmp_path,
            env={**os.environ, "RANK": str(r), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(RANKS)
    ]
    try:
        said = [p.communicate(timeout=TIMEOUT_S)[0] for p in running]
    finally:
        for p in running:
            p.kill()
            p.wait()
    assert [p.returncode for p in running] == [0] * RANKS, "\n".join(said)
