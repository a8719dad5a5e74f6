"""`report`: a merged dataset into tables, figures and one offline page."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from inpaint_bench.core.errors import UserError


def run_report(
    dataset: Path, output: Path, *, export: str, accept_disagreement: bool, compare: Path | None, as_json: bool
) -> None:
    """Write the report of `dataset` into `output`, with a comparison with dataset `compare`, and print its tables."""
    from analysis.report.export import parse_formats
    from analysis.report.report import write_report
    from inpaint_bench.core.console import echo

    formats = parse_formats(export)
    page = write_report(
        dataset,
        output,
        terminal=not as_json,
        formats=formats,
        accept_disagreement=accept_disagreement,
        compared_with=compare,
    )
    if not as_json:
        echo(f"report: {page}")
        return
    if "csv" not in formats:
        raise UserError(f"--json: prints the tables as --export csv writes them, and --export is {export}")
    tables = {}
    for path in sorted((output / "tables").glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            tables[path.stem] = list(csv.DictReader(file))
    echo(json.dumps({"report": str(page), "tables": tables}, indent=1))
