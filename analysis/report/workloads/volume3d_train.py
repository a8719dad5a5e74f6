"""Training of volume diffusion: rate, energy and memory of each recipe, with its validation beside it."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from analysis.dataset import Dataset
from analysis.report.tables import Table, TableBuilder
from inpaint_bench.core.console import pluralize

from . import Section, _medddpm, _volumes

COLUMNS = {
    "Steps/s": "steps_per_s",
    "Energy [J/step]": "joules_per_step",
    "Energy error, at most [%]": "energy_error_pct",
    "Speed-up": "speedup",
    "VRAM peak, measured [MiB]": "vram_used_mib_peak",
    "VRAM peak, whole run [MiB]": "vram_run_mib_peak",
    "Allocated peak [MiB]": "torch_allocated_peak_mib",
    "Validation L1": "validation_l1",
    "MS-SSIM": "validation_ms_ssim",
    "Prediction error": "parity_prediction_rel",
    "Gradient error": "parity_gradient_rel",
}


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return the table of recipes, and the published networks beside those that ran."""
    rows = _volumes.cells(results, runs, ["validation_l1", "validation_ms_ssim", "trained_steps"])
    trained = sorted({int(row["trained_steps"]) for row in rows if row["trained_steps"] is not None})
    scales = sorted(set(results["ms_ssim_scales"].drop_nulls().to_list()))
    counted = " or ".join(pluralize(int(count), "scale") for count in scales) or "no scales"
    note = (
        "Means over n runs. Speed-up: over fp32 with IEEE rounding and no other lever, on the same GPU, network and "
        f"batch. Validated after {' or '.join(map(str, trained)) or 'no'} steps of training from the same weights, on "
        f"held-out volumes: L1 of the predicted noise, and MS-SSIM ({counted}) of the volumes without it. Errors: "
        "relative to fp32 with IEEE rounding, contiguous and eager, before the first step."
    )
    section = _volumes.section(build, rows, COLUMNS, note, runs["run_id"].to_list(), "train")
    paragraphs = [
        "So few steps train no usable network: the validation shows whether recipes learn alike, no more.",
        "The slices are of held-out volumes: with noise of steps of the schedule, and without the predicted noise.",
    ]
    return replace(section, paragraphs=paragraphs, tables=[*section.tables, _volumes.networks(build, results)])


def more_tables(build: TableBuilder, dataset: Dataset, results: pl.DataFrame, runs: pl.DataFrame) -> list[Table]:
    """Return the claims of Med-DDPM's kernel study beside what was measured."""
    return [_medddpm.comparison(build, dataset, results, runs)]
