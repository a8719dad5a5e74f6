"""Images per second and joules per image of a run before it: of the nearest measured cell. Loads no torch.

`cells.csv` holds the cells of the committed datasets, `shares.csv` what limits the steps of profiled recipes, and
`errors.csv` how far predictions were from what was measured or published; benchmarks/measured_cells.py writes them.
A rate is measured (same GPU, batch and number of GPUs), between batches of the same GPU, or of another card.

Another card takes a step longer by its peaks: products (convolutions, GEMM, attention) by dense bf16 FLOP/s, other
kernels by memory bandwidth, idle time not at all. Assumed is that each reaches the same share of its peak there, that
the host is as fast, and that the board draws the same share of its power limit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from inpaint_bench.core import estimates
from inpaint_bench.core.config import recipe as recipes
from inpaint_bench.core.config.bench import BenchConfig, GpuConfig
from inpaint_bench.core.config.yaml_file import read_config_file
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import current_name
from inpaint_bench.core.records import to_record

from . import memory

if TYPE_CHECKING:
    import polars as pl

# Two-sided 95 % quantiles of Student's t by degrees of freedom, for n = 3 and more.
_T95 = {2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
_LIMITS = {
    **dict.fromkeys(("images_per_s", "joules_per_image", "window_s"), (1e-12, 3.4e38)),
    **dict.fromkeys(("batch", "gpus", "nodes"), (1, 1e6)),
}  # of valid runs
# Runs from before recipes were recorded: which levers a name meant then is not known, so it names another execution.
UNRECORDED = " (levers not recorded)"
EXTRAPOLATED = "extrapolated from Hopper"  # the architecture of the measured cards
Interval = tuple[float, float, float]  # expected, least, most


class Work(NamedTuple):
    """What a step does, and how: cells of equal work differ in card, batch and number of GPUs."""

    workload: str
    model: str
    variant: str
    recipe: str
    resolution_px: int  # 0: the workload has none


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Replicates of one configuration in one dataset: means over runs."""

    source: str
    work: Work
    gpu: str
    gpus: int
    nodes: int
    batch: int
    n: int
    cards: int  # different ones; 0: not known
    images_per_s: float  # of all GPUs
    rate_cv: float  # standard deviation over mean; 0 with one run
    joules_per_image: float  # 0: not known
    other_s: float  # median time of a run outside of its measured windows: start, compilation, warm-up, checks
    vram_mib: float  # peak in the measured windows, by NVML; 0: not known, as the next
    vram_run_mib: float  # peak in the whole run, with parity and the search of cuDNN

    @property
    def place(self) -> tuple[int, int]:
        return self.gpus, self.nodes


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A rate with its interval, and where it comes from."""

    images_per_s: float
    error: float  # relative: the rate is between images_per_s / (1 + error) and images_per_s * (1 + error)
    joules_per_image: float  # 0: not known
    joules_error: float
    other_s: float
    source: str
    measured: bool = False

    def seconds(self, images: float) -> Interval:
        """Return how long a run of so many images takes, with its start."""
        expected, least, most = spread(images / self.images_per_s, self.error)
        return expected + self.other_s, least + self.other_s, most + self.other_s

    def joules(self, images: float) -> Interval | None:
        """Return the energy of the GPUs; None where it is not known."""
        return spread(images * self.joules_per_image, self.joules_error) if self.joules_per_image else None


def spread(value: float, error: float) -> Interval:
    """Return a value with its interval by a relative error."""
    return value, value / (1 + error), value * (1 + error)


def scaled(values: Interval, factor: float) -> Interval:
    """Return an interval of another unit."""
    return values[0] * factor, values[1] * factor, values[2] * factor


@cache
def committed() -> tuple[Cell, ...]:
    """Return the cells of the committed datasets."""
    return tuple(_cell(row) for row in estimates.rows("cells.csv"))


def _cell(row: dict[str, Any]) -> Cell:
    return to_record(row | {"work": [row[name] for name in Work._fields]}, Cell, strict=False)


def read_cells(folder: Path) -> list[Cell]:
    """Return the cells of a dataset that `merge` wrote. Raises UserError if there is none, or it was changed."""
    import polars as pl  # slow to load, and not needed without a dataset of one's own

    from inpaint_bench.core import seal  # loads polars

    text, integer, real, time = pl.String(), pl.Int64(), pl.Float64(), pl.Datetime("us", "UTC")
    kinds: dict[str, pl.DataType] = {
        **dict.fromkeys((*Work._fields[:-1], "gpu"), text),
        **dict.fromkeys(_LIMITS, real),
        **dict.fromkeys(("resolution_px", "gpus", "nodes", "batch"), integer),
        **dict.fromkeys(("started", "ended"), time),
        **dict.fromkeys(("valid", "demonstration"), pl.Boolean()),
    }
    _, table = seal.read_runs(folder, kinds, _LIMITS)
    keys = [table[key] if key in table.columns else [None] * table.height for key in ("recipe", "workload", "levers")]
    names = [recipe and current_name(recipe, *rest) for recipe, *rest in zip(*keys, strict=True)]
    return cells_of(folder.name, table.with_columns(pl.Series("recipe", names, text)))


def cells_of(source: str, runs: pl.DataFrame) -> list[Cell]:
    """Return the cells of a table of runs, whose recipes have their names of today."""
    import polars as pl

    missing = {"variant": "", "nodes": 1, "joules_per_image": 0.0, "demonstration": False, "gpu_uuid": None}
    missing |= dict.fromkeys(("encodes_online", "vram_used_mib_peak", "vram_run_mib_peak"))
    table = runs.with_columns(pl.lit(value).alias(name) for name, value in missing.items() if name not in runs)
    rate, seconds = pl.col("images_per_s"), (pl.col("ended") - pl.col("started")).dt.total_milliseconds() / 1000
    unknown = pl.col("encodes_online").is_null() & pl.col("workload").is_in(memory.WORKLOADS)
    peaks = {"vram_mib": "vram_used_mib_peak", "vram_run_mib": "vram_run_mib_peak"}
    table = (
        table.filter(pl.col("valid") & (rate > 0) & pl.col("batch").is_not_null() & ~pl.col("demonstration"))
        .with_columns(pl.col(Work._fields[:-1]).fill_null(""), pl.col("resolution_px").fill_null(0))
        .with_columns(recipe=pl.concat_str("recipe", pl.when(unknown).then(pl.lit(UNRECORDED)), ignore_nulls=True))
        .group_by(*Work._fields, "gpu", "gpus", "nodes", "batch", maintain_order=True)
        .agg(
            pl.len().alias("n"),
            pl.col("gpu_uuid").drop_nulls().str.split(", ").explode().drop_nulls().n_unique().alias("cards"),
            (rate.std() / rate.mean()).fill_null(0.0).alias("rate_cv"),
            rate.mean(),
            pl.col("joules_per_image").mean().fill_null(0.0),
            (seconds - pl.col("window_s")).median().fill_null(0.0).alias("other_s"),
            *(pl.col(column).cast(pl.Float64).max().fill_null(0.0).alias(name) for name, column in peaks.items()),
        )
    )
    return [_cell({"source": source, **row}) for row in table.to_dicts()]


def own_cells(folders: Iterable[str | Path]) -> list[Cell]:
    """Return the committed cells, behind those of datasets of one's own. Raises UserError for a folder without one."""
    return [*(cell for folder in folders for cell in read_cells(Path(folder))), *committed()]


def work_of(bench: BenchConfig) -> Work:
    """Return the work of a point as merge names it."""
    px = bench.data.resolution_px if bench.workload.unet_channels else 0
    variant = bench.workload.variant() or ""
    return Work(bench.workload.name, bench.workload.model(bench), variant, recipes.name(bench), px)


@cache
def errors() -> dict[str, float]:
    """Return the relative error of each kind of prediction, as `error` gives it.

    Of other cards the largest that was seen, because few cards are known; of the rest the 95 % quantile.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for row in estimates.rows("errors.csv"):
        found[row["kind"]].append(error(float(row["predicted"]), float(row["reference"])))
    share = {kind: 1.0 if "card" in kind else 0.95 for kind in found}
    return {kind: sorted(seen)[math.ceil(share[kind] * len(seen)) - 1] for kind, seen in found.items()}


def error(predicted: float, reference: float) -> float:
    """Return a relative error that is as large for half as for twice the reference."""
    return max(predicted / reference, reference / predicted) - 1


def left_out_cards(cells: Sequence[Cell]) -> Iterator[tuple[str, str, float, float]]:
    """Yield kind, what, prediction and measurement of each card of one GPU that another one predicts."""
    for known, left_out in permutations((cell for cell in cells if cell.place == (1, 1)), 2):
        if (known.work, known.batch) != (left_out.work, left_out.batch) or known.gpu == left_out.gpu:
            continue
        slower, power = (
            slowdown(known.work.recipe, known.gpu, left_out.gpu),
            _over("power_limit_w", left_out.gpu, known.gpu),
        )
        what = f"{known.work.recipe} batch {known.batch} {known.work.model}, {known.gpu} to {left_out.gpu}"
        yield "card", what, known.images_per_s / slower, left_out.images_per_s
        if known.joules_per_image and left_out.joules_per_image:
            yield "energy of a card", what, known.joules_per_image * slower * power, left_out.joules_per_image


def find(work: Work, gpu: str, batch: int, cells: Sequence[Cell], *, gpus: int = 1, nodes: int = 1) -> Rate | None:
    """Return the rate of a work on a card; None where no cell tells it."""
    by_card: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if (cell.work, cell.place) == (work, (gpus, nodes)):
            by_card[cell.gpu].append(cell)
    if gpu in by_card:
        return _of_card(by_card[gpu], batch)
    if any(name not in cards() for name in (gpu, *by_card)) or (_needs_hopper(work.recipe) and not is_hopper(gpu)):
        return None
    predicted = [_other_card(_of_card(own, batch), name, gpu, work) for name, own in by_card.items()]
    return min(predicted, key=lambda rate: (rate.error, -rate.images_per_s), default=None)


def _of_card(cells: Sequence[Cell], batch: int) -> Rate:
    """Return the rate at a batch by the cells of one card and work; by the line of time over batch between two."""
    # One's own are preferred, then those of the newest day, which names begin with, and of most runs.
    ranked = sorted(cells, key=lambda cell: (cell not in committed(), cell.source[:10], cell.n, cell.source))
    best = {cell.batch: cell for cell in ranked}
    measured = batch in best
    two = (
        [best[batch]]
        if measured
        else _around(ranked, batch) or sorted(nearest(best.values(), batch), key=attrgetter("batch"))
    )
    cell = two[-1]
    rate, joules = cell.images_per_s, cell.joules_per_image
    if measured:
        scatter = _T95.get(cell.n - 1, 2.2) * cell.rate_cv * math.sqrt(1 + 1 / cell.n) if cell.n > 2 else 0.0
        # Between datasets, thus between days, cells differ more than runs of one day.
        off, source = max(errors()["repeat"], scatter), f"measured (n = {cell.n}, {cell.source})"
    elif len(two) == 1:
        off, source = errors()["one batch"], f"predicted from batch {cell.batch} ({cell.source})"
    else:
        rate, joules = between(two[0], cell, batch)
        off = errors()["batches"]
        source = f"predicted from batches {two[0].batch} and {cell.batch} ({cell.source})"
    return Rate(images_per_s=rate, error=off, joules_per_image=joules, joules_error=off, other_s=cell.other_s,
                source=source, measured=measured)  # fmt: skip


def _around(ranked: Sequence[Cell], batch: int) -> list[Cell]:
    """Return the nearest cells below and above a batch, of the last dataset that has both.

    Cells of two datasets differ by the code of two days too.
    """
    for source in dict.fromkeys(cell.source for cell in reversed(ranked)):
        own = sorted((cell for cell in ranked if cell.source == source), key=attrgetter("batch"))
        low, high = [cell for cell in own if cell.batch < batch], [cell for cell in own if cell.batch > batch]
        if low and high:
            return [low[-1], high[0]]
    return []


def between(low: Cell, high: Cell, batch: int) -> tuple[float, float]:
    """Return images/s and J/image at a batch: the time and the energy of a step are lines over the batch."""

    def per_image(at_low: float, at_high: float) -> float:
        slope = (at_high * high.batch - at_low * low.batch) / (high.batch - low.batch)
        step = at_low * low.batch + slope * (batch - low.batch)
        return step / batch if step > 0 else min(at_low, at_high)

    joules = low.joules_per_image and high.joules_per_image and per_image(low.joules_per_image, high.joules_per_image)
    return 1 / per_image(1 / low.images_per_s, 1 / high.images_per_s), joules


def nearest(cells: Iterable[Cell], batch: int) -> list[Cell]:
    """Return the cells of the two batches that are nearest, the nearest first."""
    return sorted(cells, key=lambda cell: abs(math.log(cell.batch / batch)))[:2]


def _other_card(base: Rate, base_gpu: str, gpu: str, work: Work) -> Rate:
    """Return the rate on another card; its interval is the largest error seen of such predictions."""
    slower, known = slowdown(work.recipe, base_gpu, gpu), is_hopper(gpu) and is_hopper(base_gpu)
    kinds, more = ("",) if known else ("", ", published"), 1 if base.measured else 1 + base.error
    off, joules_off = (
        max(1 + errors()[name + kind] for kind in kinds) * more - 1 for name in ("card", "energy of a card")
    )
    label, of = "predicted" if known else EXTRAPOLATED, base.source.removeprefix("measured ")
    return replace(
        base,
        images_per_s=base.images_per_s / slower,
        error=off,
        joules_per_image=base.joules_per_image * _over("power_limit_w", gpu, base_gpu) * slower,
        joules_error=joules_off,
        source=f"{label}, error up to {100 * off:.0f} %: {base_gpu.upper()} {of}",
        measured=False,
    )


def slowdown(recipe: str, base: str, gpu: str) -> float:
    """Return how many times longer a step takes on a card, by the shares of the most similar profiled recipe."""
    table = {row["recipe"]: row for row in estimates.rows("shares.csv")}
    fused = any(name in recipe for name in ("tuned", "nhwc", "compile"))
    name = "tuned_hopper" if _needs_hopper(recipe) else "tuned" if fused else recipes.BASELINE
    tensor, memory, idle = (float(table[name][limit]) for limit in ("tensor", "memory", "idle"))
    return tensor * _over("bf16_dense_tflops", base, gpu) + memory * _over("bandwidth_gb_s", base, gpu) + idle


def _over(name: str, first: str, second: str) -> float:
    """Return the ratio of a figure of two cards."""
    return float(getattr(cards()[first], name) / getattr(cards()[second], name))


@cache
def cards() -> dict[str, GpuConfig]:
    """Return the cards of conf/gpu whose peaks are known."""
    found = {path.stem: GpuConfig(**read_config_file(path, "gpu")) for path in (conf_dir() / "gpu").glob("*.yaml")}
    return {name: card for name, card in found.items() if card.bf16_dense_tflops and card.bandwidth_gb_s}


def is_hopper(gpu: str) -> bool:
    """Return whether a card is of the architecture that was measured."""
    return cards()[gpu].architecture == "Hopper"


@cache
def _needs_hopper(recipe: str) -> bool:
    """Return whether a recipe has FlashAttention-4."""
    return recipes.fields_of(recipe).get("attention") == "flash4"
