"""Sampling of volumes: time, energy and memory of each recipe, with its agreement with the baseline beside it."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from analysis.report.tables import TableBuilder
from inpaint_bench.core.schema import WindowKind

from . import Section, _volumes

COLUMNS = {
    "Volumes/s": "images_per_s",
    "Energy [J/volume]": "joules_per_image",
    "Energy error, at most [%]": "energy_error_pct",
    "Speed-up": "speedup",
    "Time [s]": "total_s",
    "VRAM peak, measured [MiB]": "vram_used_mib_peak",
    "VRAM peak, whole run [MiB]": "vram_run_mib_peak",
    "L1 to baseline": "baseline_l1",
    "MS-SSIM to baseline": "baseline_ms_ssim",
    "MS-SSIM to volume": "ms_ssim",
}


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return the table of recipes."""
    measured = results.filter(pl.col("window_id").str.starts_with(WindowKind.MEASURE.value))
    measured = measured.with_columns(total_s=pl.col("total_ms") / 1000)
    rows = _volumes.cells(measured, runs, ["total_s", "baseline_l1", "baseline_ms_ssim", "ms_ssim"])
    note = (
        "Means over n runs; time of one batch. To baseline: a short sample against that of fp32 with IEEE rounding, "
        "contiguous and eager, with the same weights, noise and segmentation. To volume: the first batch against the "
        "volumes that its segmentations are of; with random weights it says nothing."
    )
    section = _volumes.section(build, rows, COLUMNS, note, runs["run_id"].to_list(), "sample")
    broken = int((~results["finite"]).sum())
    return replace(section, paragraphs=[f"Batches with voxels that are NaN or infinite: {broken}."] if broken else [])
