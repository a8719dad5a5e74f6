"""One run's rows of a long table as a file of the dataset, below folders named site=, gpu= and run=."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.columns import HIVE_KEYS, hive_value
from inpaint_bench.core import schema

from .run_dir import Run

_ROW_GROUP = 262_144  # rows
_BATCH = 65_536  # rows that the Parquet writer takes at a time


def write_partition(rows: pa.Table, run: Run, folder: Path) -> Path | None:
    """Write the rows with site and GPU repeated as columns; return the file, None without rows.

    Integers (times, counters) are stored as differences and floats split by byte. LZ4 then makes the file smaller than
    zstd alone does, and it is written and read in half the time. Strings need no statistics, because readers skip
    files by the folder names.
    """
    if not rows.num_rows:
        return None
    values = (run.site, run.gpu, run.run_id)
    hive = (f"{key}={hive_value(value)}" for key, value in zip(HIVE_KEYS, values, strict=True))
    path = folder.joinpath(*hive) / schema.PART_PATTERN.format(0)
    path.parent.mkdir(parents=True)
    index = pa.nulls(rows.num_rows, pa.int32()).fill_null(0)
    for name, value in (("site", run.site), ("gpu", run.gpu)):
        rows = rows.append_column(name, pa.DictionaryArray.from_arrays(index, pa.array([value], pa.string())))
    strings = [field.name for field in rows.schema if pa.types.is_dictionary(field.type)]
    pq.write_table(
        rows.replace_schema_metadata({b"schema_version": str(schema.SCHEMA_VERSION).encode()}),
        path,
        row_group_size=_ROW_GROUP,
        write_batch_size=_BATCH,
        compression="lz4",
        use_dictionary=strings,
        column_encoding={field.name: encoding for field in rows.schema if (encoding := _encoding(field.type))},
        write_statistics=[name for name in rows.schema.names if name not in strings],
        store_schema=False,
    )
    return path


def _encoding(kind: pa.DataType) -> str | None:
    if pa.types.is_integer(kind):
        return "DELTA_BINARY_PACKED"
    return "BYTE_STREAM_SPLIT" if pa.types.is_floating(kind) else None
