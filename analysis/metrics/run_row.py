"""One row per run (attempt): what it was, whether it is valid, and its figures over the measure windows.

With N images, S steps, T seconds and E joules of all GPUs in the completed measure windows: images/s = N/T, mean power
= E/T (never the mean of samples), J/image = E/N, images/s/W = N/E. A figure that cannot be known is null, and
`null_reasons` says why. A run that did not complete keeps its row and has no figures.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from analysis.columns import COLUMNS, REAL, SCHEMA
from inpaint_bench.core.schema import Reason, Status, WindowKind

from . import audit, energy, manifest_facts, rates, telemetry
from .audit import board, bounds
from .audit.inputs import Finished
from .facts import Columns, Facts, number, span_of


def summarise(facts: Facts) -> dict[str, Any]:
    """Return the row of one run, with a value or None for every column of runs.parquet.

    Each stage uses the results of those before it.
    """
    manifest = facts.manifest
    columns = manifest_facts.manifest_columns(manifest)
    columns |= _source(facts, bool(columns["demonstration"]))
    row = {**dict.fromkeys(SCHEMA), **columns, "valid": False}
    if reason := _not_measured(facts):
        counted = manifest.status == Status.COMPLETED and manifest.profile is not None and manifest.profile.counts
        problems = [text for check in audit.COUNTED for text in check(facts)] if counted else []
        return {**row, "invalid_reason": "; ".join([reason, *problems])}
    facts = bounds.without_strays(facts)
    of_manifest = Columns(values=columns, reasons=manifest_facts.null_reasons(manifest))
    of_steps = rates.find_rates(facts, columns)
    sampled = telemetry.measure(facts)
    mfu = _mfu(facts, columns, of_steps.values.get("images_per_s"))
    stages = (of_manifest, of_steps, energy.find_cpu_energy(facts), sampled, mfu)
    for stage in stages:
        row |= stage.values
    _add_derived(facts, row)
    problems, warnings = audit.judge(Finished(facts=facts, rates=of_steps, telemetry=sampled, row=row))
    return {
        **row,
        "valid": not problems,
        "invalid_reason": "; ".join(problems) or None,
        "warnings": "; ".join(warnings) or None,
        "null_reasons": _join_reasons(row, stages),
    }


def is_unavailable(row: Mapping[str, Any]) -> bool:
    """Return whether a run ended because the machine lacks what its recipe needs."""
    return row.get("status") == Status.FAILED and row.get("reason") == Reason.UNAVAILABLE


def _source(facts: Facts, demonstration: bool) -> dict[str, Any]:
    """Return where telemetry came from. Replayed telemetry makes the run a demonstration."""
    requested = facts.manifest.telemetry.source if facts.manifest.telemetry else None
    source = ", ".join(facts.sources) or requested or "none"
    replayed = any(name.partition(":")[0] == "replay" for name in facts.sources)
    return {"source": source, "demonstration": demonstration or replayed or source.startswith("replay")}


def _not_measured(facts: Facts) -> str | None:
    manifest = facts.manifest
    if manifest.status != Status.COMPLETED:
        if is_unavailable({"status": manifest.status, "reason": manifest.reason}):
            return "unavailable on this machine"
        return f"status {manifest.status}" + (f" ({manifest.reason})" if manifest.reason else "")
    if manifest.profile and manifest.profile.counts:  # whatever windows the directory holds
        return "kernels were counted, nothing was timed (profile=ncu)"
    if not facts.measured:
        measured = [window for window in facts.windows if window.kind == WindowKind.MEASURE]
        states = [f"{window.status}{'' if span_of(window) else ', without an end'}" for window in measured]
        return f"no completed measure window ({', '.join(states) or 'none recorded'})"
    return None


def _mfu(facts: Facts, known: Mapping[str, Any], images_per_s: float | None) -> Columns:
    """Return model FLOP/s over the GPU's dense peak: the manifest's BF16 peak in 16 bits, conf/gpu's in fp32."""
    if not facts.uniform_steps:
        return Columns(values={})
    manifest = facts.manifest
    flop = number((manifest.workload_facts or {}).get("flop_per_image"))
    peak = manifest.gpu_facts.bf16_dense_tflops if manifest.gpu_facts else None
    if not flop or not peak or not images_per_s:
        return Columns(values={})
    if known["precision"] == "fp32":
        return Columns(values={"mfu_pct": board.fp32_mfu_pct({**known, "images_per_s": images_per_s})})
    if known["precision"] not in ("bf16", "fp16"):
        return Columns(values={}, reasons={"mfu_pct": f"the BF16 peak does not apply to {known['precision']}"})
    if problem := board.peak_problem(facts):
        return Columns(values={}, reasons={"mfu_pct": problem})
    # The rate is of all GPUs together, the peak of one.
    return Columns(values={"mfu_pct": 100 * flop * images_per_s / (peak * 1e12 * (known["gpus"] or 1))})


def _add_derived(facts: Facts, row: dict[str, Any]) -> None:
    """Add the columns that follow from others, in their order. The user states the images of a command."""
    for column in COLUMNS:
        if column.derive and (facts.uniform_steps or facts.is_command or not column.of_steps):
            known = [row[name] for name in inspect.signature(column.derive).parameters]
            row[column.name] = column.derive(*known) if all(known) else None


def _join_reasons(row: Mapping[str, Any], stages: Iterable[Columns]) -> str | None:
    """Return why figures are null, by name: the reason of the first stage that gives one."""
    reasons: dict[str, str] = {}
    for stage in stages:
        reasons = {**stage.reasons, **reasons}
    reasons = {column.name: column.null_reason for column in COLUMNS if column.kind == REAL} | reasons
    return "; ".join(f"{name}={reason}" for name, reason in sorted(reasons.items()) if row[name] is None) or None
