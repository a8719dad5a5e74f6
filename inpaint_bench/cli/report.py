"""`report`: a merged dataset into tables, figures and one offline page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .command import parser, run


def main(argv: Sequence[str] | None = None) -> int:
    does = (
        "Print a merged dataset's tables and write report.html (one offline page), report.md, runs.csv, every table "
        "as tables/*.csv and *.tex (booktabs), and every figure as figures/*.svg and *.pdf."
    )
    options = parser("report", does, "dataset -o report")
    options.add_argument("dataset", type=Path, metavar="DATASET", help="folder written by `merge`")
    options.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="folder for the report")
    options.add_argument(
        "--export",
        default="csv,latex,pdf",
        metavar="FORMATS",
        help="tables as csv and latex, figures as pdf and png (2x): all, none, or some with commas (%(default)s)",
    )
    return run(options, _report, argv)


def _report(options: argparse.Namespace) -> None:
    from analysis.report import export
    from analysis.report.report import write_report

    formats = export.formats(options.export)
    print(f"report: {write_report(options.dataset, options.output, terminal=True, formats=formats)}")


if __name__ == "__main__":
    sys.exit(main())
