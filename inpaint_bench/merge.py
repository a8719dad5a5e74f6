"""`python -m inpaint_bench.merge`: run directories of all sites into one dataset."""

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
        prog="python -m inpaint_bench.merge",
        description="Merge run directories, at any depth below the given roots, into one dataset. Inputs are "
        "only read. Everything that is left out is listed with its reason.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("roots", nargs="+", type=Path, metavar="ROOT", help="folder with run directories")
    result.add_argument(
        "-o", "--output", required=True, type=Path, metavar="DATASET", help="dataset folder; replaced if it is one"
    )
    return result


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 with a message for a user's mistake."""
    args = parser().parse_args(argv)
    from analysis.dataset import open_dataset
    from analysis.merge import merge
    from analysis.render import plain

    try:
        account = merge(args.roots, args.output)
        dataset = open_dataset(args.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    left_out = dataset.skipped.to_dicts()
    for row in left_out:
        loud = "WARNING: " if row["code"] == "conflict" else ""
        print(plain(f"{loud}skipped [{row['code']}] {row['path']}: {row['reason']}"), file=sys.stderr)
    for row in dataset.runs.filter(~dataset.runs["valid"]).iter_rows(named=True):
        print(plain(f"does not count: {row['run_id']}: {row['invalid_reason']}"), file=sys.stderr)
    print(
        f"{account['run_directories']} run directories: {account['runs']} runs merged, "
        f"{account['runs_valid']} valid; {len(left_out)} entries skipped"
    )
    print(f"dataset: {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
