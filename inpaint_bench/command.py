"""What the argparse commands share: --help with an example, and the one way out."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from .guard import guarded


def parser(verb: str, does: str, example: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"inpaint-bench {verb}",
        description=does,
        epilog=f"example:\n  python -m inpaint_bench.{verb} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(
    parser: argparse.ArgumentParser,
    body: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None,
) -> int:
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    return guarded(lambda: body(options))
