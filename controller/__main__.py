"""``python -m surefoot.controller --job JOB.toml --name a --etcd HOST:PORT …``: one controller. Exit codes: exitcodes.py."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from surefoot import history
from surefoot.ckpt.store import ObjectStoreError, open_store
from surefoot.controller.core.settings import Settings
from surefoot.controller.daemon import Controller, ControllerConfig
from surefoot.controller.errors import ControllerUsageError, CoreBrokenError
from surefoot.controller.spec.problems import SpecError
from surefoot.controller.spec.reading import load_spec
from surefoot.controller.spec.tables import JobSpec
from surefoot.controller.store import CoordError, connect
from surefoot.exitcodes import ExitCode

log = logging.getLogger("surefoot.controller")

OBJECT_DEADLINE_S = 10.0
"""Of one call to the object store: records and listings are small, and a formation that waits should say so soon."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a controller to its end; returns the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return _run(args, load_spec(args.job))
    except (SpecError, ControllerUsageError, ValueError) as e:
        log.error("%s", e)
        return ExitCode.USAGE
    except (CoordError, ObjectStoreError, OSError) as e:
        log.error("%s", e)
        return ExitCode.ENVIRONMENT
    except CoreBrokenError:
        log.exception("this controller ends; a standby goes on from the stores")
        return ExitCode.UNEXPECTED


def _run(args: argparse.Namespace, spec: JobSpec) -> int:
    try:
        token = args.token_file.read_text().strip()
    except OSError as e:
        raise ControllerUsageError(f"the token file {args.token_file} cannot be read: {e.strerror}") from e
    history.open_history(
        args.state_dir / "history" / f"controller-{args.name}.jsonl", f"controller-{args.name}"
    )
    objects = open_store(spec.job.root, deadline_s=OBJECT_DEADLINE_S)
    # Below a third of the TTL: three renewals fit into it (leases.py).
    store = connect(args.etcd, deadline_s=min(3.0, spec.detect.lease_ttl_s / 3.5))
    try:
        return _serve(Controller(_config(args, spec, token), store, objects))
    finally:
        store.close()
        history.close_history()


def _serve(controller: Controller) -> int:
    def leave(signum: int, frame: FrameType | None) -> None:
        controller.interrupt()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    return controller.run()


def _config(args: argparse.Namespace, spec: JobSpec, token: str) -> ControllerConfig:
    return ControllerConfig(
        settings=Settings.of(
            spec,
            run_id=args.run_id,
            controller=args.name,
            code_version=code_version(),
            held_patience_s=args.held_patience,
        ),
        token=token,
        state_dir=args.state_dir.absolute(),
        lease_ttl_s=spec.detect.lease_ttl_s,
        seed=secrets.randbits(64),  # two controllers must not pause alike
    )


def code_version() -> str:
    """The version that is installed; plans carry it."""
    try:
        return version("surefoot")
    except PackageNotFoundError:
        return "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m surefoot.controller", description="One controller of a job; one leads."
    )
    parser.add_argument("--job", type=Path, required=True, help="the job file")
    parser.add_argument("--name", default=f"c{os.getpid()}", help="this controller's name, unique in the job")
    parser.add_argument("--etcd", required=True, help="HOST:PORT, several separated by commas")
    parser.add_argument("--run-id", required=True)
    parser.add_argument(
        "--state-dir", type=Path, required=True, help="history and journal of this controller"
    )
    parser.add_argument("--token-file", type=Path, required=True, help="holds the job's token")
    parser.add_argument(
        "--held-patience",
        type=float,
        metavar="SECONDS",
        help="fail after this long where etcd, records and agents contradict each other; default: wait for an operator",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
