"""What to take: the answer, and per GPU and recipe the batch, its speed, energy and cost, and what to run next."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import polars as pl

from analysis import published, recipe_labels, site_rates
from analysis.columns import METRICS
from analysis.report import names
from analysis.report.figures import by_batch
from analysis.report.tables import COUNTS, DASH, Section, Table, TableBuilder, counts, mean_text
from analysis.stats import best_batch
from analysis.stats.best_batch import BatchDecision, Choice
from analysis.stats.cells import (
    CACHE_KEYS,
    WORK_KEYS,
    Cell,
    add_series,
    compare,
    is_distinguishable,
    key_text,
    work_text,
)
from analysis.units import gpu_label, number
from inpaint_bench.core.workloads.finetune_inpaint import GRAPH_WARMUP

from .study_tables import KINDS

_CHOOSES_WORK = re.compile(r"\+{0,2}(model|workload|data)[.=](?!(min_)?(warmup|measure)_)")
# What a recipe is compared with, in words.
PLAIN = {
    **dict.fromkeys((recipe_labels.BASELINE, "fp32", "cpu"), "the plain loop"),
    recipe_labels.EARLIER: "the earlier baseline",
    "poster_baseline": "poster_baseline",
}
_IMAGES = 1_000_000  # that costs are given for, beside an epoch
_RATE = "images_per_s"
# What the plain loop and a recipe must agree in, beside the batch.
_SAME = [*WORK_KEYS, "site", "gpu", "gpus", "nodes", "comparability_key"]


def sections(build: TableBuilder, others: Sequence[Section]) -> Iterator[Section]:
    """Yield a section for each workload, family of models and kind of weights that are trained.

    A section has no answer if the `others` give one.
    """
    family = pl.col("model").map_elements(names.model, pl.String, skip_nulls=False)
    cells = build.cells.drop_nulls("batch").with_columns(family=family)
    answered = {section.workload for section in others if section.answer}
    leads = not any(section.answer and section.kinds for section in others)  # no study comes before
    # Within a workload the family with most cells comes first.
    workloads = cells["workload"].unique(maintain_order=True).to_list()
    groups = cells.partition_by("workload", "family", "adapters", maintain_order=True)
    in_family = Counter((group["workload"][0], group["family"][0]) for group in groups)
    groups.sort(key=lambda group: (workloads.index(group["workload"][0]), -group.height))
    for index, group in enumerate(groups):
        suffix = f"-{index}" if index else ""
        group, workload = add_series(group.drop("series")), group["workload"][0]
        decisions = best_batch.decide_batches(group, build.runs)
        # Fastest first: that is the order of the answer. Runs that disagree have no mean, and come last.
        decisions = [d for d in decisions if d.fastest or d.cell[f"{_RATE}_n"]]
        decisions.sort(key=lambda d: -(d.cell[_RATE] or 0))
        # A study at one batch answers what to take.
        studied = any({*section.kinds} & {*KINDS.values()} and section.studied == workload for section in others)
        is_known = workload in answered or (studied and group.select("gpu", "gpus", "batch").n_unique() == 1)
        if decisions:
            work = names.capitalize(names.work(workload, group["model"]))
            if in_family[workload, group["family"][0]] > 1 or group["adapters"][0]:
                work += f", {key_text(decisions[0].cell, 'adapters')}"
            # The first answer of the page has no title of its own.
            named = f"{work}: " if leads and (len(groups) > 1 or group["adapters"][0]) else ""
            leads = leads and is_known
            yield Section(
                title=f"{work}: what to take",
                workload=workload,
                kinds=() if others else _compared(group),
                answer="" if is_known else named + _answer(group, decisions),
                best=next((f"{number(d.cell[_RATE])} images/s" for d in decisions if d.fastest), ""),
                tables=[table(build, f"decision{suffix}", work, decisions, group)],
                figures=by_batch.draw(group, suffix) or by_batch.bars([d.cell for d in decisions], suffix),
            )


def _compared(cells: pl.DataFrame) -> tuple[str, ...]:
    """Return what was compared; nothing for GPUs, which the title names."""
    if cells["gpu"].n_unique() > 1:
        return ()
    if cells["recipe"].n_unique() == 1 and cells.select(WORK_KEYS).n_unique() > 1:
        return "weights", "settings"
    kinds = {"recipe": "recipes", "batch": "batch sizes"}
    return tuple(kind for column, kind in kinds.items() if cells[column].n_unique() > 1)


def _answer(cells: pl.DataFrame, decisions: list[BatchDecision]) -> str:
    """Return which GPU, batch and recipe to take, or what different kinds of work reach."""
    known = [d for d in decisions if d.fastest]
    if not known:
        return "Runs disagree in every cell: no mean, and no best one."
    works: dict[tuple[Any, ...], list[BatchDecision]] = {}
    for decision in known:
        works.setdefault(tuple(decision.cell[key] for key in WORK_KEYS), []).append(decision)
    if len(works) == 1:
        return _take(cells, known)
    if len({(d.cell["gpu"], d.cell["recipe"], d.cell["batch"]) for d in known}) == 1:
        best, worst = known[0].cell, known[-1].cell
        rates = f"{number(worst[_RATE])} to {number(best[_RATE])} images/s"
        setting = f"{len(works)} settings of {best[recipe_labels.COLUMN]} on {names.gpu(best['gpu'], best['gpus'])}"
        if is_distinguishable(best, worst, _RATE, lower_is_better=False):
            return f"{setting}, batch {best['batch']}, reach {rates}: {_work_name(cells, best)} is the fastest."
        return f"{setting}, batch {best['batch']}, make no difference: {rates}{_few(worst)}, a tie."
    parts = [f"{_work_name(cells, d[0].cell)}: {_take(cells, d)}" for d in works.values()]
    return f"Different work, no overall fastest. {' '.join(parts)}"


def _work_name(cells: pl.DataFrame, cell: Cell) -> str:
    return work_text(cell, cells) or cell["model"]


def _take(cells: pl.DataFrame, decisions: list[BatchDecision]) -> str:
    """Return the sentence for one kind of work: what to take, and how much faster it is than what else was measured."""
    cell = decisions[0].cell
    recipe = cell[recipe_labels.COLUMN]
    text = f"Take {names.gpu(cell['gpu'], cell['gpus'])}, batch {cell['batch']}"
    parts = [f"{text}{f', recipe {recipe}' if recipe else ''}: {number(cell[_RATE])} images/s{_few(cell)}"]
    tied = [d for d in decisions[1:] if not is_distinguishable(cell, d.cell, _RATE, lower_is_better=False)]
    if tied:
        parts.append(f"tied with {names.join([d.series for d in tied])}")
    named = {cell["gpu"], *(d.cell["gpu"] for d in tied)}
    others = {d.cell["gpu"]: d.cell for d in reversed(decisions) if d.cell["gpu"] not in named}  # the fastest of each
    parts += [_versus(cell, other, f"the {gpu_label(gpu)}") for gpu, other in others.items()]
    plain = _plain(cells, cell)
    if plain and plain["run_ids"] not in [d.cell["run_ids"] for d in tied]:
        parts.append(_versus(cell, plain, f"{PLAIN[plain['recipe']]}{_at_batch(plain, cell)}"))
    energy = [d.cheapest.cell for d in decisions if d.cheapest]
    least = min(energy, key=lambda each: each["joules_per_image"], default=cell)
    if least["series"] != cell["series"] and is_distinguishable(least, cell, "joules_per_image", lower_is_better=True):
        joules = number(least["joules_per_image"])
        parts.append(f"least energy: {least['series']} at batch {least['batch']}, {joules} J/image")
    return f"{', '.join(parts)}.{_equal_work(cells, cell, plain)}"


def _equal_work(cells: pl.DataFrame, cell: Cell, loop: Cell | None) -> str:
    """Return that the loop encodes what the cell has from caches, and the fastest recipe that does so too."""
    if loop is None or all(cell[key] == loop[key] for key in CACHE_KEYS):
        return ""
    same = [pl.col(name).eq_missing(pl.lit(loop[name])) for name in (*_SAME, "batch", *CACHE_KEYS)]
    others = cells.filter(~pl.col("recipe").is_in(list(PLAIN)), pl.col(_RATE) > loop[_RATE], *same).sort(-pl.col(_RATE))
    text = " Caches hold what that loop encodes in every step"
    if others.is_empty():
        return f"{text}."
    best = others.row(0, named=True)
    rate = f"{number(best[_RATE])} images/s{_at_batch(best, cell)}{_few(best)}"
    return f"{text}; {best[recipe_labels.COLUMN]} encodes it too: {rate}, {_versus(best, loop, 'that loop')}."


def _at_batch(cell: Cell, other: Cell) -> str:
    """Return ` at batch 16` if the batch of a cell differs from the batch of another cell, else nothing."""
    return "" if cell["batch"] == other["batch"] else f" at batch {cell['batch']}"


def _few(cell: Cell) -> str:
    """Return how many runs a rate has, if these are too few for an interval."""
    return "" if cell[f"{_RATE}_low"] is not None else f" ({names.count_runs(cell[f'{_RATE}_n'])})"


def _versus(new: Cell, old: Cell, name: str) -> str:
    gain = compare(new, old, _RATE)
    ratio = 1 + gain.value if gain else new[_RATE] / old[_RATE]
    better, worse = (new, old) if ratio > 1 else (old, new)
    return names.versus(ratio, name, tie=not is_distinguishable(better, worse, _RATE, lower_is_better=False))


def _plain(cells: pl.DataFrame, cell: Cell) -> Cell | None:
    """Return the plain loop that does the same work, at the same batch if that ran, else at its fastest."""
    same = (pl.col(name).eq_missing(pl.lit(cell[name])) for name in _SAME)
    loops = cells.filter(pl.col("recipe").is_in(list(PLAIN)), *same).drop_nulls(_RATE)
    if cell["recipe"] in PLAIN or loops.is_empty():
        return None
    return loops.sort(pl.col("batch") != cell["batch"], -pl.col(_RATE)).row(0, named=True)


def table(build: TableBuilder, id: str, title: str, decisions: list[BatchDecision], cells: pl.DataFrame) -> Table:
    """Return a row per GPU and recipe in the order of the decisions."""
    runs = {run["run_id"]: run for run in build.runs.iter_rows(named=True)}
    units = {_unit(d.cell) for d in decisions}
    decided = [(d, [runs[run_id] for run_id in d.cell["run_ids"]]) for d in decisions]
    plain = [_plain(cells, decision.cell) for decision in decisions]
    loop = PLAIN[min((cell["recipe"] for cell in plain if cell), key=list(PLAIN).index, default=recipe_labels.BASELINE)]
    plain = [cell if cell and PLAIN[cell["recipe"]] == loop else None for cell in plain]
    rows = [_row(*each, cell, unit_shown=len(units) > 1) for each, cell in zip(decided, plain, strict=True)]
    epochs = {size for _, own in decided if (size := _epoch(own))}
    per = "per million images", "per epoch" + (f" of {min(epochs):,}" if len(epochs) == 1 else "")
    cost = next(iter(units)) if len(units) == 1 else "Cost"
    columns = ["GPU and recipe", "Batch", "Images/s", METRICS["joules_per_image"].heading]
    columns += [METRICS["energy_error_pct"].heading, f"Times {loop}"]
    columns += [f"{name} {each}" for name in (cost, "Price") for each in per]
    columns += ["Least energy at", "Largest completed", "Smallest out of memory", *COUNTS, "Next run", "Overrides"]
    # A column is left out if no row has a value for it, e.g. the price if no site file has one.
    kept = [i for i, values in enumerate(zip(*rows, strict=True)) if any(value != DASH for value in values)]
    # Among different kinds of work none is the fastest, as in the answer.
    alike = cells.select(WORK_KEYS).n_unique() == 1
    return build.table(
        id,
        f"{title}: batch, energy and cost",
        [columns[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
        note=" ".join([_NOTE, *names.of_many(cells.height)]),
        row_runs=[decision.cell["run_ids"] for decision in decisions],
        strong_rows=frozenset([0] if alike and decisions[0].fastest else []),
        lead_columns=(*columns[:4], *columns[5:7], columns[8], "n", "Cards"),
    )


_NOTE = (
    "Batch: the smallest one that the runs do not distinguish from the fastest. Energy: board power, host not "
    "included; its error is a bound by counter and sensor. "
    "Times the plain loop: at equal batch; the earlier baseline is slower than the plain loop. Cost: time on the GPU "
    "at images/s, without start, compilation and waiting; service units by the site's file in conf/site. One run is "
    "provisional: it has no interval."
)


def _row(decision: BatchDecision, runs: list[dict[str, Any]], plain: Cell | None, *, unit_shown: bool) -> list[str]:
    cell, rate, epoch = decision.cell, decision.cell[_RATE], _epoch(runs)
    charge = site_rates.rate(cell["site"], cell["gpu"])
    units = (cell["gpus"] or 1) / 3600 * charge.units_per_gpu_hour  # for a second
    price = units * charge.price_per_unit if charge.price_per_unit else None
    costs = [
        " ".join(filter(None, [number(images * factor / rate), unit, "(at most)" if charge.at_most else ""]))
        if images and factor and rate
        else DASH
        for factor, unit in ((units, _unit(cell) if unit_shown else ""), (price, charge.currency))
        for images in (_IMAGES, epoch)
    ]
    gain = compare(cell, plain, _RATE) if plain and plain["batch"] == cell["batch"] else None
    next_run = f"{decision.next_run or 'none'}: {decision.next_run_reason}"
    memory = [str(batch or DASH) for batch in (decision.largest_completed, decision.smallest_oom)]
    overrides = [f"gpu={cell['gpu']}", f"batch={cell['batch']}"]
    # What is not the default of `launch`.
    nodes = cell["nodes"] or 1
    devices = {"gpus": (cell["gpus"] or 1) // nodes, "nodes": nodes}
    overrides += [f"{key}={count}" for key, count in devices.items() if count > 1]
    work = _work(runs)
    if cell["workload"] != published.WORKLOAD and not any(given.startswith("workload=") for given in work):
        overrides.append(f"workload={cell['workload']}")
    levers = {lever["name"] for lever in json.loads(runs[0]["levers"] or "[]")}
    if "cuda_graph" in levers and (cell["gpus"] or 1) > 1:  # the GPUs of all nodes
        work.append(GRAPH_WARMUP)
    # Quoted: they are to be pasted into a shell, and a manifest may come from elsewhere.
    pasted = shlex.join([*overrides, *work, *recipe_labels.overrides(cell["recipe"], runs[0]["recipe_parts"])])
    return [
        *(decision.series, _batch(cell["batch"], decision.fastest), mean_text(cell, _RATE)),
        *(mean_text(cell, name) for name in ("joules_per_image", "energy_error_pct")),
        *(f"{1 + gain.value:.2f}" if gain else DASH, *costs),
        *(_batch(decision.cheapest.batch, decision.cheapest) if decision.cheapest else DASH, *memory),
        *(*counts({**cell, "n": cell[f"{_RATE}_n"]}), next_run, pasted),
    ]


def _batch(batch: int, choice: Choice | None) -> str:
    """Return a batch with those that the runs do not distinguish from it."""
    ties = sorted({choice.batch, *choice.ties} - {batch}) if choice else []
    return str(batch) + (f" (tied with {', '.join(map(str, ties))})" if ties else "")


def _work(runs: list[dict[str, Any]]) -> list[str]:
    """Return the overrides that all runs were given of model, workload and data, but not how long to measure."""
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


def suggestions(table: Table) -> list[str]:
    """Return the overrides of the fastest row, and its next run; nothing for another table."""
    if "Overrides" not in table.columns or not table.strong_rows:
        return []
    row = table.rows[min(table.strong_rows)]
    return [f"Fastest: {row[-1]}", f"Next run: {row[-2]}"]
