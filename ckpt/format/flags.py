"""Flags: small objects beside a manifest that say something about it. Torch-free.

::

    gen-0004/step-0000000120/verified.json    every byte was compared with its checksum, and fits
                             kept.json        exempt from retention, because somebody said so (`ckpt keep`)
                             aside.json       a load or `verify` found it damaged: set aside (ckpt/loading/aside.py)
                             resumes/*.json   a start resumed from it and has not got any further yet (ckpt/loading/aside.py)

A flag is created conditionally and means something only beside a manifest. Whether it is there is seen in the same listing
as the manifests, so asking costs nothing; its content is for people. None of them is needed for a load.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from surefoot.ckpt.manifest import ManifestRef, encode, step_prefix
from surefoot.ckpt.store import ObjectExistsError, ObjectStore

FlagKind = Literal["verified", "kept", "aside"]
KINDS: tuple[FlagKind, ...] = get_args(FlagKind)
FORMAT = 1

_FLAG_KEY = re.compile(rf"gen-(\d{{4,}})/step-(\d{{10,}})/({'|'.join(KINDS)})\.json")


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """Who raised a flag, when (seconds since 1970, for people), and what there is to say."""

    format: int = FORMAT
    by: str
    at: float
    about: str = ""


_BESIDE = re.compile(rf"({'|'.join(KINDS)})\.json|resumes/[^/]+\.json")


def flag_key(generation: int, step: int, kind: FlagKind) -> str:
    return f"{step_prefix(generation, step)}{kind}.json"


def flags_among(keys: Iterable[str]) -> dict[tuple[int, int], frozenset[FlagKind]]:
    """Which flags a listing shows, by (generation, step). PURE."""
    found: dict[tuple[int, int], set[FlagKind]] = {}
    for key in keys:
        if (m := _FLAG_KEY.fullmatch(key)) is not None:
            kind: FlagKind = m[3]  # pyright: ignore[reportAssignmentType]
            found.setdefault((int(m[1]), int(m[2])), set()).add(kind)
    return {at: frozenset(kinds) for at, kinds in found.items()}


def flags_beside(generation: int, step: int, keys: Iterable[str]) -> list[str]:
    """What of a listing goes with a manifest besides its attempt. PURE."""
    prefix = step_prefix(generation, step)
    return [k for k in keys if k.startswith(prefix) and _BESIDE.fullmatch(k.removeprefix(prefix))]


def raise_flag(store: ObjectStore, ref: ManifestRef, kind: FlagKind, about: str = "") -> bool:
    """Returns False where it stood there already. Raises ObjectStore…Error."""
    flag = Flag(by=f"{socket.gethostname()}:{os.getpid()}", at=round(time.time(), 3), about=about)
    try:
        store.create(flag_key(ref.generation, ref.step, kind), encode(flag))
    except ObjectExistsError:
        return False
    return True


def lower_flag(store: ObjectStore, ref: ManifestRef, kind: FlagKind) -> None:
    """A flag that is not there is no error. Raises ObjectStore…Error."""
    store.delete(flag_key(ref.generation, ref.step, kind))
