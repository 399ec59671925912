"""The commands of ``surefoot ckpt``. They parse words, call one thing and print what it returns.

Results go to stdout (``--json``: the very value that is drawn otherwise), progress bars to stderr where that is a terminal.

Exit codes: 0 done, sound, or equal; 1 what was asked about is not as it should be (`verify`: damaged; `diff`: different; a
damaged manifest, record or source; `import`: something was left out); 2 the command line, the step or the root is wrong; 5
the object store cannot be reached or denies access; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from surefoot.ckpt.errors import CkptUserError
from surefoot.ckpt.store import ObjectStore, open_store
from surefoot.ckpt.tools import tables
from surefoot.ckpt.tools.words import local, open_root, refuse_options, rename_rule, size_of, which_step
from surefoot.command import Commands, complain
from surefoot.exitcodes import ExitCode

if TYPE_CHECKING:  # what a command needs is imported when it runs
    from surefoot.ckpt.tools.importing import Foreign

NAME = "surefoot ckpt"

app = typer.Typer(
    name=NAME,
    cls=Commands,
    help="Checkpoints of a root.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Root = Annotated[
    str,
    typer.Argument(metavar="URL", help="file:///path, a path, or s3://bucket/prefix.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StepWord = Annotated[
    int | None,
    typer.Argument(metavar="[STEP]", min=0, help="Default: the newest on the lineage.", show_default=False),
]
StepOption = Annotated[
    int | None,
    typer.Option("--step", min=0, help="Which step. Default: the newest on the lineage.", show_default=False),
]
StepWordAsOption = Annotated[
    int | None,
    typer.Option("--step", min=0, help="Another way to give [STEP].", show_default=False),
]
Generation = Annotated[
    int | None,
    typer.Option(
        min=1, help="Look among what this generation committed, on the lineage or not.", show_default=False
    ),
]


# ---------------------------------------------------------------- looking


@app.command("ls")
def ls_command(url: Root, json: Json = False) -> None:
    """List the checkpoints, those off the lineage as well."""
    from surefoot.ckpt.tools.inspect import list_checkpoints

    store = open_root(url)
    rows = list_checkpoints(store)
    if json:
        _print_json(rows)
    elif rows:
        tables.print_rows(rows)
    else:
        tables.say(f"no checkpoints yet: a job has begun under {store.root}, and has not committed anything")


@app.command("show")
def show_command(
    url: Root,
    step: StepWord = None,
    step_option: StepWordAsOption = None,
    generation: Generation = None,
    tensor: Annotated[
        str | None, typer.Option(metavar="NAME", help="Statistics of this tensor.", show_default=False)
    ] = None,
    reshard: Annotated[
        int | None,
        typer.Option(metavar="W", min=1, help="What each of W ranks would read (FSDP).", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Show one checkpoint: tensors, values, cursor; or one of its tensors; or what a load by other ranks would read."""
    from surefoot.ckpt.tools.inspect import show

    store, step = open_root(url), which_step(step, step_option)
    if tensor is not None and reshard is not None:
        raise CkptUserError("--tensor and --reshard are two questions: ask one at a time")
    if tensor is not None:
        _show_tensor(store, step, generation, tensor, json=json)
    elif reshard is not None:
        _show_reshard(store, step, generation, reshard, json=json)
    else:
        _answer(show(store, step, generation), tables.print_shown, json=json)


def _show_tensor(
    store: ObjectStore, step: int | None, generation: int | None, name: str, *, json: bool
) -> None:
    from surefoot.ckpt.tools.boxreader import BoxReader
    from surefoot.ckpt.tools.inspect import find
    from surefoot.ckpt.tools.tensorstats import tensor_stats

    manifest, _ = find(store, step, generation)
    with tables.progress_bar("reading") as progress:
        stats = tensor_stats(BoxReader(store, manifest), name, progress)
    _answer(stats, tables.print_stats, json=json)


def _show_reshard(
    store: ObjectStore, step: int | None, generation: int | None, ranks: int, *, json: bool
) -> None:
    from surefoot.ckpt.planning.resharding import plan_reshard
    from surefoot.ckpt.tools.inspect import find

    manifest, _ = find(store, step, generation)
    _answer(plan_reshard(manifest, ranks), tables.print_reshard, json=json)


@app.command("verify")
def verify_command(
    url: Root,
    step: StepWord = None,
    step_option: StepWordAsOption = None,
    generation: Generation = None,
    json: Json = False,
) -> None:
    """Read one checkpoint whole and compare every byte with its checksum. Exit code 1 if it is not sound."""
    from surefoot.ckpt.tools.verifying import verify_step

    with tables.progress_bar("verifying") as progress:
        report = verify_step(open_root(url), which_step(step, step_option), generation, progress=progress)
    if json:
        _print_json({**msgspec.to_builtins(report), "ok": report.ok})
    else:
        tables.print_report(report)
    if not report.ok:
        raise typer.Exit(ExitCode.UNEXPECTED)


@app.command("diff")
def diff_command(
    url: Root,
    step_a: Annotated[int, typer.Argument(metavar="STEP_A", min=0, show_default=False)],
    step_b: Annotated[int, typer.Argument(metavar="STEP_B", min=0, show_default=False)],
    other: Annotated[
        str | None, typer.Option("--with", metavar="URL", help="STEP_B is of this root.", show_default=False)
    ] = None,
    generation_a: Annotated[
        int | None,
        typer.Option(min=1, help="Look for STEP_A among what this generation committed.", show_default=False),
    ] = None,
    generation_b: Annotated[
        int | None,
        typer.Option(min=1, help="The same for STEP_B.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Compare two checkpoints: names, shapes, every bit of every tensor, values, cursor. Exit code 1 if they differ."""
    from surefoot.ckpt.tools.boxreader import BoxReader
    from surefoot.ckpt.tools.comparing import compare
    from surefoot.ckpt.tools.inspect import find

    store_a = open_root(url)
    store_b = store_a if other is None else open_root(other)
    a = BoxReader(store_a, find(store_a, step_a, generation_a, option="--generation-a")[0])
    b = BoxReader(store_b, find(store_b, step_b, generation_b, option="--generation-b")[0])
    with tables.progress_bar("comparing") as progress:
        diff = compare(a, b, progress)
    if json:
        _print_json({**msgspec.to_builtins(diff), "same": diff.same, "same_tensors": diff.same_tensors})
    else:
        tables.print_diff(diff)
    if not diff.same:
        raise typer.Exit(ExitCode.UNEXPECTED)


# ---------------------------------------------------------------- in and out


@app.command("export")
def export_command(
    url: Root,
    dest: Annotated[str, typer.Argument(metavar="FOLDER", help="Where to write.", show_default=False)],
    step: StepOption = None,
    generation: Generation = None,
    to: Annotated[str, typer.Option("--to", metavar="safetensors|dcp", help="The format.")] = "safetensors",
    prefix: Annotated[
        str | None,
        typer.Option(
            help="Only names that begin with it, without it. Default: 'model.'.", show_default=False
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=NEW",
            help="Change names, e.g. '^blocks[.]=layers.'; may be repeated.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Change floating-point tensors to this type.", show_default=False)
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Of one file. Default: 5GB.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Write a step's weights as safetensors with a Hugging Face index, or all of it as a torch DCP folder (--to dcp: everything there is,
    as it is; --prefix, --rename, --dtype and --max-shard-size are refused)."""
    from surefoot.ckpt.tools import exporting

    open_root(url)
    of_weights = {"--prefix": prefix, "--rename": rename or None, "--dtype": dtype}
    of_weights["--max-shard-size"] = max_shard_size
    if to not in ("safetensors", "dcp"):
        raise CkptUserError(f"--to {to}: there are safetensors and dcp")
    if to == "dcp":
        refuse_options("export --to dcp", "it writes everything there is, as it is", of_weights)
        _export_dcp(url, step, generation, dest, json=json)
        return
    options: dict[str, Any] = {"prefix": exporting.PREFIX if prefix is None else prefix, "dtype": dtype}
    options["rename"] = [rename_rule(r) for r in rename or ()]
    if max_shard_size is not None:
        options["shard_nbytes"] = size_of(max_shard_size)
    with local("write to", dest), tables.progress_bar("exporting") as progress:
        plan = exporting.export(url, step, dest, generation=generation, progress=progress, **options)
    _answer(plan, lambda plan: tables.print_export(plan, dest), json=json)


def _export_dcp(url: str, step: int | None, generation: int | None, dest: str, *, json: bool) -> None:
    from surefoot.ckpt.tools.dcp.exporting import export_dcp

    with local("write to", dest), tables.progress_bar("exporting") as progress:
        m = export_dcp(url, step, dest, generation=generation, progress=progress)
    done = {"step": m.step, "generation": m.generation, "tensors": len(m.tensors), "nbytes": m.nbytes}
    words = f"step {m.step} of generation {m.generation} is a DCP folder in {dest}: {len(m.tensors)} tensors, {tables.human(m.nbytes)}"
    _answer(done, lambda _: tables.say(words), json=json)


@app.command("import")
def import_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A safetensors file, a folder of them (Hugging Face), or a torch DCP folder.",
            show_default=False,
        ),
    ],
    url: Root,
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="As which step. Default: the one that the source names (DCP: its entry `step`), or 0.",
            show_default=False,
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="Put before safetensors names. Default: 'model.'. Of a DCP folder all names stay: it is refused there.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Commit weights or a whole state from elsewhere as a checkpoint. Pickles are not run: see docs/checkpoint.md. Exit code 1 if
    a part had to be left out."""
    from surefoot.ckpt.tools import importing

    store = open_store(url)
    with local("read", source):
        foreign = _open_foreign(source, prefix)
    with tables.progress_bar("importing") as progress:
        m = importing.write_foreign(store, foreign, step=step, progress=progress)
    done = {
        "step": m.step,
        "generation": m.generation,
        "tensors": len(m.tensors),
        "nbytes": m.nbytes,
        "left_out": foreign.left_out,
    }
    words = f"step {m.step} of generation {m.generation} in {store.root}: {len(m.tensors)} tensors, {tables.human(m.nbytes)}"
    _answer(done, lambda _: tables.say(words), json=json)
    for part in foreign.left_out:
        size = f"{tables.counted(part.tensors, 'tensor')}, {tables.human(part.nbytes)}"
        complain(NAME, f"NOT imported: {part.name} ({size}): {part.why}. To keep it, {part.how}")
    if foreign.left_out:
        raise typer.Exit(ExitCode.UNEXPECTED)


def _open_foreign(source: str, prefix: str | None) -> Foreign:
    from surefoot.ckpt.tools import importing

    if importing.detect(source) == "dcp":
        from surefoot.ckpt.tools.dcp.importing import open_dcp

        refuse_options("import of a DCP folder", "its names say where they belong", {"--prefix": prefix})
        complain(
            NAME,
            f"note: {source} is a DCP folder, whose metadata is a pickle: it is read with an unpickler that admits DCP's own classes only",
        )
        return open_dcp(source)
    from surefoot.ckpt.tools.stfiles import open_safetensors

    return open_safetensors(source) if prefix is None else open_safetensors(source, prefix=prefix)


# ---------------------------------------------------------------- tidying


@app.command("keep")
def keep_command(
    url: Root,
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, show_default=False)],
    undo: Annotated[bool, typer.Option("--undo", help="Leave it to the rules again.")] = False,
    generation: Generation = None,
    json: Json = False,
) -> None:
    """Exempt a step from retention and gc."""
    from surefoot.ckpt.format.flags import lower_flag, raise_flag
    from surefoot.ckpt.tools.inspect import find_ref

    store = open_root(url)
    ref, _ = find_ref(store, step, generation)
    if undo:
        lower_flag(store, ref, "kept")
    else:
        raise_flag(store, ref, "kept", "ckpt keep")
    done = {"step": step, "generation": ref.generation, "kept": not undo}
    words = f"step {step} of generation {ref.generation} is {'left to the rules' if undo else 'kept'}"
    _answer(done, lambda _: tables.say(words), json=json)


@app.command("gc")
def gc_command(
    url: Root,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it nothing is.")] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            min=2, help="Delete old checkpoints too, but the newest N.", metavar="N", show_default=False
        ),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, help="With --keep: and every K steps.", metavar="K", show_default=False),
    ] = None,
    keep_hours: Annotated[
        float | None,
        typer.Option(help="With --keep: and one every T hours.", metavar="T", show_default=False),
    ] = None,
    off_lineage: Annotated[
        bool, typer.Option("--off-lineage", help="Delete checkpoints that do not count, too.")
    ] = False,
    abandoned: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Delete too what starts left that died and were followed by another, where it is older than so many hours: more "
            "than a save can take.",
            metavar="HOURS",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say what could be deleted: attempts that came to nothing, leftovers of generations that are over, unfinished uploads."""
    from surefoot.ckpt.keeping.cleaning import carry_out, plan_gc
    from surefoot.ckpt.keeping.retention import Retention

    if keep is None and (keep_every is not None or keep_hours is not None):
        raise CkptUserError(
            "--keep-every and --keep-hours say what to keep besides the newest N: give --keep N too"
        )
    rules = None if keep is None else Retention(newest=keep, every_steps=keep_every, every_hours=keep_hours)
    store = open_root(url)
    abandoned_s = None if abandoned is None else abandoned * 3600
    plan = plan_gc(store, rules, off_lineage=off_lineage, abandoned_s=abandoned_s)
    if yes:
        with tables.progress_bar("deleting", sizes=False) as progress:
            carry_out(store, plan, progress)
    if json:
        _print_json({**msgspec.to_builtins(plan), "nbytes": plan.nbytes, "deleted": yes})
    else:
        tables.print_gc(plan, done=yes)


# ---------------------------------------------------------------- answers


def _answer(value: Any, draw: Any, *, json: bool) -> None:
    if json:
        _print_json(value)
    else:
        draw(value)


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")
