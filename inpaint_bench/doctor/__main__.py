"""`python -m inpaint_bench.doctor`."""

import sys

from . import main

sys.exit(main())
