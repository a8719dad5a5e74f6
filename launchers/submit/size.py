"""Ask before a launch of very many points, which a typing mistake makes of a few: they take long to compose."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import islice

from hydra.core.override_parser.types import Override

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError

MAX_COUNTED = 10**6  # values of one key; more are not counted


def check_size(overrides: Sequence[Override], defaults: dict[str, object]) -> None:
    """Ask about more than `max_points` points. Raises UserError if the answer is no or there is no terminal.

    `defaults` has the values of `max_points` and `repeats` that no override replaces.
    """
    values = {**defaults, **{o.key_or_group: o.value() for o in overrides if not o.is_sweep_override()}}
    limit, repeats = values["max_points"], values["repeats"]
    if not isinstance(limit, int):  # is refused with its type when the points are composed
        return
    swept = [o for o in overrides if o.is_sweep_override() and o.is_discrete_sweep()]
    numbers = [sum(1 for _ in islice(override.sweep_string_iterator(), MAX_COUNTED)) for override in swept]
    total = math.prod(numbers) * (repeats if isinstance(repeats, int) else 1)
    if total <= limit:
        return
    largest = max(zip(numbers, (override.key_or_group for override in swept), strict=True), default=(1, "repeats"))
    count = pluralize(total, "point") + (f" ({largest[0]:,} values of {largest[1]})" if largest[0] > 1 else "")
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"This launches {count}, more than max_points={limit}. Continue? [y/N] ", end="", file=sys.stderr)
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        raise UserError("nothing was launched")
    raise UserError(f"{count} are more than max_points={limit}; with max_points={total} the launch takes them")
