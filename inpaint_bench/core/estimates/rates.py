"""Images per second and joules per image of a run before it, from measured and published cells. Loads no torch.

`cells.csv` holds the cells of the committed datasets, and those of the poster and of NVIDIA's NeMo page; `errors.csv`
how far repeated cells are apart, and how far cells are from the line between two batches; benchmarks/measured_cells.py
writes both. On a card without such cells of a recipe, the rate is that of another card times the published ratio of the
two, with the spread of that ratio over batches as its interval.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from inpaint_bench.core.config import recipe as recipes
from inpaint_bench.core.config.bench import BenchConfig, GpuConfig
from inpaint_bench.core.config.yaml_file import read_config_file
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import current_names
from inpaint_bench.core.records import to_record

from . import memory

if TYPE_CHECKING:
    import polars as pl

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
# Runs from before recipes were recorded: which levers a name meant then is not known, so it names another execution.
UNRECORDED = " (levers not recorded)"
SLOWER_CODE = 0.05  # an older dataset whose rate is lower by more than this share was measured with slower code
_SMALLER = {"h": (60, "min"), "MJ": (1000, "kJ")}  # what is printed of less than 1
Interval = tuple[float, float, float]  # expected, least, most


class Work(NamedTuple):
    """What a step does, and how: cells of equal work differ in card, batch and number of GPUs."""

    workload: str
    model: str
    variant: str
    recipe: str  # empty: a program of others
    resolution_px: int  # 0: the workload has none


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Replicates of one configuration in one dataset: means over runs. Or a published rate."""

    source: str
    work: Work
    gpu: str
    gpus: int
    nodes: int
    batch: int
    n: int  # 0: published
    ended: str  # when the last run of the dataset ended, in UTC; empty: published
    images_per_s: float  # rate of all GPUs together
    rate_cv: float  # standard deviation over mean; 0 with one run
    joules_per_image: float  # 0: not known
    other_s: float  # median time of a run outside of its measured windows: start, compilation, warm-up, checks
    vram_mib: float  # peak in the measured windows, by NVML; 0: not known, as the next
    vram_run_mib: float  # peak in the whole run, with parity and the search of cuDNN


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A rate with its interval, and where it comes from."""

    images_per_s: float
    error: float  # relative, of rate and energy: between images_per_s / (1 + error) and images_per_s * (1 + error)
    joules_per_image: float | None
    other_s: float
    source: str
    longest_other_s: float  # the longest of its datasets: a start takes two minutes if no kernels are compiled yet
    measured: bool = False
    ratio_spread: tuple[float, float] = (1.0, 1.0)  # least and greatest published ratio, over the one of this batch

    def seconds(self, images: float) -> Interval:
        """Return how long a run of so many images takes, with its start."""
        expected, least, most = _spread(images / self.images_per_s, self.error)
        slowest, fastest = self.ratio_spread
        return expected + self.other_s, least / fastest + self.other_s, most / slowest + self.longest_other_s

    def joules(self, images: float) -> Interval | None:
        """Return the energy of the GPUs; None if it is not known."""
        return _spread(images * self.joules_per_image, self.error) if self.joules_per_image else None


def _spread(value: float, error: float) -> Interval:
    return value, value / (1 + error), value * (1 + error)


def scaled(values: Interval, factor: float) -> Interval:
    """Return an interval of another unit."""
    return values[0] * factor, values[1] * factor, values[2] * factor


def amount(values: Sequence[float], unit: str) -> str:
    """Return a value, with its interval if it has one, as text. Hours below 1 are minutes, MJ below 1 kJ."""
    factor, unit = _SMALLER.get(unit, (1, unit)) if values[0] < 1 else (1, unit)
    expected, *ends = (f"{value * factor:.3g}" for value in values)
    return f"{expected} ({' to '.join(ends)}) {unit}" if ends else f"{expected} {unit}"


@cache
def committed() -> tuple[Cell, ...]:
    """Return the cells of the committed datasets, and published ones."""
    return tuple(_cell(row) for row in memory.rows("cells.csv"))


def _cell(row: dict[str, Any]) -> Cell:
    return to_record(row | {"work": [row[name] for name in Work._fields]}, Cell, strict=False)


def read_cells(folder: Path) -> list[Cell]:
    """Return the cells of a dataset that `merge` wrote. Raises UserError if there is none, or it was changed."""
    import polars as pl  # slow to load, and not needed without a dataset of one's own

    from inpaint_bench.core import seal  # loads polars

    _, table = seal.read_runs(folder)
    if "inactive_levers" in table.columns:  # such a lever may be active today
        table = table.filter(pl.col("inactive_levers").is_null())
    return cells_of(folder.name, table.with_columns(pl.Series("recipe", current_names(table), pl.String)))


def cells_of(source: str, runs: pl.DataFrame) -> list[Cell]:
    """Return the cells of a table of runs, whose recipes have their names of today."""
    import polars as pl

    missing = {"variant": "", "nodes": 1, "joules_per_image": 0.0, "demonstration": False}
    missing |= dict.fromkeys(("encodes_online", "vram_used_mib_peak", "vram_run_mib_peak"))
    table = runs.with_columns(pl.lit(value).alias(name) for name, value in missing.items() if name not in runs)
    rate, seconds = pl.col("images_per_s"), (pl.col("ended") - pl.col("started")).dt.total_milliseconds() / 1000
    unknown = pl.col("encodes_online").is_null() & pl.col("workload").is_in(memory.WORKLOADS)
    peaks = {"vram_mib": "vram_used_mib_peak", "vram_run_mib": "vram_run_mib_peak"}
    table = (
        table.filter(pl.col("valid") & (rate > 0) & pl.col("batch").is_not_null() & ~pl.col("demonstration"))
        .with_columns(pl.col(Work._fields[:-1]).fill_null(""), pl.col("resolution_px").fill_null(0))
        .with_columns(
            last=pl.col("ended").max(),
            recipe=pl.concat_str("recipe", pl.when(unknown).then(pl.lit(UNRECORDED)), ignore_nulls=True),
        )
        .group_by(*Work._fields, "gpu", "gpus", "nodes", "batch", maintain_order=True)
        .agg(
            pl.len().alias("n"),
            pl.col("last").first().dt.strftime("%Y-%m-%dT%H:%M").fill_null("").alias("ended"),
            (rate.std() / rate.mean()).fill_null(0.0).alias("rate_cv"),
            rate.mean(),
            pl.col("joules_per_image").mean().fill_null(0.0),
            (seconds - pl.col("window_s")).median().fill_null(0.0).alias("other_s"),
            *(pl.col(column).cast(pl.Float64).max().fill_null(0.0).alias(name) for name, column in peaks.items()),
        )
    )
    return [_cell({"source": source, **row}) for row in table.to_dicts()]


def own_cells(folders: Iterable[str | Path]) -> list[Cell]:
    """Return the committed cells, behind those of datasets of one's own.

    Raises UserError for a folder without a dataset, and for two of one name.
    """
    paths = {Path(folder).resolve(): Path(folder) for folder in folders}.values()
    if twice := [name for name, count in Counter(path.name for path in paths).items() if count > 1]:
        raise UserError(f"two datasets have the name {twice[0]}, by which their figures are told apart; rename one")
    own = [cell for path in paths for cell in read_cells(path)]
    named = {cell.source for cell in own}  # perhaps a committed one
    return [*own, *(cell for cell in committed() if cell.source not in named)]


def work_of(bench: BenchConfig) -> Work:
    """Return the work of a point as merge names it."""
    px = bench.data.resolution_px if bench.workload.unet_channels else 0
    variant = bench.workload.variant() or ""
    return Work(bench.workload.name, bench.workload.model(bench), variant, recipes.name(bench), px)


@cache
def errors() -> dict[str, float]:
    """Return the 95 % quantile of the relative error of each kind, which is as large for half as for twice the rate."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for row in memory.rows("errors.csv"):
        ratio = float(row["predicted"]) / float(row["reference"])
        by_kind[row["kind"]].append(max(ratio, 1 / ratio) - 1)
    return {kind: sorted(seen)[math.ceil(0.95 * len(seen)) - 1] for kind, seen in by_kind.items()}


def find(work: Work, gpu: str, batch: int, cells: Sequence[Cell], *, gpus: int = 1, nodes: int = 1) -> Rate | None:
    """Return the rate of a work on a card; None if no cell tells it."""
    by_card: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if (cell.work, cell.gpus, cell.nodes) == (work, gpus, nodes):
            by_card[cell.gpu].append(cell)
    if rate := _of_card(by_card.pop(gpu, []), batch):
        return rate
    card, hopper_only = cards().get(gpu), recipes.fields_of(work.recipe).get("attention") == "flash4"
    if card is None or (hopper_only and card.architecture != "Hopper"):
        return None
    published: dict[str, dict[tuple[int, int], Cell]] = defaultdict(dict)
    for cell in cells:
        # A ratio of fewer GPUs does not hold the exchange between more of them.
        if not cell.n and cell.work._replace(recipe=work.recipe) == work and cell.gpus >= gpus and cell.nodes >= nodes:
            published[cell.gpu][cell.batch, cell.gpus * cell.nodes] = cell
    rates = [
        _times_ratio(rate, base.upper(), batch, published[gpu], published[base])
        for base, own in by_card.items()
        if published[gpu].keys() & published[base] and (rate := _of_card([cell for cell in own if cell.n], batch))
    ]
    return min(rates, key=attrgetter("error"), default=None)


def _of_card(cells: Sequence[Cell], batch: int) -> Rate | None:
    """Return the rate at a batch by the cells of one card and work; by the line of time over batch between two.

    One's own are preferred, then measured ones. Datasets of older code count only if no other one has the batch, or
    those around it.
    """
    known = {cell.source for cell in committed()}
    kinds = (lambda c: c.source not in known, lambda c: c.source in known and c.n, lambda c: not c.n)
    for kind in kinds:
        ranked = sorted(filter(kind, cells), key=attrgetter("ended", "source"), reverse=True)  # the newest first
        current = _of_current_code(ranked)
        for group in (current, [cell for cell in ranked if cell not in current]):
            if same := [cell for cell in group if cell.batch == batch]:
                return _repeated(same)
            # Cells of two datasets differ by the code of two days too.
            datasets = [list(own) for _, own in groupby(group, key=attrgetter("source"))]
            lines = [between(own, batch) for own in datasets]
            if nearest := min(filter(None, lines), key=lambda line: line[0], default=None):
                return _rate(nearest[1], errors()["batches"], f"predicted from {nearest[1].source}")
    return None


def _of_current_code(ranked: Sequence[Cell]) -> list[Cell]:
    """Return the cells of the datasets that are not slower than newer ones at a batch that they share.

    A dataset that is faster than a newer one remains: the newer one may be of a slower host or a warmer card.
    """
    kept: list[Cell] = []
    for _, group in groupby(ranked, key=attrgetter("source")):
        cells = list(group)
        pairs = ((cell, newer) for cell in cells for newer in kept if cell.batch == newer.batch)
        if all(cell.images_per_s >= newer.images_per_s * (1 - SLOWER_CODE) for cell, newer in pairs):
            kept += cells
    return kept


def _repeated(cells: Sequence[Cell]) -> Rate:
    """Return the rate that datasets, the newest first, have of one cell: the mean of theirs."""
    newest, count, n = cells[0], len(cells), sum(cell.n for cell in cells)
    if not n:
        return _rate(newest, errors()["repeat"], f"published by {newest.source}")
    values = [cell.images_per_s for cell in cells]
    joules = [cell.joules_per_image for cell in cells if cell.joules_per_image]
    middle = mean(values)
    if count == 1:  # between datasets, thus between days, cells differ more than runs of one day
        error = max(errors()["repeat"], _prediction(n, newest.rate_cv) if n > 2 else 0.0)
    else:
        error = _prediction(count, max(_cv(values), _cv(joules)))
        if count == 2:  # too few to say how far datasets are apart; all cells together say it
            error = min(error, errors()["repeat"])
        error = max(error, max(values) / middle - 1, middle / min(values) - 1)
    whole = replace(
        newest,
        images_per_s=middle,
        joules_per_image=mean(joules or [0.0]),
        other_s=median(cell.other_s for cell in cells),
    )
    of = f" in {count} datasets, the last" if count > 1 else ","
    rate = _rate(whole, error, f"measured (n = {n}{of} {newest.source})", measured=True)
    return replace(rate, longest_other_s=max(cell.other_s for cell in cells))


def _cv(values: Sequence[float]) -> float:
    return stdev(values) / mean(values) if len(values) > 1 else 0.0


def _prediction(n: int, cv: float) -> float:
    """Return half of the 95 % prediction interval of one more value, over the mean of `n`."""
    return _T95.get(n - 1, 2.2) * cv * math.sqrt(1 + 1 / n)


def _rate(cell: Cell, error: float, source: str, *, measured: bool = False) -> Rate:
    return Rate(images_per_s=cell.images_per_s, error=error, joules_per_image=cell.joules_per_image or None,
                other_s=cell.other_s, longest_other_s=cell.other_s, source=source, measured=measured)  # fmt: skip


def between(cells: Iterable[Cell], batch: int) -> tuple[float, Cell] | None:
    """Return a cell between the nearest batches below and above, and how many times the lower one the upper one is.

    Time and energy of a step are lines over the batch.
    """
    by_batch = {cell.batch: cell for cell in cells}
    low, high = max((b for b in by_batch if b < batch), default=0), min((b for b in by_batch if b > batch), default=0)
    if not low or not high:
        return None
    first, last, share = by_batch[low], by_batch[high], (batch - low) / (high - low)
    seconds = (low / first.images_per_s * (1 - share) + high / last.images_per_s * share) / batch
    joules = (low * first.joules_per_image * (1 - share) + high * last.joules_per_image * share) / batch
    source = f"batches {low} and {high} {f'({last.source})' if last.n else f'published by {last.source}'}"
    known = first.joules_per_image and last.joules_per_image
    return high / low, replace(
        last,
        source=source,
        images_per_s=1 / seconds,
        joules_per_image=joules if known else 0.0,
        other_s=(first.other_s + last.other_s) / 2,
    )


def _times_ratio(
    rate: Rate, base: str, batch: int, own: dict[tuple[int, int], Cell], others: dict[tuple[int, int], Cell]
) -> Rate:
    """Return a rate that was measured on `base` times the published ratio of another card, `own`, to it."""
    ratios = {shape: own[shape].images_per_s / others[shape].images_per_s for shape in own.keys() & others}
    nearest = min(ratios, key=lambda shape: (abs(math.log(shape[0] / batch)), shape))
    ratio, least, most = ratios[nearest], min(ratios.values()), max(ratios.values())
    of = f"ratio of {own[nearest].source}, {ratio:.3g} ({least:.3g} to {most:.3g})"
    return replace(
        rate,
        images_per_s=rate.images_per_s * ratio,
        joules_per_image=None,  # no source has the power of both cards at several batches
        source=f"{of}, times {base} {rate.source.removeprefix('measured ')}",
        measured=False,
        ratio_spread=(least / ratio, most / ratio),
    )


def cards(config_dir: Path | None = None) -> dict[str, GpuConfig]:
    """Return the GPUs of `gpu_configs` that have memory: all but the processor."""
    return {name: card for name, card in gpu_configs(config_dir).items() if card.memory_gb}


@cache
def gpu_configs(config_dir: Path | None = None) -> dict[str, GpuConfig]:
    """Return what conf/gpu, and a folder like conf, has by the name of the file, without files that cannot be used."""
    gpus: dict[str, GpuConfig] = {}
    for path in (file for folder in (config_dir, conf_dir()) if folder for file in sorted(folder.glob("gpu/*.yaml"))):
        with suppress(UserError):  # a user's file: `launch` says what is wrong with it
            gpus[path.stem] = GpuConfig(**read_config_file(path, "gpu"))
    return gpus
