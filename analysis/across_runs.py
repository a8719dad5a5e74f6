"""What only a comparison of runs shows: one run under two ids, two runs on one GPU at one time, unequal work."""

import datetime as dt
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec
import polars as pl

from inpaint_bench.core.console import list_some
from inpaint_bench.core.records import Window
from inpaint_bench.core.schema import WindowKind

from .metrics.audit.windows import clock_tolerance_s

Row = dict[str, Any]  # a row of runs.parquet or of windows.parquet

# Columns that decide a figure, by code that counts it in the same way; `_work` adds the adapters.
_MODEL = ("workload", "model", "code_version")
_OF_WORK = {
    "flop_per_image": (*_MODEL, "variant", "encodes_online", "text_online", "location_tokens", "resolution_px"),
    "parameters": _MODEL,
}
CLOCKS_DIFFER = dt.timedelta(minutes=10)  # clocks of site and merging machine; a wrong time zone is more
_EDGES = ("start", "end")
_LABELS = (
    *("workload", "model", "site", "gpu", "gpus", "nodes", "batch", "recipe", "precision"),
    *("resolution_px", "demonstration"),
)


def content_digest(windows: Sequence[Window], tables: Mapping[str, pl.DataFrame]) -> str | None:
    """Return a digest of what a run recorded, whatever its id and labels; None if it has no window."""
    if not windows:
        return None
    digest = hashlib.sha256(msgspec.json.encode(windows))
    for name, rows in tables.items():
        texts = pl.col(pl.Categorical).cast(pl.String)
        digest.update(f"{name} {rows.drop('run_id').with_columns(texts).hash_rows().sum()}".encode())
    return digest.hexdigest()


def find_problems(
    rows: Sequence[Row], windows: Sequence[Row], digests: Mapping[str, str | None], now: dt.datetime
) -> defaultdict[str, list[str]]:
    """Return why runs are not valid beside the others, and beside the time of this merge, by run id.

    `digests` are the content digests of the runs.
    """
    by_id = {row["run_id"]: row for row in rows}
    problems: defaultdict[str, list[str]] = defaultdict(list)
    for run_id, others in _copies(rows, digests).items():
        problems[run_id].append(f"same rows as in run {list_some(sorted(others))}; one of them is a copy, remove it")
    for run_id, sharing in _same_gpu_and_time(by_id, windows).items():
        # A copy did not use the GPU a second time.
        if runs := list_some(sorted(other for other in sharing if digests[other] != digests[run_id])):
            problems[run_id].append(f"another run measured on the same GPU at the same time: {runs}")
    for row in rows:
        last = max(filter(None, (row["started"], row["ended"])), default=now)
        if last > now + CLOCKS_DIFFER:
            text = f"it ran at {last:%Y-%m-%d %H:%M} UTC, and this merge at {now:%Y-%m-%d %H:%M}"
            problems[row["run_id"]].append(f"{text}: the clock of site {row['site']} or of this machine is wrong")
    for run_id, text in _other_work(rows):
        problems[run_id].append(text)
    return problems


def _other_work(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield the runs that state another amount of work than most runs of the same work; all if two values tie."""
    for name in _OF_WORK:
        groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in rows:
            if row["valid"] and row[name] is not None:
                groups[_work(name, row)].append(row)
        for group in groups.values():
            (most, count), *others = Counter(row[name] for row in group).most_common()
            text = ", ".join(f"{value:.10g} ({number})" for value, number in [(most, count), *others])
            for row in group:
                if others and (row[name] != most or others[0][1] == count):
                    yield row["run_id"], f"{name} is {row[name]:.10g}, and runs of this work and code have {text}"


def _work(name: str, row: Row) -> tuple[Any, ...]:
    """Return what decides a figure of one image, last LoRA's adapters, which add operations and no `parameters`."""
    levers = json.loads(row["levers"] or "[]") if name == "flop_per_image" else []
    adapters = [(lever["field"], lever["requested"]) for lever in levers if lever["field"].startswith("lora_")]
    return *(row[key] for key in _OF_WORK[name]), tuple(sorted(map(str, adapters)))


def tell_read_backs(rows: Sequence[Row]) -> None:
    """Warn of the runs of a cell if different values of a lever were read back in them."""
    read_backs: dict[tuple[Any, ...], list[tuple[Row, str]]] = defaultdict(list)
    for row in rows:
        for lever in json.loads(row["levers"] or "[]") if row["valid"] else ():
            if lever["effective"] is not None:
                cell = (*(row[key] for key in _LABELS), row["variant"], lever["name"])
                read_backs[cell].append((row, json.dumps(lever["effective"])))
    for (*_, name), entries in read_backs.items():
        values = sorted({value for _, value in entries})
        for row, value in entries if len(values) > 1 else ():
            text = f"lever {name}: {value} was read back, and in the runs of this cell {list_some(values)}"
            row["warnings"] = "; ".join(filter(None, [row["warnings"], text]))


def leave_out(rows: Sequence[Row], problems: Mapping[str, Sequence[str]]) -> None:
    """Make the rows invalid that have a problem beside the others."""
    for row in rows:
        if own_problems := problems.get(row["run_id"]):
            row["invalid_across_runs"] = "; ".join(filter(None, [row["invalid_across_runs"], *own_problems]))
            row["invalid_reason"] = "; ".join(filter(None, [row["invalid_reason"], *own_problems]))
            row["valid"] = False


def _copies(rows: Sequence[Row], digests: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return the runs that do not count because of the same content under another id, and those ids.

    The later run does not count. If the labels differ nothing tells which are right, and neither run counts. A run
    that is not valid by itself does not take the other one with it.
    """
    groups: dict[str | None, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["started"] is None, row["started"])):
        groups[digests[row["run_id"]]].append(row)
    groups.pop(None, None)
    copies: dict[str, list[str]] = defaultdict(list)
    for pair in (pair for group in groups.values() for pair in combinations(group, 2)):
        dropped = [row for row in pair if not row["valid"]]
        if not dropped:
            dropped = list(pair[1:] if all(pair[0][name] == pair[1][name] for name in _LABELS) else pair)
        for row in dropped:
            copies[row["run_id"]].append(pair[row is pair[0]]["run_id"])
    return copies


def _same_gpu_and_time(by_id: Mapping[str, Row], windows: Sequence[Row]) -> Mapping[str, set[str]]:
    """Return the runs whose measure windows share time with a window of another run on the same GPU, and which.

    Within one boot the monotonic clock decides, else the wall clock. MIG instances have UUIDs of their own.
    """
    used: list[Row] = []  # a row for each GPU of a window
    for window in windows:
        row = by_id[window["run_id"]]
        # A replay names the GPU of its recording.
        if not row["gpu_uuid"] or str(row["source"]).startswith("replay"):
            continue
        # A window whose clocks contradict each other makes its own run invalid; it says nothing about other runs.
        times = {clock: _span(window, clock) for clock in ("mono", "unix")}
        lengths = [(end - start) * 1e-9 for start, end in times.values()]
        if abs(lengths[0] - lengths[1]) > clock_tolerance_s(lengths[0]):
            continue
        # A requeued job: an earlier start may have been on another GPU, and the row has those of the last one.
        if row["started"] is not None and window["t_start_unix_ns"] < row["started"].timestamp() * 1e9 - 1e6:
            continue
        known = {"run_id": row["run_id"], "kind": window["kind"], "boot": row["boot_id"] or None}
        known |= {f"{edge}_{clock}": ns for clock, span in times.items() for edge, ns in zip(_EDGES, span, strict=True)}
        used += [{"uuid": uuid, **known} for uuid in row["gpu_uuid"].split(", ")]
    overlapping: defaultdict[str, set[str]] = defaultdict(set)
    table = pl.DataFrame(used, infer_schema_length=None) if used else pl.DataFrame()
    for clock in ("mono", "unix") if used else ():
        start, end = (f"{edge}_{clock}" for edge in _EDGES)
        shared = pl.col(start) < pl.col(f"{end}_right"), pl.col(f"{start}_right") < pl.col(end)
        pairs = table.join_where(table, pl.col("uuid") == pl.col("uuid_right"), *shared)
        # The wall clock may have been set back between two runs of one boot.
        same_boot = (pl.col("boot") == pl.col("boot_right")).fill_null(False)
        pairs = pairs.filter(same_boot == (clock == "mono"), pl.col("run_id") != pl.col("run_id_right"))
        for run_id, other in pairs.filter(kind=WindowKind.MEASURE.value).select("run_id", "run_id_right").iter_rows():
            overlapping[run_id].add(other)
    return overlapping


def _span(window: Row, clock: str) -> tuple[int, int]:
    """Return start and end of a window by one clock. One without an end is open at its start only."""
    start_ns, end_ns = window[f"t_start_{clock}_ns"], window[f"t_end_{clock}_ns"]
    return start_ns, start_ns + 1 if end_ns is None else end_ns
