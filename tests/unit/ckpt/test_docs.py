"""What docs/checkpoint.md shows is run: each section's blocks of Python in their order, on two ranks, in an empty folder.

A section takes for granted what a reader has already (a model, a root that holds something); that stands here, and so does what
has to be true afterwards.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    "Loading": """
model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
optim = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optim)
state = {"model": model, "optim": optim, "scheduler": scheduler}
ckpt.save(root, 500, state)
c = ckpt.Checkpointer(root)
saved, model["head"] = model["body"].weight.detach().clone(), nn.Linear(4, 3)
with torch.no_grad():
    model["body"].weight.zero_()
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
    ("Loading", 1): """
assert torch.equal(model["body"].weight, saved) and model["head"].weight.shape == (3, 4) and old.shape == (2, 4)
assert set(n.split()[0] for n in loaded.left_over) >= {"model.head.weight", "model.head.bias"}
model["head"] = nn.Linear(4, 2)
optim = torch.optim.AdamW(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.ConstantLR(optim)
state = {"model": model, "optim": optim, "scheduler": scheduler}
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
    "Loading": """
c.close()
assert [g["lr"] for g in optim.param_groups] == [1e-4] and scheduler.base_lrs == [1e-4]
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
