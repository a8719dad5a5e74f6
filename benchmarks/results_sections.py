"""Sections of docs/results.md that are no tables of runs: profiles, counters, losses, the sidecar's cost, datasets."""

import json
from collections.abc import Iterator

import polars as pl

from analysis.dataset import open_dataset
from analysis.report.sections.counters import weighted_mean
from analysis.report.sections.curves import MARGIN_PCT, Curves
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.kernels import CONVOLUTIONS, IDLE, KernelClass
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.recipe_names import current_name
from inpaint_bench.core.schema import KERNEL_COUNTERS, KERNEL_TIMES

from . import loss_curves
from .results_tables import RESULTS, header, link, row, wrap
from .step_record import read_profile

PROFILES = ROOT / "benchmarks" / "profiles" / "2026-11-22-h200"
COUNTED = RESULTS / "2026-11-30-h200-items"
PLAIN = ["2026-11-29-h200-plain-losses", "2026-11-30-h200-plain-losses"]
BLOCK = 50  # steps
# Datasets of losses: the recipe that others are compared with, None for the one with bf16_master, and steps of a block.
LOSSES: dict[str, tuple[str | None, int]] = {
    "2026-11-26-h200-losses": (None, BLOCK),
    "2026-11-26-h200-fp8-losses": ("tuned_dit+attn_flash4", 25),
}


def profiles() -> Iterator[str]:
    """Yield the section of the profiles."""
    kinds = {
        "convolutions": CONVOLUTIONS,
        "attention": (KernelClass.ATTENTION, KernelClass.CROSS_ATTENTION),
        "GEMM": (KernelClass.GEMM,),
        "norm": (KernelClass.NORM,),
        "pointwise": (KernelClass.POINTWISE,),
        "copies, layout": (KernelClass.COPY, KernelClass.LAYOUT),
        "optimizer": (KernelClass.OPTIMIZER,),
    }
    text = "Kernels by class in a profiled step, in ms. `earlier_baseline` also encodes two images and a text for each "
    text += "sample; the others have caches. `python -m benchmarks.step_record FILE...` divides further."
    yield f"## Where the time of a step goes\n\n{wrap(text)}\n"
    yield from header(["recipe", *kinds, "idle", "step"])
    for path in sorted(PROFILES.glob("*.json")):
        profile = read_profile(path)
        ms = [sum(each.ms for each in profile.classes if each.kind in kind) for kind in kinds.values()]
        if abs(sum(ms) - profile.kernel_ms) > 0.001 or profile.step_ms is None:
            raise UserError(f"{path}: has kernels of no column of the table, or no step time")
        name = current_name(profile.recipe, "finetune_inpaint", None)
        yield row([f"`{name}`", *(f"{value:.1f}" for value in (*ms, profile.idle_ms, profile.step_ms))])
    work = f"{profile.model}, batch {profile.batch}, {profile.resolution_px} px"
    text = f"{link(PROFILES)}: {work}, {profile.device}, torch {profile.torch}."
    yield f"\n{wrap(text)}\n"


def counters() -> Iterator[str]:
    """Yield the section of the hardware counters of a fine-tuning step."""
    dataset = open_dataset(COUNTED)
    runs = dataset.runs.filter(pl.col("workload") == "finetune_inpaint")
    rows = dataset.rows(KERNEL_COUNTERS).join(runs[["run_id", "recipe", "batch"]], "run_id")
    launches = dataset.rows(KERNEL_TIMES).filter("measured", pl.col("kind") != IDLE).join(rows, "run_id", how="semi")
    share = 100 * launches.join(rows, ["run_id", "kernel"], how="semi")["ms"].sum() / launches["ms"].sum()
    recipe, batch = rows.select(pl.col("recipe").unique(), pl.col("batch").unique()).row(0)
    text = f"`{recipe}`, batch {batch}: means weighted by cycles over {rows.height} launches of the kernels that take "
    text += (
        f"{share:.0f} % of the kernel time of a step. Nsight Compute runs each launch several times, with empty caches."
    )
    yield f"## What the hardware does in a step\n\n{wrap(text)}\n"
    percent = {"tensor_pct": "tensor cores active", "sm_pct": "SM", "dram_pct": "DRAM", "l2_hit_pct": "L2 hits"}
    yield from header(["kernels", "launches", "cycles [%]", *(f"{name} [%]" for name in percent.values())])
    means = [weighted_mean(name, "sm_cycles") for name in percent]
    sizes = pl.len().alias("n"), (100 * pl.col("sm_cycles").sum() / rows["sm_cycles"].sum()).alias("cycles")
    table = rows.group_by("kind").agg(*sizes, *means).sort("cycles", descending=True)
    for kind, n, *values in table.iter_rows():
        yield row([kind, n, *(f"{value:.0f}" for value in values)])
    yield f"\n{link(COUNTED)}, n = 1.\n"


def _curves() -> Iterator[tuple[str, str, int, Curves, Curves]]:
    """Yield what is compared: the reference, the tested recipe, the steps of a block, and the losses of both."""
    for folder, (given, block) in LOSSES.items():
        dataset = open_dataset(RESULTS / folder)
        reference, tested = loss_curves.choose(dataset, given, None)
        curves = loss_curves.read_curves(dataset, [reference, *tested])
        yield from ((reference, name, block, curves[reference], curves[name]) for name in tested)
    sides: dict[str, Curves] = {"baseline": {}, "tuned_online": {}}
    for folder in PLAIN:  # one side reads photographs, the other prepared ones: no dataset holds both as one study
        dataset = open_dataset(RESULTS / folder)
        for recipe, losses_of_seeds in sides.items():
            losses_of_seeds |= loss_curves.read_curves(dataset, [recipe])[recipe]
    yield *sides, BLOCK, *sides.values()


def losses() -> Iterator[str]:
    """Yield the section of the losses of equal steps."""
    yield "## Do bf16 weights train like fp32 masters, and FP8 products like bf16?\n"
    blocks = "[blocks](../benchmarks/results/2026-11-27-h200-plain-losses/loss_curves.md)"
    yield wrap(
        "Losses of equal steps and seeds, in blocks of steps. The change is that of the mean loss, with its 95 % "
        f"interval over the seeds. It is equal where the interval lies within {MARGIN_PCT} %, less than a step "
        "gains: by so much the loss falls per step in the second half. Noise, the standard deviation between "
        "seeds, is no margin: both sides see the same batches. All masters are fp32; moments are bf16, rounded "
        "stochastically, in `tuned` and `tuned_hopper`, else fp32. Weights are random: FP8 met no outliers, as "
        "trained ones may have. Until 2026-11-29 masters began at weights rounded to bf16, on both sides of the first "
        f"rows; beside the plain loop losses were lower in every block of 500 steps ({blocks}). In the last row they "
        "begin at fp32 weights; it is of four cards, seeds 0 and 1 of two each. Trainings that share a "
        "card have invalid rates, not invalid losses."
    )
    yield ""
    columns = ["recipe", "beside", "steps", "block", "seeds", "change (95 %)", "equal", "a step gains [%]"]
    yield from header([*columns, "the loss fell by", "noise", "largest difference of a block"])
    for reference, name, block, expected, tested in _curves():
        result = loss_curves.compare(expected, tested, block)
        means = result.reference.mean(axis=0)[result.reference.shape[1] // 2 :]
        gain = 100 * (means[0] - means[-1]) / means.mean() / (block * (len(means) - 1))
        figures = [f"{value:.1e}" for value in (result.fall, result.noise, result.largest)]
        steps, equal = min(map(len, tested.values())), "no" if result.problems() else "yes"
        sizes = [steps, block, len(result.reference), result.change_text, equal, f"{gain:.2f}"]
        yield row([f"`{name}`", f"`{reference}`", *sizes, *figures])
    links = ", ".join(link(RESULTS / folder) for folder in [*LOSSES, *PLAIN])
    text = f"{links}; `python -m benchmarks.loss_curves` prints all blocks and the verdict of one dataset."
    yield f"\n{wrap(text)}\n"


def sidecar() -> Iterator[str]:
    """Yield the section of the sidecar's cost."""
    text = (
        "The sidecar is switched off and on in turns beside one training; n is the number of rounds, and the interval "
        "is of Student's t. A cost below zero is noise. `overhead.txt` beside each record has outliers and CPU time."
    )
    yield f"## What the telemetry costs\n\n{wrap(text)}\n"
    yield from header(["record", "card", "samples", "cost [% of a step]", "95 % interval", "n"])
    for path in sorted(RESULTS.glob("*/overhead.json")):
        record = json.loads(path.read_text())
        card = record.get("sampled") or record["watched"]  # its name in older records
        for arm, cost in ((arm["arm"], arm["cost"]) for arm in record["arms"]):
            ends = f"{cost['low_pct']:.2f} to {cost['high_pct']:.2f}"
            yield row([link(path.parent), card, arm, f"{cost['pct']:.2f}", ends, cost["n"]])
    yield ""


def datasets() -> Iterator[str]:
    """Yield the list of all datasets."""
    yield "## All datasets\n"
    yield from header(["dataset", "workloads", "GPUs", "runs", "valid"])
    for path in sorted(RESULTS.glob("*/dataset.json")):
        runs = open_dataset(path.parent).runs
        names = [", ".join(runs[column].drop_nulls().unique().sort()) for column in ("workload", "gpu")]
        yield row([link(path.parent), *names, runs.height, runs["valid"].sum()])
