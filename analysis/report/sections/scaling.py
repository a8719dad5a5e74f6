"""How training scales over GPUs: images/s beside the ideal line, efficiency, and GPU-hours per epoch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from analysis import recipe_labels
from analysis.columns import METRICS
from analysis.report import names
from analysis.report.estimate import Estimate
from analysis.report.figures import base, svg
from analysis.report.figures.by_batch import interval_note
from analysis.report.tables import COUNTS, DASH, Section, Table, TableBuilder, counts, mean_text
from analysis.stats.cells import CELL_KEYS, WORK_KEYS, Cell, compare, differing_work, work_text
from analysis.units import gpu_label, number
from inpaint_bench.core.console import pluralize

from . import nemo

WORTH = 0.9  # efficiency from which on more GPUs count as worth it: an epoch costs at most 11 % more GPU-hours
_RATE = "images_per_s"
_ENERGY = ("joules_per_image", "energy_error_pct")
_SAME = [name for name in CELL_KEYS if name not in ("gpus", "nodes", "batch")]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Cells that differ in the number of GPUs only, the fewest first."""

    kind: str  # weak | strong
    batch: int  # batch of each GPU, or of all together
    cells: list[Cell]

    @property
    def label(self) -> str:
        cell, scope = self.cells[-1], "per GPU" if self.kind == "weak" else "in total"
        recipe = cell[recipe_labels.COLUMN] or DASH
        return f"{gpu_label(cell['gpu'])} ({cell['site']}) {recipe} \u00b7 {self.kind}, batch {self.batch} {scope}"

    def ideal(self, cell: Cell) -> float:
        """Return the rate at the efficiency of the fewest GPUs."""
        return float(self.cells[0][_RATE] * cell["gpus"] / self.cells[0]["gpus"])

    def efficiency(self, cell: Cell) -> Estimate | None:
        """Return the efficiency in percent, with its interval if there are enough runs; None for the reference."""
        change = None if cell is self.cells[0] else compare(cell, self.cells[0], _RATE)
        if change is None:
            return None
        share = 100 * self.cells[0]["gpus"] / cell["gpus"]
        low, high = (None if end is None else share * (1 + end) for end in (change.low, change.high))
        return Estimate(share * (1 + change.value), low, high, form=lambda value: f"{value:.1f}")

    def worth(self) -> str:
        """Return the most GPUs that are worth it, by the lower end of the efficiency's interval, else by the mean."""
        shares = [(cell["gpus"], self.efficiency(cell)) for cell in self.cells]
        kept = (gpus for gpus, each in shares if not each or (each.low or each.value) >= 100 * WORTH)
        return f"{self.label}: {pluralize(max(kept), 'GPU')} of up to {self.cells[-1]['gpus']} worth it."


def sections(build: TableBuilder) -> list[Section]:
    """Return a section per kind of work on scaling; none if no cell has another number of GPUs than one like it."""
    works: dict[tuple[Any, ...], list[Series]] = {}
    for series in find_series(build.cells):
        works.setdefault(tuple(series.cells[0][key] for key in WORK_KEYS), []).append(series)
    return [_section(build, alike, f"-{index}" if index else "") for index, alike in enumerate(works.values())]


def _section(build: TableBuilder, all_series: list[Series], suffix: str) -> Section:
    """Return the section of one kind of work, which it names beside other work."""
    cell = all_series[0].cells[0]
    title = ": ".join(filter(None, ["Scaling over GPUs", work_text(cell, build.cells)]))
    published = [] if suffix else [nemo.scaling(build), nemo.gpu_comparison(build)]
    return Section(
        title=title,
        kinds=("scaling over GPUs",),
        studied=cell["workload"],
        answer=": ".join(filter(None, [_named_work(cell, build.cells), _answer(all_series)])),
        best=f"{number(max((cell[_RATE] for series in all_series for cell in series.cells), default=None))} images/s",
        paragraphs=[_METHOD, *(series.worth() for series in all_series)],
        tables=[_table(build, all_series, title, suffix), _communication(build, all_series, suffix), *published],
        figures=[_figure(all_series, suffix)],
    )


def _named_work(cell: Cell, cells: pl.DataFrame) -> str:
    """Return `work_text` with names for people: `SD 1.5 inpainting fine-tune, 256 px`."""
    several = {"workload", "model"} & {*differing_work(cells)}
    own = cells.filter(pl.col("workload") == cell["workload"], pl.col("model") == cell["model"])
    name = names.work(cell["workload"], [cell["model"]]) if several else ""
    return ", ".join(filter(None, [name, work_text(cell, own)]))


def _answer(all_series: list[Series]) -> str:
    """Return the rate of the most GPUs, and how many times the rate of the fewest each series reaches."""
    most = [(each, max(each.cells, key=lambda cell: (cell["gpus"], cell[_RATE]))) for each in all_series]
    ends = sorted(most, key=lambda pair: -pair[1][_RATE])
    shares = [series.efficiency(cell) for series, cell in ends]
    reached = [
        f"{cell[recipe_labels.COLUMN]} {cell[_RATE] / (fewest := series.cells[0])[_RATE]:.2f} times "
        f"{pluralize(fewest['gpus'], 'GPU')} ({share.value:.0f} % of ideal, {series.kind}, batch {cell['batch']})"
        for (series, cell), share in zip(ends, shares, strict=True)
        if share is not None
    ]
    few = "" if any(share and share.low is not None for share in shares) else " Too few runs for an interval."
    best = ends[0][1]
    rate = f"{number(best[_RATE])} images/s"
    return f"{names.gpu(best['gpu'], best['gpus'])} reach {rate}: {names.join(reached, 4)}.{few}"


_METHOD = (
    "Weak scaling keeps the batch of each GPU, strong scaling that of all GPUs together. Efficiency is images/s per "
    "GPU over that of the fewest GPUs measured; the ideal is 100 %. The largest number of GPUs counts as worth it that "
    f"keeps at least {100 * WORTH:.0f} % (the lower end of the interval, where there is one): a convention."
)


def find_series(cells: pl.DataFrame) -> Iterator[Series]:
    """Yield every series of at least two numbers of GPUs."""
    alone = pl.col("recipe").map_elements(recipe_labels.on_one_gpu, return_dtype=pl.String)
    total = pl.col("batch") * pl.col("gpus")
    known = cells.drop_nulls([_RATE, "gpus", "batch"]).with_columns(total=total, alone=alone)
    keys = [name for name in _SAME if name != "recipe"]
    for alike in known.partition_by([*keys, "alone"], maintain_order=True):
        for same in alike.partition_by("recipe", maintain_order=True):
            if 1 not in same["gpus"]:
                same = pl.concat([alike.filter(recipe=same["alone"][0], gpus=1), same])
            for kind, column in (("weak", "batch"), ("strong", "total")):
                for rows in same.sort(column, "gpus", "nodes").partition_by(column, maintain_order=True):
                    if rows["gpus"].n_unique() > 1:
                        yield Series(kind=kind, batch=rows[column][0], cells=rows.to_dicts())


def _table(build: TableBuilder, all_series: list[Series], title: str, suffix: str) -> Table:
    columns = ["Scaling", "GPU", "Site", "Recipe", "Batch per GPU", "Batch in total", "GPUs", "Nodes"]
    columns += [*COUNTS, METRICS[_RATE].heading, "Ideal [images/s]", "Efficiency [%]", "GPU-hours per epoch"]
    columns += [METRICS[name].heading for name in _ENERGY]
    epochs = dict(build.runs.select("run_id", "dataset_images").iter_rows())
    rows = []
    cells = [(curve, cell) for curve in all_series for cell in curve.cells]
    for series, cell in cells:
        keys = [gpu_label(cell["gpu"]), cell["site"], cell[recipe_labels.COLUMN] or DASH]
        shape = [cell["batch"], cell["total"], cell["gpus"], cell["nodes"]]
        # An epoch is not defined if there are several data sets.
        images, *others = {epochs.get(run_id) for run_id in cell["run_ids"]}
        hours = cell["gpus"] * images / cell[_RATE] / 3600 if images and not others else None
        rates = [mean_text(cell, _RATE), number(series.ideal(cell)), series.efficiency(cell) or DASH, number(hours)]
        energy = [mean_text(cell, name) for name in _ENERGY]
        rows.append([series.kind, *keys, *map(str, shape), *counts(cell), *rates, *energy])
    note = (
        "Ideal: the rate per GPU of the fewest GPUs, which are the reference and have no efficiency; beside a lever of "
        "several GPUs one GPU without it, if none with it was measured. GPU-hours: GPUs times images of the data set "
        "over images/s. Energy is that of all GPUs."
    )
    lead = ("Scaling", "GPU", "Recipe", "Batch per GPU", "GPUs", METRICS[_RATE].heading, "Efficiency [%]", columns[-2])
    ranked = sorted(range(len(cells)), key=lambda i: -max(cell[_RATE] for cell in cells[i][0].cells))
    order: dict[tuple[str, ...], int] = {}
    for i in ranked:  # a reference once, also if several series have it
        series, cell = cells[i]
        order.setdefault((*cell["run_ids"], *([] if cell is series.cells[0] else [series.label])), i)
    return build.table(
        f"scaling{suffix}", title, columns, rows, note=note, lead_columns=lead, lead_rows=(*order.values(),)
    )


def _communication(build: TableBuilder, all_series: list[Series], suffix: str) -> Table:
    profiles = build.runs.select("run_id", "profile").drop_nulls()
    facts = {run_id: json.loads(profile).get("communication") or {} for run_id, profile in profiles.iter_rows()}
    cells = {tuple(cell["run_ids"]): cell for series in all_series for cell in series.cells}
    rows = []
    for cell in cells.values():
        profiled = [facts[run_id] for run_id in cell["run_ids"] if facts.get(run_id)]
        for call in sorted({call for calls in profiled for call in calls}):
            runs = [calls[call] for calls in profiled if call in calls]
            times = dict.fromkeys(("ms", "call_ms", "exposed_ms"), pl.Float64)
            total, whole, exposed = pl.DataFrame(runs, schema=times).mean().row(0)
            beside = None if total is None or exposed is None else total - exposed
            share = 100 * exposed / whole if exposed is not None and whole else None
            keys = [gpu_label(cell["gpu"]), cell["site"], cell[recipe_labels.COLUMN] or DASH]
            shape = [cell["batch"], cell["gpus"], cell["nodes"], len(runs), call]
            rows.append([*keys, *map(str, shape), *map(number, (total, beside, exposed, share))])
    columns = ["GPU", "Site", "Recipe", "Batch per GPU", "GPUs", "Nodes", "Profiles", "Call"]
    columns += ["Communication [ms]", "Beside other kernels [ms]", "Exposed [ms]", "Exposed [% of call]"]
    note = (
        "Of profiled steps of rank 0, which are no measurement of speed. A kernel of communication also waits for the "
        "other GPUs. Exposed: no other kernel ran at the same time; on a CPU that is not known."
    )
    return build.table(f"communication{suffix}", "Time in communication", columns, rows, note=note)


def _figure(all_series: list[Series], suffix: str) -> base.Figure:
    shown = all_series[: len(svg.SERIES)]
    points = [
        {"series": series.label, "gpu": cell["gpu"], "recipe": f"{series.kind} {cell['recipe']}", "gpus": cell["gpus"]}
        | {"value": cell[_RATE], "ideal": series.ideal(cell), "n": cell["n"]}
        | {name: cell[f"{_RATE}_{end}"] for name, end in base.ENDS.items()}
        for series in shown
        for cell in series.cells
    ]
    rows = pl.DataFrame(points, schema_overrides=dict.fromkeys(base.ENDS, pl.Float64))
    rates = [point[name] for point in points for name in ("value", "ideal")]
    counts_of_gpus = sorted(set(rows["gpus"]))
    log = len(counts_of_gpus) > 2  # between two there is no curve to judge
    limits = (0.8 * min(rates), 1.25 * max(rates)) if log else (0.0, 1.1 * max(rates))
    ends = [counts_of_gpus[0], counts_of_gpus[-1]]
    across = alt.Scale(**({"type": "log", "base": 2} if log else {"domain": ends}), nice=False, padding=15)
    x = alt.X("gpus:Q").title("GPUs").scale(across).axis(values=counts_of_gpus, format="d")
    y = alt.Y("value:Q").title(METRICS[_RATE].heading).scale(type="log" if log else "linear", nice=False, domain=limits)
    layers = base.curves(rows, x, y, limits, log=log)
    run_ids = [run_id for series in shown for cell in series.cells for run_id in cell["run_ids"]]
    dashed = "Dashed: the rate per GPU of the fewest GPUs, times GPUs." + (" Both axes are logarithmic." if log else "")
    omitted = len(all_series) - len(shown)
    notes = [f"The table has {omitted} more series."] if omitted else []
    caption = [dashed, interval_note(rows, limits), *notes, base.n_note(run_ids, rows.height)]
    title, subtitle = "Images/s over GPUs", "Solid: measured; dashed: ideal"
    return base.figure(f"fig-scaling{suffix}", title, subtitle, caption, layers, run_ids)
