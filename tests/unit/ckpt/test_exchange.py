"""In and out: safetensors as Hugging Face has them, and torch DCP folders; nothing of a stranger's is run."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from surefoot import ckpt
from surefoot.ckpt.errors import CkptUserError, DamagedError, StateError, StateMismatchError
from surefoot.ckpt.manifest import Manifest, TensorMeta
from surefoot.ckpt.store import open_store
from surefoot.ckpt.tools import exporting
from surefoot.ckpt.tools.boxreader import BoxReader, slabs
from surefoot.ckpt.tools.comparing import compare
from surefoot.ckpt.tools.dcp.exporting import export_dcp
from surefoot.ckpt.tools.dcp.folder import UntrustedPickleError
from surefoot.ckpt.tools.dcp.importing import open_dcp
from surefoot.ckpt.tools.importing import require_names, write_foreign
from surefoot.ckpt.tools.inspect import find
from surefoot.ckpt.tools.stfiles import open_safetensors
from surefoot.ckpt.tools.tiemeta import TIES
from surefoot.exitcodes import ExitCode

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"
)  # torch's own calls, in one process


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 7)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.zeros(()))


def make_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel()).view(p.shape) + 1000 * k + seed)
    groups = [{"params": [model.emb.weight, model.up.weight], "lr": 0.1}, {"params": [model.up.bias]}]
    optim = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    model.up.weight.grad = torch.ones(7, 6)
    model.emb.weight.grad = torch.ones(10, 6)
    optim.step()
    sched = torch.optim.lr_scheduler.StepLR(optim, 3)
    extra = torch.arange(5).to(torch.float8_e4m3fn)
    return {"model": model, "optim": optim, "sched": sched, "epoch": 3, "ema": {"w": extra, "n": (1, 2.5)}}


@pytest.fixture(scope="module")
def saved_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "root"
    ckpt.save(str(folder), 20, make_state(), cursor={"at": 5})
    return folder


@pytest.fixture
def root(saved_root: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(saved_root, tmp_path / "root"))


def reader(root: str, step: int | None = None) -> BoxReader:
    store = open_store(root)
    return BoxReader(store, find(store, step)[0])


# ---------------------------------------------------------------- safetensors


def test_an_export_opens_with_the_library_and_keeps_ties(root: str, tmp_path: Path) -> None:
    """CKP-17: stored once, written once, and both names load."""
    plan = ckpt.export(root, 20, tmp_path / "out")
    model: Net = make_state()["model"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == {"emb.weight", "up.weight", "up.bias", "seen"}
    for name, t in loaded.items():
        assert torch.equal(t, model.state_dict()[name]), name
    assert plan.ties == {"head.weight": "emb.weight"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt", TIES: '{"head.weight":"emb.weight"}'}
    other: Net = make_state(5)["model"]
    assert load_model(other, tmp_path / "out" / "model.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, model.emb.weight)
    assert other.head.weight is other.emb.weight


def test_files_stay_below_the_limit_and_the_index_names_them(root: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    plan = ckpt.export(root, 20, tmp_path / "out", shard_nbytes=190, progress=lambda *a: told.append(a))
    index = json.loads((tmp_path / "out" / exporting.INDEX).read_bytes())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) == 3
    assert index["metadata"]["total_size"] == plan.nbytes == told[-1][0] == told[-1][1]
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert sorted(index["weight_map"]) == ["emb.weight", "seen", "up.bias", "up.weight"]


def test_names_and_types_can_be_changed(root: str, tmp_path: Path) -> None:
    rules = [(r"^up\.", "mlp.up_proj."), (r"(\w+)\.weight", r"\1.w")]
    ckpt.export(root, 20, tmp_path / "out", rename=rules, dtype="bfloat16")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == {"emb.w", "mlp.up_proj.w", "mlp.up_proj.bias", "seen"}
    assert {t.dtype for t in loaded.values()} == {torch.bfloat16}
    assert torch.equal(loaded["emb.w"], make_state()["model"].emb.weight.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefix": "modle."}, "model., optim."),
        ({"rename": [("weight|bias", "x")]}, "and so would"),
        ({"rename": [("(", "x")]}, "no regular expression"),
        ({"dtype": "int8"}, "cannot change"),
        ({"prefix": "optim."}, ""),
    ],
)
def test_what_cannot_be_exported_is_said_before_anything_is_written(
    root: str, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    if not said:
        ckpt.export(root, 20, tmp_path / "out", **options)
        return
    with pytest.raises(CkptUserError, match=said):
        ckpt.export(root, 20, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_export_is_not_overwritten_and_never_half_there(root: str, tmp_path: Path) -> None:
    ckpt.export(root, 20, tmp_path / "out")
    with pytest.raises(CkptUserError, match="already"):
        ckpt.export(root, 20, tmp_path / "out")
    (path,) = Path(root).glob("gen-*/step-*/*/r00000-0.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="r00000"):
        ckpt.export(root, 20, tmp_path / "again", prefix="")
    assert not list((tmp_path / "again").iterdir())


def test_weights_come_in_from_a_folder_and_load(root: str, tmp_path: Path) -> None:
    ckpt.export(root, 20, tmp_path / "out", shard_nbytes=200)
    there = str(tmp_path / "new")
    manifest = write_foreign(open_store(there), open_safetensors(tmp_path / "out"))
    assert manifest.step == 0
    assert manifest.aliases == {"model.head.weight": "model.emb.weight"}
    model = make_state(5)["model"]
    ckpt.load(there, {"model": model})
    want = make_state()["model"].state_dict()
    assert all(torch.equal(t, want[n]) for n, t in model.state_dict().items())
    assert ckpt.verify(there).ok
    with pytest.raises(CkptUserError, match="--step"):
        write_foreign(open_store(there), open_safetensors(tmp_path / "out"))
    assert write_foreign(open_store(there), open_safetensors(tmp_path / "out"), step=7).generation == 2
    assert ckpt.steps(there) == [0, 7]


def test_a_single_file_carries_its_ties(root: str, tmp_path: Path) -> None:
    ckpt.export(root, 20, tmp_path / "out")
    foreign = open_safetensors(tmp_path / "out" / "model.safetensors")
    assert foreign.aliases == {"model.head.weight": "model.emb.weight"}


@pytest.mark.parametrize("tied", ["format", TIES, "7"])
def test_a_tied_name_may_be_any(tmp_path: Path, tied: str) -> None:
    """An export has them in one entry of the metadata, which no name of a tensor can be taken for."""
    saved, w = str(tmp_path / "saved"), torch.arange(3.0)
    ckpt.save(saved, 1, {"model": {"W": w, tied: w}})
    plan = ckpt.export(saved, 1, tmp_path / "out")
    ((second, kept),) = plan.ties.items()
    assert {second, kept} == {"W", tied}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt", TIES: json.dumps({second: kept}, separators=(",", ":"))}
    there = str(tmp_path / "new")
    write_foreign(open_store(there), open_safetensors(tmp_path / "out"))
    live = {"model": {"W": torch.zeros(3), tied: torch.zeros(3)}}
    ckpt.load(there, live)
    assert torch.equal(live["model"]["W"], w)
    assert torch.equal(live["model"][tied], w)


def test_an_export_of_before_has_its_ties_among_other_words(tmp_path: Path) -> None:
    said(tmp_path / "m.safetensors", ("emb.weight",), {"format": "pt", "head.weight": "emb.weight"})
    assert open_safetensors(tmp_path).aliases == {"model.head.weight": "model.emb.weight"}


def said(path: Path, tensors: tuple[str, ...], about: dict[str, str]) -> None:
    """A safetensors file with these metadata."""
    save_file({name: torch.ones(2) for name in tensors}, path, about)


def test_what_the_library_ties_is_tied(tmp_path: Path) -> None:
    """Its save_model writes the names that it drops, beside a model's other metadata."""
    saved = make_state()["model"]
    save_model(saved, str(tmp_path / "model.safetensors"), {"format": "pt", "author": "me"})
    foreign = open_safetensors(tmp_path)
    assert foreign.aliases == {"model.head.weight": "model.emb.weight"}
    there = str(tmp_path / "new")
    write_foreign(open_store(there), foreign)
    other = make_state(5)["model"]
    ckpt.load(there, {"model": other})
    assert torch.equal(other.head.weight, saved.emb.weight)


@pytest.mark.parametrize(
    ("tensors", "about", "ties"),
    [
        (("pt", "b"), {"format": "pt", "x": "b"}, {"x": "b"}),
        (("0", "3"), {"format": "pt", "epoch": "3", "1": "0"}, {"1": "0"}),
        (("0", "3"), {"format": "surefoot", "rank": "0", "step": "3"}, {}),
        (("a",), {"z": "y", "y": "a"}, {"z": "a", "y": "a"}),
        (("a",), {"z": "y", "y": "z", "x": "nothing"}, {}),
        (("a", "b"), {"a": "b"}, {}),
        (("a", "b"), {"z": "a", "a": "b"}, {"z": "a"}),
        (("a",), {"format": "a"}, {"format": "a"}),
        (("0", "1"), {"format": "pt", "x": "0", TIES: '{"format":"0","3":"1"}'}, {"format": "0", "3": "1"}),
        (("a",), {TIES: "a"}, {TIES: "a"}),
        (("a",), {TIES: "{}", "z": "a"}, {}),
        (("a",), {TIES: '{"z":["a"]}', "y": "a"}, {"y": "a"}),
    ],
)
def test_only_what_can_be_a_tie_is_one(
    tmp_path: Path, tensors: tuple[str, ...], about: dict[str, str], ties: dict[str, str]
) -> None:
    said(tmp_path / "1.safetensors", tensors, about)
    assert open_safetensors(tmp_path, prefix="").aliases == ties


def test_a_name_of_two_tensors_is_refused(tmp_path: Path) -> None:
    """Files say the same of a tie, as the shards of one model do, or they are of several models."""
    said(tmp_path / "1.safetensors", ("a",), {"z": "y", "y": "a"})
    said(tmp_path / "2.safetensors", ("b",), {"z": "a"})
    assert open_safetensors(tmp_path, prefix="").aliases == {"z": "a", "y": "a"}
    said(tmp_path / "2.safetensors", ("b",), {"z": "b"})
    with pytest.raises(CkptUserError, match="z is another name of a and of b"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda p: p.mkdir(), "is a folder"),
        (os.mkfifo, "is a pipe"),
        (lambda p: p.symlink_to(p.name), "symbolic links"),
        (lambda p: p.symlink_to("gone"), "No such file"),
    ],
    ids=["folder", "pipe", "loop", "dangling"],
)
def test_what_is_no_file_is_named(tmp_path: Path, make: Any, what: str) -> None:
    """Nobody waits for a pipe that nobody writes to."""
    (tmp_path / "hf").mkdir()
    make(tmp_path / "hf" / "m.safetensors")
    with pytest.raises(CkptUserError, match=what) as e:
        open_safetensors(tmp_path / "hf")
    assert "m.safetensors" in str(e.value)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_what_is_no_file_in_a_dcp_folder_is_named(root: str, tmp_path: Path, name: str) -> None:
    export_dcp(root, 20, tmp_path / "dcp")
    path = tmp_path / "dcp" / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CkptUserError, match=f"{name} is a pipe"):
        open_dcp(tmp_path / "dcp")


def cut_off(path: Path) -> None:
    os.truncate(path, 8192)


def overwrite(path: Path) -> None:
    with open(path, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"x")
    os.utime(path, ns=(0, 0))  # whatever the clock of the file system can tell


def replace(path: Path) -> None:
    said(path.with_name("other"), ("a",), {})
    os.replace(path.with_name("other"), path)


def import_while(change: Any, when: str, folder: Path) -> str:
    """The root that this file was imported into, and which was changed before or while its data were read."""
    path = folder / "m.safetensors"
    save_file({"a": torch.ones(3_000_000)}, path)
    foreign = open_safetensors(path)

    def read(name: str, box: Any) -> Any:
        if when == "before":
            change(path)
        for n, chunk in enumerate(foreign.read(name, box)):
            if n == 0 and when == "while":
                change(path)
            yield chunk

    write_foreign(open_store(str(folder / "new")), dataclasses.replace(foreign, read=read))
    return str(folder / "new")


@pytest.mark.parametrize(
    ("change", "when"),
    [
        (cut_off, "before"),
        (cut_off, "while"),
        (overwrite, "before"),
        (overwrite, "while"),
        (replace, "before"),
    ],
)
def test_a_file_that_changes_while_it_is_imported_is_damage(tmp_path: Path, change: Any, when: str) -> None:
    """CKP-42, for what we take in: it is an error, where a mapped file would be a SIGBUS; and nothing is committed."""
    with pytest.raises(DamagedError, match=r"m\.safetensors was changed while it was read"):
        import_while(change, when, tmp_path)
    assert ckpt.steps(str(tmp_path / "new")) == []


def test_a_file_that_is_replaced_while_it_is_imported_stays_what_it_was(tmp_path: Path) -> None:
    there = import_while(replace, "while", tmp_path)
    assert torch.equal(ckpt.read(there, 0, "model.a"), torch.ones(3_000_000))


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CkptUserError, match="pickle"):
        open_safetensors(tmp_path)
    with pytest.raises(CkptUserError, match="no such"):
        open_safetensors(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda b: b[:-1], "bytes of data"),
        (lambda b: (2**62).to_bytes(8, "little") + b[8:], "no safetensors"),
        (lambda b: b.replace(b'"F32"', b'"F99"'), "F99"),
        (lambda b: b.replace(b"[0,16]", b"[8,16]"), "8"),
        (lambda b: b.replace(b"[2,2]", b"[2,9]"), "takes"),
        (lambda b: (4).to_bytes(8, "little") + b"{[[[" + b[12:], "no safetensors"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, spoil: Any, said: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(2, 2)}, path)
    assert open_safetensors(path).nbytes == 16
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DamagedError, match=said):
        open_safetensors(path)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "", ".."])
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / exporting.INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(DamagedError, match="beside"):
        open_safetensors(tmp_path)


def test_slabs_follow_each_other() -> None:
    t = torch.arange(5 * 4 * 3).view(5, 4, 3)
    for nbytes in (8, 24, 30, 96, 200, 10_000):
        parts = [
            t[tuple(slice(o, o + e) for o, e in zip(b.offset, b.extent, strict=True))].reshape(-1)
            for b in slabs((5, 4, 3), 8, nbytes)
        ]
        assert torch.equal(torch.cat(parts), t.reshape(-1))
        assert max(p.numel() * 8 for p in parts) <= max(nbytes, 8)
    assert [b.extent for b in slabs((), 8, 1)] == [()]
    assert list(slabs((0, 3), 8, 1)) == []


def test_only_one_name_of_a_type_without_a_word(tmp_path: Path) -> None:
    manifest = Manifest(
        generation=1,
        step=1,
        attempt="a",
        world_size=1,
        tensors={"model.z": TensorMeta(dtype="complex128", shape=(1,))},
    )
    with pytest.raises(CkptUserError, match="complex128"):
        exporting.plan_export(manifest)


# ---------------------------------------------------------------- DCP


def test_dcp_there_and_back_is_the_same_to_the_last_bit(root: str, tmp_path: Path) -> None:
    export_dcp(root, 20, tmp_path / "dcp")
    foreign = open_dcp(tmp_path / "dcp")
    there = str(tmp_path / "new")
    assert write_foreign(open_store(there), foreign).step == 20
    diff = compare(reader(root), reader(there))
    assert diff.same, diff
    assert diff.equal > 8
    assert reader(there).manifest.cursor == {"at": 5}
    state = make_state(9)
    ckpt.load(there, state)
    want = make_state()
    assert torch.equal(state["model"].emb.weight, want["model"].emb.weight)
    assert state["optim"].state[state["model"].up.weight]["exp_avg"].sum() != 0
    assert state["ema"]["n"] == (1, 2.5)


def state_dicts(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return get_state_dict(state["model"], state["optim"])


def test_torch_reads_an_exported_folder(root: str, tmp_path: Path) -> None:
    export_dcp(root, 20, tmp_path / "dcp")
    other = make_state(5)
    model_sd, optim_sd = state_dicts(other)
    state = {"model": model_sd, "optim": optim_sd}
    dcp_load(state, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    want_model, want_optim = state_dicts(make_state())
    assert all(torch.equal(model_sd[n], t) for n, t in want_model.items())
    assert torch.equal(optim_sd["state"]["up.weight"]["exp_avg"], want_optim["state"]["up.weight"]["exp_avg"])
    assert state["optim"]["param_groups"][0]["betas"] == (0.8, 0.9)


def test_what_torch_wrote_loads_as_a_live_state(tmp_path: Path) -> None:
    saved = make_state()
    model_sd, optim_sd = get_state_dict(saved["model"], saved["optim"])
    state = {"model": model_sd, "optim": optim_sd, "sched": saved["sched"].state_dict(), "epoch": 3}
    dcp_save(state, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    there = str(tmp_path / "new")
    write_foreign(open_store(there), open_dcp(tmp_path / "dcp"), step=4)
    live = make_state(9)
    live = {k: live[k] for k in ("model", "optim", "sched", "epoch")}
    live["epoch"] = 0
    ckpt.load(there, live)
    assert torch.equal(live["model"].up.weight, saved["model"].up.weight)
    mine, theirs = (
        live["optim"].state[live["model"].up.weight],
        saved["optim"].state[saved["model"].up.weight],
    )
    assert all(torch.equal(mine[k], theirs[k]) for k in ("step", "exp_avg", "exp_avg_sq"))
    assert live["optim"].param_groups[0]["betas"] == (0.8, 0.9)
    assert live["epoch"] == 3
    assert live["sched"].state_dict() == saved["sched"].state_dict()


def raw_optimizer() -> tuple[dict[str, Any], str]:
    state = make_state()
    return {"model": state["model"].state_dict(), "optim": state["optim"].state_dict()}, "numbers parameters"


def flattened_optimizer() -> tuple[dict[str, Any], str]:
    state = make_state()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optim = get_state_dict(state["model"], state["optim"], options=options)
    return {"model": model, "optim": optim}, "flattened"


def raw_optimizer_without_state() -> tuple[dict[str, Any], str]:
    model = make_state()["model"]
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model.state_dict(), "optim": optim.state_dict()}, "numbers parameters"


def optimizer_of_a_model_elsewhere() -> tuple[dict[str, Any], str]:
    state = make_state()
    _, optim = get_state_dict(state["model"], state["optim"])
    return {"model": {"other.weight": torch.ones(2)}, "optim": optim}, "no model"


@pytest.mark.parametrize(
    "make",
    [raw_optimizer, flattened_optimizer, raw_optimizer_without_state, optimizer_of_a_model_elsewhere],
)
def test_an_optimizer_that_cannot_be_taken_over_is_said_and_the_rest_imported(
    run: Any, tmp_path: Path, make: Any
) -> None:
    """Its state would stand under names that no load asks for."""
    state, why = make()
    dcp_save({**state, "step": 7}, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    there = str(tmp_path / "new")
    code, out, err = run("import", str(tmp_path / "dcp"), there, "--json")
    assert code == ExitCode.UNEXPECTED
    told = json.loads(out)
    (part,) = told["left_out"]
    assert part["name"] == "optim"
    assert why in part["why"]
    assert f"NOT imported: optim ({part['tensors']} tensors, " in err
    assert err.startswith("surefoot ckpt: note: "), "that there are pickles is no error"
    assert part["how"] in err
    manifest = reader(there).manifest
    assert (told["step"], manifest.step) == (7, 7)
    assert {n.partition(".")[0] for n in manifest.tensors} == {"model"}
    assert set(manifest.values) == {"step"}
    assert manifest.facts["left_out"] == ["optim"]
    model = make_state(5)["model"]
    if "other.weight" not in state["model"]:
        ckpt.load(there, {"model": model, "step": 0})
        assert torch.equal(model.up.weight, state["model"]["up.weight"])


def test_nothing_is_committed_where_all_would_be_left_out(tmp_path: Path) -> None:
    optim = make_state()["optim"].state_dict()
    dcp_save({"optim": optim}, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    with pytest.raises(CkptUserError, match="nothing of it can be imported: of optim, it is a plain"):
        open_dcp(tmp_path / "dcp")


def test_an_optimizer_below_the_top_finds_its_own_model(tmp_path: Path) -> None:
    """Two pairs with the same parameter names: each optimizer belongs to the model beside it."""
    pairs = {name: make_state(seed) for name, seed in (("gen", 0), ("disc", 3))}
    state: dict[str, Any] = {}
    for name, pair in pairs.items():
        model, optim = get_state_dict(pair["model"], pair["optim"])
        state[name] = {"model": model, "optim": optim}
    dcp_save(state, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    foreign = open_dcp(tmp_path / "dcp")
    assert foreign.left_out == ()
    there = str(tmp_path / "new")
    write_foreign(open_store(there), foreign)
    live: dict[str, dict[str, Any]] = {}
    for name in pairs:
        other = make_state(9)
        live[name] = {"model": other["model"], "optim": other["optim"]}
    ckpt.load(there, live)
    for name, pair in pairs.items():
        mine, theirs = live[name], pair
        assert torch.equal(mine["model"].up.weight, theirs["model"].up.weight)
        mine_state = mine["optim"].state[mine["model"].up.weight]
        assert torch.equal(mine_state["exp_avg"], theirs["optim"].state[theirs["model"].up.weight]["exp_avg"])


@pytest.mark.parametrize(
    ("step", "found"),
    [(7, 7), (torch.tensor(7), 7), (-1, 0), ("7", 0), (True, 0), (torch.tensor(7.5), 0), (torch.ones(2), 0)],
    ids=str,
)
def test_the_step_that_a_folder_names_is_the_one_it_is_imported_as(
    tmp_path: Path, step: Any, found: int
) -> None:
    dcp_save(
        {"w": torch.ones(3), "step": step}, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True
    )
    assert write_foreign(open_store(tmp_path / "new"), open_dcp(tmp_path / "dcp")).step == found
    again = write_foreign(open_store(tmp_path / "other"), open_dcp(tmp_path / "dcp"), step=9)
    assert again.step == 9


@pytest.mark.parametrize("entry", [7, torch.tensor(7)], ids=str)
def test_a_state_needs_no_entry_for_the_step_that_the_checkpoint_tells(tmp_path: Path, entry: Any) -> None:
    """It comes back where the state has one. What says another step than the checkpoint's is missed as anything is."""
    dcp_save(
        {"w": torch.ones(3), "step": entry}, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True
    )
    there = str(tmp_path / "new")
    write_foreign(open_store(there), open_dcp(tmp_path / "dcp"))
    without: dict[str, Any] = {"w": torch.zeros(3)}
    loaded = ckpt.load(there, without)
    assert loaded is not None
    assert (loaded.step, loaded.left_over) == (7, ())
    assert torch.equal(without["w"], torch.ones(3))
    having = {"w": torch.zeros(3), "step": entry * 0}
    ckpt.load(there, having)
    assert having["step"] == 7
    write_foreign(open_store(there), open_dcp(tmp_path / "dcp"), step=9)
    with pytest.raises(StateMismatchError, match="step is in the checkpoint and not in the state"):
        ckpt.load(there, without)


def test_an_entry_of_our_own_is_missed_after_a_round_trip_as_before(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    ckpt.save(saved, 7, {"w": torch.ones(3), "step": 7})
    export_dcp(saved, 7, tmp_path / "dcp")
    there = str(tmp_path / "new")
    write_foreign(open_store(there), open_dcp(tmp_path / "dcp"))
    for root in (saved, there):
        with pytest.raises(StateMismatchError, match="step is in the checkpoint and not in the state"):
            ckpt.load(root, {"w": torch.zeros(3)})


class Loud:
    """Runs code of this process when it is unpickled."""

    fired = 0

    def __reduce__(self) -> Any:
        return _fire, ()


def _fire() -> None:
    Loud.fired += 1


def test_the_fault_fires_where_nobody_guards_against_it() -> None:
    Loud.fired = 0
    pickle.loads(pickle.dumps(Loud()))
    assert Loud.fired == 1


def test_a_dcp_folder_that_would_run_code_is_refused(root: str, tmp_path: Path) -> None:
    """CKP-42, for what we take in: metadata and items are pickles there."""
    Loud.fired = 0
    dcp = tmp_path / "dcp"
    dcp_save({"epoch": 3, "x": Loud()}, storage_writer=FileSystemWriter(dcp), no_dist=True)
    with pytest.raises(UntrustedPickleError, match="x is no plain value"):
        open_dcp(dcp)
    metadata = pickle.loads((dcp / ".metadata").read_bytes())
    metadata.planner_data["epoch"] = Loud()
    (dcp / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UntrustedPickleError, match="_fire"):
        open_dcp(dcp)
    for data in (b"cos\nsystem\n(S'true'\ntR.", b"", b"\x80\x04\x95garbage"):
        (dcp / ".metadata").write_bytes(data)
        with pytest.raises((UntrustedPickleError, DamagedError)):
            open_dcp(dcp)
    assert Loud.fired == 0


def test_a_dcp_folder_cannot_lead_out_of_itself(root: str, tmp_path: Path) -> None:
    export_dcp(root, 20, tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../root/secret"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="outside"):
        open_dcp(tmp_path / "dcp")


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("key", ["w@rank0", "w@rank1.x", "__metadata__", "half\ud800"])
@pytest.mark.parametrize("value", [torch.ones(2), 3], ids=["tensor", "value"])
def test_a_name_that_a_save_refuses_is_not_imported(tmp_path: Path, key: str, value: Any) -> None:
    """It could be loaded into no state."""
    with pytest.raises(StateError) as save:
        ckpt.save(str(tmp_path / "saved"), 1, {key: value})
    dcp_save(
        {"b": torch.ones(1), key: value}, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True
    )
    with pytest.raises(CkptUserError) as taken:
        open_dcp(tmp_path / "dcp")
    assert str(taken.value).endswith(str(save.value)), "the same words"
    assert str(tmp_path / "dcp") in str(taken.value)


def test_a_safetensors_name_that_a_save_refuses_is_not_imported(tmp_path: Path) -> None:
    said(tmp_path / "1.safetensors", ("a", "w@rank0"), {"format": "pt"})
    with pytest.raises(CkptUserError, match=r"1\.safetensors: model\.w@rank0: keys with '@rank'"):
        open_safetensors(tmp_path)
    said(tmp_path / "1.safetensors", ("a",), {"format": "pt", "w@rank0": "a"})
    with pytest.raises(CkptUserError, match=r"model\.w@rank0: keys with '@rank'"):
        open_safetensors(tmp_path)


def test_what_was_one_rank_s_own_comes_back_from_our_own_exports(tmp_path: Path) -> None:
    def make(n: float) -> dict[str, Any]:
        return {"model": {"w": torch.full((3,), n), "mine": ckpt.PerRank(torch.full((2,), n))}}

    saved, there = str(tmp_path / "saved"), str(tmp_path / "new")
    ckpt.save(saved, 1, make(1.0))
    ckpt.export(saved, 1, tmp_path / "st")
    export_dcp(saved, 1, tmp_path / "dcp")
    write_foreign(open_store(there), open_safetensors(tmp_path / "st"), step=1)
    write_foreign(open_store(there), open_dcp(tmp_path / "dcp"), step=2)
    for step in (1, 2):
        live = make(0.0)
        ckpt.load(there, live, step=step)
        assert live["model"]["mine"].value.tolist() == [1.0, 1.0]


def test_one_name_is_one_entry() -> None:
    require_names([("a.b", "here"), ("a.c", "there")])
    with pytest.raises(CkptUserError, match=r"^there: a\.b is the name of something in here already"):
        require_names([("a.b", "here"), ("a.b", "there")])


# ---------------------------------------------------------------- on S3


@pytest.mark.slow
@pytest.mark.s3
def test_in_and_out_of_s3(s3_url: str, tmp_path: Path) -> None:
    """Objects of several parts; and gc finds the upload of an import that was cut off."""
    big = {"w": torch.arange(5_000_000, dtype=torch.float32), "b": torch.arange(7)}
    (tmp_path / "hf").mkdir()
    save_file(big, tmp_path / "hf" / "model.safetensors")
    store = open_store(s3_url)
    foreign = open_safetensors(tmp_path / "hf")
    read = foreign.read

    def cut_off(name: str, box: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_foreign(store, dataclasses.replace(foreign, read=cut_off))
    assert store.unfinished("") == [], "what was begun is aborted"
    assert write_foreign(store, dataclasses.replace(foreign, read=read)).generation == 2
    assert ckpt.verify(s3_url).ok
    ckpt.export(s3_url, None, tmp_path / "out")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(again[n], t) for n, t in big.items())
    assert sum(a.nbytes for a in again.values()) > 16 * 2**20
