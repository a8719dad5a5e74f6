"""The section of the sample workload `matmul`."""

from __future__ import annotations

import polars as pl

from analysis.report.tables import Table, TableBuilder

from . import Section


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return the median time by width."""
    medians = results.group_by("width").agg(pl.col("time_ms").median()).sort("width")
    rows = [[str(row["width"]), f"{row['time_ms']:.3f}"] for row in medians.to_dicts()]
    table = Table(id="matmul", title="Products of matrices", columns=["Width", "Time [ms]"], rows=rows)
    return Section(title="Products of matrices", paragraphs=[], tables=[table], figures=[])
