"""`report`: a merged dataset into tables, figures and one offline page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .command import parser, run


def main(argv: Sequence[str] | None = None) -> int:
    does = (
        "Print a merged dataset's tables and write report.html (one offline page), report.md, runs.csv and "
        "figures/*.svg."
    )
    options = parser("report", does, "dataset -o report")
    options.add_argument("dataset", type=Path, metavar="DATASET", help="folder written by `merge`")
    options.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="folder for the report")
    return run(options, _report, argv)


def _report(options: argparse.Namespace) -> None:
    from analysis.report import write_report

    print(f"report: {write_report(options.dataset, options.output, terminal=True)}")


if __name__ == "__main__":
    sys.exit(main())
