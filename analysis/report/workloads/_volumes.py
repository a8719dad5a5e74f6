"""What the sections of both workloads of volume diffusion share: a row per run, means over cells, published figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from analysis import published
from analysis.report.tables import DASH, Table, TableBuilder
from analysis.units import gpu_label, gpu_order

SOURCE = "arXiv 2606.19365 (Ryoo et al., ICPE '26), its abstract; networks counted from Med-DDPM's public code"
KEYS = ["site", "gpu", "model", "batch", "recipe", "precision", "variant", "comparability_key"]
PUBLISHED_NAMES = {"whole_head": "whole_head", "brats": "brats_4mod"}
CLAIMS = {
    "sm_cycles_reduction_max": "SM cycles, largest reduction",
    "dynamic_instruction_reduction_max": "executed instructions, largest reduction",
    "tensor_core_utilization_gain_low": "tensor core utilisation, smallest gain",
    "tensor_core_utilization_gain_high": "tensor core utilisation, largest gain",
    "ipc_gain": "instructions per cycle, gain",
    "gpu_generations": "generations of GPUs",
    "quality_degradation": "loss of synthesis quality",
    "dominant_kernels": "kernels that take most time",
}
UNITS = {"x": " times", "pct": " %", "count": "", "qualitative": ""}
FIGURES = ["steps_per_s", "images_per_s", "joules_per_image", "vram_used_mib_peak", "torch_allocated_peak_mib"]
FIGURES += ["parity_prediction_rel", "parity_gradient_rel"]


def cells(results: pl.DataFrame, runs: pl.DataFrame, own: Sequence[str]) -> list[dict[str, Any]]:
    """Return means over the runs of each cell, `own` being columns of the results: of a run the mean of what it has."""
    per_run = results.group_by("run_id").agg(pl.col(name).mean() for name in own)
    keys = [name for name in KEYS if name in runs.columns]
    joined = per_run.join(runs.select("run_id", *keys, *FIGURES), on="run_id").sort("run_id")
    means = joined.group_by(keys, maintain_order=True).agg(pl.col(*FIGURES, *own).mean(), n=pl.len())
    rows = means.to_dicts()
    return sorted(rows, key=lambda row: (gpu_order(row["gpu"]), row["model"], row["batch"], row["precision"] != "fp32"))


def keys_text(row: dict[str, Any]) -> list[str]:
    """Return GPU, site, network, batch, recipe and precision as a table prints them."""
    return [
        gpu_label(row["gpu"]),
        row["site"],
        row["model"],
        str(row["batch"]),
        row["recipe"],
        row["precision"] or DASH,
    ]


def speedup(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the rate over that of fp32 (IEEE) without another lever, on the same GPU and work."""
    same = ("site", "gpu", "model", "batch", "variant", "comparability_key")
    for other in rows:
        plain = other["recipe"] in ("fp32", "cpu") and all(other.get(key) == row.get(key) for key in same)
        if plain and other["images_per_s"] and row["images_per_s"]:
            return f"{row['images_per_s'] / other['images_per_s']:.2f}"
    return DASH


def networks(build: TableBuilder, results: pl.DataFrame) -> Table:
    """Return the published networks beside those that ran."""
    own = {row["network"]: row for row in results.unique("network").to_dicts()}
    rows = []
    stated = {row["variant"]: row for row in published.read("medddpm_models.csv").to_dicts()}
    for name, published_name in PUBLISHED_NAMES.items():
        known, ran = stated[published_name], own.get(name)
        rows.append(
            [
                published_name,
                known["volume"],
                f"{known['params']:,}",
                f"{ran['parameters']:,}" if ran else DASH,
                f"{known['fwd_tflop']:.3f}",
                f"{ran['forward_tflop']:.3f} at {ran['depth']}x{ran['height']}x{ran['width']}" if ran else DASH,
            ]
        )
    columns = ["Network", "Published volume", "Published parameters", "Parameters of the runs"]
    columns += ["Published forward [TFLOP]", "Forward of the runs [TFLOP]"]
    return build.table("volume3d-networks", "Published 3-D networks", columns, rows, note=f"Published: {SOURCE}.")


def claims(build: TableBuilder) -> Table:
    """Return what the abstract claims."""
    rows = [
        [
            CLAIMS[row["claim"]],
            DASH if row["value"] is None else f"{row['value']:g}{UNITS[row['unit']]}",
            row["scope"],
        ]
        for row in published.read("medddpm_claims.csv").to_dicts()
    ]
    note = (
        f"Published: {SOURCE}. Its reductions are the largest of any kernel, counted by a profiler: no speed-ups of a "
        "step, and not comparable with steps/s above."
    )
    return build.table(
        "volume3d-claims", "Published: TF32 and channels_last_3d", ["Claim", "Value", "Scope"], rows, note=note
    )
