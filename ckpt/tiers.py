"""What agents and ranks use of `ckpt`: snapshots in slots, and their way to a committed checkpoint.

Torch-free on import; `Stager` and `restore_committed` import it when used.
"""

from surefoot.ckpt.errors import ImageError, SlotTooSmallError
from surefoot.ckpt.format.image import ImageInfo, read_image, unseal, verify_image
from surefoot.ckpt.keeping.cleaning import apply_retention, sweep_orphans
from surefoot.ckpt.keeping.retention import Retention
from surefoot.ckpt.live.staging import Restored, Stager
from surefoot.ckpt.loading.restore import committed_rows, restore_committed
from surefoot.ckpt.manifest import LedgerRow
from surefoot.ckpt.objects.probe import do_without_conditions
from surefoot.ckpt.planning.interval import CostMeter, IntervalChoice, choose
from surefoot.ckpt.saving.commit import CommitOutcome, Committed, Fenced, GivenUp, Lost, commit
from surefoot.ckpt.saving.upload import report_failure, upload_images

__all__ = [
    "CommitOutcome",
    "Committed",
    "CostMeter",
    "Fenced",
    "GivenUp",
    "ImageError",
    "ImageInfo",
    "IntervalChoice",
    "LedgerRow",
    "Lost",
    "Restored",
    "Retention",
    "SlotTooSmallError",
    "Stager",
    "apply_retention",
    "choose",
    "commit",
    "committed_rows",
    "do_without_conditions",
    "read_image",
    "report_failure",
    "restore_committed",
    "sweep_orphans",
    "unseal",
    "upload_images",
    "verify_image",
]
