"""A seed that is another one in every session, for tests that try a part of what `make faults` tries in whole."""

from __future__ import annotations

import os
import random

VARIABLE = "INPAINT_BENCH_TESTS_SEED"


def sample(choices: range, count: int) -> list[int]:
    """Return some of the numbers in their order, and print the variable that gives them again."""
    seed = os.environ.get(VARIABLE) or str(random.SystemRandom().randrange(10**6))
    print(f"{VARIABLE}={seed}")
    return sorted(random.Random(seed).sample(choices, count))
