"""Export to safetensors files with an index, as Hugging Face writes and expects them. (torch only to change types)

::

    dest/model-00001-of-00002.safetensors      or model.safetensors, where one file is enough
         model-00002-of-00002.safetensors
         model.safetensors.index.json          {"metadata": {"total_size": …}, "weight_map": {name: file}}; written last

Names lose `prefix` (``model.``, where training scripts keep the model) and go through the rename rules. Of tied tensors one
name is written, which is what `safetensors.torch.load_model` and `transformers` expect: the live model ties the others again.
For an import they stand in the file's metadata (ckpt/tools/tiemeta.py).

Tensors are read piece by piece and written as they come: memory is a few chunks, whatever the size of the model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from surefoot.ckpt.errors import CkptUserError
from surefoot.ckpt.format.stformat import DTYPES, StTensor, encode_header
from surefoot.ckpt.manifest import Manifest, TensorMeta
from surefoot.ckpt.planning.plan import ITEMSIZES
from surefoot.ckpt.planning.ties import precedence
from surefoot.ckpt.progress import Progress, stepwise
from surefoot.ckpt.store import Root, open_store
from surefoot.ckpt.tools.boxreader import BoxReader, tensor_nbytes
from surefoot.ckpt.tools.inspect import find
from surefoot.ckpt.tools.tiemeta import about_export
from surefoot.ckpt.tools.words import local_folder

INDEX = "model.safetensors.index.json"
PREFIX = "model."
"""Where training scripts keep the model."""
SHARD_NBYTES = 5 * 10**9
"""Hugging Face's own limit for a file."""
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class ExportTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the export: `stored` in the checkpoint, `name` in the file."""

    name: str
    stored: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class ExportFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tensors: tuple[ExportTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class ExportPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an export writes."""

    step: int
    generation: int
    files: tuple[ExportFile, ...]
    ties: dict[str, str]
    """Names that are not written, to the one that is."""
    left_out: int
    """Tensors of the checkpoint that do not begin with the prefix (an optimizer's, for instance)."""

    def __repr__(self) -> str:
        tensors = sum(len(f.tensors) for f in self.files)
        return (
            f"ExportPlan(step={self.step}, generation={self.generation}, {tensors} tensors, {self.nbytes} bytes in {len(self.files)} files, "
            f"{self.left_out} left out)"
        )

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.files)


# ---------------------------------------------------------------- the plan (PURE)


def plan_export(
    manifest: Manifest,
    *,
    prefix: str = PREFIX,
    rename: Sequence[tuple[str, str]] = (),
    dtype: str | None = None,
    shard_nbytes: int = SHARD_NBYTES,
) -> ExportPlan:
    """What goes where.

    Args:
        prefix: only names that begin with it, without it.
        rename: (regular expression, replacement), applied one after the other to each name.
        dtype: change floating-point tensors to this type.

    Raises CkptUserError: no such names, two that become one, a type that safetensors has no word for.
    """
    if dtype is not None and dtype not in FLOATS:
        raise CkptUserError(f"cannot change weights to {dtype!r}; there are {', '.join(FLOATS)}")
    chosen, ties = _choose(manifest, prefix, _renaming(rename))
    tensors = [_export_tensor(name, stored, manifest.tensors[stored], dtype) for name, stored in chosen]
    return ExportPlan(
        step=manifest.step,
        generation=manifest.generation,
        files=tuple(_files(tensors, shard_nbytes)),
        ties=ties,
        left_out=len(manifest.tensors) - len(chosen),
    )


def _renaming(rules: Sequence[tuple[str, str]]) -> Callable[[str], str]:
    compiled: list[tuple[re.Pattern[str], str]] = []
    for pattern, replacement in rules:
        try:
            compiled.append((re.compile(pattern), replacement))
        except re.error as e:
            raise CkptUserError(f"{pattern!r} is no regular expression: {e}") from e

    def rename(name: str) -> str:
        for pattern, replacement in compiled:
            try:
                name = pattern.sub(replacement, name)
            except (re.error, IndexError) as e:
                raise CkptUserError(f"{replacement!r} is no replacement for {pattern.pattern!r}: {e}") from e
        return name

    return rename


def _choose(
    manifest: Manifest, prefix: str, rename: Callable[[str], str]
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """(exported name, stored name) of each stored tensor, and the ties."""
    names: dict[str, list[str]] = {}
    for name, stored in ({n: n for n in manifest.tensors} | manifest.aliases).items():
        if name.startswith(prefix):
            names.setdefault(stored, []).append(name)
    if not names:
        heads = sorted({n.partition(".")[0] + "." for n in manifest.tensors if "." in n})
        raise CkptUserError(
            f"no tensor of step {manifest.step} begins with {prefix!r}; the beginnings there are: {', '.join(heads) or 'none'}"
        )
    chosen: list[tuple[str, str]] = []
    ties: dict[str, str] = {}
    taken: dict[str, str] = {}
    for stored, mine in names.items():
        written = min(mine, key=lambda name: precedence(name.removeprefix(prefix)))
        for name in mine:
            out = rename(name.removeprefix(prefix))
            other = taken.setdefault(out, name)
            if not out or other != name:
                rest = f", and so would {other}" if out else ""
                raise CkptUserError(
                    f"{name} would be exported as {out!r}{rest}: mend the prefix or the rename rules"
                )
            if name != written:
                ties[out] = rename(written.removeprefix(prefix))
        chosen.append((rename(written.removeprefix(prefix)), stored))
    return sorted(chosen), dict(sorted(ties.items()))


def _export_tensor(name: str, stored: str, meta: TensorMeta, dtype: str | None) -> ExportTensor:
    to = dtype if dtype is not None and meta.dtype in FLOATS else meta.dtype
    if to not in DTYPES:
        raise CkptUserError(
            f"{name} is of {meta.dtype}, for which safetensors has no word: leave it out, or save it as another"
        )
    nbytes = tensor_nbytes(meta) // ITEMSIZES[meta.dtype] * ITEMSIZES[to]
    return ExportTensor(name=name, stored=stored, dtype=to, shape=meta.shape, nbytes=nbytes)


def _files(tensors: Iterable[ExportTensor], shard_nbytes: int) -> Iterator[ExportFile]:
    """In order of names, a new file where the next tensor would not fit; a larger one has a file of its own."""
    shards: list[list[ExportTensor]] = [[]]
    for t in tensors:
        if shards[-1] and sum(x.nbytes for x in shards[-1]) + t.nbytes > shard_nbytes:
            shards.append([])
        shards[-1].append(t)
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05d}-of-{len(shards):05d}" if len(shards) > 1 else "model"
        # The largest element types first: every tensor is aligned to its own, without holes.
        shard.sort(key=lambda t: (-ITEMSIZES[t.dtype], t.name))
        yield ExportFile(name=f"{name}.safetensors", tensors=tuple(shard))


# ---------------------------------------------------------------- writing


def export(
    root: Root,
    step: int | None,
    dest: str | os.PathLike[str],
    *,
    generation: int | None = None,
    prefix: str = PREFIX,
    rename: Sequence[tuple[str, str]] = (),
    dtype: str | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    progress: Progress | None = None,
) -> ExportPlan:
    """Write a committed step's weights (None: the newest step) as safetensors files with an index into the folder `dest`.

    Every block is verified as it is read. Returns what was written. See `plan_export` for the options.

    Args:
        generation: look among what this one committed, on the lineage or not.

    Raises: StepMissingError, CkptUserError (see `plan_export`; `dest` holds an export already), DamagedError, OSError,
        ObjectStore…Error.
    """
    store = open_store(root)
    manifest, _ = find(store, step, generation)
    plan = plan_export(manifest, prefix=prefix, rename=rename, dtype=dtype, shard_nbytes=shard_nbytes)
    write_export(BoxReader(store, manifest), plan, local_folder(dest), progress)
    return plan


def require_empty(folder: Path, patterns: Sequence[str]) -> None:
    """Raises CkptUserError where `folder` holds files of these patterns, or is a file."""
    if folder.exists() and not folder.is_dir():
        raise CkptUserError(f"{folder} is a file: name a folder to write to")
    if held := sorted(p.name for pattern in patterns for p in folder.glob(pattern)):
        raise CkptUserError(f"{folder} holds {held[0]} already: choose another folder, or remove it first")


def write_export(reader: BoxReader, plan: ExportPlan, folder: Path, progress: Progress | None = None) -> None:
    """Raises as `export`. After a failure the folder holds no index, and may hold finished files."""
    require_empty(folder, ("*.safetensors", INDEX))
    folder.mkdir(parents=True, exist_ok=True)
    tell = stepwise(progress, plan.nbytes)
    for file in plan.files:
        _write_file(reader, plan, file, folder / file.name, tell)
    weights = {t.name: f.name for f in plan.files for t in f.tensors}
    index = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weights.items()))}
    with _finished(folder / INDEX) as at:
        at.write_text(json.dumps(index, indent=2) + "\n")


def _write_file(
    reader: BoxReader, plan: ExportPlan, file: ExportFile, path: Path, tell: Callable[[int], None]
) -> None:
    with _finished(path) as at, open(at, "wb") as f:
        f.write(encode_header(_placed(file.tensors), about_export(plan.ties)))
        for t in file.tensors:
            stored = reader.meta(t.stored).dtype
            for chunk in reader.chunks(t.stored):
                data = chunk if t.dtype == stored else _cast(chunk, stored, t.dtype)
                f.write(data.data)
                tell(len(data))
        f.flush()
        os.fsync(f.fileno())


def _placed(tensors: Iterable[ExportTensor]) -> Iterator[StTensor]:
    at = 0
    for t in tensors:
        yield StTensor(name=t.name, dtype=t.dtype, shape=t.shape, begin=at, end=at + t.nbytes)
        at += t.nbytes


def _cast(raw: np.ndarray, dtype: str, to: str) -> np.ndarray:
    import torch

    t = torch.from_numpy(raw).view(getattr(torch, dtype)).to(getattr(torch, to))
    return t.view(torch.uint8).numpy()


@contextmanager
def _finished(path: Path) -> Iterator[Path]:
    """A temporary beside `path`, which takes its name if all goes well, and goes otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
