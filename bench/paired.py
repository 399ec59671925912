"""The arithmetic of the checkpoint benchmark: what is a key, what a ratio of one round, and what is expected. PURE.

A *round* measures things that belong together one after the other, ours and the peer's in turn, and gives a row of seconds
(or bytes). A ratio is taken within a row, so that what slows the whole machine for a while slows both of its sides; a key
is the median of its ratios over all rows, its spread their least and greatest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Key:
    """One figure: the section that measures it, how it follows from a row, and what is expected of it (None: reported only)."""

    section: str
    of_row: Callable[[Row], float]
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most)


def over(upper: str, lower: str) -> Callable[[Row], float]:
    """The ratio of two entries of a row."""
    return lambda row: row[upper] / row[lower]


def entry(name: str) -> Callable[[Row], float]:
    return lambda row: row[name]


def _least_over(uppers: Sequence[str], lower: str) -> Callable[[Row], float]:
    return lambda row: min(row[name] for name in uppers) / row[lower]


_RAW_WRITERS = ("raw_write_s", "raw_mmap_s", "raw_pwrite2_s")
_RAW_READERS = ("raw_read_s", "raw_mmap_read_s", "raw_pread2_s")

KEYS: dict[str, Key] = {
    "stall_over_memcpy": Key("stall", over("stall_s", "memcpy_s"), at_most=1.3),
    "stall_vs_dcp_async": Key(
        "stall", _least_over(("dcp_thread_stall_s", "dcp_process_stall_s"), "stall_s"), at_least=3
    ),
    "upload_drag_s": Key("stall", entry("drag_s")),
    "save_over_raw": Key("files", _least_over(_RAW_WRITERS, "save_s"), at_least=0.85),
    "save_vs_dcp": Key("files", over("dcp_save_s", "save_s"), at_least=1.5),
    "load_over_raw": Key("files", _least_over(_RAW_READERS, "load_s"), at_least=0.85),
    "load_vs_dcp": Key("files", over("dcp_load_s", "load_s"), at_least=1.5),
    "reshard_load_vs_dcp": Key("reshard", over("dcp_load_s", "load_s"), at_least=2),
    "first_over_steady_save": Key("first", over("first_save_s", "save_s"), at_most=1.5),
    "first_over_steady_stall": Key("first", over("first_stall_s", "stall_s")),
    "rss_over_staged": Key("memory", over("grown_nbytes", "staged_nbytes"), at_most=1.15),
    "get_bytes_over_unique": Key("dp8", over("got_nbytes", "unique_nbytes"), at_most=1.1),
    "plan_ms_1k_ranks_1k_tensors": Key("plan", entry("plan_ms_1k_ranks_1k_tensors"), at_most=100),
    "plan_first_ms_1k_ranks_1k_tensors": Key(
        "plan", entry("plan_first_ms_1k_ranks_1k_tensors"), at_most=5000
    ),
    "s3_save_over_boto3": Key("s3", over("boto3_put_s", "save_s"), at_least=0.9),
    "s3_load_over_boto3": Key("s3", over("boto3_get_s", "load_s"), at_least=0.9),
    "s3_save_vs_dcp": Key("s3_dcp", over("dcp_save_s", "save_s")),
    "s3_load_vs_dcp": Key("s3_dcp", over("dcp_load_s", "load_s")),
}

SECTIONS = tuple(dict.fromkeys(key.section for key in KEYS.values()))


def sections_of(names: Iterable[str]) -> list[str]:
    """The sections that measure these keys (or are named themselves), in the order they run.

    Raises ValueError for a name that is neither.
    """
    wanted: set[str] = set()
    for name in names:
        if name not in KEYS and name not in SECTIONS:
            raise ValueError(f"{name!r} is neither a key nor a section: {', '.join([*KEYS, *SECTIONS])}")
        wanted.add(KEYS[name].section if name in KEYS else name)
    return [section for section in SECTIONS if section in wanted]


def slowest(by_rank: Sequence[Row]) -> dict[str, float]:
    """One row of what all ranks measured at the same time: the whole took as long as its slowest rank."""
    return {name: max(row[name] for row in by_rank) for name in by_rank[0]}


def summary(rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """All keys whose section has rows: medians, `spread`, `missed` (what is not as expected), and the `rounds` themselves."""
    ratios = {
        name: [key.of_row(row) for row in rows[key.section]]
        for name, key in KEYS.items()
        if rows.get(key.section)
    }
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    return {
        **{name: rounded(value) for name, value in medians.items()},
        "spread": {name: [rounded(min(v)), rounded(max(v))] for name, v in ratios.items()},
        "missed": [name for name, value in medians.items() if not KEYS[name].met(value)],
        "rounds": {
            section: [{k: rounded(v) for k, v in row.items()} for row in table]
            for section, table in rows.items()
        },
    }


def stall_and_drag(steady: Sequence[float], saving: float, after: Sequence[float]) -> tuple[float, float]:
    """From step durations: what the step that held the save took beyond a median one, and what the steps beside the upload
    took beyond it, all together.

    Args:
        steady: steps with no save under way.
        saving: the step that held the save.
        after: those from there until the commit was known.
    """
    usual = statistics.median(steady)
    return saving - usual, sum(step - usual for step in after)


def flatness(settled: Sequence[float], unit: float) -> float:
    """How much higher the last fifth of a series lies than the first fifth after its first two, by medians, in `unit`s."""
    rest = settled[2:]
    n = max(1, len(rest) // 5)
    return (statistics.median(rest[-n:]) - statistics.median(rest[:n])) / unit


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")
