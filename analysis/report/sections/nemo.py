"""Tables of the NeMo page: published figures of Stable Diffusion on NVIDIA GPUs, with their ratios worked out here.

Each is shown only beside runs of its own kind of work, and never averaged with them. The page prints single numbers
without error bars.
"""

from __future__ import annotations

from analysis import published
from analysis.report.tables import Table, TableBuilder
from analysis.units import number

SOURCE = "Published: NVIDIA NeMo Framework, Stable Diffusion performance page."


def latency(build: TableBuilder) -> Table:
    """Return seconds per batch of TensorRT and of PyTorch under AMP, and how much faster TensorRT is."""
    rows = [
        [row["model"], str(row["batch"]), f"{row['fw_fp16_amp_s']:g}", f"{row['trt_fp16_s']:g}"]
        + [number(row["batch"] / row[f"{name}_s"]) for name in ("fw_fp16_amp", "trt_fp16")]
        + [f"{row['fw_fp16_amp_s'] / row['trt_fp16_s']:.2f}", f"{row['speedup_printed']:g}"]
        for row in published.read("nemo_inference_latency.csv").to_dicts()
    ]
    columns = ["Model", "Batch", "AMP [s]", "TensorRT [s]", "AMP [images/s]", "TensorRT [images/s]", *_SPEEDUP]
    note = f"{SOURCE} One A100 80 GB, 50 PLMS steps, 512 px, fp16: from the prompt to the decoded images."
    return build.table("nemo-latency", "Published: latency of making images", columns, rows, note=note)


def scaling(build: TableBuilder) -> Table:
    """Return samples/s on 1 to 64 nodes: speedup and efficiency per GPU type, and H100 over A100 at equal nodes."""
    stated = published.read("nemo_scaling.csv").to_dicts()
    rates = {(row["gpu"], row["nodes"]): row["samples_per_s"] for row in stated}
    slowest, rows = stated[0]["gpu"], []
    for row in stated:
        gpu, nodes, rate = row["gpu"], row["nodes"], row["samples_per_s"]
        speedup = rate / rates[gpu, 1]
        ratios = [f"{100 * speedup / nodes:.1f}", f"{rate / rates[slowest, nodes]:.2f}"]
        rows.append([gpu, str(nodes), f"{rate:,.2f}", f"{speedup:.2f}", f"{row['speedup_printed']:g}", *ratios])
    columns = ["GPU", "Nodes", "Samples/s", *_SPEEDUP, "Efficiency [%]", f"Over {slowest}"]
    note = f"{SOURCE} Training of SD 2 base at 512 px, 8 GPUs per node, weak scaling."
    return build.table("nemo-scaling", "Published: scaling of training", columns, rows, note=note)


def gpu_comparison(build: TableBuilder) -> Table:
    """Return global batches per second of A100 and H100."""
    rows = []
    for row in published.read("nemo_gpu_comparison.csv").to_dicts():
        slow, fast = row["gb_per_s_a100"], row["gb_per_s_h100"]
        keys = [row["model"], str(row["nodes"]), str(row["global_batch"])]
        rows.append([*keys, f"{slow:g}", f"{fast:g}", f"{fast / slow:.2f}", f"{row['speedup_printed']:g}"])
    columns = ["Model", "Nodes", "Global batch", "A100 [batches/s]", "H100 [batches/s]", *_SPEEDUP]
    note = f"{SOURCE} Training under fp16 AMP, micro-batch 32."
    return build.table("nemo-gpus", "Published: A100 and H100", columns, rows, note=note)


_SPEEDUP = ("Speedup", "Speedup as printed")
