"""The checkpoint benchmark's arithmetic; what it measures is measured by running it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "paired.py"
    spec = importlib.util.spec_from_file_location("bench_paired", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


paired = _load()


def stall_row(memcpy_s: float, stall_s: float, thread_s: float, process_s: float) -> dict[str, float]:
    return {
        "memcpy_s": memcpy_s,
        "stall_s": stall_s,
        "drag_s": 0.5,
        "dcp_thread_stall_s": thread_s,
        "dcp_process_stall_s": process_s,
    }


def test_a_key_is_the_median_of_the_ratios_of_its_rounds() -> None:
    """Not the ratio of medians: in the second round the whole machine was slow, and that divides out."""
    rows = [stall_row(1, 1.2, 6, 4), stall_row(10, 11, 44, 66), stall_row(1, 1.4, 5.6, 7)]
    result = paired.summary({"stall": rows})
    assert result["stall_over_memcpy"] == 1.2
    assert result["spread"]["stall_over_memcpy"] == [1.1, 1.4]
    assert result["stall_vs_dcp_async"] == 4.0, "the faster of DCP's two ways, round by round"
    assert result["spread"]["stall_vs_dcp_async"] == [3.333, 4.0]
    assert result["upload_drag_s"] == 0.5
    assert result["missed"] == []
    assert result["rounds"]["stall"][0]["memcpy_s"] == 1
    assert "save_over_raw" not in result, "what was not measured has no key"


def test_what_is_not_as_expected_is_named() -> None:
    rows = [stall_row(1, 1.4, 3, 3)]
    assert paired.summary({"stall": rows})["missed"] == ["stall_over_memcpy", "stall_vs_dcp_async"]


def test_raw_is_the_fastest_of_the_plain_ways() -> None:
    row = {"raw_write_s": 3.0, "raw_mmap_s": 2.0, "raw_pwrite2_s": 1.8, "save_s": 2.0, "dcp_save_s": 5.0}
    row |= {"raw_read_s": 1.0, "raw_mmap_read_s": 0.9, "raw_pread2_s": 1.1, "load_s": 1.0, "dcp_load_s": 2.0}
    result = paired.summary({"files": [row]})
    assert (result["save_over_raw"], result["save_vs_dcp"]) == (0.9, 2.5)
    assert (result["load_over_raw"], result["load_vs_dcp"]) == (0.9, 2.0)


def test_the_slowest_rank_is_the_whole() -> None:
    assert paired.slowest([{"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 4.0}]) == {"a": 2.0, "b": 5.0}


def test_stall_and_drag_are_beyond_the_median_step() -> None:
    stall_s, drag_s = paired.stall_and_drag([1.0, 1.0, 9.0], 1.5, [1.25, 1.0, 1.5])
    assert (stall_s, drag_s) == pytest.approx((0.5, 0.75))


def test_flat_memory_has_no_drift_whatever_the_first_saves_took() -> None:
    assert paired.flatness([900, 500, *[100] * 48], 100) == 0
    growing = [0, 0, *range(100, 600, 10)]
    assert paired.flatness(growing, 100) == pytest.approx(4.0)


def test_names_of_keys_and_sections_choose_sections_in_their_order() -> None:
    assert paired.sections_of(["s3_save_over_boto3", "load_over_raw", "files"]) == ["files", "s3"]
    with pytest.raises(ValueError, match="no_such_key"):
        paired.sections_of(["no_such_key"])


def test_every_documented_key_is_there() -> None:
    keys = """stall_over_memcpy stall_vs_dcp_async upload_drag_s save_over_raw save_vs_dcp load_over_raw load_vs_dcp reshard_load_vs_dcp
    get_bytes_over_unique first_over_steady_save rss_over_staged plan_ms_1k_ranks_1k_tensors plan_first_ms_1k_ranks_1k_tensors
    s3_save_over_boto3 s3_load_over_boto3"""
    assert set(keys.split()) <= set(paired.KEYS)
