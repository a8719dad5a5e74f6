"""Keys that both workloads of volume diffusion have, and the shapes of their networks."""

from dataclasses import dataclass, field
from typing import ClassVar

from msgspec import UNSET, UnsetType

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.validation import one_of, within
from inpaint_bench.core.errors import UserError

from . import Facts, Relation, Result, WorkloadConfig, check_standalone

MAX_SIDE = 512  # voxels


@dataclass(frozen=True, kw_only=True)
class VolumeShape:
    """What decides the shapes of a network."""

    image_channels: int
    label_channels: int
    volume: tuple[int, int, int]  # voxels that it was published for
    channels: int = 64
    multipliers: tuple[int, ...] = (1, 1, 2, 3, 4)
    blocks: int = 1  # residual blocks per level
    attention_at: tuple[int, ...] = ()  # downsampling factors with attention, besides the middle
    crop: bool = False  # files are cropped or padded to the sides of the network, not resampled

    @property
    def multiple(self) -> int:
        return int(2 ** (len(self.multipliers) - 1))


SHAPES = {
    "whole_head": VolumeShape(image_channels=1, label_channels=2, volume=(128, 128, 128), attention_at=(8,)),
    "brats": VolumeShape(image_channels=4, label_channels=4, volume=(144, 192, 192), blocks=2, crop=True),
    # For tests and demonstrations, never for results.
    "tiny": VolumeShape(
        image_channels=1, label_channels=2, volume=(16, 16, 16), channels=32, multipliers=(1, 2), attention_at=(2,)
    ),
}


@dataclass(kw_only=True)
class VolumeConfig(WorkloadConfig):
    """A 3-D UNet that removes noise from volumes, conditioned on their segmentation."""

    not_in_variant: ClassVar[tuple[str, ...]] = ("network", "volume")  # the model's name tells them
    data_kinds: ClassVar[tuple[str, ...]] = ("synthetic", "nifti")
    capabilities: ClassVar[tuple[str, ...]] = ("volumes", "one_shape")
    unread: ClassVar[tuple[str, ...]] = (
        "model",
        "quality",
        "data.resolution_px",
        "data.masks",
        "data.full_mask_share",
        "data.block_m",
    )
    network: str = one_of("whole_head", "brats", "tiny", default="whole_head")  # tiny: for tests
    volume: list[int] = field(default_factory=list)  # voxels of the three sides; empty: as published for the network
    diffusion_steps: int = within(2, 4000, 250)  # steps of the noise schedule

    @property
    def shape(self) -> VolumeShape:
        return SHAPES[self.network]

    @property
    def sides(self) -> tuple[int, int, int]:
        """Return depth, height and width in voxels."""
        depth, height, width = self.volume or self.shape.volume
        return depth, height, width

    def volumes_needed(self, bench: BenchConfig) -> tuple[int, int]:
        """Return how many volumes a run trains on, and how many it needs that are held out."""
        raise NotImplementedError

    def check(self, bench: BenchConfig) -> None:
        multiple = self.shape.multiple
        if self.volume and (len(self.volume) != 3 or any(s % multiple or not 0 < s <= MAX_SIDE for s in self.volume)):
            raise UserError(
                f"workload.volume={list(self.volume)}: must be three multiples of {multiple}, at most {MAX_SIDE}"
            )
        check_standalone(bench)
        if bench.recipe.precision == "fp16":
            raise UserError(f"recipe.precision=fp16: workload={self.name} takes fp32 or bf16")

    def model(self, bench: BenchConfig) -> str:
        return f"{self.network} {'x'.join(map(str, self.sides))}"


class VolumeFacts(Facts, kw_only=True):
    """Facts of both workloads."""

    network: str
    volume: list[int]
    diffusion_steps: int
    parameters: int
    cudnn: int | None  # version
    flop_per_image: int | UnsetType = UNSET
    sampler_steps: int | UnsetType = UNSET
    learning_rate: float | UnsetType = UNSET
    volumes: int | UnsetType = UNSET


class VolumeResult(Result, kw_only=True):
    """Columns that both have: what a call is of."""

    repeated: ClassVar[tuple[str, ...]] = ("network",)
    relations: ClassVar[tuple[Relation, ...]] = (
        Relation("depth", lambda volume: volume[0]),
        Relation("height", lambda volume: volume[1]),
        Relation("width", lambda volume: volume[2]),
    )

    network: str
    depth: int
    height: int
    width: int
