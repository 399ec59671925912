"""One tensor of a committed step, or a part of it. (torch)"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from surefoot.ckpt.boxes import Box, Held, whole
from surefoot.ckpt.live.leaves import Leaf, dtype_of
from surefoot.ckpt.live.source import Want
from surefoot.ckpt.loading.fetching import ManifestSource
from surefoot.ckpt.loading.restore import require_objects
from surefoot.ckpt.store import Root, open_store
from surefoot.ckpt.tools.inspect import find, stored_name


def read(
    root: Root,
    step: int | None,
    name: str,
    part: Sequence[slice] | None = None,
    *,
    generation: int | None = None,
) -> torch.Tensor:
    """One whole tensor of a committed step (None: the newest), or `part` of it, in host memory. Needs no process group, and reads the
    blocks that hold it alone.

    Args:
        part: a slice per dimension (leading ones suffice), without steps.
        generation: look among what this one committed, on the lineage or not.

    Raises: StepMissingError (no such step, or no such name in it), DamagedError, ObjectStore…Error; ValueError for a slice
    with a step.
    """
    store = open_store(root)
    manifest, _ = find(store, step, generation)
    require_objects(store, manifest)
    stored = stored_name(manifest, name)
    meta = manifest.tensors[stored]
    box = whole(meta.shape) if part is None else _box_of(part, meta.shape)
    tensor = torch.empty(box.extent, dtype=dtype_of(meta.dtype), device="cpu")
    if tensor.numel():
        leaf = Leaf(name=name, held=(Held(box, (0,) * len(box.extent)),), views=(tensor,), meta=meta)
        with torch.no_grad():
            ManifestSource(store, manifest).fill([Want(leaf=leaf, stored=stored)])
    return tensor


def _box_of(part: Sequence[slice], shape: tuple[int, ...]) -> Box:
    if len(part) > len(shape):
        raise ValueError(f"{len(part)} slices for a tensor of shape {list(shape)}")
    bounds = [
        s.indices(n) for s, n in zip([*part, *[slice(None)] * (len(shape) - len(part))], shape, strict=True)
    ]
    if any(by != 1 for _, _, by in bounds):
        raise ValueError("slices with a step other than 1 are no box: read the whole part, and index that")
    return Box(tuple(a for a, _, _ in bounds), tuple(max(b - a, 0) for a, b, _ in bounds))
