"""Nsight Compute: which kernels it counts, how it is started, what it prints, and why no counter could be read."""

import csv
import math
import os
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch

from inpaint_bench.core import child
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.kernels import METRICS

from .profile import ATTACHED

TOOLS = {"ncu": "Nsight Compute", "nsys": "Nsight Systems"}
# Sections whose rules apply. Not SourceCounters: it instruments and samples the instructions, which takes longest.
SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables"),
    *("SchedulerStats", "WarpStateStats", "LaunchStats", "Occupancy"),
)
SCOPES = ("global", "local")
_FORM = ("--csv", "--print-units", "base", "--print-kernel-base", "mangled")
SETUP_S = 1800  # a run may take this long beyond its own limit: building, compiling, printing


def find(tool: str = "ncu") -> str:
    """Return the path of a profiler. Raises UnavailableError if there is none."""
    if path := shutil.which(tool):
        return path
    raise UnavailableError(
        f"profile={tool} needs {TOOLS[tool]}, and no `{tool}` is on PATH: it comes with the CUDA toolkit "
        "(a module of the site: sites.<name>.environment.modules)"
    )


def command(
    ncu: str, functions: Sequence[str], launches: int, report: Path, output: Path, application: Sequence[str]
) -> list[str]:
    """Return the command that counts the kernels of these functions between cudaProfilerStart and cudaProfilerStop."""
    return [
        ncu,
        *("--target-processes", "application-only"),  # no workers of a loader or a compiler
        *("--profile-from-start", "off"),
        *("--graph-profiling", "node"),  # kernels in a CUDA graph one by one
        *("--clock-control", "none"),  # the card's clocks are left alone
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(functions)})$"),
        *("--launch-count", str(launches)),
        *("--metrics", ",".join(METRICS.values())),
        *(argument for name in SECTIONS for argument in ("--section", name)),
        *("--export", str(report)),
        *("--page", "raw", *_FORM),
        *("--log-file", str(output)),
        *application,
    ]


def show(ncu: str, report: Path, page: str, limit_s: float) -> str:
    """Return a page of a report; empty if ncu cannot read it."""
    printed, returncode = run([ncu, "--import", str(report), "--page", page, *_FORM], limit_s)
    return "" if returncode else printed


def run(arguments: Sequence[str], limit_s: float) -> tuple[str, int]:
    """Run the command; return what it and the application printed, and its exit code. Raises UserError if it hangs."""
    # Two profilers cannot share a process.
    environment = {name: value for name, value in os.environ.items() if name not in ATTACHED}
    try:
        done = child.run(arguments, timeout_s=limit_s + SETUP_S, env=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"{Path(arguments[0]).name} did not end within {limit_s + SETUP_S:g} s") from None
    return (done.stdout + done.stderr).decode(errors="replace"), done.returncode


def check(text: str, returncode: int, site: SiteConfig) -> None:
    """Raise for an output without counters: UnavailableError if the machine gives none, else UserError."""
    if "ERR_NVGPUCTRPERM" in text:
        raise UnavailableError(f"this job may not read the GPU's performance counters (ERR_NVGPUCTRPERM): {_way(site)}")
    if "driver resource was unavailable" in text:
        raise UnavailableError(
            "the GPU's performance counters are in use by another tool, such as DCGM, which the site can pause"
        )
    if "Failed to initialize the profiler" in text:
        raise UnavailableError(f"the driver gives Nsight Compute no counters here: {main_error(text)}")
    if returncode != 0:
        raise UserError(f"ncu ended with {returncode}: {main_error(text)}")
    if "No kernels were profiled" in text:
        raise UserError("ncu saw none of the kernels of the profile before it: does the recipe run on the GPU?")


def _way(site: SiteConfig) -> str:
    if not site.connection.has_slurm:
        return "set the option NVreg_RestrictProfilingToAdminUsers=0 of the driver, or run as root"
    if site.counter_features:
        features = "&".join(site.counter_features)
        return f"jobs of `launch` at {site.name} ask for nodes that allow it, --constraint={features}"
    return f"ask the site which feature of its nodes allows it, and set sites.{site.name}.counter_features=[...]"


_EXCEPTION = re.compile(r"^(?:Original )?Traceback \(most recent call last\):\n(?:[ \t].*\n)*(\S.*)$", re.MULTILINE)
_CONSEQUENCES = re.compile(r"^(?:During handling of the above exception|Exception ignored |Error in )", re.MULTILINE)


def main_error(text: str) -> str:
    """Return the line that says most of why a profiler or its application failed."""
    errors = re.findall(r"^==ERROR== (.+)$", text, re.MULTILINE)
    # The last is "An error occurred"; what the application printed says more than "returned an error code".
    telling = [line for line in errors if not line.startswith(("An error", "The application returned"))]
    # An exception is followed by those of its handling: loader processes, for example, end with the application.
    exceptions = _EXCEPTION.findall(_CONSEQUENCES.split(text)[0]) or _EXCEPTION.findall(text)
    printed = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    lines = telling or exceptions or printed or errors
    return lines[-1].strip()[:300] if lines else "it printed nothing"


# --- from a profile to the kernels to count, and from what is printed to rows --------------------

_OPENING, _CLOSING = "<([{", ">)]}"


class Launch(msgspec.Struct, kw_only=True):
    """The counters of one launch of a kernel, by column of the table `kernel_counters`; None if there is none."""

    number: int  # in the order of the launches that were counted
    kernel: str  # as the profiler of PyTorch names it
    grid: str
    block: str
    counters: dict[str, float | None]


class Rule(msgspec.Struct, kw_only=True):
    """What a rule says of one launch: the columns of the table `kernel_rules`."""

    launch: int
    section: str
    rule: str
    type: str
    scope: str | None = None
    speedup_pct: float | None = None
    text: str


class Selection(msgspec.Struct, kw_only=True):
    """The kernels to count, by the names that Nsight Compute selects by."""

    functions: list[str] = []
    launches: int = 0  # launches in one call
    left_out: list[str] = []  # heaviest kernels that are left out: a sentence each


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


def parse_rules(text: str, launches: Iterable[int]) -> tuple[list[Rule], list[str]]:
    """Return what rules say of these launches in the output of `ncu --csv --page details`, and what could not be read.

    Versions differ in columns: the older ones estimate no speed-up. A row of a metric may end before theirs.
    """
    lines = text.splitlines(keepends=True)
    first = next((index for index, line in enumerate(lines) if line.startswith('"ID",')), None)
    if first is None:
        return [], ["no rules: Nsight Compute printed no page of details"]
    (columns,) = csv.reader(lines[first : first + 1])
    if missing := {"Section Name", "Rule Name", "Rule Type", "Rule Description"} - {*columns}:
        return [], [f"no rules: this Nsight Compute prints no column {', '.join(sorted(missing))}"]
    known, rules, unread = {str(number) for number in launches}, [], Counter[str]()
    for cells in csv.reader(line for line in lines[first + 1 :] if not line.startswith("==")):
        row = dict(zip(columns, cells, strict=False))
        if len(cells) > len(columns) or row.get("ID") not in known:
            unread["a row of another form or launch"] += bool(cells)
        elif row.get("Rule Name"):
            rules.append(_rule(row, unread))
    return rules, [
        f"rules of Nsight Compute: {what}, {pluralize(count, 'time')}" for what, count in unread.items() if count
    ]


def _rule(row: dict[str, str], unread: Counter[str]) -> Rule:
    scope, estimate = row.get("Estimated Speedup Type", ""), row.get("Estimated Speedup", "")
    rule = Rule(
        launch=int(row["ID"]), section=row["Section Name"], rule=row["Rule Name"],
        type=row["Rule Type"], text=row["Rule Description"],
    )  # fmt: skip
    speedup = _number(estimate)
    # A kernel cannot save more than the time it takes.
    if scope in SCOPES and speedup is not None and speedup >= 0 and (scope == "local" or speedup <= 100):
        rule.scope, rule.speedup_pct = scope, speedup
    elif scope or estimate:
        unread[f"an estimate that is not known, {scope!r} {estimate!r}"] += 1
    return rule


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
