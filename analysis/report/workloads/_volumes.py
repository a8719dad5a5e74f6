"""What the sections of both workloads of volume diffusion share: a row per run, means over cells, published figures."""

from __future__ import annotations

import math
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
    "tensor_core_utilization_gain": "tensor core utilisation, gain",
    "ipc_gain": "instructions per cycle, gain",
    "quality_degradation": "loss of synthesis quality",
    "dominant_kernels": "kernels that take most time",
}
TFLOP_TOLERANCE = 0.01
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
    own = {row["network"]: row for row in results.sort("run_id").unique("network", keep="first").to_dicts()}
    rows = []
    stated = {row["variant"]: row for row in published.read("medddpm_models.csv").to_dicts()}
    for name, published_name in PUBLISHED_NAMES.items():
        known, ran = stated[published_name], own.get(name)
        rows.append([published_name, known["volume"], f"{known['params']:,}", f"{known['fwd_tflop']:.3f}"])
        if not ran:
            rows[-1] += [DASH] * 3 + ["not measured"]
            continue
        sides = [ran[side] for side in ("depth", "height", "width")]
        per_voxel = ran["forward_tflop"] / math.prod(sides)
        ratio = per_voxel / (known["fwd_tflop"] / math.prod(map(int, known["volume"].split("x"))))
        agrees = ran["parameters"] == known["params"] and abs(ratio - 1) <= TFLOP_TOLERANCE
        measured = f"{ran['forward_tflop']:.3f} at {'x'.join(map(str, sides))}"
        rows[-1] += [f"{ran['parameters']:,}", measured, f"{ratio:.4f}", "yes" if agrees else "no"]
    columns = ["Network", "Published volume", "Published parameters", "Published forward [TFLOP]"]
    columns += ["Parameters of the runs", "Forward of the runs [TFLOP]", "FLOP per voxel / published", "Agrees"]
    note = (
        f"Published: {SOURCE}. Agrees: the same number of parameters, and FLOP per voxel within "
        f"{100 * TFLOP_TOLERANCE:g} %; attention makes them depend on the volume a little."
    )
    return build.table("volume3d-networks", "Published 3-D networks", columns, rows, note=note)
