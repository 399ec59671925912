"""Which checkpoints may go. PURE; ckpt/cleaning.py carries it out after a commit.

Never deleted: the newest committed one, whatever the rules; anything the running generation has not committed yet; anything
off the lineage or of another attempt (it may be somebody's who still works on it). A manifest goes first, so that a kill
in between leaves data without a manifest, never a manifest without its data. Ledgers stay: they are the evidence of what
was trained on, and small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from surefoot.ckpt.manifest import Manifest, ManifestRef, attempt_prefix

NEWEST_MIN = 2
"""A single one could turn out damaged when it is needed."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the `newest` N checkpoints, and those whose step is a multiple of `every_steps`."""

    newest: int
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if self.newest < NEWEST_MIN:
            raise ValueError(
                f"keep = {self.newest}: at least {NEWEST_MIN} have to be kept, since the newest may turn out damaged"
            )
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(
                f"keep every {self.every_steps} steps: the number must be at least 1, or left out"
            )


def deletable(line: Sequence[ManifestRef], retention: Retention) -> list[ManifestRef]:
    """What of a lineage (ascending) the rules let go, oldest first. PURE."""
    kept = set(line[-max(retention.newest, 1) :])
    if retention.every_steps is not None:
        kept |= {m for m in line if m.step % retention.every_steps == 0}
    return [m for m in line if m not in kept]


def objects_of(manifest: Manifest, stored: Iterable[str]) -> list[str]:
    """The keys that go with a manifest: its data objects and its attempt's part records, without the ledger. PURE.

    Args:
        stored: what is listed under the manifest's attempt; nothing outside of it is ever returned.
    """
    prefix = attempt_prefix(manifest.generation, manifest.step, manifest.attempt)
    ledger = manifest.ledger.key if manifest.ledger is not None else None
    return sorted(key for key in stored if key.startswith(prefix) and key != ledger)
