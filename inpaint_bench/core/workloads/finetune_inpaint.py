"""Keys of the workload `finetune_inpaint`."""

import json
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.levers import CAPABILITIES, RecipeConfig
from inpaint_bench.core.config.recipe import check_network
from inpaint_bench.core.config.validation import one_of, within
from inpaint_bench.core.errors import UserError

from . import Relation, StableDiffusionFacts, WorkloadConfig

# Least and largest loss of steps and validations, and metrics of quality. The noise that is predicted has a variance of
# 1: a network that predicts zero has a loss of 1.
BOUNDS = {"loss": (0, 10), "psnr_hole_db": (-10, 100), "ssim_hole": (-1, 1), "lpips": (0, 2)}
DDP_EAGER_STEPS = 11  # before DDP may be captured in a CUDA graph: PyTorch's notes on CUDA graphs
GRAPH_WARMUP = f"workload.warmup_steps={DDP_EAGER_STEPS + 2}"  # what a launch of several GPUs with cuda_graph needs


@dataclass(kw_only=True)
class Config(WorkloadConfig):
    """Fine-tuning. Only training reads the keys after train_steps."""

    capabilities = tuple(need for need in CAPABILITIES if need != "volumes")
    unet_channels = (9,)
    unread = ("quality.inception_weights", "quality.clip_model")
    not_in_variant = (
        *("min_warmup_s", "epochs", "dataset_images", "train_steps", "validate_every", "validation_images"),
        *("sample_images", "sample_steps", "checkpoint_every_s", "keep_checkpoints", "save_weights", "resume"),
    )

    min_warmup_s: float = within(0, 1e6, 0.0)  # after warmup_steps, which may compile: load the GPU for so long
    epochs: int = within(1, 100_000, 16)  # the report states the time and cost of so many; train_steps trains
    dataset_images: int = within(1, 1_000_000_000, 6500)  # images in one such epoch
    learning_rate: float = within(1e-12, 10, 1.0e-5)  # learning rate of the optimizer, the highest of a schedule
    # adamw is executed as recipe.optimizer says; adafactor; muon for matrices, with adamw for all other weights
    optimizer: str = one_of("adamw", "adafactor", "muon", default="adamw")
    weight_decay: float = within(0, 10, 0.01)  # shrinks all trained weights, times the learning rate
    max_grad_norm: float | None = within(1e-6, 1e6, None)  # gradients are clipped to this norm; null: not clipped
    train_steps: int | None = within(1, 1_000_000_000, None)  # null: only warm-up and one measured stretch
    # the learning rate after its warm-up: constant, or falling to 0 at the end, linearly or as half a cosine
    schedule: str = one_of("constant", "linear", "cosine", default="constant")
    schedule_warmup: int = within(0, 1_000_000_000, 0)  # first steps, over which the learning rate rises linearly
    schedule_steps: int | None = within(1, 1_000_000_000, None)  # length of linear and cosine; null: train_steps
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
    def steps_of_schedule(self) -> int | None:
        """Return after how many steps the learning rate is 0; None if it stays."""
        return None if self.schedule == "constant" else self.schedule_steps or self.train_steps

    def update_keys(self) -> dict[str, Any]:
        """Return the keys, beside the learning rate, that decide the updates and differ from their defaults."""
        values = vars(self) | {"schedule_steps": self.steps_of_schedule}
        return {name: values[name] for name in UPDATE if values[name] != getattr(Config, name)}

    def variant(self) -> str | None:
        # Schedules of different lengths are different, even if one length is that of the training.
        return super(Config, replace(self, schedule_steps=self.steps_of_schedule)).variant()

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
        self._check_schedule()
        self._check_update(bench)

    def _check_schedule(self) -> None:
        """Raise UserError for a schedule that does not fit the training."""
        end = self.steps_of_schedule
        if self.schedule_steps and end is None:
            raise UserError(
                f"workload.schedule_steps={self.schedule_steps}: schedule=constant has no end; leave it out, or set "
                "workload.schedule=linear or cosine"
            )
        if end and self.train_steps and end < self.train_steps:
            raise UserError(
                f"workload.schedule_steps={end}: the learning rate would be 0 from there to the end of the training, "
                f"workload.train_steps={self.train_steps}; set as many or more"
            )
        if self.train_steps and self.schedule_warmup >= min(self.train_steps, end or self.train_steps):
            raise UserError(
                f"workload.schedule_warmup={self.schedule_warmup}: the training ends before the warm-up does, after "
                f"workload.train_steps={self.train_steps}; set fewer"
            )

    def _check_update(self, bench: BenchConfig) -> None:
        """Raise UserError for an optimizer, or clipping, that the recipe does not go with."""
        recipe, optimizer = bench.recipe, self.optimizer
        for field, optimizers, taken, reason in NOT_WITH:
            if optimizer in optimizers and (value := getattr(recipe, field)) not in taken:
                value = str(value).lower()
                raise UserError(f"workload.optimizer={optimizer}: not with recipe.{field}={value}: {reason}")
        if self.max_grad_norm is not None and recipe.sharding not in ("none", "zero1"):
            raise UserError(
                f"workload.max_grad_norm={self.max_grad_norm:g}: not with recipe.sharding={recipe.sharding}: each GPU "
                "has a part of the gradients, and would clip to the norm of its own"
            )


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
            f"set {GRAPH_WARMUP} or more"
        )


# Keys that decide the updates beside the learning rate, and are newer than the first checkpoints.
UPDATE = ("max_grad_norm", "optimizer", "weight_decay", "schedule", "schedule_warmup", "schedule_steps")
# What other optimizers than AdamW do not go with: fields of the recipe, optimizers, the values taken, and the reason.
_OTHERS = ("adafactor", "muon")
NOT_WITH: tuple[tuple[str, tuple[str, ...], tuple[Any, ...], str], ...] = (
    ("weights", _OTHERS, ("fp32", "half"), "weights that are trained in bf16 have an AdamW of their own"),
    ("optimizer", ("adafactor",), ("adamw",), "that is how AdamW is executed"),
    ("optimizer", ("muon",), ("adamw", "adamw_loop", "adamw_fused"), "its 8-bit moments are for AdamW alone"),
    ("sharding", _OTHERS, ("none",), "it needs whole weights and gradients on every GPU"),
    ("cuda_graph", _OTHERS, (False,), "PyTorch's reads numbers on the host in every step, which a graph cannot replay"),
    ("precision", ("muon",), ("bf16", "fp32"), "it does not count its updates, by which skipped ones are found"),
)
# Keys that mean nothing without train_steps: those declared after it.
TRAINING_ONLY = [spec.name for spec in fields(Config)]
del TRAINING_ONLY[: TRAINING_ONLY.index("train_steps") + 1]
