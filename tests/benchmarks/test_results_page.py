"""docs/results.md shows the committed datasets as they are."""

import polars as pl
import pytest

from benchmarks import results_page
from benchmarks.results_tables import RESULTS, Figure, Measured
from inpaint_bench.core.errors import UserError


def test_page_is_what_the_datasets_say():
    assert results_page.TARGET.read_text() == results_page.page(), "stale: run python -m benchmarks.results_page"


def test_a_row_is_the_range_of_the_valid_runs():
    runs = pl.read_parquet(RESULTS / "2026-11-23-h200-volumes" / "runs.parquet")
    runs = runs.filter(pl.col("valid") & (pl.col("recipe") == "fp32+tf32") & pl.col("model").str.starts_with("whole"))
    rates, energies = sorted(runs["steps_per_s"]), sorted(runs["joules_per_image"])
    row = f"| whole_head 128x128x128 | `fp32+tf32` | {rates[0]:.2f} to {rates[-1]:.2f} | "
    row += f"{energies[0]:.0f} to {energies[-1]:.0f} |"
    (line,) = (line for line in results_page.page().splitlines() if line.startswith(row))
    bounds, cards = sorted(runs["energy_error_pct"]), runs["gpu_uuid"].n_unique()
    assert f"| {bounds[0]:.1f} to {bounds[-1]:.1f} |" in line
    assert line.endswith(f"| {runs.height} | {cards} |")


def test_row_that_mixes_batches_is_refused():
    rate = Figure("images/s", "images_per_s")
    table = Measured(
        title="Mixed", datasets=("2026-11-23-h200-finetune",), text="", rows={"recipe": "recipe"}, figures=(rate,)
    )
    with pytest.raises(UserError, match=r"Mixed: the row \('tuned_hopper',\) mixes runs that differ in batch"):
        list(table.lines())
