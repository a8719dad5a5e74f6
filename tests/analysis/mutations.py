"""Mutate a valid run directory at random, merge it beside untouched ones, and tell what the merge says of each."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from analysis import merge
from analysis.columns import METRICS
from analysis.comparability import ATTRIBUTES
from analysis.dataset import open_dataset
from inpaint_bench.core import schema
from inpaint_bench.core.tables import SCHEMAS

from . import real_run

SEED = 20261122
PER_MERGE = 50
NEIGHBOURS = ("n-first", "z-last")  # untouched, before and after the mutants in the order of the merge
TABLES = tuple(name for name in schema.RUN_TABLES if name != "samples_cpu")  # that one: metrics/test_cpu_energy.py
DONOR = "d-donor"  # untouched too, but mutants take its files and its run id
JSON_FILES = (schema.MANIFEST, schema.WINDOWS, schema.TELEMETRY)
IDENTITY = (
    "run_id",
    "site",
    "gpu",
    "gpus",
    "nodes",
    "batch",
    "recipe",
    "workload",
    "model",
    "seed",
    "precision",
    "demonstration",
)
NOT_HEADLINE = ("energy_ratio", "energy_error_pct", "joules_per_image_error")  # of the measurement's quality
HEADLINE = tuple(name for name in METRICS if name not in NOT_HEADLINE)
TOLERANCE = 0.01  # relative: what runs of one configuration differ by in the committed datasets
TOLERANCE_POINTS = 1.0  # of percentages and degrees


class Outcome(StrEnum):
    """What the merge says of a mutated run."""

    LEFT_OUT = "left out"  # with a reason
    INVALID = "invalid"
    TOLD = "told"  # valid, with a new warning, flag, skipped file, or reason for a null
    MISSED = "missed"  # valid, a figure differs, and nothing is said
    NO_EFFECT = "no effect"  # valid, with the same figures
    UNLISTED = "unlisted"  # neither a row nor a skipped file
    CRASH = "crash"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change of one file of a run directory."""

    file: str  # of a table: its name
    field: str  # indices of lists left out; empty: the whole file
    kind: str

    def __str__(self) -> str:
        return f"{self.file} {self.field} {self.kind}".replace("  ", " ")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one mutant."""

    number: int
    mutation: Mutation
    outcome: Outcome
    detail: str  # the differing figures of a valid run, else the reason


# --- mutations of values ---------------------------------------------------------------------------

NUMBERS: dict[str, Callable[[Any, random.Random], Any]] = {
    "zero": lambda value, rng: 0,
    "negative": lambda value, rng: -value or -1,
    "scaled": lambda value, rng: type(value)(value * rng.choice([0.5, 0.9, 1.1, 2, 10, 1000])),
    "shifted": lambda value, rng: value + rng.choice([1, -1, 2 * 10**9, -(2 * 10**9), 3600 * 10**9]),
    "NaN": lambda value, rng: rng.choice([math.nan, math.inf, -math.inf]),
}
OTHER_WORDS = ("a40", "a100", "h200", "grace", "delta", "completed", "failed", "running", "warmup", "measure", "fp32")
TEXTS: dict[str, Callable[[Any, random.Random], Any]] = {
    "other text": lambda value, rng: rng.choice([value + "x", value[:-1], value.upper(), *OTHER_WORDS]),
}
ANY_VALUE: dict[str, Callable[[Any, random.Random], Any]] = {
    "wrong type": lambda value, rng: rng.choice(
        [other for other in ("text", [], {}, True, 1.5, [value], {"a": value}) if type(other) is not type(value)]
    ),
    "null": lambda value, rng: None,
    "empty": lambda value, rng: type(value)() if value is not None else {},
}


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from _places(child, (*path, key))


def _holder(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def mutate_json(folder: Path, rng: random.Random) -> Mutation:
    """Change one value of one of the records."""
    name = rng.choice(JSON_FILES)
    path = folder / name
    record = json.loads(path.read_text())
    places = list(_places(record))
    place = rng.choice(places)
    holder, key = _holder(record, place), place[-1]
    old = holder[key]
    kinds = dict(ANY_VALUE)
    if isinstance(old, str):
        kinds |= TEXTS
    elif isinstance(old, int | float) and not isinstance(old, bool):
        # Mostly numbers that look like numbers: those are the ones that nothing but another source can contradict.
        kinds |= NUMBERS
    kind = rng.choice([*kinds, "removed", "swapped"])
    if kind == "removed":
        del holder[key]
    elif kind == "swapped":
        # Of the same type, and neither inside the other.
        apart = [other for other in places if other[: len(place)] != place[: len(other)]]
        like = [other for other in apart if type(_holder(record, other)[other[-1]]) is type(old)]
        other = rng.choice(like or [place])
        holder[key], _holder(record, other)[other[-1]] = _holder(record, other)[other[-1]], old
    else:
        holder[key] = kinds[kind](old, rng)
    path.write_text(json.dumps(record))
    return Mutation(file=name, field=".".join(str(key) for key in place if isinstance(key, str)), kind=kind)


def _each(change: Callable[[Any], Any]) -> Callable[[list[Any], random.Random], list[Any]]:
    return lambda values, rng: [None if value is None else change(value) for value in values]


def _scaled(values: list[Any], rng: random.Random) -> list[Any]:
    factor = rng.choice([0.5, 0.9, 1.1, 2, 1000])
    return [value and type(value)(value * factor) for value in values]


def _shifted(values: list[Any], rng: random.Random) -> list[Any]:
    by = rng.choice([1, 10, -10, 2 * 10**9, 3600 * 10**9])
    return [None if value is None else value + by for value in values]


def _outlier(values: list[Any], rng: random.Random) -> list[Any]:
    row, value = rng.randrange(len(values)), rng.choice([0, -1, math.nan, 1e30, 2**62])
    return [value if index == row else old for index, old in enumerate(values)]


def _rotated(values: list[Any], rng: random.Random) -> list[Any]:
    by = rng.randrange(1, max(2, len(values)))
    return values[by:] + values[:by]


NUMBER_COLUMNS: dict[str, Callable[[list[Any], random.Random], list[Any]]] = {
    "zero": _each(lambda value: 0),
    "negative": _each(lambda value: -value),
    "huge": lambda values, rng: [rng.choice([1e30, 2**62, 2**63, 10**18])] * len(values),
    "NaN": lambda values, rng: [rng.choice([math.nan, math.inf])] * len(values),
    "scaled": _scaled,
    "shifted": _shifted,
    "one outlier": _outlier,
}
TEXT_COLUMNS: dict[str, Callable[[list[Any], random.Random], list[Any]]] = {
    "other text": lambda values, rng: [rng.choice(["x", "nvml", "replay:x", "warmup-0", "xid", "GPU-x"])] * len(values),
}
COLUMNS: dict[str, Callable[[list[Any], random.Random], list[Any]]] = {
    "null": lambda values, rng: [None] * len(values),
    "constant": lambda values, rng: values[:1] * len(values),
    "reversed": lambda values, rng: values[::-1],
    "rotated": _rotated,
    "wrong type": lambda values, rng: [str(value) for value in values] if values[0] != str(values[0]) else [1.5],
}
ROWS: dict[str, Callable[[pa.Table, random.Random], pa.Table]] = {
    "rows removed": lambda rows, rng: pa.concat_tables(
        [rows.slice(0, rows.num_rows // 3), rows.slice(2 * rows.num_rows // 3)]
    ),
    "rows cut off": lambda rows, rng: rows.slice(0, rows.num_rows // 2),
    "rows repeated": lambda rows, rng: pa.concat_tables([rows, rows]),
    "rows reversed": lambda rows, rng: rows.take(list(range(rows.num_rows))[::-1]),
    "no rows": lambda rows, rng: rows.slice(0, 0),
}


def _column_of(values: list[Any], kind: pa.DataType, length: int) -> pa.Array:
    """Return the values in the column's type where it can hold them, else in whatever type can, else as text."""
    values = values if len(values) == length else values * length
    kind = pa.string() if pa.types.is_dictionary(kind) else kind
    for attempt in (kind, None):
        try:
            return pa.array(values, type=attempt, from_pandas=False)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            continue
    return pa.array([str(value) for value in values])


def mutate_table(folder: Path, rng: random.Random) -> Mutation:
    """Change one column, or rows, of one table, in one of its parts or in all."""
    table = rng.choice(TABLES)
    parts = sorted((folder / table).iterdir())
    if len(parts) > 1 and rng.random() < 0.3:
        parts = [rng.choice(parts)]
    name = rng.choice(SCHEMAS[table].names)
    other = rng.choice(SCHEMAS[table].names)
    by_text = pa.types.is_dictionary(SCHEMAS[table].field(name).type) or name == "detail"
    kind = rng.choice(
        [*COLUMNS, *(TEXT_COLUMNS if by_text else NUMBER_COLUMNS), "removed", "renamed", "swapped", *ROWS]
    )
    chosen = rng.getrandbits(32)
    for part in parts:
        rows = pq.ParquetFile(part).read()
        if kind in ROWS:
            rows = ROWS[kind](rows, random.Random(chosen))
        elif kind == "removed":
            rows = rows.drop_columns([name])
        elif kind == "renamed":
            rows = rows.rename_columns({name: f"{name}_"})
        elif kind == "swapped":
            rows = rows.rename_columns({name: other, other: name}) if other != name else rows
        else:
            change = {**COLUMNS, **NUMBER_COLUMNS, **TEXT_COLUMNS}[kind]
            values = change(rows[name].to_pylist(), random.Random(chosen))
            array = _column_of(values, SCHEMAS[table].field(name).type, rows.num_rows)
            rows = rows.set_column(rows.schema.get_field_index(name), name, array)
        pq.write_table(rows, part, compression="zstd")
    return Mutation(file=table, field="" if kind in ROWS else name, kind=kind)


# --- mutations of files ----------------------------------------------------------------------------


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 8, 64])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


FILES: dict[str, Callable[[Path, Path, random.Random], Any]] = {
    "truncated": lambda path, donor, rng: os.truncate(path, rng.randrange(path.stat().st_size)),
    "emptied": lambda path, donor, rng: path.write_bytes(b""),
    "bits flipped": lambda path, donor, rng: _flip(path, rng),
    "not UTF-8": lambda path, donor, rng: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
    "copied from another run": lambda path, donor, rng: shutil.copy(donor, path),
    "removed": lambda path, donor, rng: path.unlink(),
    "renamed": lambda path, donor, rng: path.rename(path.with_name(f"old-{path.name}")),
    "linked to another run": lambda path, donor, rng: _replace(path, lambda link: link.symlink_to(donor)),
    "folder in its place": lambda path, donor, rng: _replace(path, Path.mkdir),
    "copied beside": lambda path, donor, rng: shutil.copy(path, path.with_name("part-000009.parquet")),
}
FOLDERS: dict[str, Callable[[Path, Path, random.Random], Any]] = {
    "folder removed": lambda path, donor, rng: shutil.rmtree(path),
    "folder copied from another run": lambda path, donor, rng: shutil.copytree(donor, path, dirs_exist_ok=True),
    "folder linked to another run": lambda path, donor, rng: (shutil.rmtree(path), path.symlink_to(donor)),
    "file in place of folder": lambda path, donor, rng: (shutil.rmtree(path), path.write_text("x")),
    "stray folder": lambda path, donor, rng: (path / rng.choice(["part-000009.parquet", "x"])).mkdir(),
    "stray text": lambda path, donor, rng: (path / rng.choice(["part-000009.parquet", "x"])).write_text("x"),
}


def mutate_file(folder: Path, rng: random.Random, donor: Path) -> Mutation:
    """Damage, replace, copy, remove or link one file or one table's folder."""
    if rng.random() < 0.25:
        table, kind = rng.choice(TABLES), rng.choice(list(FOLDERS))
        FOLDERS[kind](folder / table, donor / table, rng)
        return Mutation(file=table, field="", kind=kind)
    name = rng.choice([*JSON_FILES, *TABLES])
    path = folder / name
    if path.is_dir():
        path = rng.choice(sorted(path.iterdir()))
    kind = rng.choice(list(FILES))
    FILES[kind](path, donor / path.relative_to(folder), rng)
    return Mutation(file=name, field="", kind=kind)


def mutate(folder: Path, rng: random.Random, donor: Path) -> Mutation:
    """Change a run directory at random."""
    chance = rng.random()
    if chance < 0.4:
        return mutate_json(folder, rng)
    return mutate_table(folder, rng) if chance < 0.8 else mutate_file(folder, rng, donor)


# --- merging mutants -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What a merge says of its runs, by their directories."""

    rows: dict[str, dict[str, Any]]
    skips: list[dict[str, Any]]


def _merge(root: Path, out: Path) -> Merged | Outcome:
    try:
        merge.merge([root], out, allow_mixed=list(ATTRIBUTES))
    except Exception as error:
        print(f"{type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return Outcome.CRASH
    dataset = open_dataset(out)
    rows = {Path(row["run_dir"]).name: row for row in dataset.runs.to_dicts()}
    return Merged(rows=rows, skips=dataset.skipped.to_dicts())


def _differs(name: str, before: Any, after: Any) -> bool:
    if name in IDENTITY or before is None or after is None:
        return bool(before != after)
    if not math.isfinite(after):
        return True
    points = "pct" in name or name.startswith("temp_")
    return bool(abs(after - before) > (TOLERANCE_POINTS if points else TOLERANCE * abs(before)))


def judge(mutant: Path, merged: Merged, untouched: dict[str, Any]) -> tuple[Outcome, str]:
    """Return what the merge says of a mutant, and which figures differ from those of the same run untouched."""
    own = [skip for skip in merged.skips if mutant.name in Path(skip["path"]).parts]
    row = merged.rows.get(mutant.name)
    if row is None:
        text = "; ".join(f"{skip['code']}: {skip['reason']}" for skip in own)
        return (Outcome.LEFT_OUT, text) if own else (Outcome.UNLISTED, "")
    if not row["valid"]:
        return Outcome.INVALID, str(row["invalid_reason"])
    differing = [name for name in (*IDENTITY, *HEADLINE) if _differs(name, untouched[name], row[name])]
    if not differing:
        return Outcome.NO_EFFECT, ""
    changes = ", ".join(f"{name} {untouched[name]} to {str(row[name])[:40]}" for name in differing)
    # A null says by itself that the figure is not known; `null_reasons` says why.
    silent = [name for name in differing if row[name] is not None or name in IDENTITY]
    more = [name for name in ("warnings", "flags") if row[name] and row[name] != untouched[name]]
    return (Outcome.TOLD if own or more or not silent else Outcome.MISSED), changes


def run_mutations(count: int, *, folder: Path) -> Iterator[tuple[list[Result], list[str]]]:
    """Yield, per merge, the results of its mutants and what changed of the untouched neighbours.

    Mutant number k is the same whatever the count is.
    """
    originals = folder / "originals"
    names = [f"m-{slot:02d}" for slot in range(PER_MERGE)]
    for index, name in enumerate((*names, *NEIGHBOURS, DONOR)):
        real_run.write_run(originals / name, name, index)
    untouched = _merge(originals, folder / "untouched")
    assert isinstance(untouched, Merged)
    assert all(row["valid"] for row in untouched.rows.values())
    assert not untouched.skips
    for first in range(0, count, PER_MERGE):
        yield _run_batch(list(range(first, min(first + PER_MERGE, count))), folder, untouched)


def _run_batch(numbers: list[int], folder: Path, untouched: Merged) -> tuple[list[Result], list[str]]:
    originals, work = folder / "originals", folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    mutations = {}
    for number in numbers:
        name = f"m-{number % PER_MERGE:02d}"
        shutil.copytree(originals / name, work / "in" / name)
        mutations[number] = mutate(work / "in" / name, random.Random(f"{SEED} {number}"), originals / DONOR)
    for name in (*NEIGHBOURS, DONOR):
        shutil.copytree(originals / name, work / "in" / name)
    merged = _merge(work / "in", work / "out")
    if isinstance(merged, Outcome):
        if len(numbers) == 1:
            only = numbers[0]
            return [Result(number=only, mutation=mutations[only], outcome=merged, detail="")], []
        # One of them broke the merge of all: each again by itself.
        alone = [_run_batch([number], folder, untouched) for number in numbers]
        return [result for results, _ in alone for result in results], [text for _, texts in alone for text in texts]
    results = []
    for number, mutation in mutations.items():
        name = f"m-{number % PER_MERGE:02d}"
        outcome, detail = judge(work / "in" / name, merged, untouched.rows[name])
        results.append(Result(number=number, mutation=mutation, outcome=outcome, detail=detail))
    changed = [text for name in NEIGHBOURS for text in _neighbour_changes(name, merged, untouched)]
    return results, changed


def _neighbour_changes(name: str, merged: Merged, untouched: Merged) -> Iterator[str]:
    before, after = untouched.rows[name], merged.rows.get(name)
    if after is None:
        yield f"{name} is gone"
        return
    # Where it lies differs; which attributes differ between runs depends on all runs.
    for column in before.keys() - {"run_dir", "comparability_key"}:
        if before[column] != after[column]:
            yield f"{name}: {column} {before[column]} to {after[column]}"
