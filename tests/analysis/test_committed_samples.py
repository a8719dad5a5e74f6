"""The present code computes the figures of committed datasets again, and finds no contradiction in their valid runs."""

from __future__ import annotations

import polars as pl
import pytest

from analysis.columns import DEFINITIONS, PARITY
from analysis.dataset import open_dataset
from inpaint_bench.core.records import PARITY_TOLERANCE

from .committed import DATASETS, RESULTS, computed, contradictions

FIGURES = [*DEFINITIONS, "images_per_s", "joules_per_image", "step_ms_p50", "energy_ratio", "gpu_util_pct"]
QUICK = ("2026-11-28-h200-sd2-plain", "2026-11-21-h200-batches")


@pytest.mark.parametrize("name", QUICK)
def test_figures_of_a_committed_dataset_follow_from_its_samples(name: str) -> None:
    dataset = open_dataset(RESULTS / name)
    completed = dataset.runs.filter(pl.col("status") == "completed", pl.col("valid"))
    assert completed.height > 3
    for row in completed.iter_rows(named=True):
        new = computed(dataset, row)
        new["flags"] = (new["flags"] or "").removesuffix(",lever_inactive") or None  # of later code
        assert {name: new[name] for name in FIGURES} == {name: row[name] for name in FIGURES}, row["run_id"]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.faults) for name in DATASETS]
)
def test_no_valid_run_of_a_committed_dataset_contradicts_itself(name: str) -> None:
    dataset = open_dataset(RESULTS / name)
    for row in dataset.runs.filter("valid").iter_rows(named=True):
        assert contradictions(dataset, row) == [], row["run_id"]


def test_the_limit_of_parity_holds_against_fp32_for_all_that_was_compared_with_bf16() -> None:
    """|recipe - fp32| is at most |recipe - baseline| + |baseline - fp32|, both of which were measured."""
    runs = pl.concat(
        [
            open_dataset(RESULTS / name).runs.select("workload", "recipe", "parity_reference", *PARITY)
            for name in DATASETS
        ]
    ).filter(pl.col("workload").str.starts_with("finetune"), pl.col("parity_reference") == "baseline")
    assert {"earlier_baseline+fp32", "tuned_dit+fp8+attn_flash4", "tuned_hopper"} <= {*runs["recipe"]}
    for name in PARITY:
        largest, of_fp32 = runs[name].max(), runs.filter(pl.col("recipe") == "earlier_baseline+fp32")[name].max()
        # Both are relative to the norm of the baseline, which may be smaller than that of fp32 by their difference.
        assert (largest + of_fp32) / (1 - of_fp32) < PARITY_TOLERANCE, name
