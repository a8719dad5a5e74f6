"""Keys of the workload `finetune_inpaint`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.levers import CAPABILITIES, RecipeConfig
from inpaint_bench.core.config.recipe import check_network
from inpaint_bench.core.config.validation import within
from inpaint_bench.core.errors import UserError

from . import Relation, StableDiffusionFacts, WorkloadConfig

# Least and largest loss of steps and validations, and metrics of quality. The noise that is predicted has a variance of
# 1: a network that predicts zero has a loss of 1.
BOUNDS = {"loss": (0, 10), "psnr_hole_db": (-10, 100), "ssim_hole": (-1, 1), "lpips": (0, 2)}
DDP_EAGER_STEPS = 11  # before DDP may be captured in a CUDA graph: PyTorch's notes on CUDA graphs


@dataclass(kw_only=True)
class Config(WorkloadConfig):
    """Fine-tuning. Only training reads the keys after train_steps."""

    capabilities = tuple(need for need in CAPABILITIES if need != "volumes")
    unet_channels = (9,)
    not_in_variant = (
        *("min_warmup_s", "epochs", "dataset_images", "train_steps", "validate_every", "validation_images"),
        *("sample_images", "sample_steps", "checkpoint_every_s", "keep_checkpoints", "save_weights", "resume"),
    )

    min_warmup_s: float = within(0, 1e6, 0.0)  # after warmup_steps, which may compile: load the GPU for so long
    epochs: int = within(1, 100_000, 16)  # the report states the time and cost of so many; train_steps trains
    dataset_images: int = within(1, 1_000_000_000, 6500)  # images in one such epoch
    learning_rate: float = within(1e-12, 10, 1.0e-5)  # learning rate of the optimizer, constant
    max_grad_norm: float | None = within(1e-6, 1e6, None)  # gradients are clipped to this norm; null: not clipped
    train_steps: int | None = within(1, 1_000_000_000, None)  # null: only warm-up and one measured stretch
    validate_every: int = within(0, 1_000_000_000, 0)  # steps; 0: never. Also before the first and after the last
    validation_images: int = within(1, 1_000_000, 64)  # validate on at most this many held-out images
    sample_images: int = within(0, 64, 0)  # held-out images restored at the end, for metrics and a grid
    sample_steps: int = within(1, 999, 20)  # denoising steps of each sampled image
    checkpoint_every_s: float = within(0, 1e7, 0.0)  # 0: only on a signal and at the end of training
    keep_checkpoints: int = within(1, 1000, 2)  # checkpoints to keep, the newest
    save_weights: bool = False  # a diffusers pipeline folder when training ends
    resume: bool = True  # from the last good checkpoint of this point

    @property
    def resumes(self) -> bool:
        return self.train_steps is not None

    @property
    def validates(self) -> bool:
        return bool(self.validate_every or self.sample_images)

    def encodes_texts_once(self, recipe: RecipeConfig) -> bool:
        """Return whether nothing but the cache reads the text encoders: no picture is made, and they are not saved."""
        return not self.validates and (not self.save_weights or bool(recipe.lora_rank))

    def check(self, bench: BenchConfig) -> None:
        if self.min_warmup_s and self.train_steps is not None:
            raise UserError(
                f"workload.min_warmup_s={self.min_warmup_s:g}: a training does not read this. "
                "Set workload.warmup_steps, or leave workload.train_steps empty to benchmark."
            )
        check_network(bench)
        saved = not bench.model.random_only and (bench.recipe.lora_rank or bench.model.weights)
        if self.save_weights and not bench.model.byte_tokenized and not saved:
            raise UserError(
                "workload.save_weights=true: random weights of SDXL and of transformers are for measuring alone"
            )
        if bench.ranks > 1:
            _check_parallel(bench)
        # A key of training that no training reads would go unnoticed, for example if train_steps was forgotten.
        for name in TRAINING_ONLY:
            if (value := getattr(self, name)) != getattr(Config, name) and self.train_steps is None:
                key = f"workload.{name}={json.dumps(value)}"
                raise UserError(f"{key}: only training reads this. Set workload.train_steps to train.")


def finetune_keys(bench: BenchConfig) -> Config:
    """Return the keys of fine-tuning, if that is the workload."""
    assert isinstance(bench.workload, Config)
    return bench.workload


def _count_trained(parameters_by_network: dict[str, int], levers: dict[str, Any]) -> int | None:
    if "sharding" in levers:  # each rank counts its own part
        return None
    trained = parameters_by_network.get("lora", parameters_by_network["unet"])
    return trained + parameters_by_network.get("location", 0)


def _flop_per_image(flop_parts: dict[str, float], encodes_online: int, text_online: bool) -> float:
    # Steps with LoRA have no gradients of the frozen weights and are recorded by themselves.
    step = flop_parts.get("unet_step") or 3 * flop_parts["unet_forward"]
    text = flop_parts.get("text_step") or flop_parts.get("text_encode", 0)
    return step + text_online * text + encodes_online * flop_parts.get("vae_encode", 0)


class Facts(StableDiffusionFacts, kw_only=True):
    """What makes rates of trainings comparable."""

    relations: ClassVar[tuple[Relation, ...]] = (
        *StableDiffusionFacts.relations,
        Relation("parameters_trained", _count_trained, 0.01),  # kernels may keep weights padded
        Relation("flop_per_image", _flop_per_image),
    )

    parameters_trained: int
    encodes_online: int  # encodings of an image in a step
    text_online: bool
    cache: dict[str, Any] | None
    optimizer: dict[str, Any]
    epochs: int
    dataset_images: int
    batch_requested: int | str | UnsetType = UNSET


def _check_parallel(bench: BenchConfig) -> None:
    where = f"gpus={bench.gpus} nodes={bench.nodes}"
    if bench.searches_batch:
        raise UserError(f"{where}: batch=auto searches on one GPU; find the batch with gpus=1, then set it")
    if bench.recipe.format == "webdataset":
        raise UserError(f"{where}: recipe.format=webdataset has one stream; choose files, memmap or hdf5")
    if bench.recipe.cuda_graph and bench.workload.warmup_steps <= DDP_EAGER_STEPS:
        raise UserError(
            f"{where}: recipe.cuda_graph=true captures after {DDP_EAGER_STEPS} eager steps of DDP; "
            f"set workload.warmup_steps={DDP_EAGER_STEPS + 2} or more"
        )


# Keys that mean nothing without train_steps: those declared after it.
TRAINING_ONLY = [spec.name for spec in fields(Config)]
del TRAINING_ONLY[: TRAINING_ONLY.index("train_steps") + 1]
