"""A committed step becomes a DCP folder, by torch's own writer. (torch)"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import CkptUserError, DamagedError
from surefoot.ckpt.format.values import decode_value, tensor_names
from surefoot.ckpt.manifest import Manifest
from surefoot.ckpt.planning.plan import nbytes_of
from surefoot.ckpt.progress import Progress
from surefoot.ckpt.state import dtype_of
from surefoot.ckpt.store import Root, open_store
from surefoot.ckpt.tools.boxreader import BoxReader
from surefoot.ckpt.tools.dcp import OURS
from surefoot.ckpt.tools.dcp.folder import METADATA
from surefoot.ckpt.tools.exporting import require_empty
from surefoot.ckpt.tools.inspect import find
from surefoot.ckpt.tools.words import local_folder


def export_dcp(
    root: Root,
    step: int | None,
    dest: str | os.PathLike[str],
    *,
    generation: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write a committed step (None: the newest; `generation` as in `inspect.find`) as a DCP folder, by torch's own writer, which makes
    pickles of its own.

    Tensors are read when their turn comes; memory is the largest one.

    Raises: StepMissingError, CkptUserError (`dest` holds something), DamagedError, ObjectStore…Error.
    """
    store = open_store(root)
    manifest, _ = find(store, step, generation)
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
