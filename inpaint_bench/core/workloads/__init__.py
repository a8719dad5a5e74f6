"""Declarations of the workloads: a module per workload, named as it is, with `Config` and, where it has one, `Result`.

`Config` is the dataclass of its keys below `workload`, chosen by `/<name>_schema@_here_` in the defaults of its YAML.
`Result` is a row of its own figures; merge collects them as the table `results_<name>` of the dataset. Nothing here
loads torch: launcher, sidecar and analysis read these declarations too.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from inpaint_bench.core.config.levers import FIELDS, capabilities
from inpaint_bench.core.config.validation import within
from inpaint_bench.core.errors import UserError

if TYPE_CHECKING:
    from inpaint_bench.core.config.bench import BenchConfig


# What a lever may need of a workload, in words. RecipeConfig declares the needs of each lever with its field.
CAPABILITIES = {
    "unet": "the UNet of Stable Diffusion",
    "vae": "an encoder of images in its step",
    "optimizer": "an AdamW that updates its weights",
    "backward": "a backward pass",
    "data": "a data loader",
    "ranks": "several processes",
    "one_shape": "a network that is called with one shape",
    "graph": "a step that can be captured in a CUDA graph",
}


@dataclass(kw_only=True)
class WorkloadConfig:
    """What is executed and measured: the keys that every workload has.

    Every other key is part of `variant`: only runs that agree in it are averaged. `not_in_variant` of a subclass lists
    more keys that do not change the work of a step, or that `model` tells.
    """

    not_in_variant: ClassVar[tuple[str, ...]] = ()
    data_kinds: ClassVar[tuple[str, ...]] = ("synthetic", "folder", "prepared")  # that it can read
    capabilities: ClassVar[tuple[str, ...]] = ()  # of CAPABILITIES: levers that need others are refused
    unet_channels: ClassVar[tuple[int, ...]] = ()  # inputs that its Stable Diffusion UNet may have; none: has no such

    name: str  # the name of its file, and of workload=
    module: str  # Python module with the workload
    warmup_steps: int = within(0, 1_000_000, 10)  # steps before measuring begins
    measure_steps: int = within(1, 100_000_000, 50)  # steps that are measured, at least
    min_measure_s: float = within(0, 1e6, 20.0)  # measuring goes on until both are reached

    @property
    def resumes(self) -> bool:
        """Return whether a job that is stopped continues where it was: it may requeue itself at its time limit."""
        return False

    @property
    def parallel(self) -> bool:
        """Return whether it can use several GPUs, with a process each."""
        return False

    @property
    def validates(self) -> bool:
        """Return whether images have to be held out."""
        return False

    def check(self, bench: BenchConfig) -> None:
        """Raise UserError for keys of the whole configuration that this workload cannot use. Before submission."""

    @classmethod
    def levers(cls) -> list[str]:
        """Return the fields of a recipe that this workload has a use for."""
        return [field for field in FIELDS if {*capabilities(field)} <= {*cls.capabilities}]

    def check_levers(self, bench: BenchConfig) -> None:
        """Raise UserError for a lever that needs what this workload does not have."""
        from inpaint_bench.core.config import recipe  # which imports the configuration

        for field, name in recipe.levers(bench.recipe).items():
            if missing := [CAPABILITIES[need] for need in capabilities(field) if need not in self.capabilities]:
                raise UserError(
                    f"{name}: workload={self.name} has no use for it, as it needs {' and '.join(missing)}; "
                    f"levers: {', '.join(self.levers())}"
                )

    def check_standalone(self, bench: BenchConfig) -> None:
        """Raise UserError for what a workload with a network of its own has no use for."""
        self.check_levers(bench)
        if bench.searches_batch:
            raise UserError(f"batch=auto: workload={self.name} does not search a batch; give a number")
        if bench.model.weights:
            raise UserError(f"model.weights: workload={self.name} has a network of its own")

    def model(self, bench: BenchConfig) -> str:
        """Return the name of the model in manifest and report."""
        return bench.model.name

    def variant(self) -> str | None:
        """Return the keys that differ from their defaults and change what is executed, e.g. `tiling=off`."""
        same = {*(spec.name for spec in fields(WorkloadConfig)), *self.not_in_variant}
        changed = []
        for spec in fields(self):
            default = spec.default if spec.default_factory is MISSING else spec.default_factory()
            if spec.name not in same and (value := getattr(self, spec.name)) != default:
                text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
                changed.append(f"{spec.name}={text}")
        return ", ".join(changed) or None


class Facts(msgspec.Struct, kw_only=True):
    """What a workload tells of itself: the manifest's `workload_facts`, of which analysis reads some by name.

    What is UNSET is left out there.
    """

    precision: str
    tf32: bool | UnsetType = UNSET
    channels_last: bool | UnsetType = UNSET
    cudnn_benchmark: bool | UnsetType = UNSET
    fp32_precision: dict[str, str] | UnsetType = UNSET  # of operations that stay fp32: tf32 or ieee
    weights: str | UnsetType | None = UNSET  # a file or folder; None: random
    compile_s: float | UnsetType | None = UNSET  # first pass with compilation; None: nothing was compiled
    setup_s: float | UnsetType = UNSET
    # The worker adds these.
    uniform_steps: bool | UnsetType = UNSET
    skipped_steps: int | UnsetType | None = UNSET  # None: the device did not answer
    losses_not_finite: int | UnsetType = UNSET
    warmup_s: float | UnsetType = UNSET


class StableDiffusionFacts(Facts, kw_only=True):
    """Facts of workloads with the networks of Stable Diffusion."""

    resolution_px: int
    weights_precision: str
    own_shapes: bool  # the weights have other shapes than the model whose name the run carries
    parameters: int  # of the UNet
    parameters_by_network: dict[str, int]
    flop_per_image: int
    flop_parts: dict[str, int]
    location_tokens: int
    num_images: int


class Result(msgspec.Struct, kw_only=True):
    """A row of a workload's own table: its figures of one timed call. Columns are texts, numbers and truth values."""

    window_id: str  # of the call in the step table
    step: int  # negative: no call of this row could be made


def result_columns(result: type[Result]) -> list[tuple[str, type, bool]]:
    """Return name, type (str, int, float or bool) and whether it may be null, of each column."""
    columns = []
    for name, hint in get_type_hints(result).items():
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        (kind,) = (option for option in options if option is not type(None))
        columns.append((name, kind, type(None) in options))
    return columns


@cache
def declarations() -> dict[str, Any]:
    """Return the modules of this package by the name of their workload."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def results() -> dict[str, type[Result]]:
    """Return the record of results of each workload that has one."""
    return {name: module.Result for name, module in declarations().items() if hasattr(module, "Result")}
