"""A home of its own for the ``surefoot`` command under test, and proof that nothing of it is left behind."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from surefoot import marks


@dataclass
class Home:
    """A base folder for run folders (short, for sockets), and the commands started with it."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """``surefoot <arguments>`` in a session of its own, its output in pipes."""
        process = subprocess.Popen(
            [sys.executable, "-m", "surefoot.controller.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd or self.folder,
            env=os.environ | {marks.HOME_ENV: str(self.folder)} | environment,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def call(
        self, *arguments: str, cwd: Path | None = None, timeout_s: float = 100, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """`start`, and wait for its end."""
        process = self.start(*arguments, cwd=cwd, **environment)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def processes(self) -> list[int]:
        """Everything that was started under this home, however deep, and lives: the environment tells."""
        entry = f"{marks.HOME_ENV}={self.folder}".encode()
        found: list[int] = []
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if entry in environ.split(b"\0") and marks.start_time(pid) is not None:
                found.append(pid)
        return found

    def left(self) -> list[str]:
        """Run folders, shared memory and processes of this home."""
        folders = [f.name for f in self.folder.iterdir() if f.name[:1] in ("2", ".")]
        shm = [str(s) for s in Path("/dev/shm").glob("surefoot-*") if self._owns(s)]
        return [*folders, *shm, *(f"pid {pid}" for pid in self.processes())]

    def _owns(self, shm: Path) -> bool:
        try:
            return (shm / ".run").read_text().startswith(str(self.folder))
        except OSError:
            return False
