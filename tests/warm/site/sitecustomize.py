"""Hand this interpreter's program to the fork server if it loads torch (tests/warm). Loads nothing otherwise."""

import os
import sys

MODULES = (
    *("launchers.entry", "submitit.core._submit", "inpaint_bench.profiling.count", "inpaint_bench.profiling.nsys"),
    *(f"tests.run.{name}" for name in ("child", "rank_losses", "tensor_gradients")),
    "tests.warm.program",
)


def _program():
    """Return the arguments of `python -m` from the module on, if the server may run that module."""
    words = sys.orig_argv[1:]
    while words and words[0] in ("-u", "-P"):
        words.pop(0)
    return words[1:] if words[:1] == ["-m"] and words[1] in MODULES else None


if os.environ.get("INPAINT_BENCH_TESTS_WARM") and (_found := _program()):
    import inpaint_bench_tests_warm_client

    inpaint_bench_tests_warm_client.run(_found)
