"""`report`: a merged dataset into tables, figures and one offline page."""

from __future__ import annotations

from pathlib import Path


def run_report(dataset: Path, output: Path, *, export: str, accept_disagreement: bool) -> None:
    """Write the report of `dataset` into `output` and print its tables."""
    from analysis.report.export import parse_formats
    from analysis.report.report import write_report
    from inpaint_bench.core.console import echo

    formats = parse_formats(export)
    page = write_report(dataset, output, terminal=True, formats=formats, accept_disagreement=accept_disagreement)
    echo(f"report: {page}")
