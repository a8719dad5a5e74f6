"""Checks of what a workload declares beside its facts and its table of results: bounds, repetitions, relations.

The declarations are in inpaint_bench/core/workloads.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import polars as pl

from analysis.metrics.facts import Facts
from analysis.units import number
from inpaint_bench.core.console import list_some, pluralize, share
from inpaint_bench.core.records import Quality
from inpaint_bench.core.workloads import Relation, Result, declarations

_STEP = ["window_id", "step"]


def check_rows(facts: Facts, table: str, result: type[Result], rows: pl.DataFrame) -> Iterator[str]:
    """Compare the rows with the steps that were timed: none is missing, repeated or of another step."""
    timed = rows.filter(pl.col("step") >= 0)
    if repeated := rows.height - rows.select(_STEP).n_unique():
        yield f"{table} repeats {pluralize(repeated, 'row')}"
    steps = facts.tables["steps"].select(pl.col("window_id").cast(pl.String), pl.col("step").cast(pl.Int64))
    if "steps" in facts.files.incomplete:
        return
    if unknown := timed.join(steps, on=_STEP, how="anti").height:
        yield f"{table} has {pluralize(unknown, 'row')} of steps that the step table does not have"
    wanted = steps if result.each_step else steps.tail(1)
    if missing := wanted.join(timed, on=_STEP, how="anti").height:
        yield f"{table} lacks {share(missing, wanted.height, 'row')}, by the step table"


def check_values(facts: Facts, table: str, result: type[Result], rows: pl.DataFrame) -> Iterator[str]:
    """Compare each value with its bounds, with the fact that it repeats, and with what it follows from."""
    wrong: dict[str, list[str]] = {}  # by sentence of the first row
    known = _known(facts, rows)
    stated = facts.manifest.workload_facts or {}
    for row, beside in zip(rows.to_dicts(), known, strict=True):
        for what, text in _problems(result, row, beside, stated):
            wrong.setdefault(what, []).append(f"{text} in step {row['step']}")
    for texts in wrong.values():
        yield f"{table}: {list_some(texts, most=1)}"
    for name in result.null_if_not_finite:
        if count := rows[name].null_count():
            counted = stated.get("losses_not_finite", count)
            text = "" if counted == count else f", and losses_not_finite is {counted}"
            yield f"{table}, {name}: {share(count, rows.height, 'value', 'are')} not finite{text}"


def check_facts(facts: Facts) -> Iterator[str]:
    """Compare the workload's facts with what they follow from."""
    declared = getattr(declarations().get(facts.manifest.workload or ""), "Facts", None)
    levers = {lever.field: lever.requested for lever in facts.manifest.levers or []}
    known = {**(facts.manifest.workload_facts or {}), "levers": levers}
    yield from (text for _, text in _contradictions(declared.relations if declared else (), known))


def check_quality(facts: Facts) -> Iterator[str]:
    """Compare losses, validations and metrics of quality with the bounds that the workload declares."""
    declared = declarations().get(facts.manifest.workload or "")
    bounds, quality = getattr(declared, "BOUNDS", {}), facts.manifest.quality or Quality()
    found = [("loss", window.window_id, facts.steps_of(window)["loss"].to_list()) for window, _ in facts.measured]
    found += [("loss", f"validation {each.get('step')}", [each.get("loss")]) for each in quality.validation]
    found += [(name, "quality", [metric.get("value")]) for name, metric in (quality.metrics or {}).items()]
    for name, where, values in found:
        low, high = bounds.get(name, (-math.inf, math.inf))
        known = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
        if outside := [value for value in known if not low <= value <= high]:
            yield f"{where}: {name} is {_text(outside[0])}, outside {number(low)} to {number(high)}"


def _known(facts: Facts, rows: pl.DataFrame) -> list[dict[str, Any]]:
    host_ms = (pl.col("t_end_mono_ns") - pl.col("t_start_mono_ns")) / 1e6
    steps = facts.tables["steps"].select(
        pl.col("window_id").cast(pl.String),
        pl.col("step").cast(pl.Int64),
        pl.col("device_ms").cast(pl.Float64),
        host_ms.alias("host_ms"),
        pl.coalesce(pl.col("device_ms").cast(pl.Float64), host_ms).alias("step_ms"),
    )
    joined = rows.select(_STEP).join(steps.unique(_STEP), on=_STEP, how="left", maintain_order="left")
    images = {window.window_id: window.images for window in facts.windows}
    sizes = [device.memory_mib for device in facts.manifest.devices if device.memory_mib]
    fixed: dict[str, Any] = {"memory_mib": min(sizes) if sizes and not facts.replayed else None}
    fixed |= {"run_batch": facts.manifest.batch, "run_gpus": facts.manifest.gpus}
    return [{**fixed, **row, "window_images": images.get(row["window_id"])} for row in joined.to_dicts()]


def _problems(
    result: type[Result], row: Mapping[str, Any], beside: Mapping[str, Any], stated: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    for name in result.__struct_fields__:
        value = row[name]
        low, high = result.bounds.get(name, (-math.inf if name == "step" else 0, math.inf))
        if isinstance(value, int | float) and not (low <= value <= high and math.isfinite(value)):
            text = f"outside {number(low)} to {number(high)}" if high < math.inf else "which no measurement gives"
            yield f"bound {name}", f"{name} is {_text(value)}, {text}"
    for name in result.repeated:
        if name in stated and stated[name] != row[name]:
            yield f"fact {name}", f"{name} is {_text(row[name])}, and the workload states {_text(stated[name])}"
    yield from _contradictions(result.relations, {**stated, **beside, **row})


def _contradictions(relations: Iterable[Relation], known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for index, relation in enumerate(relations):
        expected, value = _computed(relation, known), known.get(relation.column)
        if expected is not None and value is not None and not agrees(relation, value, expected):
            word = {"equal": "", "least": "at least ", "most": "at most "}[relation.limit]
            given = " and ".join(name.removesuffix("_ms") for name in _parameters(relation.compute))
            yield f"relation {index}", f"{relation.column} is {_text(value)}, and by {given} {word}{_text(expected)}"


@cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _computed(relation: Relation, known: Mapping[str, Any]) -> Any:
    """Return what the column should be, None if something that it follows from is not known."""
    given = {}
    for name, parameter in _parameters(relation.compute).items():
        given[name] = known.get(name)
        if given[name] is None and parameter.default is inspect.Parameter.empty:
            return None
    try:
        return relation.compute(**given)
    except (ArithmeticError, AttributeError, LookupError, TypeError):  # facts of another shape, which other checks name
        return None


def agrees(relation: Relation, value: Any, expected: Any) -> bool:
    """Return whether a value is what it should be, within the relation's tolerance."""
    if isinstance(expected, str | bool) or isinstance(value, str | bool):
        return bool(value == expected)
    margin = relation.tolerance * abs(expected)
    difference = value - expected
    if relation.limit == "least":
        return bool(difference >= -margin)
    return bool(difference <= margin) if relation.limit == "most" else bool(abs(difference) <= margin)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
