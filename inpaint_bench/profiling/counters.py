"""From what Nsight Compute prints to typed rows, and from a profile to the kernels that are worth counting."""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec
import torch

from inpaint_bench.core.kernels import METRICS

_OPENING, _CLOSING = "<([{", ">)]}"


class Launch(msgspec.Struct, kw_only=True):
    """The counters of one launch of a kernel, by column of the table `kernel_counters`; None where there is none."""

    number: int  # in the order of the launches that were counted
    kernel: str  # as the profiler of PyTorch names it
    grid: str
    block: str
    counters: dict[str, float | None]


class Selection(msgspec.Struct, kw_only=True):
    """The kernels to count, by the names that Nsight Compute selects by."""

    functions: list[str] = []
    launches: int = 0  # of one call
    left_out: list[str] = []  # of the heaviest: a sentence each


def parse(text: str) -> list[Launch]:
    """Return the launches in the output of `ncu --csv --print-units base --print-kernel-base mangled`.

    Reads both layouts: a column per metric (`--page raw`), with a row of units below the heading, and a row per metric.
    Lines of the profiler (==PROF==) and of the application are passed over.
    """
    lines = iter(text.splitlines())
    heading = next((line for line in lines if line.startswith('"ID",')), None)
    if heading is None:
        return []
    (columns,) = csv.reader([heading])
    launches: dict[str, Launch] = {}
    for cells in csv.reader(line for line in lines if line.startswith('"')):
        row = dict(zip(columns, cells, strict=False))
        if not row["ID"].isdecimal():  # the row of units
            continue
        launch = launches.setdefault(row["ID"], _launch(row))
        values = {row["Metric Name"]: row.get("Metric Value", "")} if "Metric Name" in row else row
        for column, metric in METRICS.items():
            if metric in values:
                launch.counters[column] = _number(values[metric])
    return list(launches.values())


def _launch(row: dict[str, str]) -> Launch:
    name = torch._C._demangle(row.get("Kernel Name", ""))
    shape = {"grid": row.get("Grid Size", ""), "block": row.get("Block Size", "")}
    return Launch(number=int(row["ID"]), kernel=name, **shape, counters=dict.fromkeys(METRICS))


def _number(text: str) -> float | None:
    """Return a number as ncu prints it, 1,234.50; None for n/a and for what is not finite."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def function_name(kernel: str) -> str:
    """Return a kernel's name without namespace, template and parameters, as `ncu --kernel-name` compares it."""
    depth, text = 0, ""
    for letter in kernel:
        depth += (letter in _OPENING) - (letter in _CLOSING)
        if depth == 0 and letter not in _CLOSING:
            text += letter
    words = text.split()  # a type that it returns, and its name
    return words[-1].rpartition("::")[2] if words else ""


def select(kernels: Iterable[tuple[str, float, int]], most_functions: int, most_launches: int) -> Selection:
    """Choose from (name, milliseconds, launches) of one call the heaviest, as many as `most_launches` has room for.

    Kernels of one function differ in template arguments only, by which Nsight Compute cannot select safely: its
    spelling of them is another one than the profiler's. They are counted together or not at all.
    """
    ms: defaultdict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for name, kernel_ms, count in kernels:
        if name and not name.startswith(("Memcpy", "Memset")):
            ms[function_name(name)] += kernel_ms
            launches[function_name(name)] += count
    chosen = Selection()
    for name in sorted(ms, key=lambda name: -ms[name]):
        if len(chosen.functions) == most_functions:
            break
        if chosen.launches + launches[name] <= most_launches:
            chosen.functions.append(name)
            chosen.launches += launches[name]
        else:
            chosen.left_out.append(
                f"{name} was not counted: {launches[name]:,} launches in a call, and {most_launches:,} are counted "
                "of all kernels (profiler_launches)"
            )
    return chosen
