"""A number that is known twice (manifest, windows, steps, results) cannot be changed unnoticed, whatever the workload.

docs/dataset.md lists the others. The numbers of the samples are in test_mutations.py.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pytest
from msgspec import inspect as types

from analysis.metrics import run_row
from analysis.metrics.facts import Facts
from inpaint_bench.core import schema
from inpaint_bench.core.records import Manifest, Window, to_record
from inpaint_bench.core.tables import SCHEMAS
from inpaint_bench.core.workloads import _denoisers, _volumes, finetune_inpaint, results, sd_inference
from tests.analysis import real_run
from tests.analysis.build import load_run
from tests.analysis.metrics import test_results
from tests.analysis.second_source import documented
from tests.seeds import sample

S = 10**9
Tolerance = Callable[[float], float]  # of a value, in its unit


def exactly(value: float) -> float:
    return 0.0


def by(amount: float) -> Tolerance:
    return lambda value: amount


def relative(share: float) -> Tolerance:
    return lambda value: share * abs(value)


PEAKS = ("memory_gb", "bandwidth_gb_s", "bf16_dense_tflops", "power_limit_w")
# Numbers that the table of checks knows twice, by their place, with the tolerance of the check.
MANIFEST: dict[str, Tolerance] = {
    **dict.fromkeys(("batch", "gpus", "nodes", "seed", "progress.step"), exactly),
    **dict.fromkeys(("data.found", "data.used", "data.beyond_limit"), exactly),
    **dict.fromkeys((f"devices.{name}" for name in ("max_sm_clock_mhz", "mig_mode", "energy_start_mj")), exactly),
    **dict.fromkeys(("devices.power_limit_w", "devices.memory_mib"), relative(1e-6)),
    "telemetry.hz": relative(1e-3),
    "progress.images_per_s": relative(1e-6),
    "progress.t_unix_ns": by(1.5 * S),
    **{f"gpu_facts.{name}": relative(1e-6) for name in PEAKS},
    **{f"parity.{name}_rel": by(0.1) for name in ("prediction", "loss", "gradient", "update", "encoder")},
}
FACTS: dict[str, Tolerance] = {  # of the workload
    **dict.fromkeys(("num_images", "encodes_online", "batch_requested", "images_stated"), exactly),
    **dict.fromkeys(("parameters", "parameters_by_network.unet", "evaluations", "sampler_steps"), exactly),
    "parameters_trained": relative(0.01),
    **dict.fromkeys(("flop_per_image", "guidance", "psnr_db"), relative(1e-6)),
    **{f"flop_parts.{name}": by(1e-6 * 4.658e12) for name in ("unet_forward", "vae_encode", "text_encode")},
    "volume": exactly,
}
WINDOWS: dict[str, Tolerance] = {
    **dict.fromkeys(("steps", "images"), exactly),
    **{f"t_{edge}_{clock}_ns": by(0.5 * S) for edge in ("start", "end") for clock in ("mono", "unix")},
}
# One row: by a share of the window, or by a step.
STEPS: dict[str, Tolerance] = {
    **dict.fromkeys(("step", "images"), exactly),
    **dict.fromkeys(("t_start_mono_ns", "t_end_mono_ns", "data_wait_ns"), by(0.8 * S)),
    "device_ms": by(0.01 * 40_000),
}
BUILT = {"batch", "gpus", "nodes"}  # in the runs of test_results.py, beside facts of the workload
# Numbers that the path, other processes or a profile state too; test_audit.py, test_ranks.py and test_kernels.py change
# them.
OTHERS = (
    "attempt",
    "point",
    "ranks.",
    "profile.communication.",
    "resumed.",
    "slurm.",
    "levers.",
    "telemetry.energy_hz",
    "data.train",
    "data.validation",
)
COMMAND = {"command": ["train"], "uniform_steps": False, "images_stated": 1600}
RECORDS = (finetune_inpaint.Facts, sd_inference.Facts, _denoisers.DenoiserFacts, _volumes.VolumeFacts)
WORKLOADS = [*test_results.ROWS, "finetune_inpaint", "command"]


@cache
def sound(folder: Path, workload: str) -> tuple[Any, list[Any], dict[str, pl.DataFrame], Any]:
    """Return manifest and windows as dictionaries, tables and files of a run without a contradiction."""
    if workload in test_results.ROWS:
        run, windows, tables = test_results.sound(folder, workload)
        return msgspec.to_builtins(run), msgspec.to_builtins(windows), tables, None
    path = real_run.write_run(folder / workload, f"r-{workload}")
    loaded, tables = load_run(path)
    manifest, own = msgspec.to_builtins(loaded.manifest), msgspec.to_builtins(loaded.windows)
    if workload == "command":
        manifest |= {"workload": workload, "batch": None, "progress": None, "workload_facts": COMMAND}
        own = [window | {"steps": 0} for window in own[1:]]
        tables = {**tables, "steps": tables["steps"].clear()}
    return manifest, own, tables, loaded


def told(manifest: Any, windows: list[Any], tables: dict[str, pl.DataFrame], files: Any) -> list[str]:
    """Return all that the row of a run says of contradictions."""
    given: dict[str, Any] = {} if files is None else {"files": files}
    record, own = to_record(manifest, Manifest), [to_record(window, Window) for window in windows]
    row = run_row.summarise(Facts(manifest=record, windows=own, tables=tables, **given))
    return [row["invalid_reason"] or "", row["warnings"] or ""]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...], float]]:
    """Yield the numbers inside a JSON value: their names, their path, and the number."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield ".".join(key for key in path if isinstance(key, str)), path, value


def put(value: Any, path: tuple[Any, ...], number: float) -> Any:
    value = copy.deepcopy(value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = number
    return value


def changed(value: float, tolerance: Tolerance, rng: random.Random) -> float:
    if isinstance(value, bool):
        return not value
    sign, by_three = rng.choice([-1, 1]), 3 * tolerance(value)
    if isinstance(value, int):
        by_three = max(1, math.ceil(by_three))
        sign = 1 if value < by_three else sign  # columns of counts hold nothing below zero
    return value + sign * by_three


def known_twice(
    workload: str, manifest: Any, windows: list[Any], steps: pl.DataFrame
) -> list[tuple[str, Any, Tolerance]]:
    """Return file, place and tolerance of each number of this run that is known twice."""
    known = MANIFEST | {f"workload_facts.{name}": tolerance for name, tolerance in FACTS.items()}
    if result := results().get(workload):  # by its table; nothing else is there twice
        equal = [relation.compute for relation in result.relations if relation.limit == "equal"]
        related = [name for compute in equal for name in inspect.signature(compute).parameters]
        names = BUILT | {f"workload_facts.{name}" for name in (*result.repeated, *related)}
        known = {name: tolerance for name, tolerance in known.items() if name in names}
    found = [("manifest", path, known.get(name)) for name, path, _ in places(manifest)]
    measured = [index for index, window in enumerate(windows) if window["kind"] == "measure"]
    found += [("windows", path, WINDOWS.get(name)) for name, path, _ in places(windows) if path[0] in measured]
    found += [("steps", name, tolerance) for name, tolerance in STEPS.items() if steps.height]
    table = schema.results_table(workload)
    found += [(table, name, by(amount)) for name, amount in test_results.known_twice(workload)] if result else []
    return [(file, place, tolerance) for file, place, tolerance in found if tolerance is not None]


@pytest.mark.slow  # judges a run for each draw
@pytest.mark.parametrize("draws", [20, pytest.param(200, marks=pytest.mark.faults)])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_changed_number_is_told(workload: str, draws: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    manifest, windows, tables, files = sound(tmp_path_factory.getbasetemp() / "stored", workload)
    assert told(manifest, windows, tables, files)[0] == ""
    before = told(manifest, windows, tables, files)
    numbers = known_twice(workload, manifest, windows, tables["steps"])
    for seed in sample(range(10**6), draws):
        rng = random.Random(seed)
        file, place, tolerance = rng.choice(numbers)
        new_manifest, new_windows, new_tables = manifest, windows, tables
        if file in tables:
            rows, own = tables[file], [window["window_id"] for window in windows if window["kind"] == "measure"]
            known = pl.col("window_id").is_in(own) & pl.col(place).is_not_null()
            at = rng.choice(rows.with_row_index().filter(known)["index"])
            new = changed(rows[place][at], tolerance, rng)
            value = pl.when(pl.int_range(pl.len()) == at).then(pl.lit(new)).otherwise(place).cast(rows.schema[place])
            new_tables = {**tables, file: rows.with_columns(value.alias(place))}
        else:
            record = manifest if file == "manifest" else windows
            holder: Any = record
            for key in place:
                holder = holder[key]
            new = changed(holder, tolerance, rng)
            if file == "manifest":
                new_manifest = put(manifest, place, new)
            else:
                new_windows = put(windows, place, new)
        assert told(new_manifest, new_windows, new_tables, files) != before, (file, place, new)


def declared(kind: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of the numbers that a record may hold, and of what may be anything."""
    if isinstance(kind, types.StructType):
        for field in kind.fields:
            yield from declared(field.type, (*path, field.name))
    elif isinstance(kind, types.UnionType):
        for option in kind.types:
            yield from declared(option, path)
    elif isinstance(kind, types.ListType | types.DictType):
        yield from declared(kind.item_type if isinstance(kind, types.ListType) else kind.value_type, path)
    elif isinstance(kind, types.IntType | types.FloatType | types.AnyType):
        yield ".".join(path)


def is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def test_the_documentation_lists_every_other_number() -> None:
    """A number is in a table of this file, of test_results.py, or in the list of docs/dataset.md, and in one alone."""
    facts = {name for record in RECORDS for name in declared(types.type_info(record))}
    stored = {("manifest.json", name) for name in declared(types.type_info(Manifest)) if name != "workload_facts"}
    stored |= {("manifest.json", f"workload_facts.{name}") for name in facts}
    stored |= {("windows.json", name) for name in declared(types.type_info(Window))}
    known = {("manifest.json", name) for name in MANIFEST}
    known |= {("manifest.json", f"workload_facts.{name.partition('.')[0]}") for name in FACTS}
    known |= {(file, name) for file, name in stored if name.startswith(OTHERS)}
    known |= {("windows.json", name) for name in WINDOWS} | {("steps", name) for name in STEPS}
    tables = ["steps", *map(schema.results_table, test_results.ROWS)]
    stored |= {(table, column.name) for table in tables for column in SCHEMAS[table] if is_number(column.type)}
    for workload in test_results.ROWS:
        table = schema.results_table(workload)
        known |= {(table, "step"), *((table, name) for name, _ in test_results.known_twice(workload))}
    assert sorted(stored - known - documented()) == []
    assert sorted(documented() & known) == []
    assert documented()
