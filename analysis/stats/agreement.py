"""Whether the replicates of one configuration agree: if they do not, a mean would hide that one of them is wrong.

The limits are by convention. Among 19 cells of two to four valid runs on H200 cards (benchmarks/results) the widest
range is 16 %, on a host that was busy. The others are below 13 %, and between cards 8 %. None of their runs is an
outlier.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

# What is compared, and how it is called.
METRICS = {"images_per_s": "images/s", "joules_per_image": "J/image"}
METRICS |= {"joules_per_image_with_cpu": "J/image with processors"}
MAX_RANGE = 0.20
OUTLIER = 0.10
OUTLIER_RANGES = 5.0
ACCEPTED = "disagreement_accepted"  # a column of the runs of a report, if the user accepts it


def disagree(values: Sequence[float]) -> bool:
    """Return whether replicates with these positive values contradict each other."""
    ordered = sorted(value for value in values if value > 0)
    if len(ordered) < 2:
        return False
    if ordered[-1] > (1 + MAX_RANGE) * ordered[0]:
        return True
    return len(ordered) > 2 and (_is_outlier(ordered[0], ordered[1:]) or _is_outlier(ordered[-1], ordered[:-1]))


def _is_outlier(value: float, others: Sequence[float]) -> bool:
    mean = sum(others) / len(others)
    return abs(value - mean) > max(OUTLIER * mean, OUTLIER_RANGES * (others[-1] - others[0]))


def describe_disagreement(runs: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in which figures these runs of one cell disagree, with lowest and highest; None if they agree."""
    texts = []
    for metric, name in METRICS.items():
        known = sorted((row for row in runs if row[metric] is not None), key=lambda row: row[metric])
        if disagree([row[metric] for row in known]):
            low, high = (f"{row[metric]:.4g} ({row['run_id']})" for row in (known[0], known[-1]))
            texts.append(f"{name} {low} to {high}")
    return "; ".join(texts) or None


def is_withheld(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether runs disagree and so have no mean: not if the user accepts it, on a CPU, or in a demonstration.

    Both scatter widely, and nobody reads more from them than that the pipeline works.
    """
    excused = any(row.get(ACCEPTED) or row["demonstration"] or row["gpu"] == "cpu" for row in runs)
    return not excused and describe_disagreement(runs) is not None


def accept(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the runs, so that those that disagree have means nevertheless."""
    return runs.with_columns(pl.lit(True).alias(ACCEPTED))
