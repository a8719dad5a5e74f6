"""`python -m inpaint_bench VERB ...`, the same as `inpaint-bench VERB ...`."""

from __future__ import annotations

import sys

from inpaint_bench.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
