"""The errors of `ckpt`, one tree. The object store's own stand in store.py, under the same roots.

::

    CkptError
    ├── CkptUserError            the caller's: mend the call, the state or the root
    │   ├── StateError               a state that cannot be saved as it is (also TypeError)
    │   ├── StateMismatchError       live state and checkpoint do not fit (also KeyError-like: it names keys)
    │   └── StepMissingError         no such step on the lineage (also LookupError)
    ├── CkptWorldError           the world's: storage damaged, another writer, a deadline
    │   ├── FormatError              not ours, or from a newer version
    │   ├── DamagedError             stored bytes are not what was written; names the object
    │   ├── RecordTakenError         somebody else opened that generation
    │   ├── LineageError             records contradict each other
    │   ├── ImageError               a snapshot image: unsealed, foreign or corrupt
    │   ├── SlotTooSmallError        a snapshot does not fit its slot
    │   ├── CoverageError            elements missing or written twice: refused before the commit
    │   ├── CommitError              the step was not committed, and why
    │   │   └── ReplicasDifferError      ranks hold other content where they should hold the same
    │   ├── ElsewhereError           another rank failed, died or hangs; the message names it
    │   └── FencedError              a newer generation exists: whether the step counts is the lineage's to say
    └── AssertionError           our bug (plain asserts)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from surefoot.ckpt.boxes import Box


class CkptError(Exception):
    """Base of everything `ckpt` raises on purpose. The message says what, where, and what to do."""


class CkptUserError(CkptError):
    """The caller's to mend."""


class CkptWorldError(CkptError):
    """Storage, another process or time stood in the way."""


class StateError(CkptUserError, TypeError):
    """The state cannot be saved as it is; the message names the entry."""


class StateMismatchError(CkptUserError):
    """The live state and the checkpoint do not fit; the message names entries, groups and shapes."""


class StepMissingError(CkptUserError, LookupError):
    """The lineage holds no such step."""


class FormatError(CkptWorldError):
    """An object is not ours, or was written by a newer version of Surefoot."""


class DamagedError(CkptWorldError):
    """Stored bytes are not what was written. `key` names the object."""

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


class LineageError(CkptWorldError):
    """The records contradict each other, or one that the lineage needs is missing."""


class ImageError(CkptWorldError):
    """A snapshot image cannot be used.

    `kind`: ``unsealed`` (never finished, or being overwritten), ``foreign`` (another format, version or owner),
    ``corrupt`` (a checksum differs).
    """

    def __init__(self, kind: Literal["unsealed", "foreign", "corrupt"], message: str) -> None:
        super().__init__(f"snapshot image {kind}: {message}")
        self.kind = kind


class SlotTooSmallError(CkptWorldError):
    """The snapshot needs a slot of at least `needed` bytes."""

    def __init__(self, *, needed: int, actual: int) -> None:
        super().__init__(
            f"the snapshot needs a slot of {needed} bytes and this one has {actual}: ask for larger slots (Stager.nbytes())"
        )
        self.needed = needed


class ElsewhereError(CkptWorldError):
    """Another rank of the load or save failed, died, hangs or was interrupted; the message names it."""


class CoverageError(CkptWorldError):
    """Some element of a tensor would be stored never or twice; the message names tensor and box, and says whether that lies in what
    the ranks hold (`Boxes`, DTensors) or is a bug of ours."""


class CommitError(CkptWorldError):
    """The step was not committed; the message says which step, which writer and why. The next save may work."""


class ReplicasDifferError(CommitError):
    """Ranks hold other content where they should hold the same: silent corruption, or two things under one name.

    `ranks_by_checksum` tells who holds what in `box` of the tensor `name` (None: not of a tensor, but of a value, a cursor or a tie, and
    words may stand for checksums); `odd` are the ranks that differ from a majority of holders in any box, empty where no majority agrees.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str,
        box: Box | None,
        ranks_by_checksum: Mapping[str, tuple[int, ...]],
        odd: tuple[int, ...],
    ) -> None:
        super().__init__(message)
        self.name = name
        self.box = box
        self.ranks_by_checksum = ranks_by_checksum
        self.odd = odd


class FencedError(CommitError):
    """A newer generation exists. Whether this step counts is for the lineage to say; stop saving under this generation."""

    def __init__(self, *, generation: int, step: int, by: int) -> None:
        super().__init__(
            f"step {step} of generation {generation} is fenced: generation {by} exists. Another start of the job is running, "
            f"or took over; end this one, or load again to continue from the lineage"
        )
        self.by = by
