"""Keys that both workloads of denoisers have."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.validation import one_of, within
from inpaint_bench.core.errors import UserError

from . import Facts, Relation, Result, WorkloadConfig, check_standalone

MODELS = {"drunet": "DRUNet", "unet": "UNet", "dncnn": "DnCNN"}
CHANNELS = (64, 128, 256, 512)


@dataclass(kw_only=True)
class DenoiserConfig(WorkloadConfig):
    """Memory and time of denoisers with random weights, as a published study measured them."""

    not_in_variant: ClassVar[tuple[str, ...]] = ("models", "channels")  # the model's name tells them
    data_kinds: ClassVar[tuple[str, ...]] = ("synthetic",)
    unread: ClassVar[tuple[str, ...]] = ("model", "quality", "data.")

    warmup_steps: int = within(0, 1000, 3)  # warm-up calls of each case
    measure_steps: int = within(1, 100_000, 3)  # measured calls of each case, at least
    min_measure_s: float = within(0, 1e4, 0.0)  # measured time of each case, at least
    models: list[str] = field(default_factory=lambda: list(MODELS))  # networks to run
    models_resident: str = one_of("all", "one", default="all")  # whose weights are on the GPU at a time
    channels: list[int] = field(default_factory=lambda: list(CHANNELS))  # channels of the levels; DnCNN has the first
    sigma: float = within(0, 1, 0.1)  # standard deviation of the noise, of images between 0 and 1
    tiling: str = one_of("library", "off", "explicit", default="library")  # library: by deepinv's rule; off: one pass
    tile_px: int = within(64, 8192, 512)  # explicit: side of a tile
    overlap_px: int = within(0, 1024, 32)  # explicit: neighbours share at least twice as much
    # where the input of a call comes from: the GPU, or the host's memory, pinned or not
    input_mode: str = one_of("device_resident", "host_random", "pinned", default="device_resident")

    def check(self, bench: BenchConfig) -> None:
        if not self.models or len(set(self.models)) < len(self.models) or not set(self.models) <= MODELS.keys():
            raise UserError(f"workload.models={list(self.models)}: name some of {', '.join(MODELS)}, none twice")
        if len(self.channels) != 4 or any(channels < 1 for channels in self.channels):
            raise UserError(f"workload.channels={list(self.channels)}: must be four numbers of 1 or more")
        if self.tile_px % 8 or 2 * self.overlap_px >= self.tile_px:
            values = f"workload.tile_px={self.tile_px}, overlap_px={self.overlap_px}"
            raise UserError(f"{values}: tile_px must be a multiple of 8 and more than twice overlap_px")
        check_standalone(bench)
        if bench.repeats == "auto":
            raise UserError(f"repeats=auto: workload={self.name} has no images/s to judge by; give a number")

    def model(self, bench: BenchConfig) -> str:
        names = ", ".join(MODELS[name] for name in self.models)
        return names if tuple(self.channels) == CHANNELS else f"{names} ({'-'.join(map(str, self.channels))} channels)"


class DenoiserFacts(Facts, kw_only=True):
    """Facts of both workloads."""

    channels: list[int]
    parameters_by_network: dict[str, int]
    tiling: str
    input_mode: str
    models_resident: str
    image_px: int | UnsetType = UNSET
    image_width_px: int | UnsetType = UNSET
    patch_overlap_px: int | UnsetType = UNSET
    patches_px: list[int] | UnsetType = UNSET
    patch_batches: list[int] | UnsetType = UNSET


def among(value: Any, known: Iterable[Any]) -> Any:
    """Return the value if it is one of the known ones, else the first of these."""
    return value if value in known else next(iter(known))


CALLS = {"direct": 1, "pad": 1, "onesplit4": 4}  # network calls per image, by branch; with tiles, one per tile


def _fp32_mib(model: str, parameters_by_network: dict[str, int], models_resident: str = "one") -> float:
    resident = [model] if models_resident == "one" else parameters_by_network
    return 4 * sum(parameters_by_network[name] for name in resident) / 2**20


class CaseResult(Result, kw_only=True):
    """Columns that both have: a call of a case. Memory is that of the rank with the most; without CUDA it is null."""

    repeated: ClassVar[tuple[str, ...]] = ("tiling", "input_mode")
    relations: ClassVar[tuple[Relation, ...]] = (
        Relation("model", lambda model, parameters_by_network: among(model, parameters_by_network)),
        Relation("published_plan", lambda channels: tuple(channels) == CHANNELS),
        Relation("time_ms", lambda host_ms: host_ms),
        Relation("weights_mib", _fp32_mib, 1e-3, "least"),
        Relation("allocated_peak_mib", lambda weights_mib: weights_mib, limit="least"),
        Relation("reserved_peak_mib", lambda allocated_peak_mib: allocated_peak_mib, limit="least"),
        Relation("nvml_used_mib", lambda reserved_peak_mib: reserved_peak_mib, limit="least"),
        Relation("nvml_used_mib", lambda memory_mib: memory_mib, 0.01, "most"),
    )

    model: str
    batch: int
    published_plan: bool  # its channels are the published ones
    tiling: str
    input_mode: str
    branch: str  # branch for each batch
    calls: int  # calls of the network, in all
    tile_h_px: int
    tile_w_px: int
    time_ms: float | None = None
    weights_mib: float | None = None  # all that is allocated between two cases
    allocated_peak_mib: float | None = None
    reserved_peak_mib: float | None = None
    nvml_used_mib: float | None = None
    out_of_memory: str | None = None  # what was asked for; time and peaks are null
