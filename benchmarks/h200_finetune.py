"""The table of what fine-tuning SD 1.5 reaches on one H200, beside its goals and the plain loop, and the ladders.

Reads a merged dataset; all figures are those of the report. Each row shows the best recipe that does this work. The
yardstick is the plain loop (recipe baseline) of the same site at the same batch; without one it is earlier_baseline,
which is slower than diffusers' own script. The runs come from `launch`; on a machine with prepared data
(prepare.caches=true prepare.formats=[memmap]) in DATA:

    common="site=local gpu=h200 wait=true repeats=3 data=prepared data.root=DATA workload.warmup_steps=6
        workload.min_warmup_s=60 workload.measure_steps=200 workload.min_measure_s=20"
    python -m inpaint_bench.launch -m $common recipe=baseline,tuned_hopper batch=4,16,32 hydra.sweep.dir=reach
    python -m inpaint_bench.launch -m $common recipe=compiled,tuned,tuned_online batch=16 hydra.sweep.dir=others
    python -m inpaint_bench.launch -m $common batch=16 study=ladder hydra.sweep.dir=ladder \\
        "study.levers=[cache_image+cache_masked+cache_text+on_gpu,cuda_graph,unet_nhwc+bf16_split,cudnn_benchmark,attn_flash4]"
    python -m inpaint_bench merge reach others ladder -o dataset
    python -m benchmarks.h200_finetune dataset

usage: python -m benchmarks.h200_finetune DATASET [--gpu h200] [--markdown]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console

from analysis import recipe_labels
from analysis.dataset import Dataset, definitions_note, open_dataset
from analysis.report import render
from analysis.report.estimate import Estimate, mean_of_runs
from analysis.report.sections import study_tables
from analysis.report.tables import COUNTS, DASH, Table, TableBuilder, counts, mean_text
from analysis.stats import study
from analysis.stats.cells import Cell, compare
from analysis.units import gpu_label, number
from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import WindowKind

MODEL, RESOLUTION_PX = "sd15_inpaint", 512  # what the goals are for
STEPS, LOAD_S = 200, 60.0  # at least so many measured steps after so much load
ONLINE = 2  # images that are encoded in the step: the image and the masked image


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A row of the table. `batch` None: the best of all batches."""

    work: str
    metric: str
    batch: int | None
    encodes: int = 0
    must: float
    aim: float

    @property
    def lower_is_better(self) -> bool:
        """Return whether a smaller value is the better one."""
        return self.metric == "joules_per_image"


GOALS = (
    Goal(work="batch 16, cached [images/s]", metric="images_per_s", batch=16, must=170, aim=178),
    Goal(work="best batch, cached [images/s]", metric="images_per_s", batch=None, must=182, aim=195),
    Goal(work="batch 4, cached [images/s]", metric="images_per_s", batch=4, must=124, aim=140),
    Goal(work="batch 16, online [images/s]", metric="images_per_s", batch=16, encodes=ONLINE, must=94, aim=105),
    Goal(work="batch 16, cached [J/image]", metric="joules_per_image", batch=16, must=4.05, aim=3.9),
)
PLAIN = [recipe_labels.BASELINE, recipe_labels.EARLIER]
WARMUP_GOALS = {"cold": (70.0, 60.0), "warm": (30.0, 15.0)}
COLUMNS = ["Work", "Recipe", "Batch", "Measured", "Must", "Aim", "Reached", "Plain loop", "Ratio", "Power [W]"]
COLUMNS += ["SM clock [MHz]", *COUNTS]


def best(cells: pl.DataFrame, goal: Goal) -> Cell | None:
    """Return the best cell that does the goal's work, None if there is none."""
    rows = cells.filter(~pl.col("recipe").is_in(PLAIN), pl.col("encodes_online") == goal.encodes)
    return _first(rows, goal)


def yardstick(cells: pl.DataFrame, goal: Goal, cell: Cell) -> Cell | None:
    """Return the plain loop at the goal's batch, of the same site and with the same driver, board and limits."""
    same = [pl.col(name) == cell[name] for name in ("site", "comparability_key")]
    return _first(cells.filter(pl.col("recipe").is_in(PLAIN), *same), goal)


def _first(rows: pl.DataFrame, goal: Goal) -> Cell | None:
    rows = rows.drop_nulls(goal.metric)
    if goal.batch is not None:
        rows = rows.filter(pl.col("batch") == goal.batch)
    return next(iter(rows.sort(goal.metric, descending=not goal.lower_is_better).to_dicts()), None)


def reached(value: float, worst: float | None, must: float, aim: float, *, lower_is_better: bool) -> str:
    """Return which goal the mean meets, and whether the whole interval does; `worst` is its worse end."""
    sign = -1 if lower_is_better else 1
    met = next(((text, goal) for text, goal in (("aim", aim), ("must", must)) if sign * value >= sign * goal), None)
    if met is None:
        return f"no, {abs(100 * (value / must - 1)):.0f} % {'above' if lower_is_better else 'below'} must"
    text, goal = met
    return f"{text}, by the mean only" if worst is not None and sign * worst < sign * goal else text


def goal_row(cells: pl.DataFrame, goal: Goal) -> list[str]:
    """Return the row of one goal."""
    goals = [number(goal.must), number(goal.aim)]
    cell = best(cells, goal)
    if cell is None:
        return [goal.work, DASH, DASH, "not measured", *goals, *[DASH] * 8]
    low, high = cell[f"{goal.metric}_low"], cell[f"{goal.metric}_high"]
    worst = high if goal.lower_is_better else low
    base = yardstick(cells, goal, cell)
    verdict = reached(cell[goal.metric], worst, goal.must, goal.aim, lower_is_better=goal.lower_is_better)
    return [
        goal.work,
        cell["recipe_short"],
        str(cell["batch"]),
        mean_text(cell, goal.metric),
        *goals,
        verdict,
        DASH if base is None else mean_text(base, goal.metric),
        DASH if base is None else _ratio(cell, base, goal.metric),
        mean_text(cell, "power_w"),
        mean_text(cell, "sm_clock_mhz_mean"),
        *counts(cell),
    ]


def _ratio(cell: Cell, base: Cell, metric: str) -> str:
    gain = compare(cell, base, metric)
    if gain is None:
        return DASH
    low, high = (None if end is None else 1 + end for end in (gain.low, gain.high))
    return Estimate(1 + gain.value, low, high, form="{:.2f}".format, narrow=False)


def warmup_s(dataset: Dataset, run_ids: Sequence[str]) -> dict[str, float]:
    """Return how long each run took to build, compile, capture and settle its first steps: until load or measurement.

    Its setup and its first window of warm-up steps; imports and the load of workload.min_warmup_s are not in it.
    """
    warmups = dataset.windows.filter(pl.col("kind") == WindowKind.WARMUP).sort("t_start_mono_ns")
    first = warmups.group_by("run_id").agg(pl.col("t_start_mono_ns").first(), pl.col("t_end_mono_ns").first())
    seconds = ((pl.col("t_end_mono_ns") - pl.col("t_start_mono_ns")) / 1e9 + pl.col("setup_s")).alias("warmup_s")
    rows = dataset.runs.join(first, "run_id").filter(pl.col("run_id").is_in(list(run_ids)))
    return dict(rows.select("run_id", seconds).drop_nulls().iter_rows())


def warmup_rows(dataset: Dataset, cells: pl.DataFrame) -> list[list[str]]:
    """Return the two rows of the warm-up: of the first run since a node booted, and of all later ones."""
    cell = best(cells, GOALS[0])
    base = yardstick(cells, GOALS[0], cell) if cell else None
    plain = _warmups(dataset, base) if base else []
    rows = []
    for state, (must, aim) in WARMUP_GOALS.items():
        head = [f"warm-up, {state} [s]"]
        own = _warmups(dataset, cell, state) if cell else []
        if cell is None or not own:
            rows.append([*head, DASH, DASH, "not measured", number(must), number(aim), *[DASH] * 8])
            continue
        mean = mean_of_runs(own, "warmup_s")
        assert mean is not None  # every run in `own` has a figure
        verdict = reached(mean.value, mean.high, must, aim, lower_is_better=True)
        row = [*head, cell["recipe_short"], str(cell["batch"]), mean, number(must), number(aim), verdict]
        plain_text = mean_of_runs(plain, "warmup_s") or DASH
        rows.append([*row, plain_text, DASH, DASH, DASH, *counts({**cell, "n": len(own)})])
    return rows


def _warmups(dataset: Dataset, cell: Cell, state: str | None = None) -> list[dict[str, Any]]:
    """Return the cell's runs with their warm-ups; of one state, or all. A cold run may have had another batch."""
    used = dataset.runs.filter(~pl.col("recipe").is_in(PLAIN), pl.col("site") == cell["site"])
    # Look at all recipes: they share kernels, so that only the first run of all has cold caches for certain.
    first = used.sort("started").unique(("node", "boot_id"), keep="first", maintain_order=True)
    cold = first.filter(pl.col("recipe") == cell["recipe"], pl.col("valid"))["run_id"].to_list()
    warm = [run_id for run_id in cell["run_ids"] if run_id not in cold]
    seconds = warmup_s(dataset, {"cold": cold, "warm": warm}.get(state or "", cell["run_ids"]))
    rows = dataset.runs.filter(pl.col("run_id").is_in(list(seconds))).to_dicts()
    return [{**row, "warmup_s": seconds[row["run_id"]]} for row in rows]


def goals_table(dataset: Dataset, build: TableBuilder, gpu: str) -> Table:
    """Return the table of goals. Raises UserError if the dataset has no such run."""
    cells = build.cells.filter(
        pl.col("gpu") == gpu, pl.col("gpus") == 1, pl.col("model") == MODEL, pl.col("resolution_px") == RESOLUTION_PX
    )
    if cells.is_empty():
        raise UserError(f"{dataset.folder}: no valid run of {MODEL} at {RESOLUTION_PX} px on gpu={gpu}")
    rows = [*(goal_row(cells, goal) for goal in GOALS), *warmup_rows(dataset, cells)]
    title = f"Fine-tuning of {MODEL} on one {gpu_label(gpu)}, and its goals"
    note = " ".join(filter(None, [_machines(dataset, cells), _notes(dataset, cells), _disagreement_note(cells)]))
    return build.table("goals", title, COLUMNS, rows, note=note)


def _disagreement_note(table: pl.DataFrame) -> str:
    """Return the sentences that list the cells whose runs disagree, or an empty string."""
    sentences = []
    for withheld, text in ((True, "Runs disagree, so no mean without --accept-disagreement"), (False, "Runs disagree")):
        cells = [
            f"{row['series']} batch {row['batch']}: {row['disagreement']}"
            for row in table.filter(pl.col("disagreement").is_not_null(), pl.col("withheld") == withheld).to_dicts()
        ]
        sentences += [f"{text}: {'; '.join(cells)}."] if cells else []
    return " ".join(sentences)


def _machines(dataset: Dataset, cells: pl.DataFrame) -> str:
    runs = dataset.runs.filter(pl.col("run_id").is_in(cells["run_ids"].explode().to_list()))
    boards = runs.select("gpu_name", "power_limit_w", "driver", "torch").unique().sort(pl.all())
    texts = [
        f"{row['gpu_name']}, {number(row['power_limit_w'])} W, driver {row['driver']}, torch {row['torch']}"
        for row in boards.to_dicts()
    ]
    return f"Boards: {'; '.join(texts)}."


def _notes(dataset: Dataset, cells: pl.DataFrame) -> str:
    """Return what the rows are, and which are shorter than asked for."""
    chosen = [cell for goal in GOALS if (cell := best(cells, goal))]
    runs = dataset.runs.filter(pl.col("run_id").is_in([run for cell in chosen for run in cell["run_ids"]]))
    load = dataset.windows.filter(pl.col("kind") == WindowKind.WARMUP).group_by("run_id")
    seconds = load.agg(((pl.col("t_end_mono_ns") - pl.col("t_start_mono_ns")).sum() / 1e9).alias("load_s"))
    runs = runs.join(seconds, "run_id", how="left").with_columns(pl.col("load_s").fill_null(0.0))
    short = runs.filter((pl.col("n_steps") < STEPS) | (pl.col("load_s") < LOAD_S))
    text = (
        "Of each row the best recipe is shown. Warm-up: setup, which compiles, and the first steps, which capture; "
        "imports are not in it. Cold: the first run since the node booted, the plain loop's apart, if it was of this "
        "recipe; warm: its other runs at batch 16. Plain loop: baseline, without one earlier_baseline, which is slower."
    )
    if short.height:
        steps, load_s = short["n_steps"].min(), short["load_s"].min()
        text += f" {short.height} of {runs.height} runs are shorter than {STEPS} steps after {LOAD_S:g} s of warm-up: "
        text += f"down to {steps} steps, {number(float(str(load_s)))} s."
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="that `merge` wrote")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(argv)
    dataset = open_dataset(options.dataset)
    build = TableBuilder(runs=dataset.runs, definitions_note=definitions_note(dataset.metadata))
    ladders = [item for item in study.comparisons(dataset.runs) if item.kind == study.LADDER]
    tables = [
        goals_table(dataset, build, options.gpu),
        *(study_tables.table(build, ladder) for ladder in ladders),
        study_tables.recipe_comparison(build),
    ]
    for note in dataset.notes:
        print(note)
    for table in tables:
        if options.markdown:
            print(render.to_markdown(table))
        else:
            render.to_terminal(table, Console())
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
