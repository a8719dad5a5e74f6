"""What a lever is, and what it can observe of an execution: two more steps or calls, one of them under the profiler.

A lever is one field of a recipe: it says whether it can run, changes an execution, and is read back.
"""

from __future__ import annotations

import re
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import DeviceType, ProfilerActivity, profile

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.levers import RecipeConfig
from inpaint_bench.core.errors import first_line
from inpaint_bench.core.kernels import KernelClass, classify
from inpaint_bench.models.execution import Execution
from inpaint_bench.models.training_step import StepComponents
from inpaint_bench.profiling.profile import synchronize

E = TypeVar("E", bound=Execution)
KERNEL_LAUNCH = re.compile(r"^(cuda|cu)LaunchKernel")
GRAPH_LAUNCH = re.compile(r"^cudaGraphLaunch")
REGISTRY: list[Lever[Any]] = []  # in the order in which they are applied


class Phase(IntEnum):
    """When a lever is applied: first of all caches are opened, which the weights of the frozen networks identify before
    they are cast. Then networks are replaced, last what is done around them.
    """

    CACHES, NETWORKS, WEIGHTS, ADAPTERS, EXECUTION, STEP, DATA, WRAPPERS = range(8)


class Verification(NamedTuple):
    """What is really in effect: `read_back` of the field judges it (core/config/levers.py).

    `active` is False if something else shows that the lever is not active, None if nothing was observed.
    """

    effective: Any
    evidence: str
    active: bool | None = True


class Lever(Generic[E]):
    """One field of `RecipeConfig`. Its methods are called only if the field differs from its default.

    A class with a `field`, or several `fields` that are read back alike, is registered by its definition. What it needs
    of a workload stands with that field in `RecipeConfig`, and is checked before anything is submitted.
    """

    field: str
    fields: ClassVar[Iterable[str]] = ()
    phase: ClassVar[int] = Phase.EXECUTION

    def __init_subclass__(cls) -> None:
        for name in cls.__dict__.get("fields", [cls.field] if "field" in cls.__dict__ else []):
            lever = cls()
            lever.field = name
            insort(REGISTRY, lever, key=lambda lever: lever.phase)

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        """Return why the lever cannot run on this machine, in a sentence, or None. Builds nothing.

        What the configuration tells is refused before (core/config/conflicts.py).
        """
        return None

    def apply(self, execution: E) -> None:
        """Change the execution. Nothing to do for PyTorch's switches, nor for what the loader reads."""

    def verify(self, observed: Observation[E]) -> Verification:
        """Read back what is in effect from what ran, not from the configuration."""
        raise NotImplementedError


# --- observation ---------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Observation(Generic[E]):
    """An execution, and what was observed of one step or call."""

    execution: E
    kernels: Counter[str] = field(default_factory=Counter)  # on the device, by name
    host_events: Counter[str] = field(default_factory=Counter)  # operators and runtime calls, by name
    calls: Counter[str] = field(default_factory=Counter)  # calls of what the step calls, by role, and of the last block
    outputs: dict[str, torch.dtype] = field(default_factory=dict)  # dtypes of the outputs of these calls
    problem: str = ""  # why the profiler recorded nothing

    @property
    def recipe(self) -> RecipeConfig:
        return self.execution.recipe

    @property
    def cuda(self) -> bool:
        return self.execution.device.type == "cuda"

    def count(self, pattern: str) -> int:
        """Count the kernels whose name matches; on the CPU, the operators."""
        return sum(n for name, n in self._names() if re.search(pattern, name, re.IGNORECASE))

    def count_class(self, kind: KernelClass, detail: str) -> int:
        """Count the kernels of a class with this detail; on the CPU, the operators."""
        return sum(n for name, n in self._names() if classify(name) == (kind, detail))

    @property
    def layout_copies(self) -> int:
        return self.count_class(KernelClass.LAYOUT, "cuDNN")

    def _names(self) -> Iterable[tuple[str, int]]:
        return (self.kernels or self.host_events).items()

    def launches(self, pattern: re.Pattern[str]) -> int:
        """Count the runtime calls whose name matches."""
        return sum(n for name, n in self.host_events.items() if pattern.match(name))


def observe(execution: E, probe: Callable[[], Callable[[], object]]) -> Observation[E]:
    """Make two more steps or calls and return what was observed of the second."""
    probe()()
    observed = Observation(execution=execution)
    call = probe()
    with _counted_calls(observed):
        _profile(observed, call)
    return observed


def _profile(observed: Observation[Any], call: Callable[[], object]) -> None:
    """Record kernels and host events of `call`, or the reason why there are none."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if observed.cuda else [])]
    synchronize(observed.execution.device)
    calling = False
    try:
        # The device is idle when the profile begins and when it ends: it holds this call's kernels, and all of them.
        with profile(activities=activities) as profiler:
            calling = True
            call()
            synchronize(observed.execution.device)
            calling = False
    except RuntimeError as error:  # no permission to profile, or another profiler is active
        if calling:
            raise
        observed.problem = f"the profiler did not run ({first_line(error)})"
        return
    # Not profiler.events(), which also finds out what called what, in 60 us for each event.
    results = profiler.profiler and profiler.profiler.kineto_results
    for event in results.events() if results else []:
        names = observed.kernels if event.device_type() == DeviceType.CUDA else observed.host_events
        names[event.name()] += 1


@contextmanager
def _counted_calls(observed: Observation[Any]) -> Iterator[None]:
    """Count calls of the networks within the block. A replayed CUDA graph calls none of them."""
    execution: Execution = observed.execution
    originals = dict(execution.calls)

    def counted(role: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            observed.calls[role] += getattr(function, "passes", 1)  # a pipeline makes several of one call
            observed.outputs[role] = (result[0] if isinstance(result, tuple) else result).dtype
            return result

        return call

    def count_block(*_: Any) -> None:
        observed.calls["block"] += 1

    hooks = []
    if isinstance(execution, StepComponents):
        # Gradient checkpointing shows here: it runs a block once more in the backward pass. NhwcUNet excludes it. The
        # last one, because the backward pass may end before the first: at the first adapter.
        networks = execution.networks
        hooks.append(networks.architecture.last_layer(networks.unet).register_forward_pre_hook(count_block))
    execution.calls |= {role: counted(role, function) for role, function in originals.items()}
    try:
        yield
    finally:
        execution.calls |= originals
        for hook in hooks:
            hook.remove()


def unet_kernels(observed: Observation[Any]) -> Observation[Any]:
    """Observe a forward pass of the UNet alone: the frozen networks have attention too, with kernels of their own."""
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False  # it would measure the convolutions of a new shape
    try:
        # Not profiled: a new shape may compile, and run kernels that no step runs.
        observed.execution.eager_pass()
        unet_only = Observation(execution=observed.execution)
        _profile(unet_only, observed.execution.eager_pass)
    finally:
        torch.backends.cudnn.benchmark = benchmark
    return unet_only


@dataclass(kw_only=True)
class Convolutions:
    """Convolutions of an eager pass: maps of one pixel or one channel have both layouts and are not counted."""

    channels_last: int = 0  # whose input is
    total: int = 0
    outputs: Counter[torch.dtype] = field(default_factory=Counter)


@torch.no_grad()
def convolutions(execution: Execution) -> Convolutions:
    """Observe the convolutions of a small pass of the networks that have them."""
    seen = Convolutions()

    def look(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        value = inputs[0]
        seen.outputs[output.dtype] += 1
        if value.shape[1] > 1 and value.shape[2:].numel() > 1:
            seen.channels_last += value.is_contiguous(memory_format=execution.channels_last)
            seen.total += 1

    layers = [m for network in execution.modules.values() for m in network.modules()]
    hooks = [m.register_forward_hook(look) for m in layers if isinstance(m, nn.Conv2d | nn.Conv3d)]
    try:
        execution.eager_pass()
    finally:
        for hook in hooks:
            hook.remove()
    return seen
