"""Sampling of volumes: time, energy and memory of each recipe, with its agreement with the baseline beside it."""

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
    "MMD to real": "mmd",
    "MS-SSIM of pairs": "pair_ms_ssim",
    "of real pairs": "real_pair_ms_ssim",
    "Difference to other weights": "other_weights_rel",
}


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return the table of recipes."""
    measured = results.filter(pl.col("window_id").str.starts_with(WindowKind.MEASURE.value))
    measured = measured.with_columns(total_s=pl.col("total_ms") / 1000)
    trained = measured.select("run_id", trained=", trained with " + pl.col("trained_with")).unique()
    runs = runs.join(trained, on="run_id", how="left").with_columns(pl.col("model") + pl.col("trained").fill_null(""))
    rows = _volumes.cells(measured, runs, [name for name in COLUMNS.values() if name in measured.columns])
    compared = " or ".join(map(str, sorted({*measured["compared_volumes"].drop_nulls()}))) or "no"
    note = (
        "Means over n runs; time of one batch. To baseline: a short sample against that of fp32 with IEEE rounding, "
        "contiguous and eager, with the same weights, noise and segmentation. To volume: the first batch against the "
        "volumes that its segmentations are of; with random weights it says nothing. Then sets: "
        f"{compared} samples and as many held-out volumes; MMD is that of voxels, squared, 0 for equal distributions; "
        "pairs: the lower, the more volumes differ; other weights: |a - b| / |b| of samples from the same noise."
    )
    section = _volumes.section(build, rows, COLUMNS, note, runs["run_id"].to_list(), "sample")
    broken = int((~results["finite"]).sum())
    return replace(section, paragraphs=[f"Batches with voxels that are NaN or infinite: {broken}."] if broken else [])
