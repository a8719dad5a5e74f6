"""Tables of the NeMo page: published figures of Stable Diffusion on NVIDIA GPUs, with their ratios worked out here.

Each is shown only beside runs of its own kind of work, and never averaged with them. The page prints single numbers
without error bars.
"""

from __future__ import annotations

from typing import Any

from analysis import published
from analysis.report.tables import Table, TableBuilder
from analysis.units import number

SOURCE = "NVIDIA NeMo Framework, Stable Diffusion performance page"
_SERIES = ("a100", "h100")


def latency(build: TableBuilder) -> Table:
    """Return seconds per batch of TensorRT and of PyTorch under AMP, and how much faster TensorRT is."""
    rows = [
        [row["model"], str(row["batch"]), f"{row['fw_fp16_amp_s']:g}", f"{row['trt_fp16_s']:g}"]
        + [number(row["batch"] / row[f"{name}_s"]) for name in ("fw_fp16_amp", "trt_fp16")]
        + [f"{row['fw_fp16_amp_s'] / row['trt_fp16_s']:.2f}", f"{row['speedup_printed']:g}"]
        for row in published.read("nemo_inference_latency.csv").to_dicts()
    ]
    columns = ["Model", "Batch", "AMP [s]", "TensorRT [s]", "AMP [images/s]", "TensorRT [images/s]"]
    note = (
        f"Published: {SOURCE}. One A100 80 GB, 50 PLMS steps, 512 px, fp16: from the prompt to the decoded images. "
        "Speedups are worked out from seconds that are printed with one decimal."
    )
    title = "Published: latency of making images"
    return build.table("nemo-latency", title, [*columns, "Speedup", "Speedup as printed"], rows, note=note)


def scaling(build: TableBuilder) -> Table:
    """Return samples/s on 1 to 64 nodes: speedup and efficiency per GPU type, and H100 over A100 at equal nodes."""
    published_rows = published.read("nemo_scaling.csv").to_dicts()
    rates = {(row["gpu"], row["nodes"]): row["samples_per_s"] for row in published_rows}
    slowest = published_rows[0]["gpu"]
    rows = []
    for row in published_rows:
        gpu, nodes, rate = row["gpu"], row["nodes"], row["samples_per_s"]
        speedup = rate / rates[gpu, 1]
        cells: list[Any] = [gpu, str(nodes), f"{rate:,.2f}", f"{speedup:.2f}", f"{row['speedup_printed']:g}"]
        rows.append([*cells, f"{100 * speedup / nodes:.1f}", f"{rate / rates[slowest, nodes]:.2f}"])
    columns = ["GPU", "Nodes", "Samples/s", "Speedup", "Speedup as printed", "Efficiency [%]", f"Over {slowest}"]
    note = f"Published: {SOURCE}. Training of SD 2 base at 512 px, 8 GPUs per node, weak scaling."
    return build.table("nemo-scaling", "Published: scaling of training", columns, rows, note=note)


def gpu_comparison(build: TableBuilder) -> Table:
    """Return global batches per second of A100 and H100."""
    rows = [
        [row["model"], str(row["nodes"]), str(row["global_batch"])]
        + [f"{row[f'gb_per_s_{gpu}']:g}" for gpu in _SERIES]
        + [f"{row['gb_per_s_h100'] / row['gb_per_s_a100']:.2f}", f"{row['speedup_printed']:g}"]
        for row in published.read("nemo_gpu_comparison.csv").to_dicts()
    ]
    columns = ["Model", "Nodes", "Global batch", "A100 [batches/s]", "H100 [batches/s]"]
    note = f"Published: {SOURCE}. Training under fp16 AMP, micro-batch 32."
    title = "Published: A100 and H100"
    return build.table("nemo-gpus", title, [*columns, "Speedup", "Speedup as printed"], rows, note=note)
