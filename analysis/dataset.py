"""A merged dataset: its long tables are written per run, and scanned lazily, because a report reads few of their rows.

A run's rows of a long table are one file, below folders named site=, gpu= and run=.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core import schema, seal
from inpaint_bench.core.config.validation import did_you_mean
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Manifest
from inpaint_bench.core.schema import Status, WindowKind

from . import comparability, recipe_labels
from .columns import DEFINITIONS, HIVE_KEYS, REAL, SCHEMA, WINDOW_SCHEMA, hive_value
from .ingest import parts
from .metrics import steadiness
from .metrics.audit.board import fp32_mfu_pct
from .metrics.flags import Flag
from .metrics.manifest_facts import WITHOUT_FP8, lacks_fp8

_PLACE = HIVE_KEYS[:2]  # are columns, too
_ROW_GROUP = 262_144  # rows
_STALE = r"(step_drift_pct|step_block_cv_pct)=[^;]*(; )?|not steady: [^;]*(; )?"  # by blocks of 10 s
_BATCH = 65_536  # rows that the Parquet writer takes at a time


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The tables of a dataset folder."""

    folder: Path
    metadata: dict[str, Any]  # dataset.json
    notes: list[str]  # how it was merged, as far as a reader has to know: nothing if by this code
    runs: pl.DataFrame
    windows: pl.DataFrame
    skipped: pl.DataFrame

    def scan(self, table: str, run_id: str | None = None) -> pl.LazyFrame:
        """Scan the rows of a long table, of one run or of all. Raise UserError for another name of either."""
        if table not in schema.TABLES:
            raise UserError(f"{table}: not one of {', '.join(schema.TABLES)}.{did_you_mean(table, schema.TABLES)}")
        if run_id is not None and run_id not in self.runs["run_id"]:
            raise UserError(f"{run_id}: no run of {self.folder}; dataset.runs['run_id'] lists them")
        run = "*" if run_id is None else hive_value(run_id)
        paths = sorted((self.folder.absolute() / table).glob(f"site=*/gpu=*/run={run}/part-*.parquet"))
        if not paths:
            return parts.empty_frame(table).lazy().with_columns(pl.lit(None, pl.String).alias(key) for key in _PLACE)
        # A path is no pattern, and a folder above the dataset that is named a=b is no column.
        rows = pl.scan_parquet(paths, glob=False, hive_partitioning=False)
        if table.startswith((schema.RESULTS, schema.KERNEL_COUNTERS)):  # an earlier version may have had fewer columns
            rows = pl.concat([rows, parts.empty_frame(table).lazy()], how="diagonal")
        # The folder may be that of another run id: `1` and `r-1` have the same.
        return rows if run_id is None else rows.filter(pl.col("run_id") == run_id)

    def rows(self, table: str) -> pl.DataFrame:
        """Read a long table of all runs, without the columns that tell where its files lie."""
        rows = self.scan(table).drop(_PLACE).collect()
        return rows.with_columns(pl.selectors.categorical().cast(pl.String))


def open_dataset(folder: Path | str) -> Dataset:
    """Open a folder that `merge` wrote. Raise UserError if it is missing, no dataset, of another schema or changed.

    All of its files are read to compare them with what the merge wrote.
    """
    folder = Path(folder)
    metadata, runs = seal.read_runs(folder)
    seal.refuse(folder, seal.table_changes(folder))
    note, written = definitions_note(metadata), runs.columns
    runs = _with_all_columns(runs, SCHEMA)
    runs = runs.with_columns(pl.col("nodes").fill_null(1))  # merges that wrote none knew of one node only
    runs = _with_mfu_of_fp32(_without_wrong_parameters(runs))
    dataset = Dataset(
        folder=folder,
        metadata=metadata,
        notes=[note] if note else [],
        runs=recipe_labels.add_short_names(comparability.add_comparability_key(runs)),
        windows=_with_all_columns(seal.read_table(folder / schema.RUN_WINDOWS), WINDOW_SCHEMA),
        skipped=seal.read_table(folder / schema.SKIPPED),
    )
    return replace(dataset, runs=add_columns(dataset.runs, dataset.windows, dataset.scan, written))


def definitions_note(metadata: Mapping[str, Any]) -> str:
    """Return a sentence on the columns that the merge defined differently, empty if there are none."""
    definitions = metadata.get("definitions")
    known = definitions if isinstance(definitions, dict) else {}
    other = [name for name, version in DEFINITIONS.items() if known.get(name, 1) != version]
    verb = "was" if len(other) == 1 else "were"
    return (
        f"Merged by other code, in which {', '.join(other)} {verb} defined differently; merge again." if other else ""
    )


def _without_wrong_parameters(runs: pl.DataFrame) -> pl.DataFrame:
    """Remove the numbers that older merges took over and a merge of today does not."""
    rows = runs.select("model", "parameters", pl.col("levers").fill_null("").str.contains('"linears"')).iter_rows()
    wrong = pl.Series([lacks_fp8(*row) for row in rows], dtype=pl.Boolean)
    reasons = pl.col("null_reasons") + pl.when(wrong).then(pl.lit(f"; parameters={WITHOUT_FP8}")).otherwise(pl.lit(""))
    return runs.with_columns(parameters=pl.when(~wrong).then("parameters"), null_reasons=reasons)


def _with_mfu_of_fp32(runs: pl.DataFrame) -> pl.DataFrame:
    """Add the MFU that older merges did not work out."""
    rows = runs.iter_rows(named=True)
    mfu = pl.Series([fp32_mfu_pct(row) if row["precision"] == "fp32" else row["mfu_pct"] for row in rows], dtype=REAL)
    reasons = pl.col("null_reasons").str.replace(r"mfu_pct=[^;]*(; |$)", "")
    reasons = pl.when(pl.col("mfu_pct").is_null() & mfu.is_not_null()).then(reasons).otherwise("null_reasons")
    return runs.with_columns(mfu_pct=mfu, null_reasons=reasons)


def add_columns(
    runs: pl.DataFrame, windows: pl.DataFrame, scan: Callable[[str], pl.LazyFrame], written: list[str]
) -> pl.DataFrame:
    """Return the runs with what follows from steps and samples; `written` are the columns that the merge wrote."""
    if "step_mean_pct" not in written:
        runs = _judge_steps(runs, windows, scan("steps").collect())
    return runs if "vram_run_mib_peak" in written else _add_peaks(runs, scan("samples_slow"))


def _judge_steps(runs: pl.DataFrame, windows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    own = steps.partition_by("run_id", as_dict=True)
    done = (pl.col("kind") == WindowKind.MEASURE) & (pl.col("status") == Status.COMPLETED)
    measured = windows.filter(done).select("run_id", "window_id", "t_start_mono_ns", "t_end_mono_ns").rows()
    known = runs.filter(pl.col("step_ms_p50").is_not_null())["run_id"]  # others have steps of different work, or none
    rows: list[dict[str, Any]] = []
    for run_id in known.filter(known.is_in([name for (name,) in own])):
        spans = {window_id: (start, end) for name, window_id, start, end in measured if name == run_id}
        inside = steadiness.measured_steps(own[run_id,], spans)
        seconds = sum(end - start for start, end in spans.values()) * 1e-9
        verdict = steadiness.judge(inside["start_s"].to_numpy(), inside["step_ms"].to_numpy(), seconds)
        warning = verdict.explanation if verdict.verdict == "no" else None
        rows.append({"run_id": run_id, "warning": warning, **verdict.columns})
    names = list(steadiness.Steadiness(blocks=0).columns)
    judged = pl.DataFrame(rows, schema={name: SCHEMA.get(name, pl.String()) for name in ("run_id", "warning", *names)})
    runs = runs.drop(names).join(judged, "run_id", how="left", maintain_order="left")
    texts = pl.col("warnings", "null_reasons").str.replace_all(_STALE, "").str.strip_chars("; ")
    runs = runs.with_columns(texts)
    unsteady = pl.when(pl.col("steady") == "no").then(pl.lit(Flag.UNSTEADY.value))
    warnings = pl.concat_str("warnings", "warning", separator="; ", ignore_nulls=True).replace("", None)
    flags = pl.concat_str("flags", unsteady, separator=",", ignore_nulls=True).replace("", None)
    return runs.with_columns(warnings=warnings, flags=flags).drop("warning")


def _add_peaks(runs: pl.DataFrame, samples: pl.LazyFrame) -> pl.DataFrame:
    used, room = pl.col("vram_used_mib"), pl.col("vram_total_mib") - pl.col("vram_reserved_mib")
    peaks = (
        samples.filter(used <= pl.col("vram_total_mib"))
        .group_by("run_id")
        .agg(vram_run_mib_peak=used.max().cast(pl.Float64), vram_run_pct=(100 * used / room).max().cast(pl.Float64))
    )
    runs = runs.drop("vram_run_mib_peak", "vram_run_pct").join(
        peaks.collect(), "run_id", how="left", maintain_order="left"
    )
    judged = pl.col("vram_used_mib_peak").is_not_null()  # by the samples of its own GPUs
    return runs.with_columns(pl.when(judged).then(pl.col("vram_run_mib_peak", "vram_run_pct")))


def _with_all_columns(frame: pl.DataFrame, columns: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Add the columns that an older merge did not write, as null."""
    return frame.with_columns(pl.lit(None, kind).alias(name) for name, kind in columns.items() if name not in frame)


def write_partition(rows: pa.Table, manifest: Manifest, folder: Path) -> Path | None:
    """Write a run's rows of a long table below its folder, with site and GPU as columns; return the file, if any.

    Integers (times, counters) are stored as differences and floats split by byte. LZ4 then makes the file smaller than
    zstd alone does, and it is written and read in half the time. Strings need no statistics, because readers skip
    files by the folder names.
    """
    if not rows.num_rows:
        return None
    values = {"site": str(manifest.site), "gpu": str(manifest.gpu), "run": manifest.run_id}
    path = folder.joinpath(*(f"{key}={hive_value(values[key])}" for key in HIVE_KEYS), schema.PART_PATTERN.format(0))
    path.parent.mkdir(parents=True)
    # The same site and GPU in every row: a dictionary of one entry, and index 0 everywhere.
    index = pa.nulls(rows.num_rows, pa.int32()).fill_null(0)
    for name in _PLACE:
        value = pa.array([values[name]], pa.string())
        rows = rows.append_column(name, pa.DictionaryArray.from_arrays(index, value))
    strings = [field.name for field in rows.schema if pa.types.is_dictionary(field.type)]
    integers = {field.name: "DELTA_BINARY_PACKED" for field in rows.schema if pa.types.is_integer(field.type)}
    floats = {field.name: "BYTE_STREAM_SPLIT" for field in rows.schema if pa.types.is_floating(field.type)}
    pq.write_table(
        rows.replace_schema_metadata({b"schema_version": str(schema.SCHEMA_VERSION).encode()}),
        path,
        row_group_size=_ROW_GROUP,
        write_batch_size=_BATCH,
        compression="lz4",
        use_dictionary=strings,
        column_encoding=integers | floats,
        write_statistics=[name for name in rows.schema.names if name not in strings],
        store_schema=False,
    )
    return path
