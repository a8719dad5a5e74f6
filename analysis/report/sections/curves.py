"""The section on training curves: losses of equal steps and seeds, a study of its own, with its own validity.

`_METHOD` says what is compared. That the 95 % interval of the change (Student's t over the seeds) lies within the
margin is a test of equivalence: few seeds or scattered differences make it fail, where a test for a difference would
pass. The noise is no margin for it: both sides see the same batches, so that a bias far below it shows. In the second
half of the committed trainings a step lowers the loss by 0.07 to 0.09 %. A reference that does not learn would agree
with anything: its loss must fall by more than 3 times the noise.
"""

import math
from collections.abc import Sequence

import altair as alt
import numpy as np
import polars as pl
from numpy.typing import NDArray

from analysis.dataset import Dataset
from analysis.report import names
from analysis.report.figures import base, svg
from analysis.report.figures.base import Figure
from analysis.report.tables import Section, Table, TableBuilder
from analysis.stats.intervals import mean_interval
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import Status

LEAST_FALL = 3.0  # least fall of the reference's loss, in multiples of the noise
LEAST_BLOCKS = 4
MARGIN_PCT = 0.05  # percent of the loss
MASTERS = "bf16_master"  # in the name of a recipe whose optimizer has fp32 masters and moments
SAME = ("gpu", "model", "batch", "resolution_px", "data_identity")  # what runs that are compared must agree in

BLOCK, SHORT_BLOCK = 50, 25  # steps that a loss is averaged over; the latter in a training too short for the former
Curves = dict[int, NDArray[np.float64]]  # by seed: the loss of every step
_EQUAL = f"equal within {MARGIN_PCT} %"
_METHOD = (
    "A run counts if it is completed and all of its losses are finite, whether its rate is valid or not: company on "
    "the GPU changes rates, not losses. Runs of one seed differ by what their recipes compute alone. Noise: the "
    "standard deviation of the reference over its seeds, pooled over blocks of steps. Equal: no block differs by more, "
    f"and the 95 % interval over the seeds of the difference of the mean loss lies within {MARGIN_PCT} % of it, less "
    "than what one step gains late in a training of some hundred steps."
)


class Comparison:
    """Block means of a tested recipe against those of the reference; arrays are [seeds, blocks], of two seeds at least.

    `spread` is the standard deviation of the reference over the seeds, `largest` the largest difference of a block,
    `change_pct` has the ends of its 95 % interval.
    """

    def __init__(self, reference: NDArray[np.float64], tested: NDArray[np.float64]) -> None:
        self.reference, self.tested, self.difference = reference, tested, tested - reference
        self.spread = reference.std(axis=0, ddof=1)
        self.noise = float(np.sqrt(np.mean(self.spread**2)))
        means, changes = reference.mean(axis=0), 100 * self.difference.mean(axis=1) / reference.mean()
        self.fall = float(means[0] - means[-1])
        self.largest = float(np.abs(self.difference.mean(axis=0)).max())
        low, high = mean_interval([("one card", float(change)) for change in changes]) or (math.nan, math.nan)
        self.change_pct = (float(changes.mean()), low, high)
        self.change_text = "{:+.3f} % ({:+.3f} to {:+.3f})".format(*self.change_pct)

    def problems(self, margin_pct: float = MARGIN_PCT) -> list[str]:
        """Return why the tested recipe is not shown to be equal; nothing if it is."""
        texts, (_, low, high) = [], self.change_pct
        if not self.fall > LEAST_FALL * self.noise:
            texts.append(f"the reference's loss fell by {self.fall:.2g} only, so nothing is shown")
        if not self.largest <= self.noise:
            texts.append(f"a block differs by {self.largest:.2g}, more than the noise")
        if not max(-low, high) < margin_pct:
            texts.append(f"the loss differs by {self.change_text}, which is not within {margin_pct} %")
        return texts


def compare(reference: Curves, tested: Curves, block: int) -> Comparison:
    """Average the steps of the seeds that both have in blocks. Raises UserError for too few seeds or steps."""
    seeds = sorted(reference.keys() & tested.keys())
    steps = min((len(curves[seed]) for curves in (reference, tested) for seed in seeds), default=0)
    if len(seeds) < 2 or steps < LEAST_BLOCKS * block:
        raise UserError(
            f"{len(seeds)} seeds of both recipes with {steps} steps: at least 2 seeds and {LEAST_BLOCKS * block} "
            "steps are needed"
        )
    whole = steps // block * block
    losses = (np.stack([curves[seed][:whole] for seed in seeds]) for curves in (reference, tested))
    means = [each.reshape(len(seeds), -1, block).mean(axis=2) for each in losses]
    return Comparison(*means)


def choose(dataset: Dataset, reference: str | None, tested: list[str] | None) -> tuple[str, list[str]]:
    """Return the reference and the tested recipes: as given, else as the dataset has them. Raises UserError."""
    recipes = sorted(dataset.runs["recipe"].drop_nulls().unique())
    if reference is None:
        references = [recipe for recipe in recipes if MASTERS in recipe] or _extended(recipes)
        if len(references) != 1:
            raise UserError(f"{dataset.folder}: --reference is needed, of {', '.join(recipes)}")
        (reference,) = references
    return reference, tested or [recipe for recipe in recipes if recipe != reference]


def _extended(recipes: list[str]) -> list[str]:
    """Return the recipe whose levers all others have too, as a list, which is empty if there is none."""
    parts = {recipe: set(recipe.split("+")) for recipe in recipes}
    return [recipe for recipe in recipes if all(parts[recipe] <= other for other in parts.values())]


def read_curves(dataset: Dataset, recipes: list[str]) -> dict[str, Curves]:
    """Return the losses of the completed runs of each recipe, by seed. Raises UserError if they do not compare."""
    runs = dataset.runs.filter((pl.col("status") == Status.COMPLETED.value) & pl.col("recipe").is_in(recipes))
    differing = [f"{name} ({', '.join(map(str, runs[name].unique()))})" for name in SAME if runs[name].n_unique() > 1]
    if differing:
        raise UserError(f"{dataset.folder}: the runs differ in {', '.join(differing)}")
    curves: dict[str, Curves] = {recipe: {} for recipe in recipes}
    for run in runs.select("run_id", "recipe", "seed").to_dicts():
        if run["seed"] in curves[run["recipe"]]:
            raise UserError(f"{dataset.folder}: two runs of {run['recipe']} with seed {run['seed']}")
        # A step that was done again after a resume counts once.
        steps = dataset.scan("steps", run["run_id"]).sort("t_start_mono_ns").collect().unique("step", keep="last")
        losses = steps.sort("step")["loss"].to_numpy().astype(np.float64)
        if not np.isfinite(losses).all():
            raise UserError(f"{run['run_id']} ({run['recipe']}, seed {run['seed']}): not all losses are finite")
        curves[run["recipe"]][run["seed"]] = losses
    return curves


def block_rows(comparisons: dict[str, Comparison], reference: str, block: int) -> pl.DataFrame:
    """Return the block means of all recipes, one row per recipe, seed in order, and block."""
    sides = {reference: next(iter(comparisons.values())).reference}
    sides |= {name: comparison.tested for name, comparison in comparisons.items()}
    return pl.DataFrame(
        {"recipe": recipe, "seed": seed, "last_step": (number + 1) * block, "loss": float(mean)}
        for recipe, means in sides.items()
        for seed, row in enumerate(means)
        for number, mean in enumerate(row)
    )


def sections(dataset: Dataset, build: TableBuilder) -> list[Section]:
    """Return the section; empty unless the dataset is a study of losses.

    It is one if one recipe has fp32 masters, or if runs of several seeds and of one recipe and its extensions have no
    valid rate on a side.
    """
    recipes = dataset.runs["recipe"].drop_nulls().unique().to_list()
    has_masters = sum(MASTERS in recipe for recipe in recipes) == 1
    rated = dataset.runs.filter("valid")["recipe"].n_unique()
    is_study = has_masters or (len(_extended(recipes)) == 1 and rated < len(recipes))
    if len(recipes) < 2 or not is_study:
        return []
    title = "Training curves"
    try:
        reference, tested = choose(dataset, None, None)
        curves = read_curves(dataset, [reference, *tested])
        steps = min((len(losses) for own in curves.values() for losses in own.values()), default=0)
        block = BLOCK if steps >= LEAST_BLOCKS * BLOCK else SHORT_BLOCK
        comparisons = {name: compare(curves[reference], curves[name], block) for name in tested}
    except UserError as error:
        return [Section(title=title, paragraphs=[f"{error}."])] if has_masters else []
    rows = [
        [name, f"{number * block + 1}\u2013{(number + 1) * block}", f"{each.reference[:, number].mean():.5f}"]
        + [f"{value:+.2e}" for value in (own.mean(), own.min(), own.max())]
        + [f"{each.spread[number]:.2e}"]
        for name, each in comparisons.items()
        for number, own in enumerate(each.difference.T)
    ]
    columns = ["Recipe", "Steps", "Loss of the reference", "Difference, mean", "lowest seed", "highest seed"]
    columns += ["Deviation over seeds"]
    compared = dataset.runs.filter(pl.col("recipe").is_in([reference, *tested]))
    ids = compared["run_id"].to_list()
    note = f"Reference: {reference}."
    blocks = build.table("loss-curves", "Losses of equal steps", columns, rows, note=note)
    section = Section(
        title=title,
        kinds=("training curves",),
        studied=compared["workload"][0],
        answer=" ".join(_verdict(name, reference, each, block) for name, each in comparisons.items()),
        best="not shown equal" if any(each.problems() for each in comparisons.values()) else _EQUAL,
        paragraphs=[_METHOD],
        tables=[_summary(build, comparisons, note, ids), blocks],
        figures=[draw(comparisons, reference, block, ids)],
    )
    return [section]


def _summary(build: TableBuilder, comparisons: dict[str, Comparison], note: str, ids: list[str]) -> Table:
    """Return a row per tested recipe: how far its loss is from the reference's, and the margin."""
    rows = []
    for name, each in comparisons.items():
        change, low, high = each.change_pct
        interval = f"{low:+.3f} to {high:+.3f}"
        figures = [f"{change:+.3f}", interval, f"{MARGIN_PCT}", "no" if each.problems() else "yes"]
        rows.append([name, *figures, f"{each.largest:.1e}", f"{each.noise:.1e}", str(len(each.reference))])
    columns = ["Recipe", "Change of the loss [%]", "95 % interval", "Margin [%]", "Equal"]
    columns += ["Largest difference", "Noise", "Seeds"]
    title, lead, row_runs = "How far the losses are apart", tuple(columns[:6]), [ids] * len(rows)
    return build.table("loss-changes", title, columns, rows, note=note, lead_columns=lead, row_runs=row_runs)


def _verdict(name: str, reference: str, comparison: Comparison, block: int) -> str:
    seeds, blocks = comparison.reference.shape
    data = f"over {blocks * block} steps and {seeds} seeds its losses differ by {comparison.change_text}"
    if problems := comparison.problems():
        return f"{name} is not shown to train like {reference}: {data}, margin {MARGIN_PCT} %; {names.join(problems)}."
    return f"{name} trains like {reference}: {data}, {_EQUAL}."


def draw(comparisons: dict[str, Comparison], reference: str, block: int, run_ids: Sequence[str] = ()) -> Figure:
    """Draw curves per seed above, differences from the reference with the noise below."""
    rows = block_rows(comparisons, reference, block)
    own = rows.filter(pl.col("recipe") == reference).rename({"loss": "own"}).drop("recipe")
    differences = rows.filter(pl.col("recipe") != reference).join(own, on=["seed", "last_step"])
    differences = differences.with_columns(difference=pl.col("loss") - pl.col("own"))
    noise = next(iter(comparisons.values())).noise
    look = base.lines([reference, *comparisons], "recipe")
    x = alt.X("last_step:Q", title="Steps", axis=alt.Axis(tickCount=5))
    curves = alt.Chart(alt.InlineData(values=rows.to_dicts())).mark_line()
    lines = alt.Chart(alt.InlineData(values=differences.to_dicts())).mark_line()
    band = alt.Chart(alt.InlineData(values=[{"low": -noise, "high": noise}])).mark_rect(color=svg.GRID)
    upper = curves.encode(x, alt.Y("loss:Q", title="Loss", scale=alt.Scale(zero=False)), *look, detail="seed:N")
    lower = alt.layer(
        band.encode(y=alt.Y("low:Q"), y2="high:Q"),
        lines.encode(x, alt.Y("difference:Q", title="Difference from the first"), *look, detail="seed:N"),
    )
    subtitle = [f"Means of {block} steps, a line per seed", "Band: the noise, one standard deviation over the seeds"]
    notes = [f"n = {pluralize(rows.select('recipe', 'seed').n_unique(), 'run')}, valid or not."]
    chart = alt.vconcat(upper.properties(height=150), lower.properties(height=90))
    return base.figure("fig-loss-curves", "Losses of equal steps", subtitle, notes, chart, run_ids)
