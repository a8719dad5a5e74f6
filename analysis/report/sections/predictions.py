"""Predicted before measured: claims of `predict` beside the cells that have been measured since."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby

from analysis.predict.claims import METRIC, Claim, Score, score
from analysis.report.estimate import Estimate
from analysis.report.section import Section
from analysis.report.tables import DASH, Table, TableBuilder, mean_text

TITLE = "Predicted before measured"
_NOTE = (
    "Error: predicted over measured, less 1. Before: the claim is dated before the first run of the cell began, by the "
    "clocks of both. A claim that was made after it is a test of the method and no prediction."
)


def section(build: TableBuilder, claims: Sequence[Claim]) -> Section:
    """Return the claims whose cells this dataset has measured, and their errors by class."""
    scores = sorted(score(claims, build.cells, build.runs), key=lambda one: (_class(one), str(one.claim.cell)))
    scored = len({id(each.claim) for each in scores})
    said = f"{scored} of {len(claims)} claims have a measured cell here; {len(claims) - scored} are open."
    tables = [_by_class(build, scores), _each(build, scores)] if scores else []
    return Section(title=TITLE, paragraphs=[said], tables=tables)


def _class(each: Score) -> tuple[str, str]:
    return ", ".join(filter(None, (each.claim.kind, each.claim.label))), "yes" if each.before else "no"


def _by_class(build: TableBuilder, scores: Sequence[Score]) -> Table:
    rows = []
    for keys, group in groupby(scores, _class):
        each = list(group)
        errors = [100 * abs(one.error) for one in each if one.error is not None]
        typical = [f"{statistics.median(errors):.1f}", f"{max(errors):.1f}"] if errors else [DASH, DASH]
        rows.append([*keys, str(len(each)), *typical, f"{sum(one.inside for one in each)} of {len(each)}"])
    columns = ["Class", "Before", "Claims", "Median |error| [%]", "Largest [%]", "Measured inside the interval"]
    return build.table("prediction-errors", "Errors and coverage by class of prediction", columns, rows, note=_NOTE)


def _each(build: TableBuilder, scores: Sequence[Score]) -> Table:
    rows = []
    for each in scores:
        claim = each.claim
        predicted: str | Estimate = f"{claim.low:.1f} to {claim.high:.1f}"
        if claim.value is not None:
            predicted = Estimate(claim.value, claim.low, claim.high, form="{:.1f}".format)
        error = DASH if each.error is None else f"{100 * each.error:+.1f}"
        name, before = _class(each)
        keys = [name, str(claim.cell), f"{claim.made_at:%Y-%m-%d}"]
        measured = [mean_text(each.cell, METRIC), str(each.cell["n"])]
        rows.append([*keys, predicted, *measured, error, "yes" if each.inside else "no", before, claim.note or DASH])
    columns = ["Class", "Cell", "Made", "Predicted [images/s]", "Measured [images/s]", "n", "Error [%]", "Inside"]
    row_runs = [each.cell["run_ids"] for each in scores]
    return build.table("predictions", "Claims", [*columns, "Before", "Note"], rows, row_runs=row_runs)
