"""Published figures of Stable Diffusion, of the NeMo page above all, with their ratios worked out here.

Each is shown only beside runs of its own kind of work. The page prints single numbers without error bars.
"""

from dataclasses import replace

import polars as pl

from analysis import published, recipe_labels
from analysis.report.tables import COUNTS, DASH, Section, Table, TableBuilder, counts, mean_text
from analysis.units import gpu_label, gpu_order, number

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


def ladder(build: TableBuilder) -> Table:
    """Return samples/s of training ControlNet, with a lever more in each row."""
    stated, rate = published.read("nemo_controlnet_ablation.csv").to_dicts(), "samples_per_s"
    rows = []
    for row in stated:
        levers = " + ".join(name for name in _LEVERS if row[name]) or "none"
        gain = [f"{row[rate]:.2f}", f"{row[rate] / stated[0][rate]:.2f}", f"{row['gain']:g}"]
        rows.append([str(row["batch"]), levers, str(row["memory_gb"]), *gain])
    note = f"{SOURCE} Training of ControlNet on one A100 80 GB: another network than SD 2."
    columns = ["Batch", "Levers", "Memory [GB]", "Samples/s", *_SPEEDUP]
    return build.table("nemo-levers", "Published: levers of training ControlNet", columns, rows, note=note)


def text_to_image(build: TableBuilder) -> list[Section]:
    """Return the section on training SD 2 at 512 px: measured images/s per GPU, and published ones."""
    ours = {"workload": "finetune_text2image", "model": "sd2", "resolution_px": 512, "demonstration": False}
    note = (
        "Published rates of several GPUs are of whole nodes, divided by their GPUs, which exchange gradients; a single "
        "GPU exchanges none. milabench runs a plain loop of diffusers in bf16, with the encoders in the step: the same "
        "work as `baseline` without caches. MLPerf trains from random weights and predicts v; its rates are read from "
        "the time stamps of its result files."
    )
    sections = _beside_published(build, build.cells.filter(**ours), "sd2_training", "training of SD 2", note)
    return [replace(section, tables=[*section.tables, ladder(build)]) for section in sections]


def flux(build: TableBuilder) -> list[Section]:
    """Return the section on training FLUX.1: measured images/s per GPU, and published ones."""
    ours = pl.col("model").is_in(["flux", "flux_fill"]) & ~pl.col("demonstration")
    note = (
        "MLPerf trains all weights of FLUX.1 schnell from random ones, at 256 px and with 256 tokens of text: an image "
        "of it is less work than one of ours. Its rates are read from the time stamps of its result files (v5.1: ten "
        "runs each; v6.0: 262,144 images of one run) and divided by the GPUs, which exchange gradients. No round that "
        "could be read has an A100, H100 or H200. NeMo AutoModel and torchtitan have recipes for FLUX.1, of which no "
        "rate was found."
    )
    return _beside_published(build, build.cells.filter(ours), "flux_training", "training of FLUX.1", note)


def _beside_published(build: TableBuilder, found: pl.DataFrame, name: str, what: str, note: str) -> list[Section]:
    """Return cells of one kind of training beside the rates in a file, if there are such cells."""
    cells = found.to_dicts()
    if not cells:
        return []
    stated, rows = published.read(f"{name}.csv").to_dicts(), []
    sized = "resolution_px" in stated[0]
    cells.sort(key=lambda cell: (gpu_order(cell["gpu"]), cell["batch"], cell["recipe"]))
    for cell in cells:
        cached = [name for name, online in _CACHED.items() if not cell[online]]
        model = f"{cell['model']}, " if sized else ""
        keys = [f"measured, {model}{cell[recipe_labels.COLUMN]}", *([str(cell["resolution_px"])] if sized else [])]
        keys += [gpu_label(cell["gpu"]), str(cell["gpus"])]
        keys += [str(cell["batch"]), cell["precision"] or DASH, " and ".join(cached) or "nothing"]
        total = cell["images_per_s"]  # null if runs disagree
        rate = mean_text(cell, "images_per_s") if cell["gpus"] == 1 else number(total and total / cell["gpus"])
        rows.append([*keys, rate, *counts(cell)])
    for row in stated:
        keys = [f"published, {row['source']}", *([str(row["resolution_px"])] if sized else []), row["gpu"]]
        keys += [str(row["gpus"]), str(row["batch_per_gpu"] or DASH)]
        rate = f"{row['images_per_s'] / row['gpus']:.1f}"
        rows.append([*keys, row["precision"] or DASH, row["cached"], rate, *[DASH] * len(COUNTS)])
    columns = ["Source", *(["Pixels"] if sized else []), "GPU", "GPUs", "Batch per GPU", "Precision", "Cached"]
    columns += ["Images/s per GPU", *COUNTS]
    row_runs = [cell["run_ids"] for cell in cells] + [[]] * (len(rows) - len(cells))
    title = f"T{what[1:]}, measured and published"
    table = build.table(name.replace("_", "-"), title, columns, rows, note=note, row_runs=row_runs)
    return [Section(title=f"Comparison with published {what}", tables=[table])]


_CACHED = {"latents": "encodes_online", "texts": "text_online"}  # what a cache holds if the column is 0
_LEVERS = ("flash_attention", "channels_last", "inductor")
_SPEEDUP = ("Speedup", "Speedup as printed")
