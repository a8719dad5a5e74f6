"""The table of goals holds the report's figures, and says what was not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.dataset import Dataset, open_dataset
from analysis.merge import merge
from analysis.report.tables import Table, TableBuilder, mean_text
from benchmarks import h200_finetune
from inpaint_bench.core.errors import UserError
from tests.analysis.build import unix_offset_ns, write_levers, write_run

CACHED = {"encodes_online": 0, "text_online": False}
ONLINE = {"encodes_online": 2, "text_online": True}
RATES = (9.9, 10.0, 10.1)  # steps/s of three runs


def write(root: Path, recipe: str, batch: int, steps_per_s: float, seed: int, **facts: Any) -> str:
    run_id = f"r-{recipe}-{batch}-{seed}"
    write_run(
        root,
        run_id,
        gpu="h200",
        site="local",
        recipe=recipe,
        batch=batch,
        seed=seed,
        point=len(list(root.glob("*"))) if root.exists() else 0,
        steps_per_s=steps_per_s,
        power_w=650.0,
        workload_facts={"setup_s": 5.0 + seed, **facts},
    )
    return run_id


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("runs")
    for seed, rate in enumerate(RATES):
        write(folder / "sweep", "tuned", 16, rate, seed, **CACHED)
        write(folder / "sweep", "baseline", 16, rate / 4, seed, **ONLINE)
    write(folder / "sweep", "tuned", 32, 5.5, 0, **CACHED)
    write_levers(folder / "ladder", "ladder", ["tf32", "channels_last"], repeats=1)
    merge([folder], folder / "dataset")
    return open_dataset(folder / "dataset")


@pytest.fixture(scope="module")
def table(dataset: Dataset) -> Table:
    return h200_finetune.goals_table(dataset, TableBuilder(runs=dataset.runs), "h200")


def row(table: Table, work: str) -> dict[str, str]:
    (row_cells,) = (cells for cells in table.rows if cells[0].startswith(work))
    return dict(zip(table.columns, row_cells, strict=True))


def test_a_row_has_the_mean_and_interval_of_the_report_and_the_plain_loop_beside_it(
    dataset: Dataset, table: Table
) -> None:
    figures = row(table, "batch 16, cached [images/s]")
    cells = TableBuilder(runs=dataset.runs).cells.filter(batch=16, site="local")
    tuned, plain = (cells.filter(recipe=name).to_dicts()[0] for name in ("tuned", "earlier_baseline"))
    assert figures["Measured"] == mean_text(tuned, "images_per_s") == "160 (156 to 164)"
    assert figures["Plain loop"] == mean_text(plain, "images_per_s")
    assert figures["Ratio"].startswith("4.00")
    assert (figures["n"], figures["Must"], figures["Aim"]) == ("3", "170", "178")
    assert figures["Reached"] == "no, 6 % below must"


def test_work_that_nobody_ran_stays_in_the_table(table: Table) -> None:
    assert row(table, "batch 4")["Measured"] == "not measured"
    # The plain loop encodes its images online, but is the yardstick.
    assert row(table, "batch 16, online")["Measured"] == "not measured"


def test_the_warm_up_is_setup_and_first_steps_and_only_the_first_run_since_boot_is_cold(
    dataset: Dataset, table: Table
) -> None:
    ids = [f"r-tuned-{batch}-{seed}" for batch, seed in ((16, 0), (16, 1), (16, 2), (32, 0))]
    first = min(ids, key=unix_offset_ns)
    seconds = {run_id: 5.0 + int(run_id[-1]) + 9.0 for run_id in ids}  # setup, and 9 s of warm-up steps
    assert h200_finetune.warmup_s(dataset, ids) == pytest.approx(seconds)
    assert row(table, "warm-up, cold")["Measured"] == f"{seconds[first]:.1f}"
    warm = [seconds[run_id] for run_id in ids[:3] if run_id != first]
    assert row(table, "warm-up, warm")["Measured"].startswith(f"{sum(warm) / len(warm):.1f}")


def test_short_runs_and_the_board_are_named(table: Table) -> None:
    assert "NVIDIA H200, 700 W" in table.note
    assert "4 of 4 runs are shorter than 200 steps after 60 s" in table.note


@pytest.mark.parametrize(
    ("value", "worst", "lower", "text"),
    [
        (180, 179, False, "aim"),
        (180, 170, False, "aim, by the mean only"),
        (160, None, False, "must"),
        (140, 139, False, "no, 10 % below must"),
        (50, 60, True, "aim"),
        (170, 171, True, "no, 10 % above must"),
    ],
)
def test_a_goal_is_reached_by_the_mean_and_by_its_interval(
    value: float, worst: float | None, lower: bool, text: str
) -> None:
    must, aim = (155, 178) if not lower else (155, 60)
    assert h200_finetune.reached(value, worst, must, aim, lower_is_better=lower) == text


def test_a_gpu_without_runs_is_a_sentence(dataset: Dataset) -> None:
    with pytest.raises(UserError, match="no valid run of sd15_inpaint at 512 px on gpu=a40"):
        h200_finetune.main([str(dataset.folder), "--gpu", "a40"])
