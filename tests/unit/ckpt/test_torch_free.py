"""Agents, controllers and the command line import no torch, and no s3fs where files are enough."""

import subprocess
import sys

import pytest

TORCH_FREE = (
    *("record", "manifest", "store", "boxes", "tiers"),
    *("objects.files", "planning.plan", "planning.interval", "planning.resharding"),
    *("format.image", "format.flags", "format.stformat"),
    *("keeping.retention", "keeping.cleaning", "keeping.orphans"),
    *("saving.generation", "saving.cadence"),
    *(
        f"tools.{name}"
        for name in ("inspect", "boxreader", "verifying", "exporting", "importing", "cli", "tables")
    ),
)


@pytest.mark.slow
def test_no_torch() -> None:
    imports = ", ".join(f"surefoot.ckpt.{m}" for m in TORCH_FREE)
    code = f"import sys, {imports}; import surefoot.ckpt as c; c.steps, c.verify, c.Manifest; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.split())
    assert "surefoot.ckpt.saving.commit" in loaded
    assert not loaded & {"torch", "s3fs", "fsspec", "botocore", "aiohttp", "rich"}
