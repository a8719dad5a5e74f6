"""Training of volume diffusion: rate, energy and memory of each recipe, with its validation beside it."""

from __future__ import annotations

import polars as pl

from analysis.dataset import Dataset
from analysis.report.tables import Table, TableBuilder, cell
from inpaint_bench.core.console import pluralize

from . import Section, _medddpm, _volumes

COLUMNS = ["GPU", "Site", "Network", "Batch", "Recipe", "Precision", "n", "Steps/s", "Speed-up", "Energy [J/step]"]
COLUMNS += ["VRAM peak [MiB]", "Allocated peak [MiB]", "Validation L1", "MS-SSIM", "Prediction error", "Gradient error"]


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return the table of recipes, and the published networks beside those that ran."""
    rows = _volumes.cells(results, runs, ["validation_l1", "validation_ms_ssim", "trained_steps"])
    table = []
    for row in rows:
        joules = row["joules_per_image"]
        table.append(
            [
                *_volumes.keys_text(row),
                str(row["n"]),
                cell(row["steps_per_s"]),
                _volumes.speedup(row, rows),
                cell(None if joules is None else joules * row["batch"]),
                *(cell(row[name]) for name in ("vram_used_mib_peak", "torch_allocated_peak_mib")),
                *(cell(row[name]) for name in ("validation_l1", "validation_ms_ssim")),
                *(cell(row[f"parity_{name}_rel"]) for name in ("prediction", "gradient")),
            ]
        )
    trained = sorted({int(row["trained_steps"]) for row in rows if row["trained_steps"] is not None})
    steps = " or ".join(map(str, trained)) or "no"
    scales = sorted(set(results["ms_ssim_scales"].drop_nulls().to_list()))
    counted = " or ".join(pluralize(int(count), "scale") for count in scales) or "no scales"
    note = (
        "Means over n runs. Speed-up: over fp32 with IEEE rounding and no other lever, on the same GPU, network and "
        f"batch. Validated after {steps} steps of training from the same weights, on held-out volumes: L1 of the "
        f"predicted noise, and MS-SSIM ({counted}) of the volumes without it. Errors: "
        "relative to fp32 with IEEE rounding, contiguous and eager, before the first step."
    )
    main = build.table("volume3d-train", "Training of volume diffusion by recipe", COLUMNS, table, note=note)
    return Section(
        title="Volume diffusion: training",
        paragraphs=[
            "So few steps train no usable network: the validation shows whether recipes learn alike, no more.",
            "The slices are of held-out volumes: with noise of steps of the schedule, and without the predicted noise.",
        ],
        tables=[main, _volumes.networks(build, results)],
    )


def published_tables(build: TableBuilder, dataset: Dataset, results: pl.DataFrame, runs: pl.DataFrame) -> list[Table]:
    """Return the claims of Med-DDPM's kernel study beside what was measured."""
    return [_medddpm.comparison(build, dataset, results, runs)]
