"""How fast checkpoints are, against plain copies, writers and readers, torch DCP and boto3, on the same bytes, turn by turn.

Two ranks hold about 2.4 GB of FSDP2 + AdamW state, most of it *ballast* that takes no part in a step, so that steps are
short. Every round measures ours and the peers one after the other (whose turn is first changes), every key is the median of
the ratios of at least 5 rounds. Ours runs as shipped: checksums and fsync on. Files lie on tmpfs, the S3 server is the
one of the test extra, on loopback and with its volumes on tmpfs: processor and protocol are measured, no disk, no network.

``bench/ckpt.py --json`` prints one JSON object: the keys of paired.py (see there for each one's two sides and what is
expected), `spread` (least and greatest of each), `missed` (keys that are not as expected), `rounds` (every measurement) and
`machine`. ``--quick`` takes about 100 MB and few rounds: it shows that all of it works, its figures say little.
``--only load_vs_dcp,s3`` measures the named keys and sections alone. It needs 20 GB of free memory and about 20 minutes.

* ``stall``: the step that held the save minus the median step, on the slowest rank, in a training loop with real collectives.
  DCP's includes its `get_state_dict`, which ours does itself. `upload_drag_s`: what the steps until the commit took beyond
  the median, all together.
* ``raw``: the fastest of write() in 8 MiB chunks, a copy into mmap with msync, and pwrite() by two threads; each rank writes
  its own bytes, both at once, fsync included. Reading likewise, what was written just before, into memory that was written before. Whoever writes, raw, ours
  or DCP, has its own last files taken away right before, so that all get memory that was free for a moment only.
* ``memory``: the growth of the proportional set size of the ranks and all their processes, at its peak, over the bytes
  staged, in each of 50 saves; `rss_drift_over_staged`: how much higher the last ten settle than the first ten.
* ``first``: a new checkpointer's first save over its second; for blocking saves, and for the stall.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import paired
from ckpt_sections import FULL, MEASURE, QUICK, Bench, Rows
from ckpt_world import BenchError, no_orphans


def measure(bench: Bench, sections: list[str]) -> dict[str, Any]:
    rows: dict[str, Rows] = {}
    with no_orphans():
        for section in sections:
            bench.say(f"{section}: {(MEASURE[section].__doc__ or '').strip()}")
            rows[section] = MEASURE[section](bench)
    result = paired.summary(rows) | bench.beside
    if "memory" in rows:
        settled = [row["settled_nbytes"] for row in rows["memory"]]
        result["rss_drift_over_staged"] = paired.rounded(
            paired.flatness(settled, rows["memory"][0]["staged_nbytes"])
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--quick", action="store_true", help="about 100 MB, few rounds")
    parser.add_argument("--only", default="", help="keys or sections, separated by commas")
    args = parser.parse_args()

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    try:
        sections = paired.sections_of(filter(None, args.only.split(","))) or list(paired.SECTIONS)
    except ValueError as e:
        parser.error(str(e))
    from restart import machine

    here = machine()
    try:
        result = measure(Bench(QUICK if args.quick else FULL, say), sections)
    except BenchError as e:
        say(f"ckpt: {e}")
        return 1
    except KeyboardInterrupt:
        say("ckpt: interrupted")
        return 130
    result |= {"machine": here, "quick": args.quick}
    if args.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0


def _print(result: dict[str, Any]) -> None:
    for name, key in paired.KEYS.items():
        if name not in result:
            continue
        least, greatest = result["spread"][name]
        wanted = "" if key.at_least is None else f"at least {key.at_least}"
        wanted = wanted if key.at_most is None else f"at most {key.at_most}"
        missed = "  MISSED" if name in result["missed"] else ""
        print(f"{name:<36}{result[name]:9.4g}  ({least:.4g} to {greatest:.4g})  {wanted}{missed}")


if __name__ == "__main__":
    sys.exit(main())
