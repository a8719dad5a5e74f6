"""The sidecar reads the energy counter at 10 Hz where windows may be short, by the length that a run asks for."""

from __future__ import annotations

import time
from pathlib import Path

import polars as pl
import pytest

from inpaint_bench.run.attempt import start_sidecar
from inpaint_bench.telemetry.sampling.streams import ENERGY_READS

from .support import bench

REPLAY = ("telemetry=replay", "telemetry.capture=h200-synthetic", "telemetry.ready_timeout_s=60")


@pytest.mark.parametrize(
    ("overrides", "hz"),
    [
        (["workload.min_measure_s=29.9"], 10),
        (["workload.min_measure_s=30"], 1),
        (["workload.min_measure_s=5", "telemetry.fast_hz=5"], 5),  # at most once per row
        (["workload.min_measure_s=5", "telemetry.energy_hz=10", "telemetry.fast_hz=20"], 10),
        (["workload.min_measure_s=0", "workload.train_steps=100"], 1),
    ],
)
def test_counter_is_read_as_often_as_the_window_needs(tmp_path: Path, overrides: list[str], hz: float) -> None:
    config = bench(*REPLAY, *overrides)
    before = config.telemetry.energy_hz
    sidecar = start_sidecar(config, tmp_path, "r-test", [])
    time.sleep(5)
    report = sidecar.stop()
    assert (sidecar.state.energy_hz, report.energy_hz) == (hz, hz)  # what the analysis judges gaps by
    assert config.telemetry.energy_hz == before  # the key, and so the configuration's hash, stays
    parts = sorted((tmp_path / "samples_fast").glob("part-*.parquet"))
    rows = pl.concat([pl.read_parquet(part) for part in parts]).sort("t_mono_ns")
    later = rows[ENERGY_READS:-1]  # in the first rows, and in the last, it is always read
    expected = hz / report.streams["fast"].hz
    assert later.height > 3
    assert later["energy_mj"].count() == pytest.approx(expected * later.height, abs=1)
