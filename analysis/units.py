"""Numbers, GPU types and counts as every table and figure prints them."""

import math
import re
from collections.abc import Iterable

import polars as pl

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import UNKNOWN, item

_IMAGE = re.compile(r"\b([Ii])mage(s?)\b")


def number(value: float | int | None) -> str:
    """Return three significant digits, never an exponent for what a person can read; an en dash for null."""
    if value is None:
        return "\u2013"
    # Use the rounded value: 999.9 is printed as 1,000 and 0.09999 as 0.100.
    size = abs(float(f"{value:.3g}"))
    if size == 0:
        return "0"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-4:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def made(text: str, workloads: Iterable[str | None]) -> str:
    """Return a text on images as one on what these workloads make: volumes, or either."""
    items = set(map(item, workloads))
    if "volume" not in items:
        return text
    volume = "{0}olume{1}" if items == {"volume"} else "{2} (volume{1})"
    return _IMAGE.sub(lambda word: volume.format("V" if word[1] == "I" else "v", word[2], word[0]), text)


def runtime_heading(runs: pl.DataFrame) -> str:
    """Return what the runtime column is: projected from images/s, measured, or both."""
    kinds = sorted(runs["runtime_kind"].drop_nulls().unique().to_list()) if runs.height else []
    return f"Runtime, {' and '.join(kinds) or 'projected'} [h]"


def gpu_label(gpu: str) -> str:
    """Return a GPU type in capitals."""
    return gpu if gpu in ("cpu", UNKNOWN) else gpu.upper()


def scale_labels(gpus: int | None, nodes: int | None) -> list[str]:
    """Return `8 GPUs` and `2 nodes`; nothing for one, which goes without saying."""
    counts = ((gpus, "GPU"), (nodes, "node"))
    return [pluralize(count, noun) for count, noun in counts if (count or 1) > 1 and count is not None]


def gpu_order(gpu: str) -> tuple[str, int, str]:
    """Return a sort key that puts A40 before A100: letters first, then the number as a number."""
    match = re.match(r"([a-zA-Z]*)(\d*)", gpu)
    assert match is not None
    return match[1].lower(), int(match[2] or 0), gpu
