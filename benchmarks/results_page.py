"""Write docs/results.md from the committed datasets: `python -m benchmarks.results_page`.

PAGE lists the sections. A further dataset needs a further `Measured`: title, dataset, the columns that make a row, and
the figures. Every figure comes from a dataset, a profile or a record; what the sentences state is in the log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl

from analysis.dataset import open_dataset
from analysis.report.sections.curves import MARGIN_PCT
from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.kernels import CONVOLUTIONS, KernelClass
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.recipe_names import current_name

from . import loss_curves
from .results_tables import RESULTS, Figure, Measured, denoised, header, images, ladder, link, row, scaling, wrap
from .step_record import read_profile

TARGET = ROOT / "docs" / "results.md"
PROFILES = ROOT / "benchmarks" / "profiles" / "2026-11-22-h200"
BLOCK = 50  # steps
HEAD = """# What was measured

`python -m benchmarks.results_page` writes this page from the datasets in `benchmarks/results`. A range goes from the
lowest to the highest of n runs. Each run is a process of its own, and only valid runs count
([what makes a run invalid](dataset.md#what-makes-a-run-invalid)). Where no run is valid, the table gives the reason,
such as `oom_gpu`. Recipes are spelled as `recipe=` takes them ([levers](levers.md)), a key as `lora_rank=16` in them as
`recipe.lora_rank=16`. In the dataset of 2026-11-21, `workers_8` and `prefetch_4` are `earlier_baseline` with
`recipe.num_workers=8` and `recipe.prefetch_factor=4`. `baseline` is the plain loop; older datasets have
`earlier_baseline` in its place, which is slower ([both](#beside-the-plain-loop)). Cards are the
different GPUs of n runs. Energy is board power, host not included; its error is a bound for a run, by counter and
sensor. VRAM peaks are those of the measured windows and of the whole run, with parity and cuDNN's search. A run is not
steady where its mean step is more than 2 % off its median step, or the last third of its measured time 2 % off the
first.

Two cards and three batches of one day are in [which GPU, which batch](#which-gpu-which-batch), with slower kernels than
today's. [Planned and done runs](campaign.md) join all datasets: each cell with its n and cards. `inpaint-bench advise`
computes hours, service units and energy of a training from them ([advice](advise.md)). The report of a dataset adds
intervals, telemetry and checks:

```console
$ inpaint-bench report benchmarks/results/2026-11-23-h100-h200 -o report
```

The log of all experiments, failures included, is [benchmarks/README.md](../benchmarks/README.md).
"""


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
        "trained ones may have. Beside the plain loop the losses of `tuned_hopper` are lower in every block, and "
        f"why is not known ({blocks}). Trainings that share a card have invalid rates, not invalid losses."
    )
    yield ""
    columns = ["recipe", "beside", "steps", "block", "seeds", "change (95 %)", "equal", "a step gains [%]"]
    yield from header([*columns, "the loss fell by", "noise", "largest difference of a block"])
    for folder, (given, block) in LOSSES.items():
        dataset = open_dataset(RESULTS / folder)
        reference, tested = loss_curves.choose(dataset, given, None)
        curves = loss_curves.read_curves(dataset, [reference, *tested])
        for name in tested:
            result = loss_curves.compare(curves[reference], curves[name], block)
            means = result.reference.mean(axis=0)[result.reference.shape[1] // 2 :]
            gain = 100 * (means[0] - means[-1]) / means.mean() / (block * (len(means) - 1))
            figures = [f"{value:.1e}" for value in (result.fall, result.noise, result.largest)]
            steps, equal = min(map(len, curves[name].values())), "no" if result.problems() else "yes"
            sizes = [steps, block, len(result.reference), result.change_text, equal, f"{gain:.2f}"]
            yield row([f"`{name}`", f"`{reference}`", *sizes, *figures])
    links = ", ".join(link(RESULTS / folder) for folder in LOSSES)
    text = f"{links}; `python -m benchmarks.loss_curves` prints all blocks and the verdict."
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


RATE, JOULES = Figure("images/s", "images_per_s"), Figure("J/image", "joules_per_image")
VRAM = (
    Figure("VRAM peak, measured [GiB]", pl.col("vram_used_mib_peak") / 1024),
    Figure("VRAM peak, whole run [GiB]", pl.col("vram_run_mib_peak") / 1024),
)
BUSY = Figure("GPU busy [%]", "gpu_util_pct", 0)
MFU = Figure("MFU [%]", "mfu_pct")
GRADIENTS = Figure("gradients [%]", 100 * pl.col("parity_gradient_rel"))
PEAK = Figure("allocated peak [GiB]", "peak_gib")
WIDTHS = {"step": "series_px", "width": "width_px"}
SHAPES = denoised("results_denoise_shape", "mpx_per_s", "denoiser_predicted_shape.csv", WIDTHS)
PATCHES = denoised("results_denoise_patch", "images_per_s", "denoiser_predicted_batch.csv", {"patch": "patch_px"})
STEPS = Figure("steps/s", "steps_per_s", 2), Figure("J/step", "joules_per_image", 0), *VRAM
MADE_IMAGES = (
    Figure("seconds per batch", pl.col("batch") / pl.col("images_per_s"), 2),
    Figure("images/s", "images_per_s", 2),
    Figure("J/image", "joules_per_image", 0),
    Figure("PSNR [dB]", "psnr_db"),
)
PATCHED: dict[str, Any] = {
    "rows": {"network": "model", "patch [px]": "patch_px"},
    "across": "batch",
    "figures": (Figure("images/s", "images_per_s", 2),),
    "cases": PATCHES,
}
# Datasets of losses: the recipe that others are compared with, None for the one with bf16_master, and steps of a block.
LOSSES: dict[str, tuple[str | None, int]] = {
    "2026-11-22-h200-losses": (None, BLOCK),
    "2026-11-26-h200-losses": (None, BLOCK),
    "2026-11-26-h200-fp8-losses": ("tuned_dit+attn_flash4", 25),
}
PAGE: tuple[Measured | Callable[[], Iterator[str]], ...] = (
    Measured(
        title="Beside the plain loop",
        dataset="2026-11-27-h200-yardstick",
        text="`baseline` computes what diffusers' train_text_to_image.py does with --mixed_precision=bf16: VAE and "
        "text encoder in bf16 without autocast, the UNet in fp32 under autocast, AdamW. It has 4 loader processes and "
        "pinned memory, and does not clip gradients (the script's default is 1). A bare loop, which imports nothing "
        "of ours (`benchmarks/bare_loop.py`), made 42.0 to 42.6 images/s in turn with it on the same card (n = 3), "
        "and 25.1 with 0 loader processes, the script's default (n = 1). `earlier_baseline` has VAE and text encoder "
        "in fp32 under autocast, and pageable memory: it is slower than diffusers' script. `tuned_online` does the "
        "work of these loops on the GPU, from decoded photographs; `tuned_hopper` has caches, which leave the "
        "difference of the TFLOP undone, and masks from a pool of 8 per image. Weights of `tuned`, `tuned_hopper` and "
        "`tuned_online` are bf16 with exact fp32 masters, AdamW's moments bf16, rounded stochastically; in the loops "
        "both are fp32. No location tokens.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, Figure("TFLOP per image", pl.col("flop_per_image") / 1e12, 2), JOULES, BUSY, MFU, *VRAM),
    ),
    Measured(
        title="Beside the plain loop, on an H100",
        dataset="2026-11-28-h100-yardstick",
        text="The same commands on another card. The bare loop made 37.9 to 38.1 images/s in turn with `baseline` "
        "(n = 3). One run of `baseline` and one of `earlier_baseline` are not steady.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, BUSY, MFU, *VRAM),
    ),
    Measured(
        title="Fine-tuning, lever by lever",
        dataset="2026-11-23-h200-ladder",
        text="Each row adds levers to the row above it. The first row is slower than the plain loop. Weights are "
        "random, of the model's shapes; caches are made by `prepare.caches=true`.",
        rows={"recipe": "step"},
        figures=(RATE, JOULES),
        cases=ladder,
    ),
    Measured(
        title="The fastest recipes, under load",
        dataset="2026-11-23-h200-finetune",
        text="Warm-up and windows are longer than above. `tuned_online` caches nothing and encodes images and texts in "
        "every step. The start is building and compiling; it is longest in the first run on a node.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, Figure("power [W]", "power_w", 0), Figure("start [s]", "setup_s", 0)),
    ),
    Measured(
        title="The fastest recipes, 2026-11-26",
        dataset="2026-11-26-h200-finetune",
        text="The recipes above with the kernels of 2026-11-26.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, Figure("power [W]", "power_w", 0), Figure("start [s]", "setup_s", 0)),
    ),
    Measured(
        title="The same on two more cards, 2026-11-28",
        dataset="2026-11-28-h200-headlines",
        text="SD 1.5, SD 2 at batch 64 and FLUX.1 Fill, a run on each of two cards, which the power cap holds at lower "
        "clocks than those above: rates per GHz are equal. All runs of a cell, with their cards: "
        "[planned and done runs](campaign.md).",
        rows={"model": "model", "recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, MFU, Figure("SM clock [MHz]", "sm_clock_mhz_mean", 0)),
    ),
    Measured(
        title="FLUX.1 Fill",
        dataset="2026-11-26-h200-flux",
        text="11.9e9 weights at 512 px, everything frozen from caches. `tuned_dit` trains adapters of rank 16, "
        "`bf16_stochastic` all weights, `earlier_baseline+half+lora` is eager with adapters of rank 4. MFU is in "
        "percent of the bf16 peak: FP8 products count as the operations that they replace, recomputed operations do "
        "not count. Gradients: how far those of the first pass are from the same pass without levers, where both fit. "
        "FP8 and bf16 ran on different cards at batch 16; "
        "[losses](#do-bf16-weights-train-like-fp32-masters-and-fp8-products-like-bf16) of both. `frozen_fp8` and "
        "`frozen_nf4` ran within 44 GiB, the memory of an A40; their rates are of an H200.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, MFU, GRADIENTS),
    ),
    Measured(
        title="FLUX.1 Fill at 1,024 px",
        dataset="2026-11-26-h200-flux-1024",
        text="The same, with four times as many tokens of an image.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(Figure("images/s", "images_per_s", 2), Figure("J/image", "joules_per_image", 0), *VRAM, MFU),
    ),
    Measured(
        title="FLUX.2 klein, inpainting",
        dataset="2026-11-28-h200-klein",
        text="The transformer of 4B parameters, random weights, adapters of rank 16, 512 px: 1,024 noisy tokens, 1,024 "
        "of the masked image, 512 of text. The plain loop, `half+lora`, encodes images and texts in every step, the "
        "others have caches. `frozen_fp8` keeps frozen weights in 8 bits, so that 44 GiB are enough.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(Figure("images/s", "images_per_s", 2), Figure("J/image", "joules_per_image", 1), *VRAM, MFU),
    ),
    Measured(
        title="Stable Diffusion 2, SDXL and Stable Diffusion 3.5",
        dataset="2026-11-26-h200-models",
        text="Texts to images with SD 2 and SD 3.5 medium, inpainting with SDXL; 512 px. SDXL encodes its images in "
        "every step, the others have caches.",
        rows={"model": "model", "recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, MFU),
    ),
    Measured(
        title="Which GPU, which batch",
        dataset="2026-11-23-h100-h200",
        text="Two sites merged, each with its own Slurm, with the kernels of 2026-11-23. `poster_optimized` is slower "
        "than `earlier_baseline` because diffusers' UNet undid channels_last then. At the smallest batch both are "
        "limited by the CPU, which cannot launch kernels fast enough.",
        rows={"GPU": "gpu", "recipe": "recipe"},
        across="batch",
        figures=(RATE,),
    ),
    Measured(
        title="Energy by GPU and batch",
        dataset="2026-11-23-h100-h200",
        text="The same runs.",
        rows={"GPU": "gpu", "recipe": "recipe"},
        across="batch",
        figures=(JOULES,),
    ),
    profiles,
    Measured(
        title="torch.compile instead of our kernels",
        dataset="2026-11-21-h200-batches",
        text="A ladder that ends with `compiled`.",
        rows={"recipe": "step"},
        figures=(RATE, JOULES),
        cases=ladder,
    ),
    Measured(
        title="One lever at a time",
        dataset="2026-11-21-h200-levers-x4",
        text="Each lever alone, on several cards: a small gap may be a difference of the cards.",
        rows={"recipe": "recipe"},
        figures=(RATE, JOULES),
        where=pl.col("study_name") == "one_at_a_time",
    ),
    Measured(
        title="The poster's recipes, channels_last kept",
        dataset="2026-11-28-h200-poster",
        text="Batch 16, photographs, encoders in the step. All 98 convolutions of the UNet keep the layout; "
        "`no_channels_last` leaves the poster's four other levers.",
        rows={"recipe": "recipe"},
        figures=(RATE, JOULES, *VRAM, Figure("waiting for data [%]", "data_wait_pct", 2), BUSY),
    ),
    Measured(
        title="The poster's recipes by batch, channels_last undone",
        dataset="2026-11-21-h200-levers-x4",
        text="The poster states model, cards, batches and about 6,500 photographs, and five changes of its second "
        "loop: pinned memory, more workers, prefetch, asynchronous copies, channels_last. It states neither "
        "resolution, precision, casts of the frozen networks, optimizer, clipping, epochs, numbers of workers nor "
        "versions, nor whether latents are cached. Here all that is as in `earlier_baseline`. The report shows the "
        "published figures beside these. diffusers' UNet undid channels_last in all but 7 of its 98 convolutions.",
        rows={"recipe": "recipe"},
        across="batch",
        figures=(RATE,),
        where=pl.col("recipe").str.starts_with("poster"),
    ),
    Measured(
        title="The poster's input pipeline, and levers alone, on an H100",
        dataset="2026-11-25-h100-pipeline",
        text="`poster_baseline` executes what `earlier_baseline` does. `poster_optimized` is slower because diffusers' "
        "UNet undid channels_last then, and `poster_baseline` hardly waits for data.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, Figure("waiting for data [%]", "data_wait_pct", 2), BUSY),
    ),
    Measured(
        title="Stable Diffusion 2, text to image, the plain loop",
        dataset="2026-11-28-h200-sd2-plain",
        text="Encoders in the step, as in milabench's plain loop of diffusers, which is published with 53.8 to 56.4 "
        "images/s for an H200 at batch 32.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM),
    ),
    Measured(
        title="Stable Diffusion 2, text to image",
        dataset="2026-11-25-h100-sd2",
        text="`workload=finetune_text2image model=sd2`. The report shows the rates of NeMo, MosaicML and MLPerf beside "
        "these.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM),
    ),
    Measured(
        title="Does the speed depend on the weights?",
        dataset="2026-11-23-h200-weights",
        text="Weights as initialised, scaled by their fan-in, and after a training.",
        rows={"model": "model", "recipe": "recipe"},
        figures=(RATE, JOULES),
    ),
    losses,
    Measured(
        title="Two GPUs",
        dataset="2026-11-23-h200-two-gpus",
        text="DDP with NCCL on one host; the batch is per GPU. Weak and strong are images/s in percent of the "
        "ideal, the number of GPUs times the mean rate of one: weak at the same batch per GPU, strong at the same "
        "total batch.",
        rows={"recipe": "recipe", "GPUs": "gpus", "batch": "batch"},
        figures=(RATE, JOULES, Figure("weak [%]", "weak"), Figure("strong [%]", "strong")),
        cases=scaling,
    ),
    Measured(
        title="Two GPUs, 2026-11-26",
        dataset="2026-11-26-h200-two-gpus",
        text="With the kernels of 2026-11-26: DDP, and gradients averaged where they lie.",
        rows={"recipe": "recipe", "GPUs": "gpus", "batch": "batch"},
        figures=(RATE, JOULES, Figure("weak [%]", "weak")),
        cases=scaling,
    ),
    Measured(
        title="Two GPUs, gradients exchanged by copy engines",
        dataset="2026-11-28-h200-exchange",
        text="`exchange=peer_copies` beside `in_place` and one GPU on the same two cards, in turns, and DDP on two "
        "others. The one-GPU rates of the two cards differ by 1.6 %, and both go at the pace of the slower.",
        rows={"recipe": "recipe", "GPUs": "gpus", "batch": "batch"},
        figures=(RATE, JOULES, Figure("weak [%]", "weak"), *VRAM),
        cases=scaling,
    ),
    Measured(
        title="Making images",
        dataset="2026-11-23-h200-inference",
        text="`workload=sd_inference`, from the prompt to decoded images. Another program used the other card of the "
        "host meanwhile. PSNR compares the images with the images of `baseline`.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=MADE_IMAGES,
        cases=images,
    ),
    Measured(
        title="Making one image, 2026-11-26",
        dataset="2026-11-26-h200-image",
        text="SD 1.5 with the kernels of 2026-11-26.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=MADE_IMAGES,
        cases=images,
    ),
    Measured(
        title="Making images with SD 1.5 and SD 2",
        dataset="2026-11-25-h100-inference",
        text="`amp_fp16` is the setting of the NeMo page, whose figures the report shows.",
        rows={"model": "model", "recipe": "recipe", "batch": "batch"},
        figures=MADE_IMAGES,
        cases=images,
    ),
    Measured(
        title="Denoisers: memory over the width of an image",
        dataset="2026-11-23-h200-denoisers",
        text="`workload=denoise_shape`. The last column compares the peak, without the weights, with the sum of the "
        "network's tensors.",
        rows={"network": "model", "series [px]": "series_px"},
        figures=(
            *(Figure("width [px]", "width_px", 0), Figure("Mpx/s", "mpx_per_s"), PEAK),
            Figure("beyond the tensors [%]", "excess_pct"),
        ),
        cases=SHAPES,
    ),
    Measured(
        title="Denoisers: patches",
        dataset="2026-11-23-h200-denoisers",
        text="`workload=denoise_patch`; the batch is the number of patches in it.",
        **PATCHED,
    ),
    Measured(
        title="Denoisers: patches that lie on the GPU",
        dataset="2026-11-25-h100-denoisers",
        text="`workload.input_mode=device_resident`: the timed call neither draws nor copies the image.",
        **PATCHED,
    ),
    Measured(
        title="Denoisers: patches that need more memory than their tensors",
        dataset="2026-11-23-h200-denoisers",
        text="All other cases stay within a tenth of the sum of the tensors. These need more, presumably cuDNN's "
        "workspace. Compare their rate with half the batch in the table above.",
        rows={"network": "model", "patch [px]": "patch_px", "batch": "batch"},
        figures=(PEAK, Figure("beyond the tensors [GiB]", "excess_gib")),
        cases=PATCHES,
        where=pl.col("excess_pct") > 10,
    ),
    Measured(
        title="Training on volumes",
        dataset="2026-11-23-h200-volumes",
        text="`workload=volume3d_train` in both shapes of Med-DDPM. `fp32` rounds as IEEE says. Profiles, counters by "
        "Nsight Compute and the published claims are in the report.",
        rows={"network": "model", "recipe": "recipe"},
        figures=STEPS,
    ),
    Measured(
        title="Training on volumes with bf16 and compile",
        dataset="2026-11-25-h100-volumes",
        text="The whole head, under autocast to bf16.",
        rows={"recipe": "recipe"},
        figures=STEPS,
    ),
    Measured(
        title="Training on volumes with fused kernels",
        dataset="2026-11-26-h200-volumes",
        text="`recipe=tuned_volume`: fused norms, upsampling without atomic additions, padded channels, measured "
        "cuDNN plans and inductor's CUDA graphs. BraTS had 12 steps.",
        rows={"network": "model", "recipe": "recipe"},
        figures=STEPS,
    ),
    Measured(
        title="LoRA and SDXL",
        dataset="2026-11-23-h200-lora-sdxl",
        text="Images and texts are encoded in every step. LoRA saves memory more than time.",
        rows={"model": "model", "recipe": "recipe"},
        figures=(RATE, JOULES, *VRAM, BUSY),
        where=pl.col("workload") == "finetune_inpaint",
    ),
    Measured(
        title="A program that was only watched",
        dataset="2026-11-23-h200-lora-sdxl",
        text="diffusers' Dreambooth example under `inpaint-bench watch`: the whole command, with imports and saving.",
        rows={"program": "recipe"},
        figures=(Figure("seconds", "window_s"), Figure("kJ", pl.col("energy_j") / 1000, 2), RATE, JOULES, BUSY),
        where=pl.col("workload") == "command",
    ),
    sidecar,
    datasets,
)


def page() -> str:
    """Return the page as Markdown."""
    sections = ((entry.lines if isinstance(entry, Measured) else entry)() for entry in PAGE)
    return "\n".join([HEAD, *(line for lines in sections for line in lines)]).rstrip() + "\n"


def main() -> int:
    TARGET.write_text(page(), encoding="utf-8")
    print(f"Wrote {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
