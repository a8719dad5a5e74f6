"""Declarations of the workloads: a module per workload, named as it is, with `Config` and, if it has one, `Result`.

`Config` is the dataclass of its keys below `workload`, chosen by `/<name>_schema@_here_` in the defaults of its YAML.
`BOUNDS`, if it has some, are those of its losses and metrics of quality.
`Result` is a row of its own figures; merge collects them as the table `results_<name>` of the dataset. Nothing here
loads torch: launcher, sidecar and analysis read these declarations too.
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import msgspec
from msgspec import UNSET, UnsetType

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.bench import WorkloadConfig as WorkloadConfig
from inpaint_bench.core.config.recipe import check_levers
from inpaint_bench.core.errors import UserError


def check_standalone(bench: BenchConfig) -> None:
    """Raise UserError for what a workload with a network of its own has no use for."""
    check_levers(bench)
    if bench.searches_batch:
        raise UserError(f"batch=auto: workload={bench.workload.name} does not search a batch; give a number")
    if bench.model.weights:
        raise UserError(f"model.weights: workload={bench.workload.name} has a network of its own")


class Relation(NamedTuple):
    """A column of results, or a fact of the workload, that follows from others, so that merge can compare the two.

    The parameters of `compute` are columns of the row, else facts of the workload, else facts of the run:
    `window_images`, `host_ms`, `device_ms` and `step_ms` (of the device if it is known) of the step, `memory_mib` of
    the smallest GPU, `run_batch`, `run_gpus`. For a fact they are other facts, and `levers`, the requested value by
    field. Where one of them is unknown, nothing is compared.
    """

    column: str
    compute: Callable[..., Any]
    tolerance: float = 1e-6  # relative
    limit: Literal["equal", "least", "most"] = "equal"


class Facts(msgspec.Struct, kw_only=True):
    """What a workload tells of itself: the manifest's `workload_facts`, without what is UNSET."""

    relations: ClassVar[tuple[Relation, ...]] = ()

    precision: str
    tf32: bool | UnsetType = UNSET
    channels_last: bool | UnsetType = UNSET
    cudnn_benchmark: bool | UnsetType = UNSET
    fp32_precision: dict[str, str] | UnsetType = UNSET  # precision of operations that stay fp32: tf32 or ieee
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

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation("parameters", lambda parameters_by_network: parameters_by_network["unet"], 0.0),
    )

    resolution_px: int
    weights_precision: str
    own_shapes: bool  # the weights have other shapes than the model whose name the run carries
    parameters: int  # parameters of the UNet
    parameters_by_network: dict[str, int]
    flop_per_image: int
    flop_parts: dict[str, int]
    location_tokens: int
    num_images: int


class Result(msgspec.Struct, kw_only=True):
    """A row of a workload's own table: its figures of one timed call. Columns are texts, numbers and truth values."""

    each_step: ClassVar[bool] = True  # every step has a row
    bounds: ClassVar[dict[str, tuple[float, float]]] = {}  # least and largest value; other numbers: 0 and above
    repeated: ClassVar[tuple[str, ...]] = ()  # columns that repeat a fact of the workload
    relations: ClassVar[tuple[Relation, ...]] = ()
    null_if_not_finite: ClassVar[tuple[str, ...]] = ()  # losses, which `losses_not_finite` counts

    window_id: str  # window of the call in the step table
    step: int  # negative: no call of this row could be made


def result_columns(result: type[Result]) -> list[tuple[str, type, bool]]:
    """Return name, type (str, int, float or bool) and whether it may be null, of each column."""
    columns = []
    for field in msgspec.structs.fields(result):
        options = get_args(field.type) or (field.type,)
        (kind,) = (option for option in options if option is not NoneType)
        columns.append((field.name, kind, NoneType in options))
    return columns


@cache
def declarations() -> dict[str, Any]:
    """Return the modules of this package by the name of their workload."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def results() -> dict[str, type[Result]]:
    """Return the record of results of each workload that has one."""
    return {name: module.Result for name, module in declarations().items() if hasattr(module, "Result")}
