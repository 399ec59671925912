"""Safetensors files to be imported: a file, or a folder with or without a Hugging Face index. Torch-free.

Nothing of what a file says is believed, no pickle is opened, and who changes a file while it is read gets an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from surefoot.ckpt.boxes import Box, whole
from surefoot.ckpt.errors import CkptUserError, DamagedError
from surefoot.ckpt.format.stformat import StTensor, decode_header, header_nbytes
from surefoot.ckpt.manifest import TensorMeta
from surefoot.ckpt.record import RECORDS
from surefoot.ckpt.tools.exporting import INDEX
from surefoot.ckpt.tools.importing import Foreign, require_names
from surefoot.ckpt.tools.tiemeta import is_export, ties_told
from surefoot.ckpt.tools.words import local, local_folder, open_regular

READ_NBYTES = 4 * 2**20


def open_safetensors(source: str | os.PathLike[str], *, prefix: str = "model.") -> Foreign:
    """A safetensors file, or a folder of them; `prefix` is put before each name.

    Raises: CkptUserError (no such files, none that can be read, or no safetensors files; two tensors with one name, a second name of
        two tensors, a name that no save would store), DamagedError (a safetensors file is damaged or cut off).
    """
    folder = local_folder(source)
    found: dict[str, tuple[_StFile, StTensor]] = {}
    said: list[dict[str, str]] = []
    with local("read", str(folder)):
        for path in _files_of(folder):
            file, tensors, about = _open_file(path)
            said.append(about)
            for t in tensors:
                if t.name in found:
                    raise CkptUserError(f"{folder}: {t.name} stands in two files, the second is {path.name}")
                found[t.name] = file, t

    def read(name: str, box: Box) -> Iterator[bytes]:
        file, t = found[name.removeprefix(prefix)]
        return file.chunks(t.begin, t.end)

    metas = {prefix + n: TensorMeta(dtype=t.dtype, shape=t.shape) for n, (_, t) in found.items()}
    ties = ties_told(said, found, folder)
    own = all(is_export(about) for about in said)
    places = [(prefix + n, file.path) for n, (file, _) in found.items()]
    require_names([*places, *((prefix + second, folder) for second in ties)], own=own)
    return Foreign(
        label=str(folder),
        tensors=metas,
        pieces=[(n, whole(m.shape)) for n, m in metas.items() if 0 not in m.shape],
        read=read,
        aliases={prefix + second: prefix + kept for second, kept in ties.items()},
    )


def _files_of(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise CkptUserError(f"{folder}: there is no such file or folder")
    if (index := folder / INDEX).is_file():
        return [folder / name for name in _indexed(index)]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if (folder / RECORDS).is_dir():
        raise CkptUserError(
            f"{folder} is a root of Surefoot's own checkpoints: it is loaded from as it is (ckpt.load), or copied as a folder; there is "
            f"nothing to import"
        )
    pickles = (p for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt") and p.is_file())
    for path in sorted(pickles):
        with open_regular(path) as f:
            _require_safetensors(path, f.read(_HEAD_NBYTES))
    raise CkptUserError(f"{folder} holds no *.safetensors")


_HEAD_NBYTES = 9
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
"""How files of torch.save begin, and pickles of protocol 2 and above. A safetensors file may begin like these: with the length of its
header, a number of 8 bytes, of which the upper are 0; but then comes a brace."""


def _require_safetensors(path: Path, head: bytes) -> None:
    """Raises CkptUserError for what is another kind of file, by its first bytes: what torch.save or pickle wrote is not opened."""
    if head[4:] == b"\0\0\0\0{":
        return
    if head[:4] == _ZIP or (head[:1] == _PICKLE and head[1:2] in (b"\2", b"\3", b"\4", b"\5")):
        what = "a zip with a pickle in it, as torch.save writes" if head[:4] == _ZIP else "a pickle"
        raise CkptUserError(
            f"{path} is {what}: it is not opened, since loading it can run anything. Where you trust it, load it yourself, optimizer and "
            f"all: torch.load(…, weights_only=True), load_state_dict, ckpt.save (docs/checkpoint.md: From torch.save)"
        )
    if head[8:] != b"{":
        what = "an empty file" if not head else "no safetensors file"
        raise CkptUserError(
            f"{path} is {what}: name a safetensors file, a folder of them, or a torch DCP folder"
        )


def _indexed(index: Path) -> list[str]:
    """The files that an index names. Raises DamagedError."""
    try:
        weights = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weights.values()))
        if not all(
            isinstance(n, str) and n == os.path.basename(n) and n not in ("", ".", "..") for n in names
        ):
            raise ValueError(f"its files must lie beside it, and it names {names[:3]}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise DamagedError(f"{index} is no index: {e}", key=index.name) from e
    if missing := [n for n in names if not (index.parent / n).is_file()]:
        raise DamagedError(f"{index} names {missing[0]}, which is not there", key=missing[0])
    return names


@dataclass(frozen=True, slots=True)
class _StFile:
    """A safetensors file whose header was read. It is not mapped: who cuts it off meanwhile would kill us (SIGBUS)."""

    path: Path
    data_start: int
    seen: tuple[int, ...]

    def chunks(self, begin: int, end: int) -> Iterator[bytes]:
        """These bytes of the data section. Raises: DamagedError (it is not the file any more that it was), CkptUserError (it
        cannot be opened)."""
        with local("read", str(self.path)), open_regular(self.path) as f:
            at, stop = self.data_start + begin, self.data_start + end
            while at < stop and (data := os.pread(f.fileno(), min(READ_NBYTES, stop - at), at)):
                yield data
                at += len(data)
            if at < stop or _version(f) != self.seen:
                raise DamagedError(
                    f"{self.path} was changed while it was read: import it again when nobody writes to it",
                    key=self.path.name,
                )


def _open_file(path: Path) -> tuple[_StFile, list[StTensor], dict[str, str]]:
    """The file, its tensors, and the metadata; no data are read yet."""
    with open_regular(path) as f:
        _require_safetensors(path, f.read(_HEAD_NBYTES))
        f.seek(0)
        seen = _version(f)
        size = os.fstat(f.fileno()).st_size
        length = header_nbytes(f.read(8), size, key=str(path))
        tensors, about = decode_header(f.read(length), size - 8 - length, key=str(path))
    return _StFile(path, 8 + length, seen), tensors, about


def _version(f: BinaryIO) -> tuple[int, ...]:
    s = os.fstat(f.fileno())
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns
