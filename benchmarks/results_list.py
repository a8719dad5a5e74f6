"""The sections of docs/results.md in their order, which results_page.py writes.

A further dataset needs a further `Measured`: title, dataset, the columns that make a row, and the figures. Every figure
comes from a dataset, a profile or a record; what the sentences state is in the log.
"""

from collections.abc import Callable, Iterator
from typing import Any

import polars as pl

from .results_sections import counters, datasets, losses, profiles, sidecar
from .results_tables import Figure, Measured, denoised, images, ladder, scaling, tiled, volumes_as_sets

RATE, JOULES = Figure("images/s", "images_per_s"), Figure("J/image", "joules_per_image")
SMALL_RATE = Figure("images/s", "images_per_s", 2)
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
    SMALL_RATE,
    Figure("J/image", "joules_per_image", 0),
    Figure("PSNR [dB]", "psnr_db"),
)
CLOCK = Figure("SM clock [MHz]", "sm_clock_mhz_mean", 0)
TWO_GPUS, TWO_GPUS_2 = "2026-11-29-h200-two-gpus", "2026-11-29-h200-two-gpus-2"
BREADTH, TWO_GPUS_3 = "2026-11-30-h200-breadth", "2026-11-30-h200-two-gpus"
COUNTERS, ITEMS, ITEMS_2 = (f"2026-11-30-h200-{name}" for name in ("counters", "items", "items-2"))
HEADLINES = tuple(f"2026-11-29-h200-headlines{part}" for part in ("", "-2", "-3", "-4"))
PATCHED: dict[str, Any] = {
    "rows": {"network": "model", "patch [px]": "patch_px"},
    "across": "batch",
    "figures": (SMALL_RATE,),
    "cases": PATCHES,
}
PAGE: tuple[Measured | Callable[[], Iterator[str]], ...] = (
    Measured(
        title="Beside the plain loop",
        datasets=("2026-11-27-h200-yardstick",),
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
        datasets=("2026-11-28-h100-yardstick",),
        text="The same commands on another card. The bare loop made 37.9 to 38.1 images/s in turn with `baseline` "
        "(n = 3). One run of `baseline` and one of `earlier_baseline` are not steady.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, BUSY, MFU, *VRAM),
    ),
    Measured(
        title="SD 1.5 inpainting by batch, on several cards",
        datasets=("2026-11-27-h200-yardstick", "2026-11-28-h200-breadth", *HEADLINES[:3], TWO_GPUS, ITEMS_2),
        text="No location tokens. One run of `tuned_hopper` at 16 has the poster's "
        "103,600 images, 598 s at 173.1 to 173.6 images/s in each minute. Cards of 50 to 68 °C held different clocks "
        "under the power cap; rates per GHz are equal within 4 %. `baseline` at 4 is not steady: the host launches "
        "kernels too slowly.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, BUSY, MFU, CLOCK, Figure("start [s]", "setup_s", 0)),
        where=(pl.col("model") == "sd15_inpaint")
        & (pl.col("gpus") == 1)
        & pl.col("batch_requested").is_null()
        & pl.col("recipe").is_in(["baseline", "tuned_online", "tuned_hopper"]),
    ),
    Measured(
        title="Three levers alone",
        datasets=("2026-11-28-h200-breadth", COUNTERS, ITEMS),
        text="`webdataset` and `stage_shm` read prepared data. `attn_math` computes attention without a fused kernel.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, BUSY, MFU),
        where=pl.col("recipe").str.starts_with("baseline+") & (pl.col("model") == "sd15_inpaint"),
    ),
    Measured(
        title="The largest batch",
        datasets=(COUNTERS, ITEMS, ITEMS_2),
        text="What `batch=auto` found for `baseline`: 104 when it only asked whether two steps fit, 96 since it also "
        "asks whether the third step makes PyTorch's allocator free memory. The window has 5 or 6 steps.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, BUSY),
        where=pl.col("batch_requested") == "auto",
    ),
    Measured(
        title="Fine-tuning, lever by lever",
        datasets=("2026-11-23-h200-ladder",),
        text="Each row adds levers to the row above it. The first row is slower than the plain loop. Weights are "
        "random, of the model's shapes; caches are made by `prepare.caches=true`.",
        rows={"recipe": "step"},
        figures=(RATE, JOULES),
        cases=ladder,
    ),
    Measured(
        title="SD 1.5 inpainting with position tokens",
        datasets=("2026-11-26-h200-finetune", "2026-11-28-h200-headlines"),
        text="The power cap holds the two cards of the later day at lower clocks.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, MFU, CLOCK),
        where=pl.col("model") == "sd15_inpaint",
    ),
    Measured(
        title="FLUX.1 Fill",
        datasets=("2026-11-26-h200-flux", "2026-11-28-h200-headlines", "2026-11-28-h200-breadth", *HEADLINES, BREADTH),
        text="11.9e9 weights at 512 px, everything frozen from caches. `tuned_dit` trains adapters of rank 16, "
        "`bf16_stochastic` all weights, `earlier_baseline+half+lora` is eager with adapters of rank 4. MFU is in "
        "percent of the bf16 peak: FP8 products count as the operations that they replace, recomputed operations do "
        "not count. Gradients: how far those of the first pass are from the same pass without levers, where both fit. "
        "[Losses of FP8](#do-bf16-weights-train-like-fp32-masters-and-fp8-products-like-bf16). `frozen_fp8` and "
        "`frozen_nf4` ran while PyTorch's allocator gave out at most 44 GiB; an A40 has 45.0. Their rates are of an "
        "H200.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(SMALL_RATE, JOULES, *VRAM, MFU, GRADIENTS),
        where=pl.col("model") == "flux_fill",
    ),
    Measured(
        title="FLUX.1 Fill at 1,024 px",
        datasets=("2026-11-26-h200-flux-1024",),
        text="The same, with four times as many tokens of an image.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(SMALL_RATE, Figure("J/image", "joules_per_image", 0), *VRAM, MFU),
    ),
    Measured(
        title="FLUX.2 klein, inpainting",
        datasets=("2026-11-28-h200-klein",),
        text="The transformer of 4B parameters, random weights, adapters of rank 16, 512 px: 1,024 noisy tokens, 1,024 "
        "of the masked image, 512 of text. The plain loop, `half+lora`, encodes images and texts in every step, the "
        "others have caches. `frozen_fp8` keeps frozen weights in 8 bits, so that 44 GiB are enough.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(SMALL_RATE, Figure("J/image", "joules_per_image", 1), *VRAM, MFU),
    ),
    Measured(
        title="Stable Diffusion 2, SDXL and Stable Diffusion 3.5",
        datasets=(
            *("2026-11-26-h200-models", "2026-11-28-h200-breadth", "2026-11-28-h200-sd2-plain"),
            *("2026-11-28-h200-headlines", *HEADLINES, BREADTH, COUNTERS),
        ),
        text="Texts to images with SD 2 and SD 3.5 medium, inpainting with SDXL, whose adapters have rank 4; 512 px. "
        "The plain loops and SDXL encode images in every step, the others have caches. milabench publishes 53.8 to "
        "56.4 images/s of a plain loop of diffusers on an H200 at batch 32. NeMo's page trains SD 2 with `amp_fp16` "
        "and states 64.0 images/s per GPU on nodes of eight H100s. SD 2 `baseline` at 16 is not steady on one card: "
        "its host launches kernels too slowly.",
        rows={"model": "model", "recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, MFU),
        where=pl.col("model").is_in(["sd2", "sdxl_inpaint", "sd35_medium"]),
    ),
    Measured(
        title="Which GPU, which batch",
        datasets=("2026-11-23-h100-h200",),
        text="Two sites merged, each with its own Slurm, with the kernels of 2026-11-23. `poster_optimized` is slower "
        "than `earlier_baseline` because diffusers' UNet undid channels_last then. At the smallest batch both are "
        "limited by the CPU, which cannot launch kernels fast enough.",
        rows={"GPU": "gpu", "recipe": "recipe"},
        across="batch",
        figures=(RATE,),
    ),
    Measured(
        title="Energy by GPU and batch",
        datasets=("2026-11-23-h100-h200",),
        text="The same runs.",
        rows={"GPU": "gpu", "recipe": "recipe"},
        across="batch",
        figures=(JOULES,),
    ),
    profiles,
    counters,
    Measured(
        title="torch.compile instead of our kernels",
        datasets=("2026-11-21-h200-batches",),
        text="A ladder that ends with `compiled`.",
        rows={"recipe": "step"},
        figures=(RATE, JOULES),
        cases=ladder,
    ),
    Measured(
        title="One lever of `baseline` at a time",
        datasets=("2026-11-30-h200-levers",),
        text="Photographs, encoders in the step. Beside these runs `max-autotune` compiled for another card of the "
        "host, which launched kernels later: `attn_flash` and `channels_last` are not steady. The first start of "
        "`compile_max-autotune` takes longer than 17 minutes; see the log.",
        rows={"recipe": "recipe"},
        figures=(RATE, JOULES, *VRAM, BUSY),
    ),
    Measured(
        title="One lever of `earlier_baseline` at a time",
        datasets=("2026-11-21-h200-levers-x4",),
        text="Each lever alone, on several cards: a small gap may be a difference of the cards.",
        rows={"recipe": "recipe"},
        figures=(RATE, JOULES),
        where=pl.col("study_name") == "one_at_a_time",
    ),
    Measured(
        title="The poster's recipes, channels_last kept",
        datasets=("2026-11-28-h200-poster", "2026-11-28-h200-breadth", HEADLINES[0], BREADTH, ITEMS),
        text="Photographs, encoders in the step. All 98 convolutions of the UNet keep the layout; "
        "`no_channels_last` leaves the poster's four other levers. The poster's own batch of an H200 is 24. "
        "`poster_optimized` is not steady; the host launches its kernels too slowly.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, Figure("waiting for data [%]", "data_wait_pct", 2), BUSY),
        where=pl.col("recipe").str.starts_with("poster"),
    ),
    Measured(
        title="The poster's recipes by batch, channels_last undone",
        datasets=("2026-11-21-h200-levers-x4",),
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
        datasets=("2026-11-25-h100-pipeline",),
        text="`poster_baseline` executes what `earlier_baseline` does. `poster_optimized` is slower because diffusers' "
        "UNet undid channels_last then, and `poster_baseline` hardly waits for data.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, Figure("waiting for data [%]", "data_wait_pct", 2), BUSY),
    ),
    Measured(
        title="Stable Diffusion 2, text to image",
        datasets=("2026-11-25-h100-sd2",),
        text="`workload=finetune_text2image model=sd2`. The report shows the rates of NeMo, MosaicML and MLPerf beside "
        "these.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM),
    ),
    Measured(
        title="Does the speed depend on the weights?",
        datasets=("2026-11-23-h200-weights",),
        text="Weights as initialised, scaled by their fan-in, and after a training.",
        rows={"model": "model", "recipe": "recipe"},
        figures=(RATE, JOULES),
    ),
    losses,
    Measured(
        title="Two GPUs",
        datasets=("2026-11-23-h200-two-gpus",),
        text="DDP with NCCL on one host; the batch is per GPU. Weak and strong are images/s in percent of the "
        "ideal, the number of GPUs times the mean rate of one: weak at the same batch per GPU, strong at the same "
        "total batch.",
        rows={"recipe": "recipe", "GPUs": "gpus", "batch": "batch"},
        figures=(RATE, JOULES, Figure("weak [%]", "weak"), Figure("strong [%]", "strong")),
        cases=scaling,
    ),
    Measured(
        title="Two GPUs, gradients exchanged by copy engines",
        datasets=("2026-11-26-h200-two-gpus", "2026-11-28-h200-exchange", TWO_GPUS, TWO_GPUS_2),
        text="`exchange=peer_copies` beside `in_place`, DDP and one GPU, on two pairs of cards, the first with "
        "position tokens; its DDP, and the runs of 2026-11-26, were on others. Weak: in percent of twice the mean "
        "rate of the cards alone.",
        rows={"recipe": "recipe", "GPUs": "gpus", "batch": "batch"},
        figures=(RATE, JOULES, Figure("weak [%]", "weak"), *VRAM, CLOCK),
        cases=scaling,
        where=pl.col("recipe").str.starts_with("tuned_hopper") & (pl.col("batch") == 16),
    ),
    Measured(
        title="Two GPUs: the plain loop, and SD 2 as NeMo trains it",
        datasets=(TWO_GPUS, TWO_GPUS_3),
        text="DDP from photographs, encoders in the step. On one GPU `baseline` makes 42.6 to 42.8 images/s, and SD 2 "
        "with `amp_fp16` 63.9 to 64.2. NeMo's page has 1.95 times the rate on twice the nodes.",
        rows={"model": "model", "recipe": "recipe", "GPUs": "gpus", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, BUSY),
        where=(pl.col("gpus") == 2) & pl.col("recipe").is_in(["baseline", "baseline+amp_fp16"]),
    ),
    Measured(
        title="Two GPUs: SD 2, tuned",
        datasets=(TWO_GPUS_3,),
        text="Cached images and texts, by DDP, `exchange=in_place` and `exchange=peer_copies`. One card alone makes "
        "199 to 204 images/s at batch 64.",
        rows={"recipe": "recipe", "GPUs": "gpus", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, CLOCK),
        where=pl.col("model") == "sd2",
    ),
    Measured(
        title="Two GPUs: weights, gradients and moments divided",
        datasets=(TWO_GPUS,),
        text="SD 1.5, batch 8 on each GPU. `zero1` divides the optimizer's state, `fsdp2` all three, `tensor` the "
        "linear layers of the transformer blocks. SD 1.5 needs none of them on these cards. GPUs wait for the host, "
        "and rates fell from the first to the third run of each row, within half an hour.",
        rows={"recipe": "recipe", "GPUs": "gpus", "batch": "batch"},
        figures=(RATE, JOULES, *VRAM, BUSY),
        where=pl.col("recipe").is_in(["baseline+zero1", "baseline+fsdp2", "baseline+tensor"]),
    ),
    Measured(
        title="Two GPUs: FLUX.1 Fill",
        datasets=(TWO_GPUS_2, TWO_GPUS_3),
        text="Adapters, by DDP and by a pipeline, whose GPUs keep half of the blocks each, with four micro-batches: "
        "one card makes 11.7 to 11.9 images/s at batch 8 with 77 GiB. All weights in fp32 under bf16 autocast with "
        "gradient checkpointing, by `zero1`, `fsdp2` and `tensor`: weights, gradients and moments are 177 GiB, more "
        "than one card has. `earlier_baseline+pin_memory+non_blocking` is `baseline` but for encoders in bf16, which "
        "do not run here.",
        rows={"recipe": "recipe", "GPUs": "gpus", "batch": "batch"},
        figures=(SMALL_RATE, JOULES, *VRAM, MFU),
        where=pl.col("model") == "flux_fill",
    ),
    Measured(
        title="Two GPUs: FLUX.1 Fill, blocks of the pipeline divided by bytes",
        datasets=(TWO_GPUS,),
        text="The first GPU had 17 blocks and allocated 43.7 GiB, the second one 40 and 81.0 (by the manifest). DDP of "
        "the same day beside it.",
        rows={"recipe": "recipe", "GPUs": "gpus", "batch": "batch"},
        figures=(SMALL_RATE, JOULES, *VRAM, MFU),
        where=(pl.col("model") == "flux_fill") & pl.col("recipe").str.starts_with("tuned_dit"),
    ),
    Measured(
        title="Making images",
        datasets=("2026-11-23-h200-inference",),
        text="`workload=sd_inference`, from the prompt to decoded images. Another program used the other card of the "
        "host meanwhile. PSNR compares the images with the images of `baseline`.",
        rows={"recipe": "recipe", "batch": "batch"},
        figures=MADE_IMAGES,
        cases=images,
    ),
    Measured(
        title="Making one image",
        datasets=("2026-11-26-h200-image", *HEADLINES[1:], BREADTH),
        text="`generate_hopper` computes in bf16.",
        rows={"model": "model", "recipe": "recipe", "batch": "batch"},
        figures=MADE_IMAGES,
        cases=images,
        where=pl.col("recipe").str.starts_with("generate_hopper"),
    ),
    Measured(
        title="Making images with SD 1.5 and SD 2",
        datasets=("2026-11-25-h100-inference",),
        text="`amp_fp16` is the setting of the NeMo page, whose figures the report shows.",
        rows={"model": "model", "recipe": "recipe", "batch": "batch"},
        figures=MADE_IMAGES,
        cases=images,
    ),
    Measured(
        title="Making images with SD 1.5 and SD 2 on an H200",
        datasets=("2026-11-28-h200-breadth", HEADLINES[3], BREADTH),
        text="The setting of the NeMo page. The CPUs of these three hosts launch kernels too slowly: the GPU is busy "
        "26 to 76 %, and the H100 above is faster in each cell that it has. These are times of the host, not of the "
        "card.",
        rows={"model": "model", "recipe": "recipe", "batch": "batch"},
        figures=(*MADE_IMAGES, BUSY),
        cases=images,
        where=pl.col("recipe") == "amp_fp16",
    ),
    Measured(
        title="Denoisers: memory over the width of an image",
        datasets=("2026-11-23-h200-denoisers",),
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
        title="Denoisers: explicit tiles",
        datasets=("2026-11-23-h200-denoisers", ITEMS),
        text="DRUNet, images 2,048 px high. `explicit`: tiles of 512 px, which share at least 64 px with each "
        "neighbour: 15 for widths to 1,408 px, 20 for 1,472 px, 25 for 2,048 px. A tile takes 3 to 5 % longer than as "
        "many pixels of a whole image: what tiles cost is their overlap. The runs with `off` and `library`, whose "
        "tiles are as large as these images, are older.",
        rows={"tiling": "tiling"},
        across="width_px",
        figures=(Figure("ms", "time_ms", 0), PEAK),
        cases=tiled,
    ),
    Measured(
        title="Denoisers: patches",
        datasets=("2026-11-23-h200-denoisers",),
        text="`workload=denoise_patch`; the batch is the number of patches in it.",
        **PATCHED,
    ),
    Measured(
        title="Denoisers: 2048 x 1366 pixels in patches",
        datasets=("2026-11-28-h200-breadth",),
        text="20 patches of 512 px, which share 64 px with each neighbour, ten in a batch, each image drawn on the "
        "host and copied. A sibling of the page states 4.3 GB for DRUNet with ten such patches on each of two GPUs.",
        rows={"network": "model"},
        figures=(SMALL_RATE, PEAK),
        cases=PATCHES,
    ),
    Measured(
        title="Denoisers: 2048 x 1366 pixels in patches on two GPUs",
        datasets=(TWO_GPUS, TWO_GPUS_3),
        text="Ten of the 20 patches on each GPU, and all 20 on one GPU of the second host. Two runs of the first host "
        "differ by 6 to 20 %.",
        rows={"network": "model", "GPUs": "gpus"},
        figures=(SMALL_RATE, PEAK),
        cases=PATCHES,
    ),
    Measured(
        title="Denoisers: patches that lie on the GPU",
        datasets=("2026-11-25-h100-denoisers",),
        text="`workload.input_mode=device_resident`: the timed call neither draws nor copies the image.",
        **PATCHED,
    ),
    Measured(
        title="Denoisers: patches that need more memory than their tensors",
        datasets=("2026-11-23-h200-denoisers",),
        text="All other cases stay within a tenth of the sum of the tensors. These need more, presumably cuDNN's "
        "workspace. Compare their rate with half the batch in the table above.",
        rows={"network": "model", "patch [px]": "patch_px", "batch": "batch"},
        figures=(PEAK, Figure("beyond the tensors [GiB]", "excess_gib")),
        cases=PATCHES,
        where=pl.col("excess_pct") > 10,
    ),
    Measured(
        title="Training on volumes",
        datasets=("2026-11-23-h200-volumes",),
        text="`workload=volume3d_train` in both shapes of Med-DDPM. `fp32` rounds as IEEE says. Profiles, counters by "
        "Nsight Compute and the published claims are in the report.",
        rows={"network": "model", "recipe": "recipe"},
        figures=STEPS,
    ),
    Measured(
        title="Training on volumes, rounded as PyTorch does by default",
        datasets=("2026-11-28-h200-breadth", BREADTH),
        text="`tf32_convolutions`: convolutions in TF32, matrix products as IEEE says. The whole head.",
        rows={"recipe": "recipe"},
        figures=STEPS,
        where=pl.col("workload") == "volume3d_train",
    ),
    Measured(
        title="Making volumes in 250 steps",
        datasets=("2026-11-29-h200-headlines", BREADTH),
        text="`workload=volume3d_sample`, the whole head, one volume a run after a warm-up of one. Samples of 10 steps "
        "beside those of `fp32`: MS-SSIM 0.9998 (`tuned_volume`) and 1.0000.",
        rows={"recipe": "recipe"},
        figures=(
            Figure("seconds per volume", 1 / pl.col("images_per_s")),
            Figure("J/volume", "joules_per_image", 0),
            *VRAM,
        ),
        where=pl.col("workload") == "volume3d_sample",
    ),
    Measured(
        title="Volumes after training in fp32 and in bf16",
        datasets=(ITEMS, ITEMS_2),
        text="1,005 steps of the whole head with the recipe of each row, from 64 volumes and seed 70; then 16 volumes "
        "in 250 steps each, by `fp32+tf32+channels_last`, beside 16 that were held out: maximum mean discrepancy, and "
        "MS-SSIM of all pairs. The difference is to volumes of the same noise by weights of the other recipe, which "
        "were trained again for it. One training of each: how much seeds differ is not known.",
        rows={"trained with": "trained_with"},
        figures=(
            Figure("MMD", "mmd", 3),
            Figure("MS-SSIM of pairs", "pair_ms_ssim", 3),
            Figure("of pairs held out", "real_pair_ms_ssim", 3),
            Figure("difference [%]", 100 * pl.col("other_weights_rel"), 0),
        ),
        cases=volumes_as_sets,
    ),
    Measured(
        title="Training on volumes with bf16 and compile",
        datasets=("2026-11-25-h100-volumes",),
        text="The whole head, under autocast to bf16.",
        rows={"recipe": "recipe"},
        figures=STEPS,
    ),
    Measured(
        title="Training on volumes with fused kernels",
        datasets=("2026-11-26-h200-volumes", *HEADLINES[1:]),
        text="`recipe=tuned_volume`: fused norms, upsampling without atomic additions, padded channels, measured "
        "cuDNN plans and inductor's CUDA graphs. BraTS had 12 steps.",
        rows={"network": "model", "recipe": "recipe"},
        figures=STEPS,
        where=pl.col("workload") == "volume3d_train",
    ),
    Measured(
        title="LoRA and SDXL",
        datasets=("2026-11-23-h200-lora-sdxl",),
        text="Images and texts are encoded in every step. LoRA saves memory more than time.",
        rows={"model": "model", "recipe": "recipe"},
        figures=(RATE, JOULES, *VRAM, BUSY),
        where=pl.col("workload") == "finetune_inpaint",
    ),
    Measured(
        title="A program that was only watched",
        datasets=("2026-11-23-h200-lora-sdxl",),
        text="diffusers' Dreambooth example under `inpaint-bench watch`: the whole command, with imports and saving.",
        rows={"program": "recipe"},
        figures=(Figure("seconds", "window_s"), Figure("kJ", pl.col("energy_j") / 1000, 2), RATE, JOULES, BUSY),
        where=pl.col("workload") == "command",
    ),
    sidecar,
    datasets,
)
