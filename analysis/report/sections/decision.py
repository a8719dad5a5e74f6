"""The table that answers: per GPU and recipe the batch to take, its speed, energy and cost, and what to run next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from analysis import published, recipe_labels, site_rates
from analysis.report.estimate import Estimate
from analysis.report.tables import DASH, Table, TableBuilder, mean_text
from analysis.stats import best_batch
from analysis.stats.best_batch import BatchDecision
from analysis.stats.cells import TIE_THRESHOLD, Cell, is_same_work
from analysis.units import gpu_order, number

FIRST_ROWS = 10  # of the first screen: more recipes are in a table of their own
PER_GPU = 3  # rows that each GPU has there at least, its fastest recipes
_CHOOSES_WORK = re.compile(r"\+{0,2}(model|workload)[.=](?!(min_)?(warmup|measure)_)")
PROVISIONAL = "provisional"
_IMAGES = 1000  # that energy and cost are given for, beside an epoch


def tables(build: TableBuilder) -> list[Table]:
    """Return the decision table, and where that leaves recipes out the table of all of them."""
    runs = {run["run_id"]: run for run in build.runs.iter_rows(named=True)}
    decisions = best_batch.decide_batches(build.all_cells, build.runs)
    decisions = [d for d in decisions if d.fastest or d.cell["images_per_s_n"]]
    # Per GPU the fastest recipe first.
    decisions.sort(key=lambda d: (gpu_order(d.cell["gpu"]), -(d.cell["images_per_s"] or 0), d.series))
    shown = _first_screen(decisions)
    first = _table(build, "decision", "Which batch to take, and what it costs", shown, runs)
    if len(shown) == len(decisions):
        return [first]
    return [first, _table(build, "decision-all", "Every recipe", decisions, runs)]


def _first_screen(decisions: list[BatchDecision]) -> list[BatchDecision]:
    """Return all decisions if they are few, else of each GPU the fastest, the one of least energy and the baseline."""
    if len(decisions) <= FIRST_ROWS:
        return decisions
    kept = []
    for gpu in dict.fromkeys(d.cell["gpu"] for d in decisions):
        own = [d for d in decisions if d.cell["gpu"] == gpu]
        known = [d for d in own if d.cheapest]
        cheapest = min(known, key=lambda d: d.cheapest.cell["joules_per_image"], default=None)  # type: ignore[union-attr]
        fastest = own[:PER_GPU]
        kept += [d for d in own if d in fastest or d is cheapest or d.cell["recipe"] == recipe_labels.BASELINE]
    return kept


def _table(
    build: TableBuilder, id: str, title: str, decisions: list[BatchDecision], runs: dict[str, dict[str, Any]]
) -> Table:
    units = {_unit(d.cell) for d in decisions}
    decided = [(d, [runs[run_id] for run_id in d.cell["run_ids"]]) for d in decisions]
    rows = [_row(decision, own, unit_shown=len(units) > 1) for decision, own in decided]
    epochs = {size for d in decisions if (size := _epoch(runs[run_id] for run_id in d.cell["run_ids"]))}
    per_epoch = f"per epoch of {min(epochs):,}" if len(epochs) == 1 else "per epoch"
    columns = ["GPU and recipe", "Batch", "Images/s", f"kJ per {_IMAGES:,} images", f"kJ {per_epoch}"]
    cost = next(iter(units)) if len(units) == 1 else "Cost"
    columns += [f"{cost} per {_IMAGES:,} images", f"{cost} {per_epoch}"]
    columns += [f"Price per {_IMAGES:,} images", f"Price {per_epoch}", "Runs", "Next run", "Overrides"]
    # What is known of no row needs no column: a price where no site file has one.
    empty = [i for i, cells in enumerate(zip(*rows, strict=True)) if all(cell == DASH for cell in cells)]
    kept = [i for i in range(len(columns)) if i not in empty or not rows]
    # Among different kinds of work none is the fastest, as in the headline.
    alike = is_same_work(build.all_cells)
    fastest = max((d.fastest.cell["images_per_s"] for d in decisions if d.fastest and alike), default=None)
    return build.table(
        id,
        title,
        [columns[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
        note=_note(decisions) if rows else "",
        row_runs=[decision.cell["run_ids"] for decision in decisions],
        strong_rows=frozenset(
            i for i, d in enumerate(decisions) if d.fastest and d.fastest.cell["images_per_s"] == fastest
        ),
    )


def _row(decision: BatchDecision, runs: list[dict[str, Any]], *, unit_shown: bool) -> list[str]:
    cell, fastest = decision.cell, decision.fastest
    ties = sorted({fastest.batch, *fastest.ties} - {fastest.smallest}) if fastest else []
    batch = str(cell["batch"]) + (f" (tied with {', '.join(map(str, ties))})" if ties else "")
    rate, epoch = site_rates.rate(cell["site"], cell["gpu"]), _epoch(runs)
    units = (cell["gpus"] or 1) / 3600 * rate.units_per_gpu_hour  # for a second
    price = units * rate.price_per_unit if rate.price_per_unit else None
    remarks = ["at most"] if rate.at_most else []
    costs = [
        _inverse(cell, images * factor, unit, remarks) if images and factor else DASH
        for factor, unit in ((units, _unit(cell) if unit_shown else ""), (price, rate.currency))
        for images in (_IMAGES, epoch)
    ]
    energy = [_scaled(cell, images / 1000) if images else DASH for images in (_IMAGES, epoch)]
    n = cell["images_per_s_n"]
    count = f"{n} ({PROVISIONAL})" if n == 1 else str(n)
    next_run, reason = decision.next_run, decision.next_run_reason
    suggestion = f"{next_run}: {reason}" if next_run else f"none: {reason}"
    overrides = [f"gpu={cell['gpu']}", f"batch={cell['batch']}"]
    # What is not the default of `launch`.
    nodes = cell["nodes"] or 1
    counts = {"gpus": (cell["gpus"] or 1) // nodes, "nodes": nodes}
    overrides += [f"{key}={count}" for key, count in counts.items() if count > 1]
    work = _work(runs)
    if cell["workload"] != published.WORKLOAD and not any(given.startswith("workload=") for given in work):
        overrides.append(f"workload={cell['workload']}")
    overrides += work
    # Quoted: they are to be pasted into a shell, and a manifest may come from elsewhere.
    pasted = shlex.join([*overrides, *recipe_labels.overrides(cell["recipe"], runs[0]["recipe_parts"])])
    speed = mean_text(cell, "images_per_s")
    return [decision.series, batch, speed, *energy, *costs, count, suggestion, pasted]


def _work(runs: list[dict[str, Any]]) -> list[str]:
    """Return the overrides that chose model and workload, but not how long to measure, if all runs were given them."""
    given = [shlex.split(run["overrides"] or "") for run in runs]
    shared = [override for override in given[0] if all(override in others for others in given)]
    return [override for override in shared if _CHOOSES_WORK.match(override)]


def _unit(cell: Cell) -> str:
    """Return the unit of a cell's cost. Service units of two sites have nothing to do with each other."""
    rate = site_rates.rate(cell["site"], cell["gpu"])
    return rate.unit if rate is site_rates.GPU_HOURS else f"{rate.unit} of {cell['site']}"


def _epoch(runs: Iterable[dict[str, Any]]) -> int | None:
    """Return the images of an epoch, None unless all these runs agree."""
    sizes = {run["dataset_images"] for run in runs}
    return sizes.pop() if len(sizes) == 1 else None


def _scaled(cell: Cell, factor: float) -> str:
    return _converted(cell, "joules_per_image", lambda value: factor * value)


def _inverse(cell: Cell, factor: float, unit: str, remarks: list[str]) -> str:
    """Return what takes longer the fewer images/s there are: the ends of the interval change places."""
    return _converted(cell, "images_per_s", lambda value: factor / value, unit=unit, remarks=remarks)


def _converted(cell: Cell, metric: str, convert: Callable[[float], float], **options: Any) -> str:
    """Return a figure that follows from another one, with the interval or range that follows from its own."""
    if not cell[metric]:
        return DASH
    ends: dict[str, float | None] = {}
    for low, high in (("low", "high"), ("min", "max")):
        pair = cell[f"{metric}_{low}"], cell[f"{metric}_{high}"]
        # No interval of a reciprocal where the figure's own reaches zero.
        first, last = sorted(map(convert, pair)) if all(pair) else (None, None)
        ends |= {low: first, high: last}
    return Estimate(
        convert(cell[metric]),
        ends["low"],
        ends["high"],
        least=ends["min"],
        most=ends["max"],
        form=number,
        narrow=False,
        **options,
    )


def _note(decisions: list[BatchDecision]) -> str:
    charged = {_unit(d.cell) for d in decisions} - {site_rates.GPU_HOURS.unit}
    sentences = [
        "Batch: the smallest one that the runs do not distinguish from the fastest (95 % interval of the ratio; with "
        f"too few runs, runs that overlap or means within {100 * TIE_THRESHOLD:g} %).",
        "In parentheses the 95 % interval, or with fewer than three runs or cards their range.",
        "Energy is that of the GPU board.",
        "Cost: time on the GPU at images/s, without start, compilation and waiting"
        + ("; service units by the site's file in conf/site, at its cores and memory per GPU." if charged else "."),
    ]
    if any(d.cell["images_per_s_n"] == 1 for d in decisions):
        sentences.append(f"{PROVISIONAL.capitalize()}: one run, so no interval.")
    return " ".join(sentences)


def brief(table: Table) -> Table:
    """Return what fits into a terminal of 80 characters: batch, images/s, energy and cost of 1,000 images."""
    places = [i for i, name in enumerate(table.columns) if i < 3 or name.endswith(f"per {_IMAGES:,} images")]
    count = table.columns.index("Runs") if table.rows else 0
    rows = []
    for row in table.rows:
        cells = [row[i].replace(" \u00b7 ", " \u00b7\n") if i == 0 else row[i] for i in places]
        if PROVISIONAL in row[count]:
            cells[2] = f"{cells[2]} ({PROVISIONAL})"
        # The interval of a cost is that of images/s in other units.
        costs = [("<= " if "at most" in cell else "") + cell.partition(" (")[0] for cell in cells[4:]]
        rows.append([*cells[:4], *costs])
    columns = [table.columns[i] for i in places]
    return replace(table, columns=columns, rows=rows, text_columns=frozenset({0}), note="")


def suggestions(table: Table) -> list[str]:
    """Return the overrides of the fastest row, and the next run of every row."""
    lines = [f"Fastest: {row[-1]}" for i, row in enumerate(table.rows) if i in table.strong_rows]
    return lines + [f"Next run of {row[0]}: {row[-2]}" for row in table.rows]
