"""``python -m surefoot.ckpt``: tables, JSON, and one line with an exit code for what is wrong."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from ckpt_images import arrays, make_images

from surefoot import ckpt
from surefoot.ckpt import tiers
from surefoot.ckpt.format.flags import flags_among
from surefoot.ckpt.loading.aside import note_resume
from surefoot.ckpt.record import Record, StartRef, create_record, list_manifests
from surefoot.ckpt.store import ObjectStoreDeniedError, open_store
from surefoot.ckpt.tools.tables import ago, human
from surefoot.exitcodes import ExitCode


@pytest.fixture
def root(tmp_path: Path) -> str:
    url = (tmp_path / "root").as_uri()
    store = open_store(url)
    create_record(store, Record(generation=1, start=StartRef(), reason="first_start", created_by="t"))
    for step in (20, 40):
        images = make_images(arrays(), 2, step=step)
        tiers.upload_images(store, images, generation=1, step=step, attempt="a1", writer=0, deadline_s=10)
        outcome = tiers.commit(
            store, generation=1, step=step, attempt="a1", writers=1, deadline_s=5, facts={}
        )
        assert isinstance(outcome, tiers.Committed)
    start = StartRef(generation=1, step=20)
    create_record(store, Record(generation=2, start=start, reason="rank_exit", created_by="t"))
    return url


def test_ls(run: Any, root: str) -> None:
    code, out, _ = run("ls", root)
    assert code == 0
    lines = out.splitlines()
    assert "newest" in next(line for line in lines if line.strip().startswith("20"))
    assert "off the lineage" in next(line for line in lines if line.strip().startswith("40"))


def test_ls_json(run: Any, root: str) -> None:
    code, out, _ = run("ls", root, "--json")
    rows = msgspec.json.decode(out)
    assert code == 0
    assert [(r["step"], r["counts"], r["newest"], r["world_size"]) for r in rows] == [
        (20, True, True, 2),
        (40, False, False, 2),
    ]
    assert rows[0]["nbytes"] == sum(a.nbytes for a in arrays().values())


def test_show(run: Any, root: str) -> None:
    code, out, _ = run("show", root)
    assert code == 0
    assert "model.w" in out
    assert "[7, 3]" in out
    code, out, _ = run("show", root, "--step", "40", "--generation", "1", "--json")
    shown = msgspec.json.decode(out)
    assert (shown["step"], shown["counts"], shown["cursor"]) == (40, False, {"at": 5})
    tied = next(t for t in shown["tensors"] if t["name"] == "model.tied")
    assert (tied["tied_to"], tied["nbytes"], tied["pieces"]) == ("model.w", 84, 2)


@pytest.mark.parametrize("byte", [-1, 20], ids=["data", "header"])
def test_verify(run: Any, root: str, byte: int) -> None:
    code, out, _ = run("verify", root, "--json")
    report = msgspec.json.decode(out)
    assert code == 0
    assert report["ok"]
    assert report["nbytes"] == sum(a.nbytes for a in arrays().values())
    (path,) = Path(root.removeprefix("file://")).glob("gen-0001/step-0000000020/*/r00001-0.safetensors")
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
    code, out, _ = run("verify", root)
    assert code == ExitCode.UNEXPECTED
    assert "NOT SOUND" in out
    assert "r00001-0.safetensors" in out
    assert f"{report['nbytes']} B in 2 objects compared" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ls", "ftp://x"], ExitCode.USAGE, "is no root"),
        (["verify", "{root}", "--step", "7"], ExitCode.USAGE, "no step 7"),
        (["verify", "{root}", "7", "--step", "8"], ExitCode.USAGE, "which step"),
        (["show", "{root}", "40"], ExitCode.USAGE, "--generation 1"),
        (["show", "{root}", "-1"], ExitCode.USAGE, "-1 is no step"),
        (["show", "{root}", "--step", "-1"], ExitCode.USAGE, "Invalid value for '--step'"),
        (["ls"], ExitCode.USAGE, "Missing argument 'URL'. See surefoot ckpt ls --help"),
        (["ls", "{root}", "--jsno"], ExitCode.USAGE, "--json"),
        (["verify", "{root}", "x"], ExitCode.USAGE, "valid integer"),
        (["show", "{root}", "--tensor", "model.ww"], ExitCode.USAGE, "similar names: model.w"),
        (["show", "{root}", "--tensor", "model.w", "--reshard", "2"], ExitCode.USAGE, "one at a time"),
        (["show", "{root}", "--reshard", "0"], ExitCode.USAGE, "reshard"),
        (["diff", "{root}", "20", "21"], ExitCode.USAGE, "no step 21"),
        (["export", "{root}", "{root}/out", "--to", "zip"], ExitCode.USAGE, "safetensors and dcp"),
        (["export", "{root}", "{root}/out", "--rename", "abc"], ExitCode.USAGE, "REGEX=NEW"),
        (["export", "{root}", "{root}/out", "--max-shard-size", "big"], ExitCode.USAGE, "5GB"),
        (["export", "{root}", "s3://b/x"], ExitCode.USAGE, "no local folder"),
        (["import", "{root}/nothing", "{root}"], ExitCode.USAGE, "no such file"),
        (["gc", "{root}", "--keep-every", "5"], ExitCode.USAGE, "--keep N"),
        (["gc", "{root}", "--keep", "1"], ExitCode.USAGE, "keep"),
        (["keep", "{root}", "7"], ExitCode.USAGE, "no step 7"),
        (["gc", "{root}", "--abandoned", "0.5"], ExitCode.USAGE, "abandoned"),
        (["gc", "{root}", "--keep", "2", "--keep-hours", "-1"], ExitCode.USAGE, "hours"),
        (["export", "{root}", "/proc/none/out"], ExitCode.USAGE, "cannot write to /proc/none/out"),
        (["export", "{root}", "/proc/none/out", "--to", "dcp"], ExitCode.USAGE, "name another folder"),
        (["nonsense"], ExitCode.USAGE, "nonsense"),
        (["lst", "{root}"], ExitCode.USAGE, "Did you mean 'ls'? See surefoot ckpt --help"),
    ],
)
def test_what_is_wrong_is_one_line(run: Any, root: str, words: list[str], code: int, said: str) -> None:
    ended, out, err = run(*[w.format(root=root) for w in words])
    assert ended == code
    assert said in err
    assert "Traceback" not in out + err
    assert err.count("\n") == (1 if said else 0)


ASKING = (
    *(["ls"], ["ls", "--json"], ["show"], ["show", "3"], ["verify"], ["verify", "3"], ["diff", "1", "2"]),
    *(
        ["export", "out"],
        ["export", "out", "--to", "dcp"],
        ["keep", "3"],
        ["keep", "3", "--undo"],
        ["gc", "--yes"],
    ),
)


@pytest.mark.parametrize("words", ASKING, ids=" ".join)
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("empty", "no job has ever begun there"),
        ("root/gen-0001", "no job has ever begun there"),
        ("typo", "there is no such folder"),
        ("root/generations/0001.json", "this is a file"),
    ],
)
def test_every_command_says_the_same_of_what_is_no_root(
    run: Any, root: str, tmp_path: Path, words: list[str], where: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    url = (tmp_path / where).as_uri()
    code, out, err = run(words[0], url, *words[1:])
    assert (code, out) == (ExitCode.USAGE, "")
    assert err == (
        f"surefoot ckpt: {url} is no root of checkpoints: {said}. Is the address right? It is the one that the job saves to\n"
    )


def test_a_root_in_which_nothing_is_committed_yet(run: Any, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    create_record(store, Record(generation=1, start=StartRef(), reason="start", created_by="t"))
    assert run("ls", str(tmp_path))[:2] == (
        0,
        f"no checkpoints yet: a job has begun under {store.root}, and has not committed anything\n",
    )
    assert run("ls", str(tmp_path), "--json")[1].strip() == "[]"
    assert "no checkpoint on the lineage" in run("show", str(tmp_path))[2]


def test_a_damaged_manifest_is_a_row_like_others_with_its_problem_below(run: Any, root: str) -> None:
    (path,) = Path(root.removeprefix("file://")).glob("gen-0001/step-0000000040/manifest.json")
    width = len(run("ls", root)[1].splitlines()[0])
    path.write_bytes(b"{}")
    code, out, _ = run("ls", root)
    assert code == 0
    head, sound, unreadable, problem = out.splitlines()
    assert len(head) == width + len(", unreadable")
    assert unreadable.split() == ["40", "1", "off", "the", "lineage,", "unreadable", "first_start"]
    assert sound.index("first_start") == unreadable.index("first_start")
    assert problem.startswith(
        "step 40 of generation 1 cannot be read: gen-0001/step-0000000040/manifest.json"
    )
    assert run("verify", root, "--step", "40", "--generation", "1")[0] == ExitCode.UNEXPECTED


def test_one_tensor(run: Any, root: str) -> None:
    code, out, _ = run("show", root, "20", "--tensor", "model.tied", "--json")
    stats = msgspec.json.decode(out)
    w = arrays()["model.w"].astype(float)
    assert code == 0
    assert (stats["stored_as"], stats["shape"], stats["numel"], stats["nan"]) == ("model.w", [7, 3], 21, 0)
    assert (stats["min"], stats["max"], stats["mean"]) == (w.min(), w.max(), w.mean())
    assert stats["std"] == pytest.approx(w.std())
    assert sum(stats["histogram"]) == 21
    assert [p["box"] for p in stats["pieces"]] == ["[0:4,0:3]", "[4:7,0:3]"]
    code, out, _ = run("show", root, "20", "--tensor", "model.on")
    assert "NaN 0" in out
    assert "█" in out


def test_what_other_ranks_would_read(run: Any, root: str) -> None:
    code, out, _ = run("show", root, "--reshard", "3", "--json")
    plan = msgspec.json.decode(out)
    assert code == 0
    held = [r["held_nbytes"] for r in plan["ranks"]]
    scalar = arrays()["optim.params.model.w.step"].nbytes
    assert sum(held) == sum(a.nbytes for a in arrays().values()) + 2 * scalar  # which all of them hold
    assert all(r["read_nbytes"] >= r["held_nbytes"] for r in plan["ranks"])
    out = run("show", root, "--reshard", "11")[1]
    assert "saved by 2 ranks, read by 11" in out
    assert len({len(line) for line in out.splitlines()[2:]}) == 1, "columns are aligned"


def test_what_the_job_reads_is_each_block_once(run: Any, root: str) -> None:
    """Every rank needs the one block of each object, and it leaves the store once."""
    whole = sum(a.nbytes for a in arrays().values())
    plan = msgspec.json.decode(run("show", root, "--reshard", "4", "--json")[1])
    assert sum(r["read_nbytes"] for r in plan["ranks"]) > whole
    assert (plan["read_nbytes"], plan["unique_nbytes"], plan["objects"]) == (whole, whole, 2)
    lines = run("show", root, "--reshard", "4")[1].splitlines()
    assert lines[-1].split()[0] == "job"
    assert lines[-1].split()[3:] == [str(whole), "B", "2"]


def test_a_sound_one_is_noted_and_listed(run: Any, root: str) -> None:
    assert run("verify", root, "20")[0] == 0
    assert run("keep", root, "20")[0] == 0
    assert "newest, kept, verified" in run("ls", root)[1]
    code, out, _ = run("keep", root, "20", "--undo", "--json")
    assert (code, msgspec.json.decode(out)) == (0, {"step": 20, "generation": 1, "kept": False})
    assert msgspec.json.decode(run("ls", root, "--json")[1])[0]["flags"] == ["verified"]


def test_diff(run: Any, root: str, tmp_path: Path) -> None:
    words = ("diff", root, "20", "40", "--generation-b", "1")
    code, out, _ = run(*words)
    assert code == 0
    assert "equal bit for bit, and so is everything else" in out
    other = (tmp_path / "other").as_uri()
    store = open_store(other)
    create_record(store, Record(generation=1, start=StartRef(), reason="first_start", created_by="t"))
    changed = arrays() | {"model.new": np.zeros(2, np.float32)}
    changed["model.w"][2, 1] += 0.5
    changed["model.b"][3] = np.nan
    del changed["optim.params.model.w.step"]
    images = make_images(changed, 1, step=20, values=lambda rank: {"epoch": 4})
    tiers.upload_images(store, images, generation=1, step=20, attempt="a1", writer=0, deadline_s=10)
    assert isinstance(
        tiers.commit(store, generation=1, step=20, attempt="a1", writers=1, deadline_s=5, facts={}),
        tiers.Committed,
    )
    code, out, _ = run("diff", root, "20", "20", "--with", other, "--json")
    diff = msgspec.json.decode(out)
    assert code == ExitCode.UNEXPECTED
    assert (diff["only_a"], diff["only_b"]) == (["optim.params.model.w.step"], ["model.new"])
    assert [(d["name"], d["differ"], d["max_abs"], d["not_finite"]) for d in diff["differ"]] == [
        ("model.b", 1, None, 1),
        ("model.w", 1, 0.5, 0),
    ]
    assert (diff["values"], diff["cursor_equal"], diff["equal"]) == (["epoch"], True, 1)
    out = run("diff", root, "20", "20", "--with", other)[1]
    assert "other bits: model.w: 1 of 21 elements, largest difference 0.5" in out


def test_export_import_and_back(run: Any, root: str, tmp_path: Path) -> None:
    code, out, _ = run("export", root, str(tmp_path / "hf"), "--step", "20", "--json")
    assert code == 0
    assert msgspec.json.decode(out)["ties"] == {"w": "tied"}
    code, out, _ = run("import", str(tmp_path / "hf"), str(tmp_path / "new"), "--step", "3", "--json")
    assert (code, msgspec.json.decode(out)["step"]) == (0, 3)
    assert "w is tied to tied" in run("export", root, str(tmp_path / "again"))[1]
    code, _, err = run("import", str(tmp_path / "hf"), str(tmp_path / "new"), "--step", "3")
    assert code == ExitCode.USAGE
    assert "at step 3 already" in err


def test_gc_keeps_the_sound_ones_when_verify_has_found_damage(run: Any, tmp_path: Path) -> None:
    """Steps 3 and 4 were verified and are damaged since; 1 and 2 are all there is. Brought back, a step counts again."""
    root = tmp_path / "root"
    store = open_store(root)
    create_record(store, Record(generation=1, start=StartRef(), reason="start", created_by="t"))
    for step in (1, 2, 3, 4):
        images = make_images(arrays(), 2, step=step)
        tiers.upload_images(store, images, generation=1, step=step, attempt="a1", writer=0, deadline_s=10)
        tiers.commit(store, generation=1, step=step, attempt="a1", writers=1, deadline_s=5, facts={})
    assert run("verify", str(root), "4")[0] == 0
    sound: dict[int, bytes] = {}
    for step in (3, 4):
        path = next(root.glob(f"gen-0001/step-{step:010d}/a1/r00000-0.safetensors"))
        sound[step] = path.read_bytes()
        path.write_bytes(sound[step][:-1] + bytes([sound[step][-1] ^ 1]))
        assert run("verify", str(root), str(step))[0] == ExitCode.UNEXPECTED
    _, out, _ = run("ls", str(root))
    assert out.count("set aside: damaged") == 2
    assert "verified" not in out
    assert run("gc", str(root), "--keep", "2", "--yes")[0] == 0
    assert [m.step for m in list_manifests(store)] == [1, 2, 3, 4]
    assert run("verify", str(root), "2")[0] == 0
    next(root.glob("gen-0001/step-0000000004/a1/r00000-0.safetensors")).write_bytes(sound[4])
    assert run("verify", str(root), "4")[0] == 0
    assert flags_among(o.key for o in store.list("gen-"))[1, 4] == {"verified"}


def test_gc_says_what_it_would_do(run: Any, root: str) -> None:
    folder = Path(root.removeprefix("file://"))
    dead = folder / "gen-0001" / "step-0000000030" / "dead"
    dead.mkdir(parents=True)
    (dead / "r00000-0.safetensors").write_bytes(b"x" * 5000)
    (folder / "README").write_text("mine")
    images = make_images(arrays(), 2, step=50, generation=2)
    store = open_store(root)
    tiers.upload_images(store, images, generation=2, step=50, attempt="a1", writer=0, deadline_s=10)
    tiers.commit(store, generation=2, step=50, attempt="a1", writers=1, deadline_s=5, facts={})
    tiers.upload_images(
        store,
        make_images(arrays(), 2, step=60, generation=2),
        generation=2,
        step=60,
        attempt="a2",
        writer=0,
        deadline_s=10,
    )
    store.upload("gen-0002/step-0000000070/a3/r00000-0.safetensors", 4096, deadline_s=10)
    out = run("gc", root)[1]
    assert "left alone: 1 unfinished attempt (" in out
    assert "and 1 upload under way" in out
    assert "would delete attempt dead at step 30 of generation 1, 5.0 kB: its generation is over" in out
    assert "README is none of ours" in out
    assert "nothing was deleted" in out
    assert (dead / "r00000-0.safetensors").exists()
    plan = msgspec.json.decode(run("gc", root, "--off-lineage", "--yes", "--json")[1])
    assert plan["deleted"]
    assert [c["ref"]["step"] for c in plan["checkpoints"]] == [40]
    assert not dead.exists()
    assert (folder / "README").exists()
    assert [r["step"] for r in msgspec.json.decode(run("ls", root, "--json")[1])] == [20, 50]
    run("gc", root, "--yes")  # the ledger of step 40, which no chain names any more
    assert "nothing to delete" in run("gc", root)[1]


def test_steps_off_the_lineage_are_not_said_to_be_on_it(run: Any, root: str) -> None:
    """The fixture's step 40 is off the lineage."""
    _, _, err = run("diff", root, "1", "20")
    assert "has no step 1 on the lineage; the newest there are: 20 (" in err
    _, _, err = run("show", root, "1", "--generation", "1")
    assert "has no step 1 of generation 1; the newest there are: 20, 40 (" in err


OF_STEP_40 = (
    ["show", "{root}", "40"],
    ["show", "{root}", "40", "--tensor", "model.w"],
    ["show", "{root}", "40", "--reshard", "2"],
    ["verify", "{root}", "40"],
    ["diff", "{root}", "40", "20"],
    ["diff", "{root}", "20", "40"],
    ["keep", "{root}", "40"],
    ["export", "{root}", "{out}", "--step", "40"],
    ["export", "{root}", "{out}", "--step", "40", "--to", "dcp"],
)


@pytest.mark.parametrize("words", OF_STEP_40, ids=" ".join)
def test_the_option_that_is_named_for_a_step_off_the_lineage_is_there(
    run: Any, root: str, tmp_path: Path, words: list[str]
) -> None:
    words = [w.format(root=root, out=tmp_path / "out") for w in words]
    code, _, err = run(*words)
    assert code == ExitCode.USAGE
    said = re.search(
        r"has no step 40 on the lineage; .* one of generation 1: (--generation\S*) 1 takes it", err
    )
    assert said is not None
    assert run(*words, said[1], "1")[0] == 0
    assert run(*words, said[1], "2")[0] == ExitCode.USAGE


def test_calls_take_a_generation_as_commands_do(root: str, tmp_path: Path) -> None:
    calls: list[Callable[..., Any]] = [
        lambda **g: ckpt.verify(root, 40, **g),
        lambda **g: ckpt.export(root, 40, tmp_path / "out", **g),
        lambda **g: ckpt.read(root, 40, "model.w", **g),
    ]
    for call in calls:
        with pytest.raises(ckpt.StepMissingError, match="in Python: generation=1"):
            call()
        call(generation=1)


def test_calls_take_no_step_as_the_newest(root: str, tmp_path: Path) -> None:
    assert ckpt.verify(root, None).step == 20
    assert ckpt.export(root, None, tmp_path / "out").step == 20
    assert ckpt.read(root, None, "model.w").shape == (7, 3)
    with pytest.raises(
        ckpt.StepMissingError, match=r"step 20 has no tensor .model\.ww.; similar names: model\.w"
    ):
        ckpt.read(root, None, "model.ww")


def test_where_all_are_off_the_lineage_that_is_said(run: Any, root: str) -> None:
    store = open_store(root)
    create_record(store, Record(generation=3, start=StartRef(), reason="start_over", created_by="t"))
    assert "no checkpoint on the lineage; all that there are lie off it" in run("show", root)[2]


def test_what_starts_have_died_of_is_listed_with_the_ways_out(run: Any, root: str) -> None:
    """Step 60 is the newest. One start that may be running yet changes nothing; after three a load takes step 20, and `ls` says so."""
    store = open_store(root)
    images = make_images(arrays(), 2, step=60, generation=2)
    tiers.upload_images(store, images, generation=2, step=60, attempt="a1", writer=0, deadline_s=10)
    tiers.commit(store, generation=2, step=60, attempt="a1", writers=1, deadline_s=5, facts={})
    ref = list_manifests(store)[-1]
    note_resume(store, ref)
    assert "newest, 1 resume " in run("ls", root)[1]
    assert "resumed from it" not in run("ls", root)[1]
    note_resume(store, ref)
    note_resume(store, ref)
    out = run("ls", root)[1]
    assert "newest, 3 resumes" in out
    assert "loads take it" in next(line for line in out.splitlines() if line.split()[0] == "20")
    assert "3 starts resumed from it" in out.splitlines()[-1]
    assert "`load(state, 60)`" in out.splitlines()[-1]
    assert "`resume_tries=None`" in out.splitlines()[-1]
    rows = msgspec.json.decode(run("ls", root, "--json")[1])
    assert [(r["step"], r["resumes"], r["newest"], r["loads"]) for r in rows] == [
        (20, 0, False, True),
        (40, 0, False, False),
        (60, 3, True, False),
    ]


OF_WEIGHTS = (
    ["--prefix", "model."],
    ["--prefix", ""],
    ["--rename", "a=b"],
    ["--dtype", "float7"],
    ["--max-shard-size", "5GB"],
)


@pytest.mark.parametrize("option", OF_WEIGHTS, ids=" ".join)
def test_what_an_export_to_dcp_has_no_use_for_is_refused(
    run: Any, root: str, tmp_path: Path, option: list[str]
) -> None:
    code, _, err = run("export", root, str(tmp_path / "out"), "--to", "dcp", *option)
    assert code == ExitCode.USAGE
    assert f"export --to dcp takes no {option[0]}: it writes everything" in err
    assert not (tmp_path / "out").exists()


def test_an_import_from_dcp_takes_no_prefix(run: Any, root: str, tmp_path: Path) -> None:
    assert run("export", root, str(tmp_path / "out"), "--to", "dcp")[0] == 0
    code, _, err = run("import", str(tmp_path / "out"), str(tmp_path / "to"), "--prefix", "m.")
    assert code == ExitCode.USAGE
    assert "takes no --prefix" in err
    assert not (tmp_path / "to").exists()


def test_verify_of_a_broken_manifest_does_not_send_one_to_verify(run: Any, root: str) -> None:
    path = Path(root.removeprefix("file://")) / "gen-0001/step-0000000020/manifest.json"
    path.write_bytes(path.read_bytes()[:-9])
    code, out, _ = run("verify", root, "20")
    assert code == ExitCode.UNEXPECTED
    assert "manifest.json" in out
    assert "run `ckpt verify`" not in out


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("pytorch_model.bin", b"PK\x03\x04rest", "a zip with a pickle in it"),
        ("pytorch_model.bin", b"\x80\x02}q\x00X\x03", "a pickle"),
        ("model.safetensors", b"\x80\x04\x95\x10\x00\x00\x00\x00", "a pickle"),
    ],
)
def test_a_pickle_is_known_by_its_first_bytes_and_not_opened(
    run: Any, tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / name
    path.write_bytes(data)
    code, _, err = run("import", str(path), str(tmp_path / "to"))
    assert code == ExitCode.USAGE
    assert f"{path} is {said}" in err
    assert "it is not opened" in err


def test_of_a_pickle_the_way_that_keeps_the_optimizer_is_named(run: Any, tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(b"PK\x03\x04rest")
    err = run("import", str(tmp_path / "old.pt"), str(tmp_path / "to"))[2]
    for word in ("weights_only=True", "load_state_dict", "ckpt.save", "optimizer"):
        assert word in err


NO_SOURCE = {
    "text": b"this is no safetensors file at all",
    "short": b"abc",
    "empty": b"",
    "json": b'{"w": 1}',
}


@pytest.mark.parametrize("kind", NO_SOURCE)
@pytest.mark.parametrize("named", ["file", "folder"])
def test_what_is_no_source_ends_with_2_and_what_is_damaged_with_1(
    run: Any, root: str, tmp_path: Path, kind: str, named: str
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "model.safetensors"
    path.write_bytes(NO_SOURCE[kind])
    code, _, err = run("import", str(path if named == "file" else folder), str(tmp_path / "to"))
    assert code == ExitCode.USAGE
    assert f"{path} is {'an empty file' if kind == 'empty' else 'no safetensors file'}: name a" in err
    path.unlink()
    assert run("export", root, str(folder))[0] == 0
    path.write_bytes(path.read_bytes()[:-1])
    assert (
        run("import", str(path if named == "file" else folder), str(tmp_path / "to"))[0]
        == ExitCode.UNEXPECTED
    )


def test_a_folder_with_other_metadata_is_no_source(run: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))
    code, _, err = run("import", str(tmp_path / "in"), str(tmp_path / "to"))
    assert code == ExitCode.USAGE
    assert "is no DCP folder" in err


def test_a_root_of_ours_is_not_imported(run: Any, root: str, tmp_path: Path) -> None:
    code, _, err = run("import", root.removeprefix("file://"), str(tmp_path / "to"))
    assert code == ExitCode.USAGE
    assert "is a root of Surefoot's own checkpoints" in err


def test_no_permission_is_said(run: Any, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, prefix: str) -> list[object]:
        raise ObjectStoreDeniedError(f"cannot list {prefix}: give this user read permission")

    monkeypatch.setattr("surefoot.ckpt.objects.files.FileObjectStore.list", refuse)
    for words in (["ls"], ["show"], ["verify"], ["gc"], ["show", "--tensor", "x"]):
        code, out, err = run(words[0], root, *words[1:])
        assert (code, out) == (ExitCode.ENVIRONMENT, "")
        assert err.count("\n") == 1
        assert "read permission" in err


def test_ages() -> None:
    assert [ago(s) for s in (None, 3.2, 119, 130, 7300, 200_000)] == [
        "",
        "3 s",
        "119 s",
        "2 min",
        "2 h",
        "2 d",
    ]


def test_human() -> None:
    assert [human(n) for n in (0, 999, 1000, 9_400_000, 2 * 10**12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "9.4 MB",
        "2.0 TB",
    ]
