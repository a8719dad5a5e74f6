"""A hash of what a point executes, by which runs, time limits and repetitions find their like."""

import hashlib
import json
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from .parse import resolved_values

_PLACEMENT: Final = ("site", "sites", "out", "name", "wait", "dry_run", "max_points", "budget", "time_min", "mem_gb")
_ESTIMATES: Final = ("memory_check", "datasets", "silence")
_REPLICATION: Final = ("seed", "repeats", "repeats_target", "repeats_max", "order_seed", "points_per_job")
_PROFILING: Final = ("profiler", "profiler_launches", "profiler_limit_s")  # begins when everything is measured
_OTHERS: Final = ("identity", "study", "prepare", "rerun", "notify", "track")
_LEFT_OUT: Final = {"hydra", *_PLACEMENT, *_ESTIMATES, *_REPLICATION, *_PROFILING, *_OTHERS}

# The fields that are hashed whatever their value. Never add one: a field that is not listed is hashed only if it
# differs from its default, so that a configuration keeps its hash when a field is added. `workload` has the keys of
# every workload, the lines below it those of one.
ALWAYS_HASHED: Final = {
    block: frozenset(names.split())
    for block, names in {
        "": "gpu model data recipe telemetry workload quality batch gpus nodes demonstration",
        "gpu": "name title nvml_name architecture memory_gb memory_type bandwidth_gb_s bf16_dense_tflops power_limit_w "
        "max_sm_clock_mhz home_site capture source",
        "model": "name weights unet vae text_encoder text_encoder_2 scheduler location_tokens",
        "data": "kind root num_images resolution_px seed masks full_mask_share validation_share block_m",
        "recipe": "name device precision tf32 unet vae_encoder weights lora_rank lora_alpha lora_targets "
        "lora_text_encoder channels_last cudnn_benchmark cudnn_benchmark_limit attention compile force_layout pdl "
        "cuda_graph optimizer grad_checkpoint accumulate bucket_mb bucket_view static_graph compress sharding ema "
        "num_workers prefetch_factor pin_memory non_blocking format stage_to cache_image cache_masked "
        "cache_text cache_storage mask_pool",
        "telemetry": "name source capture fast_hz energy_hz slow_hz part_s journal_s ready_timeout_s",
        "quality": "lpips_weights inception_weights clip_model",
        "workload": "name module warmup_steps measure_steps min_measure_s",
        "finetune_inpaint": "min_warmup_s epochs dataset_images learning_rate train_steps validate_every "
        "validation_images sample_images sample_steps checkpoint_every_s keep_checkpoints save_weights resume",
        "sd_inference": "sampler steps guidance",
        "fid_clip": "sampler steps guidance images judges",
        "volume3d_sample": "network volume diffusion_steps steps reference_steps weights",
        "volume3d_train": "network volume diffusion_steps volumes validation_volumes learning_rate save_weights",
        "denoise_patch": "models models_resident channels sigma tiling tile_px overlap_px input_mode image_px "
        "patches_px patch_batches",
        "denoise_shape": "models models_resident channels sigma tiling tile_px overlap_px input_mode height_px "
        "width_min_px width_max_px width_steps_px",
    }.items()
}
_FOR_REPORTS: Final = {"gpu": ("fp32_tflops", "tf32_dense_tflops", "verified")}  # no run reads them
WITHOUT_FIELD: Final = {"decode": "pillow"}  # was a field of `recipe` that is hashed always; hashes must not change


def config_hash(config: DictConfig) -> str:
    """Return 12 hex digits over the configuration without what only places, repeats or profiles a point.

    Sites are left out, so that the same point on two of them is comparable, and so is the seed, because it makes
    replicates. The tracker only reads. Paths that say what is executed (data.root, model.weights) are included.
    """
    content = resolved_values(config, _LEFT_OUT)
    if "recipe" in content:
        content["recipe"] |= WITHOUT_FIELD
    _drop_new_defaults(content, config, "")
    for block in content.keys() & ALWAYS_HASHED.keys():
        _drop_new_defaults(content[block], config[block], block)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _drop_new_defaults(content: dict[str, Any], node: DictConfig, block: str) -> None:
    """Remove the fields that are new since the list above was made and have their defaults."""
    kind: Any = OmegaConf.get_type(node)
    always = ALWAYS_HASHED[block]
    if block == "workload":  # with a module for each
        always = always | ALWAYS_HASHED.get(kind.__module__.rpartition(".")[2], frozenset())
    for name in _FOR_REPORTS.get(block, ()):
        content.pop(name, None)
    for spec in fields(kind) if is_dataclass(kind) else ():
        if spec.name in always or spec.name not in content:
            continue
        default: Any = spec.default if spec.default_factory is MISSING else spec.default_factory()
        default = asdict(default) if is_dataclass(default) and not isinstance(default, type) else default
        if content[spec.name] == default:
            del content[spec.name]
