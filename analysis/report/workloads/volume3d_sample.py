"""Sampling of volumes: time, energy and memory of each recipe, with its agreement with the baseline beside it."""

from __future__ import annotations

import polars as pl

from analysis.report.tables import TableBuilder, cell
from inpaint_bench.core.schema import WindowKind

from . import Section, _volumes

COLUMNS = ["GPU", "Site", "Network", "Batch", "Recipe", "Precision", "n", "Time [s]", "Speed-up", "Energy [J/volume]"]
COLUMNS += ["VRAM peak [MiB]", "L1 to baseline", "MS-SSIM to baseline", "MS-SSIM to volume"]


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return the table of recipes."""
    measured = results.filter(pl.col("window_id").str.starts_with(WindowKind.MEASURE.value))
    rows = _volumes.cells(measured, runs, ["total_ms", "baseline_l1", "baseline_ms_ssim", "ms_ssim"])
    table = [
        [
            *_volumes.keys_text(row),
            str(row["n"]),
            cell(row["total_ms"] / 1000),
            _volumes.speedup(row, rows),
            *(cell(row[name]) for name in ("joules_per_image", "vram_used_mib_peak")),
            *(cell(row[name]) for name in ("baseline_l1", "baseline_ms_ssim", "ms_ssim")),
        ]
        for row in rows
    ]
    note = (
        "Means over n runs; time of one batch. To baseline: a short sample against that of fp32 with IEEE rounding, "
        "contiguous and eager, with the same weights, noise and segmentation. To volume: the first batch against the "
        "volumes that its segmentations are of; with random weights it says nothing."
    )
    paragraphs = []
    if count := int((~results["finite"]).sum()):
        paragraphs.append(f"Batches with voxels that are NaN or infinite: {count}.")
    main = build.table("volume3d-sample", "Sampling of volumes by recipe", COLUMNS, table, note=note)
    return Section(title="Volume diffusion: sampling", paragraphs=paragraphs, tables=[main])
