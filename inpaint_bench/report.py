"""`python -m inpaint_bench.report`: a merged dataset into tables, figures and one offline page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .errors import UserError

EXAMPLE = """\
example:
  python -m inpaint_bench.merge runs/grace runs/delta -o dataset
  python -m inpaint_bench.report dataset -o report
"""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m inpaint_bench.report",
        description="Print a merged dataset's tables and write report.html (one offline page), report.md, "
        "runs.csv and figures/*.svg.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("dataset", type=Path, metavar="DATASET", help="folder written by inpaint_bench.merge")
    result.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="folder for the report")
    return result


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 with a message for a user's mistake."""
    args = parser().parse_args(argv)
    from analysis.report import write_report

    try:
        page = write_report(args.dataset, args.output, terminal=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
