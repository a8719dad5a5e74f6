"""Flags: what happened during a window or a run is in the dataset as codes, whether the run is valid or not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import merge
from analysis.dataset import open_dataset
from analysis.metrics.flags import Flag
from inpaint_bench.core import schema
from inpaint_bench.core.paths import ROOT
from tests.analysis.build import A40, S, rewrite, rewrite_json, write_event, write_run


def flags_of(tmp_path: Path) -> tuple[str | None, dict[str, str | None], dict[str, Any]]:
    """Return the flags of the run, the flags by window, and the run's row."""
    merge.merge([tmp_path / "grace"], tmp_path / "ds")
    dataset = open_dataset(tmp_path / "ds")
    row = dataset.runs.row(0, named=True)
    return row["flags"], dict(dataset.windows.select("window_id", "flags").iter_rows()), row


def test_undisturbed_run_has_no_flags(tmp_path: Path) -> None:
    write_run(tmp_path / "grace")
    assert flags_of(tmp_path)[:2] == (None, {"w-0": None, "w-1": None})


@pytest.mark.parametrize(
    ("column", "share", "code"),
    [
        ("throttle_sw_thermal_ns", 0.02, "throttled_thermal"),
        ("throttle_hw_thermal_ns", 0.02, "throttled_thermal"),
        ("throttle_power_cap_ns", 0.06, "throttled_power"),
        ("throttle_power_cap_ns", 0.04, None),
        ("throttle_power_brake_ns", 0.02, "throttled_brake"),
    ],
)
def test_throttling_flags_its_window(tmp_path: Path, column: str, share: float, code: str | None) -> None:
    """Throttle from the start of the measure window on; the warm-up before it is not throttled."""
    throttled_ns = ((pl.col("t_mono_ns") - 1000 * S).clip(0) * share).cast(pl.UInt64)
    rewrite(write_run(tmp_path / "grace"), "samples_slow", lambda rows: rows.with_columns(throttled_ns.alias(column)))
    run, windows, row = flags_of(tmp_path)
    assert (run, windows) == (code, {"w-0": None, "w-1": code})
    assert row["valid"]


def test_xid_in_the_window_is_a_flag_and_a_warning_and_the_run_stays_valid(tmp_path: Path) -> None:
    write_event(write_run(tmp_path / "grace"), "xid", "43", at_s=12.0)
    run, windows, row = flags_of(tmp_path)
    assert (run, windows) == ("xid", {"w-0": None, "w-1": "xid"})
    assert f"Xid 43 on GPU {A40} at 12.0 s" in row["warnings"]
    assert row["valid"]


def test_xid_outside_every_window_flags_the_run_only(tmp_path: Path) -> None:
    write_event(write_run(tmp_path / "grace"), "xid", "31", at_s=33.0)
    run, windows, row = flags_of(tmp_path)
    assert (run, windows) == ("xid", {"w-0": None, "w-1": None})
    assert "Xid" not in (row["warnings"] or "")


def test_xid_of_another_gpu_is_ignored(tmp_path: Path) -> None:
    write_event(write_run(tmp_path / "grace"), "xid", "43", gpu_uuid="GPU-of-a-neighbour")
    assert flags_of(tmp_path)[0] is None


def test_co_tenant_flags_every_window_from_its_detection_on(tmp_path: Path) -> None:
    write_event(write_run(tmp_path / "grace"), "co_tenant", "pid 4242", at_s=-5.0)
    run, windows, row = flags_of(tmp_path)
    assert (run, windows) == ("co_tenant", {"w-0": "co_tenant", "w-1": "co_tenant"})
    assert not row["valid"]


def test_power_limit_change_in_the_measurement_does_not_flag_the_warm_up(tmp_path: Path) -> None:
    write_event(write_run(tmp_path / "grace"), "power_limit", "300 W to 250 W", at_s=5.0)
    assert flags_of(tmp_path)[:2] == ("power_limit_changed", {"w-0": None, "w-1": "power_limit_changed"})


def test_preemption_flags_the_window_that_it_cut(tmp_path: Path) -> None:
    write_run(tmp_path / "grace", status="interrupted", reason="preempted")
    assert flags_of(tmp_path)[:2] == ("preempted,interrupted", {"w-0": None, "w-1": "preempted,interrupted"})


def test_windows_before_a_requeue_are_flagged(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "grace", slurm={"restart_count": 1})

    def earlier(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for edge in ("start", "end"):
            windows[0][f"t_{edge}_unix_ns"] -= 5000 * S
        return windows

    rewrite_json(folder, schema.WINDOWS, earlier)
    assert flags_of(tmp_path)[:2] == ("requeued", {"w-0": "requeued", "w-1": None})


def test_document_lists_every_flag() -> None:
    section = (ROOT / "docs" / "dataset.md").read_text().split("## Valid runs, warnings and flags")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert listed == [flag.value for flag in Flag]


def test_several_flags_have_a_fixed_order(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "grace", slurm={"restart_count": 2})
    events = [("xid", "43"), ("co_tenant", "pid 7")]
    for kind, detail in events:
        write_event(folder, kind, detail)
        (folder / "events" / "part-000000.parquet").rename(folder / "events" / f"part-{len(kind):06d}.parquet")
    assert flags_of(tmp_path)[0] == "requeued,co_tenant,xid"
