"""Which runs must not be averaged: those of one GPU type at one site that differ in any of four attributes.

A merge refuses them unless `--allow-mixed` accepts them. Then they are separate cells, and `comparability_key` says
what distinguishes them. A value that is not known is not a different value.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import polars as pl

from analysis.units import scale_labels
from inpaint_bench.core.console import list_some, pluralize
from inpaint_bench.core.errors import UserError

# Runs that agree in these appear side by side: batches of one series, steps of one study.
SETTING_KEYS = ["workload", "model", "variant", "site", "gpu", "gpus", "nodes"]
COMPARISON_KEYS = [*SETTING_KEYS, "resolution_px", "demonstration"]
# Value of --allow-mixed: column of runs.parquet. The key lists them in this order.
ATTRIBUTES = {
    "board": "gpu_name",
    "driver": "driver",
    "power_limit": "power_limit_w",
    "power_semantics": "power_semantics",
}
_LABELS = {"driver": "driver ", "power_limit": "limit ", "power_semantics": "power from "}


def add_comparability_key(runs: pl.DataFrame) -> pl.DataFrame:
    """Fill `power_semantics`, the reading and source of power, and `comparability_key`, empty if nothing differs.

    Only valid runs make an attribute differ; runs that are not valid get the key of their own values.
    """
    # The column that the energy was taken from; None for runs without energy, which then do not differ.
    reading = pl.col("energy_source").replace_strict(
        {"counter": "energy_mj", "integral": "power_instant_w"}, default=None, return_dtype=pl.String
    )
    runs = runs.with_columns(pl.format("{} by {}", reading, pl.col("source")).alias("power_semantics"))
    labels = []
    for attribute, column in ATTRIBUTES.items():
        # Unknown values are dropped before counting: a run without a driver version conflicts with no other.
        values = pl.col(column).filter(pl.col("valid").fill_null(False)).drop_nulls()
        differs = values.n_unique().over(COMPARISON_KEYS) > 1
        label = pl.concat_str(pl.lit(_LABELS.get(attribute, "")), _value(attribute))
        labels.append(pl.when(differs).then(label))
    return runs.with_columns(pl.concat_str(labels, separator=", ", ignore_nulls=True).alias("comparability_key"))


def find_integrals(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return by run id why valid runs with energy from sampled power do not count: most beside them have a counter.

    A run that lost the counter at an edge of its window must not keep the others from being merged.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["valid"] and row["energy_source"]:
            groups[tuple(row[name] for name in (*COMPARISON_KEYS, "source"))].append(row)
    problems: dict[str, list[str]] = {}
    for group in groups.values():
        integrals = [row["run_id"] for row in group if row["energy_source"] == "integral"]
        by_counter = len(group) - len(integrals)
        others = pluralize(by_counter, "comparable run")
        text = f"its energy is the integral of sampled power, and that of {others} the counter's"
        problems |= {run_id: [text] for run_id in integrals if len(integrals) < by_counter}
    return problems


def find_conflicts(runs: pl.DataFrame) -> list[tuple[str, str]]:
    """Return the attributes in which comparable valid runs differ, each with where, the values, and the runs of each.

    `runs` has its comparability keys.
    """
    conflicts = []
    for group in runs.filter("valid").sort("run_id").partition_by(COMPARISON_KEYS, maintain_order=True):
        row = group.row(0, named=True)
        parts = [f"{row['gpu']} at {row['site']}", *scale_labels(row["gpus"], row["nodes"])]
        parts += [str(row[name]) for name in ("workload", "model", "variant") if row[name]]
        setting = ", ".join([*parts, *([f"{row['resolution_px']} px"] if row["resolution_px"] else [])])
        for attribute, column in ATTRIBUTES.items():
            known = group.filter(pl.col(column).is_not_null())
            by_value = known.group_by(_value(attribute), maintain_order=True).agg("run_id").rows()
            if len(by_value) > 1:
                values = " and ".join(
                    f"{value} ({pluralize(len(ids), 'run')}: {list_some(ids)})" for value, ids in by_value
                )
                conflicts.append((attribute, f"{setting}: {attribute} {values}"))
    return sorted(conflicts, key=lambda conflict: (conflict[1].partition(":")[0], list(ATTRIBUTES).index(conflict[0])))


def refuse_conflicts(conflicts: Iterable[tuple[str, str]], allowed: Collection[str]) -> None:
    """Raise UserError, with runs and values, for conflicts in attributes that are not allowed to differ."""
    refused = {description: attribute for attribute, description in conflicts if attribute not in allowed}
    if refused:
        # The option as it would have to be given, with what is allowed already.
        option = ",".join(name for name in ATTRIBUTES if name in allowed or name in refused.values())
        raise UserError(
            f"Not comparable, so nothing was merged: {'; '.join(refused)}. Merge them into separate datasets, or add "
            f"--allow-mixed {option}: then they are cells of their own, never averaged."
        )


def check_attributes(names: Iterable[str]) -> None:
    """Raise UserError for a name that is not in ATTRIBUTES."""
    if unknown := sorted(set(names) - ATTRIBUTES.keys()):
        raise UserError(f"--allow-mixed {', '.join(unknown)}: not one of {', '.join(ATTRIBUTES)}.")


def _value(attribute: str) -> pl.Expr:
    value = pl.col(ATTRIBUTES[attribute])
    if attribute == "power_limit":
        return pl.format("{} W", value.cast(pl.String).str.replace(r"\.0$", ""))
    return value
