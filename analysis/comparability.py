"""Runs that must not be averaged: of one GPU type at one site, with one of four things different.

A merge refuses them unless it is told to take them; then, as in datasets from before that rule, they are cells of
their own: `apart` says by what. A value that is not known is not another value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl

from inpaint_bench.core.errors import UserError

# Within these, figures are put side by side: batches of one series, steps of one study.
COMPARISON_KEYS = ["workload", "model", "site", "gpu", "gpus", "resolution_px", "demonstration"]
# What a flag calls it -> column of runs.parquet. In this order they are told apart.
ATTRIBUTES = {
    "board": "gpu_name",
    "driver": "driver",
    "power_limit": "power_limit_w",
    "power_semantics": "power_semantics",
}
_RUNS_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """One thing that valid runs of one scope differ in."""

    attribute: str
    where: str
    runs: dict[str, list[str]]  # run ids by value

    @property
    def description(self) -> str:
        values = [f"{value} ({_named(ids)})" for value, ids in self.runs.items()]
        return f"{self.where}: {self.attribute} {' and '.join(values)}"


def add_comparability_key(runs: pl.DataFrame) -> pl.DataFrame:
    """Fill `power_semantics`, which reading fed power and whose, and `apart`: empty where nothing is mixed.

    Runs that do not count are marked as their values say, so that they stay with those that do.
    """
    field = pl.col("energy_source").replace_strict(
        {"counter": "energy_mj", "integral": "power_instant_w"}, default=None, return_dtype=pl.String
    )
    runs = runs.with_columns(pl.format("{} by {}", field, pl.col("source")).alias("power_semantics"))
    words = [
        pl.when(_kinds(column).over(COMPARISON_KEYS) > 1).then(_words(attribute))
        for attribute, column in ATTRIBUTES.items()
    ]
    return runs.with_columns(pl.concat_str(words, separator=", ", ignore_nulls=True).alias("comparability_key"))


def find_conflicts(runs: pl.DataFrame) -> list[Conflict]:
    """What valid runs differ in and must not, in marked runs."""
    found = []
    counted = runs.filter("valid").sort("run_id")
    for group in counted.partition_by(COMPARISON_KEYS, maintain_order=True) if counted.height else []:
        for attribute, column in ATTRIBUTES.items():
            known = group.filter(pl.col(column).is_not_null())
            if known[column].n_unique() < 2:
                continue
            each = known.with_columns(_value(attribute).alias("_value")).partition_by("_value", maintain_order=True)
            ids = {str(part["_value"][0]): part["run_id"].to_list() for part in each}
            found.append(Conflict(attribute=attribute, where=_where(group.row(0, named=True)), runs=ids))
    return sorted(found, key=lambda one: (one.where, list(ATTRIBUTES).index(one.attribute)))


def refuse_conflicts(found: Iterable[Conflict], allowed: Iterable[str]) -> None:
    """Raise UserError, naming runs and values, where a merge was not told to take what is mixed."""
    taken = set(allowed)
    wrong = [one for one in found if one.attribute not in taken]
    if not wrong:
        return
    flags = ",".join(sorted(taken | {one.attribute for one in wrong}, key=list(ATTRIBUTES).index))
    raise UserError(
        f"Not comparable, so nothing was merged: {'; '.join(one.description for one in wrong)}. Merge them into "
        f"datasets of their own, or add --allow-mixed {flags}: then they are cells of their own and in no common mean."
    )


def check_attributes(names: Iterable[str]) -> None:
    """Refuse a name that is none of ATTRIBUTES."""
    if wrong := sorted(set(names) - ATTRIBUTES.keys()):
        raise UserError(f"--allow-mixed {', '.join(wrong)}: not one of {', '.join(ATTRIBUTES)}.")


def _kinds(column: str) -> pl.Expr:
    return pl.col(column).filter(pl.col("valid").fill_null(False)).drop_nulls().n_unique()


def _value(attribute: str) -> pl.Expr:
    value = pl.col(ATTRIBUTES[attribute])
    return pl.format("{} W", _plain_number(value)) if attribute == "power_limit" else value


def _words(attribute: str) -> pl.Expr:
    prefix = {"driver": "driver ", "power_limit": "limit ", "power_semantics": "power from "}.get(attribute, "")
    return pl.concat_str(pl.lit(prefix), _value(attribute))


def _plain_number(value: pl.Expr) -> pl.Expr:
    return value.cast(pl.String).str.replace(r"\.0$", "")


def _where(row: dict[str, Any]) -> str:
    words = [f"{row['gpu']} at {row['site']}"]
    words += [f"{row['gpus']} GPUs"] if (row["gpus"] or 1) > 1 else []
    words += [str(row[name]) for name in ("workload", "model") if row[name]]
    words += [f"{row['resolution_px']} px"] if row["resolution_px"] else []
    return ", ".join(words)


def _named(ids: list[str]) -> str:
    rest = len(ids) - _RUNS_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    return f"{len(ids)} run(s): {', '.join(ids[:_RUNS_NAMED])}{more}"
