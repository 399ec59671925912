"""A DCP folder of any layout becomes something to import. (torch)"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import CkptUserError, DamagedError
from surefoot.ckpt.format.values import tensor_names
from surefoot.ckpt.live.leaves import memory_of
from surefoot.ckpt.manifest import TensorMeta
from surefoot.ckpt.planning.plan import ITEMSIZES
from surefoot.ckpt.state import dtype_name
from surefoot.ckpt.tools.boxreader import tensor_nbytes
from surefoot.ckpt.tools.dcp import OURS
from surefoot.ckpt.tools.dcp.folder import DcpFolder, read_metadata
from surefoot.ckpt.tools.dcp.names import KeyPath, Names, joined
from surefoot.ckpt.tools.importing import Foreign, LeftOut, require_names
from surefoot.ckpt.tools.words import local_folder

_Tensors = dict[KeyPath, tuple[str, dcp_metadata.TensorStorageMetadata]]


def open_dcp(source: str | os.PathLike[str]) -> Foreign:
    """A DCP folder of any layout: every chunk becomes a piece, nothing is assembled. Its step is the entry ``step``, where that is a
    whole number.

    Raises: CkptUserError (no DCP folder; nothing of it can be taken over; a name that no save would store), UntrustedPickleError, DamagedError, StateError (a
    value of a type that cannot be stored).
    """
    path = local_folder(source)
    metadata = read_metadata(path)
    folder = DcpFolder(path, metadata)
    tensors, values = _sorted_out(metadata, folder, path)
    table = values.pop((OURS,), None)
    ours = _our_table(table, path) if isinstance(table, str) else None
    names = Names(tensors, values, ours["values"] if ours else None)
    left_out = tuple(_left_out(names, tensors))
    if ours:
        aliases, encoded, cursor, step = ours["aliases"], ours["values"], ours["cursor"], ours["step"]
    else:
        aliases, encoded, cursor = dict[str, str](), names.encoded_values(), None
        step = _step_of(tensors, values, folder)
    taken = {p: kept for p, kept in tensors.items() if names.takes(p) and names.name(p) not in aliases}
    if left_out and not taken:
        first = left_out[0]
        raise CkptUserError(
            f"{path}: nothing of it can be imported: of {first.name}, {first.why}; {first.how}"
        )
    named = [(names.name(p), f"{path}, {fqn}") for p, (fqn, _) in taken.items()]
    named += [(n, path) for n, value in encoded.items() if tensor_names(value) != [n]]
    require_names([*named, *((n, path) for n in aliases)], own=ours is not None)
    keys = {names.name(p): fqn for p, (fqn, _) in taken.items()}
    stored = {names.name(p): m for p, (_, m) in taken.items()}
    metas = {n: _meta(m) for n, m in stored.items()}
    if odd := [n for n, m in metas.items() if m.dtype not in ITEMSIZES]:
        raise CkptUserError(f"{path}: {odd[0]} is of {metas[odd[0]].dtype}, which cannot be stored")
    chunks = {
        (name, Box(tuple(c.offsets), tuple(c.sizes))): tuple(c.offsets)
        for name, m in stored.items()
        for c in m.chunks
        if 0 not in c.sizes
    }
    return Foreign(
        label=str(path),
        tensors=metas,
        pieces=list(chunks),
        read=_reader(folder, path, keys, metas, chunks),
        aliases=aliases,
        values=encoded,
        cursor=cursor,
        step=step,
        step_entry="step" if step is not None and not ours else None,
        left_out=left_out,
    )


def _reader(
    folder: DcpFolder,
    path: Path,
    keys: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    chunks: Mapping[tuple[str, Box], tuple[int, ...]],
) -> Callable[[str, Box], list[memoryview]]:
    def read(name: str, box: Box) -> list[memoryview]:
        t = folder.load(keys[name], chunks[name, box])
        fits = isinstance(t, torch.Tensor) and tuple(t.shape) == box.extent
        if not fits or dtype_name(t.dtype) != metas[name].dtype:
            raise DamagedError(f"{path}: {keys[name]} {box} is not what the metadata says", key=keys[name])
        return [memory_of(t.detach().contiguous()).numpy().data]

    return read


def _meta(m: dcp_metadata.TensorStorageMetadata) -> TensorMeta:
    return TensorMeta(dtype=dtype_name(m.properties.dtype), shape=tuple(m.size))


def _left_out(names: Names, tensors: _Tensors) -> Iterator[LeftOut]:
    for o, (why, how) in names.left_out.items():
        metas = [_meta(m) for p, (_, m) in tensors.items() if p[: len(o)] == o]
        nbytes = sum(tensor_nbytes(m) for m in metas if m.dtype in ITEMSIZES)
        yield LeftOut(name=joined(o), tensors=len(metas), nbytes=nbytes, why=why, how=how)


def _step_of(tensors: _Tensors, values: Mapping[KeyPath, Any], folder: DcpFolder) -> int | None:
    """What the state itself says under ``step``: a number, or a tensor of one."""
    step = values.get(("step",))
    if ("step",) in tensors:
        fqn, m = tensors["step",]
        whole = not (m.properties.dtype.is_floating_point or m.properties.dtype.is_complex)
        if whole and not tuple(m.size) and len(m.chunks) == 1:
            found = folder.load(fqn, tuple(m.chunks[0].offsets))
            step = found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else None
    return step if type(step) is int and step >= 0 else None


def _sorted_out(
    metadata: dcp_metadata.Metadata, folder: DcpFolder, path: Path
) -> tuple[_Tensors, dict[KeyPath, Any]]:
    """Tensors by path (with their key), and plain values by path."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    tensors: _Tensors = {}
    values: dict[KeyPath, Any] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        at = paths.get(fqn, (fqn,))
        if not isinstance(at, tuple) or not all(isinstance(k, str | int) for k in at):
            raise DamagedError(f"{path}: {fqn} has the path {at!r}", key=fqn)
        if isinstance(entry, dcp_metadata.TensorStorageMetadata):
            tensors[at] = fqn, entry
        else:
            values[at] = folder.load(fqn, None)
    return tensors, values


def _our_table(text: str, path: Path) -> dict[str, Any]:
    try:
        table = json.loads(text)
        if not (isinstance(table["aliases"], dict) and isinstance(table["values"], dict)):
            raise TypeError("tables are missing")
        return {"cursor": table.get("cursor"), "step": table.get("step"), **table}
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise DamagedError(f"{path}: its table {OURS!r} is damaged: {e}", key=OURS) from e
