"""`compare`: two merged datasets side by side, with an exit code for tests of performance."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from inpaint_bench.core.errors import UserError


def run_compare(old: Path, new: Path, *, fail_on: str | None, as_json: bool) -> int:
    """Print the comparison. Returns 1 if `fail_on` is given and a cell is worse by more, or cannot be compared."""
    tolerance = None if fail_on is None else _fraction(fail_on)

    from rich.console import Console

    from analysis import seal
    from analysis.dataset import open_dataset
    from analysis.report import render
    from analysis.report.sections import dataset_comparison
    from analysis.report.tables import TableBuilder
    from analysis.stats.dataset_comparison import compare
    from inpaint_bench.core.console import echo, pluralize

    before, after = open_dataset(old), open_dataset(new)
    notes = [f"{data.folder}: {note}" for data in (before, after) for note in seal.check(data.folder, data.metadata)]
    comparison = compare(before.runs, after.runs)
    if not comparison.pairs:
        raise UserError(f"{old} and {new} have no cell in common: no GPU, recipe and batch has valid runs in both")
    build = TableBuilder(runs=after.runs)
    tables = dataset_comparison.tables(build, comparison, before, after, tolerance)
    failures = [] if tolerance is None else comparison.failures(tolerance)
    if as_json:
        rows = {
            table.id: list(csv.DictReader(render.to_csv(table, demonstration=build.demonstration).splitlines()))
            for table in tables
        }
        echo(json.dumps({"failures": failures, "notes": notes, "tables": rows}, indent=1))
        return int(bool(failures))
    for note in notes:
        echo(f"NOTE: {note}")
    for table in tables:
        if table.id == dataset_comparison.RECIPES:
            # As lines, which a terminal does not break: they are to be pasted.
            for recipe, overrides in table.rows:
                echo(f"To launch {recipe}: {overrides}")
        else:
            render.to_terminal(table, Console())
    if tolerance is not None:
        echo(f"{pluralize(len(failures), 'failure')} with --fail-on {fail_on}" + (":" if failures else ""))
        for text in failures:
            echo(f"  {text}")
    return int(bool(failures))


def _fraction(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < 100:
        raise UserError(f"--fail-on {text}: is not a percentage from 0 to below 100, such as 3%")
    return percent / 100
