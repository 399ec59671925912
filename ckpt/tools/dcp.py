"""Torch DCP folders (torch.distributed.checkpoint, `FileSystemWriter`): import and export. (torch)

**Security.** DCP's ``.metadata`` is a pickle, and so is every item (torch.save). Nothing of ours is a pickle; these are theirs.
The metadata is read by an unpickler that admits DCP's own metadata classes and torch's sizes and types, nothing else;
items by ``torch.load(weights_only=True)``, which admits tensors and plain values. A folder that asks for anything else is
refused, and what it asked for is named; no code of it runs.

**Names.** DCP keeps the state by path. A plain tensor ``{"model": {"net.weight": t}}`` is ``model.net.weight`` on both sides.
An optimizer, ``{"optim": {"state": {fqn: {key: t}}, "param_groups": [{"params": [fqn], …}]}}`` as `get_state_dict` gives it,
becomes what Surefoot stores of an optimizer, and the other way round: there a parameter is called as in its model
(``net.weight``), here as in the state (``model.net.weight``). An export also carries Surefoot's own table of values
(as JSON text, under `OURS`), so that an export that is imported again is the same to the last bit.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import CkptUserError, DamagedError
from surefoot.ckpt.format.values import decode_value, encode_value, tensor_names, tensor_ref
from surefoot.ckpt.live.leaves import memory_of
from surefoot.ckpt.manifest import Manifest, TensorMeta
from surefoot.ckpt.planning.plan import ITEMSIZES, nbytes_of
from surefoot.ckpt.progress import Progress
from surefoot.ckpt.state import dtype_name, dtype_of
from surefoot.ckpt.store import Root, open_store
from surefoot.ckpt.tools.boxreader import BoxReader
from surefoot.ckpt.tools.exporting import local_folder, require_empty
from surefoot.ckpt.tools.importing import Foreign
from surefoot.ckpt.tools.inspect import find

METADATA = ".metadata"
OURS = "surefoot"
"""Key of the table that an export carries: JSON of step, cursor, aliases and values."""

Path_ = tuple[str | int, ...]


class UntrustedPickleError(CkptUserError):
    """A DCP folder asks for more than metadata and plain values; reading it could run code. Nothing was run."""


# ---------------------------------------------------------------- reading what is theirs

_ADMITTED = {
    **dict.fromkeys(
        (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.metadata",
    ),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",
    "OrderedDict": "collections",
    "PosixPath": "pathlib",
}
"""All that DCP's own metadata is made of."""


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if _ADMITTED.get(name) == module:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise UntrustedPickleError(
            f"{self._where} asks for {module}.{name}, which is no part of DCP's metadata: reading it could run code, so it is "
            f"refused, and nothing was run"
        )


def read_metadata(folder: Path) -> dcp_metadata.Metadata:
    """DCP's table of contents, through the restricted unpickler.

    Raises: CkptUserError (no DCP folder), UntrustedPickleError, DamagedError.
    """
    path = folder / METADATA
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as e:
        raise CkptUserError(f"{folder} is no DCP folder: it has no {METADATA}") from e
    try:
        found = _MetadataUnpickler(data, path).load()
    except UntrustedPickleError:
        raise
    except Exception as e:  # a pickle can fail in any way
        raise DamagedError(f"{path} is damaged, or no DCP metadata: {e}", key=METADATA) from e
    if not isinstance(found, dcp_metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise DamagedError(f"{path} holds a {type(found).__name__}, no DCP metadata", key=METADATA)
    return found


class _Folder:
    """Items of a DCP folder."""

    def __init__(self, folder: Path, metadata: dcp_metadata.Metadata) -> None:
        self._folder = folder
        self._storage = cast("dict[Any, Any]", metadata.storage_data)

    def load(self, fqn: str, offset: tuple[int, ...] | None) -> Any:
        """One item. Raises: DamagedError, UntrustedPickleError."""
        info = self._storage.get(dcp_metadata.MetadataIndex(fqn, offset))
        if not isinstance(info, _StorageInfo):
            raise DamagedError(f"{self._folder}: nothing says where {fqn} {offset or ''} lies", key=fqn)
        if info.transform_descriptors:
            raise CkptUserError(
                f"{self._folder}: {fqn} went through {info.transform_descriptors}: not supported"
            )
        name = info.relative_path
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise DamagedError(f"{self._folder}: {fqn} lies in {name!r}, outside of the folder", key=fqn)
        try:
            with open(self._folder / name, "rb") as f:
                if not 0 <= info.offset <= info.offset + info.length <= os.fstat(f.fileno()).st_size:
                    raise DamagedError(f"{self._folder / name} ends before {fqn} does", key=fqn)
                f.seek(info.offset)
                data = f.read(info.length)
        except FileNotFoundError as e:
            raise DamagedError(f"{self._folder / name} is missing, and {fqn} lies in it", key=fqn) from e
        return self._unpickled(fqn, data)

    def _unpickled(self, fqn: str, data: bytes) -> Any:
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as e:
            raise UntrustedPickleError(
                f"{self._folder}: {fqn} is no plain value, or damaged ({str(e).splitlines()[0][:200]}): refused, and nothing was run"
            ) from e
        except Exception as e:  # whatever a damaged archive does
            raise DamagedError(f"{self._folder}: {fqn} cannot be read: {e}", key=fqn) from e


# ---------------------------------------------------------------- import


def open_dcp(source: str | os.PathLike[str]) -> Foreign:
    """A DCP folder of any layout: every chunk becomes a piece, nothing is assembled.

    Raises: CkptUserError, UntrustedPickleError, DamagedError, StateError (a value of a type that cannot be stored).
    """
    path = local_folder(source)
    metadata = read_metadata(path)
    folder = _Folder(path, metadata)
    tensors, values = _sorted_out(metadata, folder, path)
    table = values.pop((OURS,), None)
    ours = _our_table(table, path) if isinstance(table, str) else None
    names = _Names(tensors, values, ours["values"] if ours else ())
    if ours:
        aliases, encoded, cursor, step = ours["aliases"], ours["values"], ours["cursor"], ours["step"]
    else:
        aliases, encoded, cursor, step = dict[str, str](), names.encoded_values(), None, None
    keys = {names.name(p): fqn for p, (fqn, _) in tensors.items() if names.name(p) not in aliases}
    stored = {names.name(p): m for p, (_, m) in tensors.items() if names.name(p) in keys}
    chunks = {
        (name, Box(tuple(c.offsets), tuple(c.sizes))): tuple(c.offsets)
        for name, m in stored.items()
        for c in m.chunks
        if 0 not in c.sizes
    }

    def read(name: str, box: Box) -> memoryview:
        t = folder.load(keys[name], chunks[name, box])
        if (
            not isinstance(t, torch.Tensor)
            or tuple(t.shape) != box.extent
            or t.dtype != stored[name].properties.dtype
        ):
            raise DamagedError(f"{path}: {keys[name]} {box} is not what the metadata says", key=keys[name])
        return memory_of(t.detach().contiguous()).numpy().data

    metas = {
        n: TensorMeta(dtype=dtype_name(m.properties.dtype), shape=tuple(m.size)) for n, m in stored.items()
    }
    if odd := [n for n, m in metas.items() if m.dtype not in ITEMSIZES]:
        raise CkptUserError(f"{path}: {odd[0]} is of {metas[odd[0]].dtype}, which cannot be stored")
    return Foreign(
        label=str(path),
        tensors=metas,
        pieces=list(chunks),
        read=read,
        aliases=aliases,
        values=encoded,
        cursor=cursor,
        step=step,
    )


_Tensors = dict[Path_, tuple[str, dcp_metadata.TensorStorageMetadata]]


def _sorted_out(
    metadata: dcp_metadata.Metadata, folder: _Folder, path: Path
) -> tuple[_Tensors, dict[Path_, Any]]:
    """Tensors by path (with their key), and plain values by path."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    tensors: _Tensors = {}
    values: dict[Path_, Any] = {}
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


class _Names:
    """From paths to names, and the values as Surefoot stores them."""

    def __init__(
        self, tensors: Mapping[Path_, Any], values: Mapping[Path_, Any], known: Collection[str]
    ) -> None:
        """`known`: names of values, where an export of ours tells them."""
        self._tensors, self._values = tensors, values
        everything = (*tensors, *values)
        self._optimizers = {
            p[:i]
            for p in everything
            for i, k in enumerate(p[:-1])
            if k == "param_groups" and type(p[i + 1]) is int
        }

        self._owners = {o: self._owners_of(o, known) for o in self._optimizers}

    def _owners_of(self, o: Path_, known: Collection[str]) -> str:
        """What stands before a parameter's name in its model, to make it its name in the state: ``model.``, or nothing.

        It is not written down there, so it is the entry of the state that has a tensor for each of them.
        """
        mine = [p[len(o) :] for p in (*self._tensors, *self._values) if p[: len(o)] == o]
        fqns = {str(p[1]) for p in mine if p[0] == "state" and len(p) > 1}
        listed = [self._values.get((*o, *p)) for p in mine if p[0] == "param_groups" and p[-1] == "params"]
        fqns |= {str(f) for names in listed if isinstance(names, list) for f in cast("list[Any]", names)}
        names = {_joined(p) for p in self._tensors if p[: len(o)] != o}
        tops = sorted({n.partition(".")[0] for n in names}, key=lambda top: (top != "model", top))
        fits = [f"{top}." for top in tops if fqns and all(f"{top}.{f}" in names for f in fqns)]
        prefix = _joined((*o, "params", ""))
        told = [t for t in fits if any(prefix + t + f in known for f in fqns)]
        return (told or ([] if fqns <= names else fits) or [""])[0]

    def name(self, path: Path_) -> str:
        for o, owner in self._owners.items():
            if path[: len(o)] == o and path[len(o) : len(o) + 1] == ("state",):
                fqn, *rest = path[len(o) + 1 :]
                return _joined((*o, "params", f"{owner}{fqn}", *rest))
        return _joined(path)

    def encoded_values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for o in sorted(self._optimizers):
            found |= self._optimizer(o)
        rest = [p for p in self._values if not any(p[: len(o)] == o for o in self._optimizers)]
        with_tensors = {p[0] for p in self._tensors}
        for top in dict.fromkeys(p[0] for p in rest):
            mine = [p for p in rest if p[0] == top]
            if top in with_tensors:
                found |= {_joined(p): encode_value(self._values[p], _joined(p)) for p in mine}
            else:
                # What has no tensors in it was probably given by one state_dict(): one value.
                nested = _nested({p[1:]: self._values[p] for p in mine})
                found[str(top)] = encode_value(nested, str(top))
        return found

    def _optimizer(self, o: Path_) -> dict[str, Any]:
        leaves = {p[len(o) :]: self._values[p] for p in self._values if p[: len(o)] == o}
        leaves |= {p[len(o) :]: _TensorAt(self.name(p)) for p in self._tensors if p[: len(o)] == o}
        tree = _nested(leaves)
        state, groups = tree.get("state", {}), tree["param_groups"]
        found: dict[str, Any] = {}
        for number, group in enumerate(groups):
            for fqn in group.pop("params", ()):
                name = _joined((*o, "params", f"{self._owners[o]}{fqn}"))
                known = {"group": number, "state": state.get(fqn, {})}
                found[name] = encode_value(known, name, _tensor_leaf)
        name = _joined((*o, "param_groups"))
        found[name] = encode_value(groups, name, _tensor_leaf)
        return found


class _TensorAt:
    """Stands for a tensor inside a value."""

    def __init__(self, name: str) -> None:
        self.name = name


def _tensor_leaf(path: str, value: Any) -> Any:
    return tensor_ref(value.name) if isinstance(value, _TensorAt) else NotImplemented


def _joined(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def _nested(leaves: Mapping[Path_, Any]) -> Any:
    """Mappings and lists out of paths: an integer is a place in a list."""
    if () in leaves:
        return leaves[()]
    heads = dict.fromkeys(p[0] for p in leaves)
    inner = {h: _nested({p[1:]: v for p, v in leaves.items() if p[0] == h}) for h in heads}
    if heads and all(type(h) is int for h in heads):
        return [inner[h] for h in sorted(heads)]
    return inner


# ---------------------------------------------------------------- export


def export_dcp(
    root: Root, step: int | None, dest: str | os.PathLike[str], *, progress: Progress | None = None
) -> Manifest:
    """Write a committed step (None: the newest) as a DCP folder, by torch's own writer, which makes pickles of its own.

    Tensors are read when their turn comes; memory is the largest one.

    Raises: StepMissingError, CkptUserError (`dest` holds something), DamagedError, ObjectStore…Error.
    """
    store = open_store(root)
    manifest, _ = find(store, step)
    folder = local_folder(dest)
    require_empty(folder, (METADATA, "*.distcp"))
    planner = _StreamingPlanner(BoxReader(store, manifest), progress)
    writer = FileSystemWriter(folder, thread_count=1)
    try:
        with warnings.catch_warnings():
            # That this is one process is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp_save(planner.tree(), storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as e:  # DCP wraps whatever happens
        for error in e.failures.values():
            inner = error[0] if isinstance(error, tuple) else error
            raise cast("Exception", inner) from e
        raise
    return manifest


class _StreamingPlanner(DefaultSavePlanner):
    """Plans with stand-ins that take no memory, and reads a tensor when it is written."""

    def __init__(self, reader: BoxReader, progress: Progress | None) -> None:
        super().__init__()
        self._reader = reader
        self._progress = progress
        self._stored: dict[int, str] = {}
        self._stand_ins: list[torch.Tensor] = []
        self._done = 0

    def tree(self) -> dict[str, Any]:
        """The state as DCP users write it: see the module."""
        m = self._reader.manifest
        tree: dict[str, Any] = {}
        used: set[str] = set()
        optimizers = {n.removesuffix(".param_groups") for n in m.values if n.endswith(".param_groups")}
        optimizers = {o for o in optimizers if f"{o}.param_groups" in m.values}
        for o in sorted(optimizers):
            tree[o] = self._optimizer(o, used)
        for name, encoded in m.values.items():
            if any(name == f"{o}.param_groups" or name.startswith(f"{o}.params.") for o in optimizers):
                continue
            value = self._plain(encoded, name)
            if value is not None:
                used.update(tensor_names(encoded))
                _put(tree, name, value)
        for name in (*m.tensors, *m.aliases):
            if name not in used:
                _put(tree, name, self._stand_in(m.aliases.get(name, name)))
        table = {"step": m.step, "cursor": m.cursor, "aliases": m.aliases, "values": m.values}
        tree[OURS] = json.dumps(table)
        return tree

    def _optimizer(self, o: str, used: set[str]) -> dict[str, Any]:
        values = self._reader.manifest.values
        found = self._plain(values[f"{o}.param_groups"], o)
        if found is None:
            raise CkptUserError(
                f"the settings of {o} are no plain values: export the weights alone, as safetensors"
            )
        used.update(tensor_names(values[f"{o}.param_groups"]))
        groups = [{"params": list[str](), **g} for g in found]
        state: dict[str, Any] = {}
        prefix = f"{o}.params."
        owners = {n.removeprefix(prefix).partition(".")[0] for n in values if n.startswith(prefix)}
        if len(owners) == 1 and all("." in n.removeprefix(prefix) for n in values if n.startswith(prefix)):
            prefix += f"{owners.pop()}."
        for name in (n for n in values if n.startswith(prefix)):
            known = self._plain(values[name], name)
            if known is None or known["group"] not in range(len(groups)):
                continue
            used.update(tensor_names(values[name]))
            fqn = name.removeprefix(prefix)
            groups[known["group"]]["params"].append(fqn)
            state[fqn] = known["state"]
        return {"state": state, "param_groups": groups}

    def _plain(self, encoded: Any, name: str) -> Any:
        """The value with stand-ins, or None where DCP users could not load it without trusting it: then it is in our table only,
        and its tensors stand under their own names."""
        try:
            value = decode_value(encoded, name, self._stand_in)
        except DamagedError:
            return None  # of a kind that only a live state can make sense of
        return value if _is_plain(value) else None

    def _stand_in(self, name: str) -> torch.Tensor:
        meta = self._reader.meta(name)
        t = torch.zeros((), dtype=dtype_of(meta.dtype), device="cpu").expand(meta.shape)
        self._stored[id(t)] = name
        self._stand_ins.append(t)  # an id is one's own only while one lives
        return t

    def lookup_object(self, index: dcp_metadata.MetadataIndex) -> Any:
        found = super().lookup_object(index)
        name = self._stored.get(id(found))
        return found if name is None else self._read(name)

    def _read(self, name: str) -> torch.Tensor:
        meta = self._reader.meta(name)
        box = Box((0,) * len(meta.shape), meta.shape)
        raw = self._reader.box(name, box)
        self._done += len(raw)
        if self._progress is not None:
            self._progress(self._done, max(self._reader.manifest.nbytes, self._done))
        if not len(raw):
            return torch.empty(meta.shape, dtype=dtype_of(meta.dtype), device="cpu")
        assert len(raw) == nbytes_of(meta, box), "a box reader gives all of a box"
        return torch.from_numpy(raw).view(dtype_of(meta.dtype)).view(meta.shape)


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    """``a.b.c`` at tree["a"]["b.c"], or under its whole name where "a" is taken by something else."""
    top, _, rest = name.partition(".")
    inner = tree.setdefault(top, {}) if rest else None
    if inner is not None and type(inner) is dict and rest not in inner and top != OURS:
        cast("dict[str, Any]", inner)[rest] = value
    else:
        tree[name] = value


def _is_plain(value: Any) -> bool:
    """What torch.load(weights_only=True) takes."""
    if type(value) in (list, tuple):
        return all(_is_plain(v) for v in value)
    if type(value) is dict:
        return all(_is_plain(k) and _is_plain(v) for k, v in cast("dict[Any, Any]", value).items())
    return value is None or type(value) in (bool, int, float, complex, str) or isinstance(value, torch.Tensor)
