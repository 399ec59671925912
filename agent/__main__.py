"""``python -m surefoot.agent --job JOB.toml --uid n0 --etcd HOST:PORT …``: one node's agent. Exit codes: exitcodes.py."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from surefoot import marks
from surefoot.agent.config import HEARTBEAT_S, RANK_ENTRY, AgentConfig
from surefoot.agent.daemon import Agent
from surefoot.agent.errors import AgentUsageError, NodeError
from surefoot.controller.spec.problems import SpecError
from surefoot.controller.spec.reading import load_spec
from surefoot.controller.spec.tables import JobSpec
from surefoot.controller.store import CoordError, CoordStore, connect
from surefoot.exitcodes import ExitCode

log = logging.getLogger("surefoot.agent")


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent to its end; returns the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        spec = load_spec(args.job)
        incarnation = own_incarnation(spec.job.name, args.run_id, args.uid)
        return _run(_config(args, incarnation), spec)
    except (SpecError, AgentUsageError, marks.MarkError) as e:
        log.error("%s", e)
        return ExitCode.USAGE
    except (CoordError, NodeError, OSError) as e:
        log.error("%s", e)
        return ExitCode.ENVIRONMENT


def own_incarnation(job: str, run_id: str, uid: str) -> str:
    """This life's incarnation. Where this process does not carry the mark of it, it executes itself anew and then does.

    The mark must stand in the environment as the kernel shows it, that is from exec on. An incarnation begins with pid and
    start time, which exec keeps, so one that was handed down from a former life, or by whoever started us, is recognised.
    """
    pid = os.getpid()
    own = f"{pid}.{marks.start_time(pid)}."
    mark = marks.current()
    ours = mark is not None and (mark.job, mark.run_id, mark.node) == (job, run_id, uid)
    if mark is not None and ours and mark.incarnation.startswith(own):
        return mark.incarnation
    return _execute_anew(marks.Mark(job, run_id, uid, own + secrets.token_hex(4)))


def _execute_anew(mark: marks.Mark) -> NoReturn:
    os.environ |= mark.env()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _run(config: AgentConfig, spec: JobSpec) -> int:
    try:
        token = config.token_file.read_text().strip()
    except OSError as e:
        raise AgentUsageError(f"the token file {config.token_file} cannot be read: {e.strerror}") from e
    # Below a third of the TTL: three renewals fit into it (controller/leases.py).
    store = connect(config.etcd, deadline_s=min(3.0, spec.detect.lease_ttl_s / 3.5))
    try:
        return asyncio.run(_agent(config, spec, token, store))
    finally:
        store.close()


async def _agent(config: AgentConfig, spec: JobSpec, token: str, store: CoordStore) -> int:
    return await Agent(config, spec, token, store).run()


def _config(args: argparse.Namespace, incarnation: str) -> AgentConfig:
    return AgentConfig(
        job_file=args.job.absolute(),
        uid=args.uid,
        incarnation=incarnation,
        etcd=args.etcd,
        run_id=args.run_id,
        state_dir=args.state_dir.absolute(),
        shm_dir=args.shm_dir.absolute(),
        token_file=args.token_file.absolute(),
        host=args.host,
        heartbeat_s=args.heartbeat_s,
        rank_entry=args.rank_entry,
        rank_modules=tuple(filter(None, args.rank_modules.split(",")))
        if args.rank_modules is not None
        else None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m surefoot.agent", description="One node's supervisor.")
    parser.add_argument("--job", type=Path, required=True, help="the job file")
    parser.add_argument("--uid", required=True, help="this node's name")
    parser.add_argument("--etcd", required=True, help="HOST:PORT, several separated by commas")
    parser.add_argument("--run-id", required=True)
    parser.add_argument(
        "--state-dir", type=Path, required=True, help="logs, history and sockets of this node"
    )
    parser.add_argument("--shm-dir", type=Path, required=True, help="this node's snapshots, in shared memory")
    parser.add_argument("--token-file", type=Path, required=True, help="holds the job's token")
    parser.add_argument("--host", default="127.0.0.1", help="the address under which others reach this node")
    parser.add_argument("--heartbeat-s", type=float, default=HEARTBEAT_S)
    parser.add_argument("--rank-entry", default=RANK_ENTRY, help="module:function that a rank runs")
    parser.add_argument("--rank-modules", help="what the zygote imports before the job's modules, by commas")
    return parser


if __name__ == "__main__":
    exit_code = main()
    # Everything is closed. A thread may still sit in a call to a store that does not answer, and nobody waits for it.
    logging.shutdown()
    os._exit(exit_code)
