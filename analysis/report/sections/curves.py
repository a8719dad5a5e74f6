"""The section on training curves: losses of equal steps and seeds, a study of its own, with its own validity."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from analysis.dataset import Dataset
from analysis.report import names
from analysis.report.figures import base, svg
from analysis.report.figures.base import Figure
from analysis.report.section import Section
from analysis.report.tables import TableBuilder
from analysis.stats import training_curves
from analysis.stats.training_curves import BLOCK, MARGIN_PCT, Comparison, block_rows, compare
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError

_EQUAL = f"equal within {MARGIN_PCT} %"
_METHOD = (
    "A run counts if it is completed and all of its losses are finite, whether its rate is valid or not: company on "
    "the GPU changes rates, not losses. Runs of one seed differ by what their recipes compute alone. Noise: the "
    "standard deviation of the reference over its seeds, pooled over blocks of steps. Equal: no block differs by more, "
    f"and the 95 % interval over the seeds of the difference of the mean loss lies within {MARGIN_PCT} % of it, less "
    "than what one step gains late in a training of some hundred steps."
)


def sections(dataset: Dataset, build: TableBuilder) -> list[Section]:
    """Return the section; empty if no recipe has the reference's fp32 masters, or no other one beside it."""
    recipes = dataset.runs["recipe"].drop_nulls().unique().to_list()
    if len(recipes) < 2 or sum(training_curves.MASTERS in recipe for recipe in recipes) != 1:
        return []
    title = "Training curves"
    try:
        reference, tested = training_curves.choose(dataset, None, None)
        curves = training_curves.read_curves(dataset, [reference, *tested])
        comparisons = {name: compare(curves[reference], curves[name], BLOCK) for name in tested}
    except UserError as error:
        return [Section(title=title, paragraphs=[f"{error}."])]
    rows = [
        [name, f"{number * BLOCK + 1}\u2013{(number + 1) * BLOCK}", f"{each.reference[:, number].mean():.5f}"]
        + [f"{value:+.2e}" for value in (own.mean(), own.min(), own.max())]
        + [f"{each.spread[number]:.2e}"]
        for name, each in comparisons.items()
        for number, own in enumerate(each.difference.T)
    ]
    columns = ["Recipe", "Steps", "Loss of the reference", "Difference, mean", "lowest seed", "highest seed"]
    columns += ["Deviation over seeds"]
    ids = dataset.runs.filter(pl.col("recipe").is_in([reference, *tested]))["run_id"].to_list()
    note = f"Reference: {reference}."
    section = Section(
        title=title,
        kind="training curves",
        answer=" ".join(_verdict(name, reference, comparison) for name, comparison in comparisons.items()),
        best="not shown equal" if any(each.problems() for each in comparisons.values()) else _EQUAL,
        paragraphs=[_METHOD],
        tables=[build.table("loss-curves", "Losses of equal steps", columns, rows, note=note)],
        figures=[draw(comparisons, reference, BLOCK, ids)],
    )
    return [section]


def _verdict(name: str, reference: str, comparison: Comparison) -> str:
    seeds, blocks = comparison.reference.shape
    if problems := comparison.problems():
        return f"{name} is not shown to train like {reference}: {names.join(problems)}."
    data = f"over {blocks * BLOCK} steps and {seeds} seeds its losses differ by {comparison.change_text}"
    return f"{name} trains like {reference}: {data}, {_EQUAL}."


def draw(comparisons: dict[str, Comparison], reference: str, block: int, run_ids: Sequence[str] = ()) -> Figure:
    """Draw curves per seed above, differences from the reference with the noise below."""
    rows = block_rows(comparisons, reference, block)
    own = rows.filter(pl.col("recipe") == reference).rename({"loss": "own"}).drop("recipe")
    differences = rows.filter(pl.col("recipe") != reference).join(own, on=["seed", "last_step"])
    differences = differences.with_columns(difference=pl.col("loss") - pl.col("own"))
    noise = next(iter(comparisons.values())).noise
    colour = base.colour([reference, *comparisons], "recipe")
    x = alt.X("last_step:Q", title="Steps")
    curves = alt.Chart(alt.InlineData(values=rows.to_dicts())).mark_line(strokeWidth=1.2)
    lines = alt.Chart(alt.InlineData(values=differences.to_dicts())).mark_line(strokeWidth=1.2)
    band = alt.Chart(alt.InlineData(values=[{"low": -noise, "high": noise}])).mark_rect(color=svg.GRID)
    upper = curves.encode(x, alt.Y("loss:Q", title="Loss", scale=alt.Scale(zero=False)), colour, detail="seed:N")
    lower = alt.layer(
        band.encode(y=alt.Y("low:Q"), y2="high:Q"),
        lines.encode(x, alt.Y("difference:Q", title="Difference from the first"), colour, detail="seed:N"),
    )
    subtitle = [f"Means of {block} steps, a line per seed", "Band: the noise, one standard deviation over the seeds"]
    notes = [f"n = {pluralize(rows.select('recipe', 'seed').n_unique(), 'run')}, valid or not."]
    chart = alt.vconcat(upper.properties(height=150), lower.properties(height=90))
    return base.figure("fig-loss-curves", "Losses of equal steps", subtitle, notes, chart, run_ids)
