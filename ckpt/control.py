"""What controllers use of `ckpt` besides records and manifests: the flags of damaged checkpoints, and the probe. Torch-free."""

from surefoot.ckpt.loading.aside import aside_among, set_aside, why_aside
from surefoot.ckpt.objects.probe import ensure_exclusive

__all__ = ["aside_among", "ensure_exclusive", "set_aside", "why_aside"]
