"""`python -m tests.browser install`: Chromium from Debian's packages, where root may."""

from __future__ import annotations

import argparse
import sys

from tests.testbed.errors import PackagesError

from . import packages


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description=__doc__)
    parser.add_argument("verb", choices=["install"], help="apt-get what is missing")
    parser.parse_args()
    try:
        print(packages.install())
    except PackagesError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
