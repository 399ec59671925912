"""What lies in a DCP folder, read without running anything of it. (torch)

DCP's ``.metadata`` is a pickle, and so is every item (torch.save). Nothing of ours is a pickle; these are theirs. The metadata
is read by an unpickler that admits DCP's own metadata classes and torch's sizes and types, nothing else; items by
``torch.load(weights_only=True)``, which admits tensors and plain values. A folder that asks for anything else is refused,
and what it asked for is named; no code of it runs.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)

from surefoot.ckpt.errors import CkptUserError, DamagedError
from surefoot.ckpt.tools.words import local, open_regular

METADATA = ".metadata"


class UntrustedPickleError(CkptUserError):
    """A DCP folder asks for more than metadata and plain values; reading it could run code. Nothing was run."""


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

    Raises: CkptUserError (no DCP folder), UntrustedPickleError, DamagedError (what lies there cannot be read).
    """
    path = folder / METADATA
    with local("read", str(folder)):
        try:
            with open_regular(path) as f:
                data = f.read()
        except (FileNotFoundError, NotADirectoryError) as e:
            raise CkptUserError(f"{folder} is no DCP folder: it has no {METADATA}") from e
    try:
        found = _MetadataUnpickler(data, path).load()
    except UntrustedPickleError:
        raise
    except Exception as e:  # a pickle can fail in any way
        raise DamagedError(f"{path} is damaged, or no DCP metadata: {e}", key=METADATA) from e
    if not isinstance(found, dcp_metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise CkptUserError(
            f"{path} holds a {type(found).__name__}, no DCP metadata: {folder} is no DCP folder"
        )
    return found


class DcpFolder:
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
        with local("read", str(self._folder)):
            try:
                with open_regular(self._folder / name) as f:
                    if not 0 <= info.offset <= info.offset + info.length <= os.fstat(f.fileno()).st_size:
                        raise DamagedError(f"{self._folder / name} ends before {fqn} does", key=fqn)
                    f.seek(info.offset)
                    data = f.read(info.length)
                    if len(data) != info.length:
                        raise DamagedError(f"{self._folder / name} was cut off while {fqn} was read", key=fqn)
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
