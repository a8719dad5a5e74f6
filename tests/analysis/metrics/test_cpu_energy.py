"""Energy of the processor packages over the measure window, and why there is none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis.metrics import run_row
from analysis.metrics.energy import find_cpu_energy
from analysis.metrics.facts import Facts
from inpaint_bench.core.records import Environment
from tests.analysis import real_run
from tests.analysis.build import load_run, rewrite


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a run beside two processors that draw 250 W each."""
    return real_run.write_run(tmp_path / "run", "r-01")


def row_of(folder: Path) -> dict[str, Any]:
    run, tables = load_run(folder)
    return run_row.summarise(Facts(manifest=run.manifest, windows=run.windows, tables=tables, files=run))


def reason(folder: Path, change: pl.Expr, column: str) -> str:
    """Return why there is no energy after a change of one column."""
    rewrite(folder, "samples_cpu", lambda rows: rows.with_columns(change.alias(column)))
    row = row_of(folder)
    assert (row["cpu_energy_j"], row["joules_per_image_with_cpu"]) == (None, None)
    assert row["joules_per_image"] > 0
    reasons = dict(pair.split("=", 1) for pair in row["null_reasons"].split("; "))
    assert reasons["cpu_energy_j"] == reasons["joules_per_image_with_cpu"]
    return reasons["cpu_energy_j"]


def test_board_and_processors_together_are_an_energy_of_their_own(folder: Path) -> None:
    row = row_of(folder)
    assert row["valid"], row["invalid_reason"]
    assert row["cpu_energy_j"] == pytest.approx(500 * row["window_s"], rel=1e-4)
    both = (row["energy_j"] + row["cpu_energy_j"]) / row["images"]
    assert row["joules_per_image_with_cpu"] == pytest.approx(both)
    assert row["joules_per_image"] * row["images_per_s_per_w"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("column", "change", "expected"),
    [
        ("whole_node", pl.lit(False), "the job did not hold every CPU of its node"),
        ("energy_uj", pl.max("energy_uj") - pl.col("energy_uj"), "does not grow"),
        ("energy_uj", pl.lit(7), "does not grow"),
        ("t_unix_ns", pl.col("t_unix_ns") - 10**15, "no samples_cpu"),  # an earlier start in the same directory
    ],
)
def test_an_energy_that_is_not_the_jobs_is_null_with_the_reason(
    folder: Path, column: str, change: pl.Expr, expected: str
) -> None:
    assert expected in reason(folder, change, column)


def test_the_reason_of_the_sidecar_is_kept(folder: Path) -> None:
    denied = pl.lit("energy_uj=no_permission")
    rewrite(folder, "samples_cpu", lambda rows: rows.with_columns(nulls=denied))
    assert reason(folder, pl.lit(None), "energy_uj") == "no_permission"


def test_an_older_run_without_the_table_is_valid(folder: Path) -> None:
    shutil.rmtree(folder / "samples_cpu")
    run, tables = load_run(folder)
    assert run.sidecar is not None
    del run.sidecar.tables["samples_cpu"]
    row = run_row.summarise(Facts(manifest=run.manifest, windows=run.windows, tables=tables, files=run))
    assert row["valid"], row["invalid_reason"]
    assert "cpu_energy_j=no samples_cpu" in row["null_reasons"]


BEFORE = pl.col("tick_seq") < 20


@pytest.mark.parametrize(
    "change",
    [
        pl.when(BEFORE).then(pl.col("energy_uj") + 10**9).otherwise("energy_uj"),  # it wrapped
        pl.when(BEFORE).then("energy_uj").otherwise(pl.col("energy_uj") + 262 * 10**9),  # the range was added once more
        pl.when(BEFORE).then("energy_uj").otherwise(pl.col("energy_uj").filter(BEFORE).max()),  # it stands still
        pl.when(pl.col("tick_seq") % 2 == 0).then("energy_uj").otherwise(pl.col("energy_uj").shift(1)),
        pl.col("energy_uj") // 1000,  # mJ
        pl.col("energy_uj") // 1_000_000,  # J
        pl.col("energy_uj") * 1000,  # nJ
    ],
)
def test_a_counter_that_no_processor_has_gives_no_energy(folder: Path, change: pl.Expr) -> None:
    assert "outside 1 to 5,000 W: it wrapped, stands still or has another unit" in reason(folder, change, "energy_uj")


@pytest.mark.parametrize(
    ("environment", "cpus", "gpus", "expected"),
    [
        ({"cores": 16, "node_cores": 128}, [], 1, "it had 16 of 128 or more"),
        ({"cores": 16, "node_cores": 16}, [*range(112, 128)], 1, "it had 16 of 128 or more"),
        ({"cores": 8}, [*range(16)], 1, "it had 8 of 16 or more"),
        ({"cores": 16, "node_cores": 16}, [*range(16)], 1, None),
        ({"cores": 16, "node_cores": 128}, [*range(16)], 8, None),  # each rank is bound to a part of the node
        ({}, [], 1, None),
    ],
)
def test_a_job_with_fewer_cores_than_the_node_did_not_hold_it(
    folder: Path, environment: dict[str, Any], cpus: list[int], gpus: int, expected: str | None
) -> None:
    run, tables = load_run(folder)
    assert run.sidecar is not None
    run.sidecar.cpus, run.manifest.gpus = cpus, gpus
    run.manifest.environment = Environment(**environment)
    found = find_cpu_energy(Facts(manifest=run.manifest, windows=run.windows, tables=tables, files=run))
    assert expected in found.reasons["cpu_energy_j"] if expected else found.values["cpu_energy_j"] > 0
