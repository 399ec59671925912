"""The multisource loader. Knows nothing of controller or agent.

::

    mix = loader.Mixture([loader.Source("code", "s3://…/code/*.parquet", weight=0.7), loader.Source("prose", "…", weight=0.3)], seed=7)
    with loader.Loader(mix, loader.Pack(seq_len=2048, step_tokens=2**19), dp_rank=0, dp_size=8) as batches:
        for batch in batches:
            ...  # batch.step, batch.sample_ids, batch["tokens"], batch.microbatches, batch.global_valid_tokens

Importing this imports no torch; `Loader`, `Batch` and `Microbatch` bring it when first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.loader.errors import (
    BadDataError,
    CursorError,
    CursorMismatchError,
    DataAccessError,
    LoaderError,
    LoaderUsageError,
    SourceError,
)
from surefoot.loader.mixture import Mixture, Source
from surefoot.loader.pack import Pack
from surefoot.loader.stream import PlannedStep, plan

if TYPE_CHECKING:
    from surefoot.loader.client import Batch, Loader, Microbatch

__all__ = [
    "BadDataError",
    "Batch",
    "CursorError",
    "CursorMismatchError",
    "DataAccessError",
    "Loader",
    "LoaderError",
    "LoaderUsageError",
    "Microbatch",
    "Mixture",
    "Pack",
    "PlannedStep",
    "Source",
    "SourceError",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name in ("Batch", "Loader", "Microbatch"):
        from surefoot.loader import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
