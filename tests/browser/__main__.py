"""`python -m tests.browser install`: install Chromium from Debian's packages, as root."""

from __future__ import annotations

import argparse
import sys

from tests.testbed.errors import PackagesError

from . import packages


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description=__doc__)
    parser.add_argument("verb", choices=["install"], help="install the missing packages with apt-get")
    parser.parse_args()
    try:
        print(packages.install())
    except PackagesError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
