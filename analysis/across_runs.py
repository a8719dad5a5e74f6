"""What only a comparison of runs shows: samples that two runs share, and two runs on one GPU at one time.

Row digests are 64-bit hashes of a table's rows, of which the smallest are kept (a bottom-k sketch, Broder 1997): two
tables that share a part of their rows share about that part of these. A row is known by its times to the ns and by how
long it took, so that a copy with other labels or scaled values is still a copy. A copy of a whole run whose times were
shifted is known by the time between rows and by their values. Where rows come at equal intervals, e.g. in made-up data,
a copy is what has the same times, values and GPU.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, repeat
from typing import Any

import polars as pl

from inpaint_bench.core.console import list_some
from inpaint_bench.core.schema import SAMPLES, WindowKind

from .metrics.audit.windows import clock_tolerance_s

Row = dict[str, Any]  # of runs.parquet, or of windows.parquet
Digests = Mapping[str, Sequence[int]]  # by table

DIGESTS = 32  # kept of a table
# No two of 99 real runs had an equal row: three are no coincidence. A copied tenth of a table gives as many.
SHARED = 3
_ALL_PAIRS = 20
# Columns that decide a figure, by code that counts it in the same way; `_work` adds the adapters.
_MODEL = ("workload", "model", "code_version")
_OF_WORK = {
    "flop_per_image": (*_MODEL, "variant", "encodes_online", "text_online", "resolution_px"),
    "parameters": _MODEL,
}
CLOCKS_DIFFER = dt.timedelta(minutes=10)  # of a site and of the machine that merges; a wrong time zone is more
_LABELS = (
    *("workload", "model", "site", "gpu", "gpus", "nodes", "batch", "recipe", "precision"),
    *("resolution_px", "demonstration"),
)
_SAMPLE_TIMING = (pl.col("t_mono_ns").diff().alias("since_last"), pl.col("read_us"))
_STEP_TIMING = (
    (pl.col("t_end_mono_ns") - pl.col("t_start_mono_ns")).alias("duration"),
    pl.col("data_wait_ns", "device_ms"),
)
_TIMING = {**dict.fromkeys(SAMPLES, _SAMPLE_TIMING), "steps": _STEP_TIMING}
_DISTINCT = 0.5  # share of rows with a timing of their own, above which timing tells rows apart
_ROWS_LOOKED_AT = 1000  # for that share
_TIMES = pl.col("^t_.*_ns$")
_SHIFTED = ", whatever its times"  # ends the name of the digests without times


def row_digests(table: str, rows: pl.DataFrame) -> dict[str, list[int]]:
    """Return the smallest digests of a table's rows, with and without their times.

    Empty where the rows cannot be distinguished from another run's.
    """
    if table not in _TIMING or rows.height < SHARED:
        return {}
    timing = rows.select(_TIMING[table])
    first = timing.head(_ROWS_LOOKED_AT)
    if first.n_unique() > _DISTINCT * first.height:
        # Not tick_seq and step, which any run has; the energy counter goes on from run to run.
        values = pl.selectors.float().exclude(timing.columns)
        return {
            table: _smallest(rows.select(_TIMES, *_TIMING[table])),
            table + _SHIFTED: _smallest(rows.select(*_TIMING[table], values)),
        }
    # Equal steps say nothing: they have the monotonic clock alone, which begins anew with every boot.
    if table == "steps":
        return {}
    return {table: _smallest(rows.drop("run_id").with_columns(pl.col(pl.Categorical).cast(pl.String)))}


def _smallest(rows: pl.DataFrame) -> list[int]:
    # Some of them may be equal; to sort all would take ten times as long.
    return rows.hash_rows().bottom_k(4 * DIGESTS).unique().sort().head(DIGESTS).to_list()


def find_problems(
    rows: Sequence[Row], windows: Sequence[Row], digests: Mapping[str, Digests], now: dt.datetime
) -> defaultdict[str, list[str]]:
    """Return why runs are not valid beside the others, and beside the time of this merge, by run id.

    `digests` are the row digests of every run.
    """
    by_id = {row["run_id"]: row for row in rows}
    order = {run_id: (row["started"] is None, row["started"], at) for at, (run_id, row) in enumerate(by_id.items())}
    copies: dict[str, list[str]] = defaultdict(list)
    tables: dict[str, set[str]] = defaultdict(set)
    shared_tables = _shared_tables(digests, list(by_id))
    for (first, second), shared in shared_tables.items():
        pair = [by_id[first], by_id[second]]
        whole = all(shared.issuperset(digests[run_id].keys() & _TIMING.keys()) for run_id in (first, second))
        for run_id in _not_counted(pair, order, whole=whole):
            copies[run_id].append(second if run_id == first else first)
            tables[run_id] |= shared
    problems: defaultdict[str, list[str]] = defaultdict(list)
    for run_id, others in copies.items():
        copied = ", ".join(name for name in _TIMING if name in tables[run_id])
        runs = list_some(sorted(set(others)))
        problems[run_id].append(f"{copied}: same rows as in run {runs}; one of them is a copy, remove it")
    for run_id, others in _same_gpu_and_time(by_id, windows).items():
        # A copy did not use the GPU a second time.
        others = [other for other in others if shared_tables.keys().isdisjoint({(run_id, other), (other, run_id)})]
        if others:
            runs = list_some(sorted(others))
            problems[run_id].append(f"another run measured on the same GPU at the same time: {runs}")
    for row in rows:
        last = max(filter(None, (row["started"], row["ended"])), default=now)
        if last > now + CLOCKS_DIFFER:
            text = f"it ran at {last:%Y-%m-%d %H:%M} UTC, and this merge at {now:%Y-%m-%d %H:%M}"
            problems[row["run_id"]].append(f"{text}: the clock of site {row['site']} or of this machine is wrong")
    for run_id, text in (*_other_work(rows), *_wrong_order(rows)):
        problems[run_id].append(text)
    return problems


def _other_work(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield the runs that state another amount of work than most runs of the same work; all where two values tie."""
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
    levers = _levers(row) if name == "flop_per_image" else []
    adapters = [(lever["field"], lever["requested"]) for lever in levers if lever["field"].startswith("lora_")]
    return *(row[key] for key in _OF_WORK[name]), tuple(sorted(map(str, adapters)))


def _levers(row: Row) -> list[dict[str, Any]]:
    try:
        return list(json.loads(row["levers"] or "[]"))
    except ValueError:  # cut off: too long for a cell
        return []


def tell_read_backs(rows: Sequence[Row]) -> None:
    """Warn of the runs of a cell if different values of a lever were read back in them."""
    read_backs: dict[tuple[Any, ...], list[tuple[Row, str]]] = defaultdict(list)
    for row in rows:
        for lever in _levers(row) if row["valid"] else ():
            if lever["effective"] is not None:
                cell = (*(row[key] for key in _LABELS), row["variant"], lever["name"])
                read_backs[cell].append((row, json.dumps(lever["effective"])))
    for (*_, name), entries in read_backs.items():
        values = sorted({value for _, value in entries})
        for row, value in entries if len(values) > 1 else ():
            text = f"lever {name}: {value} was read back, and in the runs of this cell {list_some(values)}"
            row["warnings"] = "; ".join(filter(None, [row["warnings"], text]))


def _wrong_order(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield the runs whose operations are no fewer than those of larger images, or of training without adapters.

    If two kinds of work contradict each other, the one with fewer runs is wrong, or both if they have equally many.
    """
    works: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for row in rows:
        if row["valid"] and row["flop_per_image"] and row["resolution_px"]:
            works[*_work("flop_per_image", row), row["flop_per_image"]].append(row["run_id"])
    for (work, ids), (other, other_ids) in permutations(works.items(), 2):
        (*same, pixels, adapters, flop), (*others, larger, other_adapters, more) = work, other
        smaller = pixels < larger and adapters == other_adapters
        if same == others and flop >= more and (smaller or (pixels == larger and adapters and not other_adapters)):
            text = f"flop_per_image is {flop:.4g} {f'at {pixels} px' if smaller else 'with adapters'}"
            for run_id in [*ids, *other_ids] if len(ids) == len(other_ids) else min(ids, other_ids, key=len):
                yield run_id, f"{text}, and {more:.4g} {f'at {larger} px' if smaller else 'without'}"


def leave_out(rows: Sequence[Row], problems: Mapping[str, Sequence[str]]) -> None:
    """Make the rows invalid that have a problem beside the others."""
    for row in rows:
        if own_problems := problems.get(row["run_id"]):
            row["invalid_across_runs"] = "; ".join(filter(None, [row["invalid_across_runs"], *own_problems]))
            row["invalid_reason"] = "; ".join(filter(None, [row["invalid_reason"], *own_problems]))
            row["valid"] = False


def _shared_tables(digests: Mapping[str, Digests], run_ids: list[str]) -> dict[tuple[str, str], set[str]]:
    """Return the tables of which two runs share rows, by their ids."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for name in sorted({name for run_id in run_ids for name in digests.get(run_id, ())}):
        holders: dict[int, list[str]] = defaultdict(list)
        for run_id in run_ids:
            for digest in digests.get(run_id, {}).get(name, ()):
                holders[digest].append(run_id)
        for ids in holders.values():
            # Of many copies of one run each is compared with the first.
            for pair in combinations(ids, 2) if len(ids) <= _ALL_PAIRS else zip(repeat(ids[0]), ids[1:], strict=False):
                counts[pair][name] += 1
    shared = {}
    for pair, count in counts.items():
        names = {name for name in count if count[name] >= SHARED}
        same = {name for name in names if not name.endswith(_SHIFTED)}
        # Without times only a run as a whole is known: its steps and its power.
        power, steps = f"samples_fast{_SHIFTED}", f"steps{_SHIFTED}"
        if steps in names and (power in names or not any(power in digests[run_id] for run_id in pair)):
            same |= {name.removesuffix(_SHIFTED) for name in names}
        if same:
            shared[pair] = same
    return shared


def _not_counted(pair: list[Row], order: Mapping[str, Any], *, whole: bool) -> list[str]:
    """Return which of two runs with shared rows do not count: the later one of a whole run under two ids, else both.

    Nothing tells which of the two measured the rows. It makes no difference where all rows and the labels are the same.
    A run that is not valid by itself does not take the other one with it.
    """
    if not all(row["valid"] for row in pair):
        pair = [row for row in pair if not row["valid"]]
    elif whole and all(pair[0][name] == pair[1][name] for name in _LABELS):
        pair = [max(pair, key=lambda row: order[row["run_id"]])]
    return [row["run_id"] for row in pair]


@dataclass(frozen=True, kw_only=True)
class _Span:
    """The time of one window on one GPU, by one clock."""

    window: Row
    start_ns: int
    end_ns: int
    boot: str | None


def _same_gpu_and_time(by_id: Mapping[str, Row], windows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the runs whose measure windows share time with a window of another run on the same GPU, and which.

    Within one boot the monotonic clock decides, else the wall clock. MIG instances have UUIDs of their own.
    """
    spans: dict[tuple[str, str | None], list[_Span]] = defaultdict(list)  # by GPU and boot; None: the wall clock
    for window in windows:
        row = by_id[window["run_id"]]
        # A replay names the GPU of its recording.
        if not row["gpu_uuid"] or str(row["source"]).startswith("replay"):
            continue
        # A window whose clocks contradict each other makes its own run invalid; of other runs it says nothing.
        if not _clocks_agree(window):
            continue
        # A requeued job: an earlier start may have been on another GPU, and the row has those of the last one.
        if row["started"] is not None and window["t_start_unix_ns"] < row["started"].timestamp() * 1e9 - 1e6:
            continue
        boot = row["boot_id"] or None
        for clock, of_boot in (("unix", None), *([("mono", boot)] if boot else [])):
            start_ns, end_ns = window[f"t_start_{clock}_ns"], window[f"t_end_{clock}_ns"]
            end_ns = start_ns + 1 if end_ns is None else end_ns
            for uuid in row["gpu_uuid"].split(", "):
                spans[uuid, of_boot].append(_Span(window=window, start_ns=start_ns, end_ns=end_ns, boot=boot))
    overlapping: dict[str, dict[str, None]] = defaultdict(dict)
    for (_, of_boot), group in spans.items():
        for first, second in _overlaps(group):
            # The wall clock may have been set back between two runs of one boot.
            if of_boot is None and first.boot is not None and first.boot == second.boot:
                continue
            for own, other in ((first.window, second.window), (second.window, first.window)):
                if own["kind"] == WindowKind.MEASURE:
                    overlapping[own["run_id"]][other["run_id"]] = None
    return {run_id: list(others) for run_id, others in overlapping.items()}


def _clocks_agree(window: Row) -> bool:
    lengths = []
    for clock in ("mono", "unix"):
        start_ns, end_ns = window[f"t_start_{clock}_ns"], window[f"t_end_{clock}_ns"]
        lengths.append(0.0 if end_ns is None else (end_ns - start_ns) * 1e-9)
    return abs(lengths[0] - lengths[1]) <= clock_tolerance_s(lengths[0])


def _overlaps(spans: list[_Span]) -> Iterator[tuple[_Span, _Span]]:
    open_: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        open_ = [earlier for earlier in open_ if earlier.end_ns > span.start_ns]
        yield from ((earlier, span) for earlier in open_ if earlier.window["run_id"] != span.window["run_id"])
        open_.append(span)
