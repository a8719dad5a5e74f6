"""The workloads `denoise_shape` and `denoise_patch`: memory and time of denoisers on random images.

Protocol of "GPU Performance Under the Hood" (benchmark_invprob_inference): evaluation mode, no gradients, noise 0.1,
warm-ups and timed calls of each case, the peak reset before each call. The cache is emptied before each case, in the
study of shapes also before each call, whose time then includes the allocations. A case that does not fit into the GPU's
memory is a row that says so, and the run goes on.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from msgspec import UNSET
from torch import Tensor

from inpaint_bench import levers
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import WindowKind
from inpaint_bench.core.workloads import Result, _denoisers, denoise_patch, denoise_shape
from inpaint_bench.models.architectures import denoisers
from inpaint_bench.models.architectures.denoisers import Denoiser, TilePlan
from inpaint_bench.models.execution import Execution
from inpaint_bench.models.networks import FROZEN_SEED
from inpaint_bench.models.parallel.data_parallel import Command, announce, next_command
from inpaint_bench.profiling.profile import synchronize

from . import MIB, Call, MeasuringWorkload, ProfiledCall, Recorder, measured_calls, used_mib
from .batch_search import attempt, is_cuda_oom

PEAKS = ("allocated_peak_mib", "reserved_peak_mib", "nvml_used_mib")  # peaks of a call, columns of its row
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured at once: inputs of one size through one network."""

    label: str  # label of its first batch, in a profile
    network: Denoiser
    batches: list[int]  # that a call passes one after another; with several ranks, this one's
    size: tuple[int, int]  # size of the images: height, width
    tiles: TilePlan
    columns: dict[str, Any]  # columns of its rows, besides those that all rows have
    work: dict[str, float]  # work of a call, by the column of its rate per second


class Denoisers(MeasuringWorkload):
    """What both workloads share: networks, inputs, and how a case is measured."""

    config: _denoisers.DenoiserConfig
    result: type[_denoisers.CaseResult]
    execution: Execution
    uniform_steps = False
    empty_cache_before_calls = False

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        config = bench.workload
        assert isinstance(config, _denoisers.DenoiserConfig)
        self.bench, self.device, self.config = bench, device, config
        self.images_per_step = bench.batch_size
        levers.require(bench, device)
        self.networks = {name: self._build(name) for name in config.models}
        self.execution = Execution(
            bench=bench, device=device, networks=self.networks, calls={}, eager_pass=self._small_pass
        )
        levers.apply(self.execution)
        self.published_plan = tuple(config.channels) == _denoisers.CHANNELS
        counts = {name: sum(p.numel() for p in network.parameters()) for name, network in self.networks.items()}
        self.facts = _denoisers.DenoiserFacts(
            **self.execution.facts(),
            weights=None,
            channels=list(config.channels),
            parameters_by_network=counts,
            tiling=config.tiling,
            input_mode=config.input_mode,
            models_resident=config.models_resident,
            image_px=getattr(config, "image_px", UNSET),
            image_width_px=config.image_size[1] if isinstance(config, denoise_patch.Config) else UNSET,
            patch_overlap_px=getattr(config, "patch_overlap_px", UNSET),
            patches_px=getattr(config, "patches_px", UNSET),
            patch_batches=getattr(config, "patch_batches", UNSET),
        )
        self._shared = SharedCalls(device, bench.ranks)
        self._generator = torch.Generator().manual_seed(bench.seed)
        self._calls_done = self._cases_done = self._cases_failed = 0
        self._update_total()

    def _build(self, name: str) -> Denoiser:
        torch.manual_seed(FROZEN_SEED)
        network = denoisers.NETWORKS[name](tuple(self.config.channels)).eval()
        return network.to(self.device if self.config.models_resident == "all" else "cpu")

    # --- the protocol ----------------------------------------------------------------------------

    def measure(self, recorder: Recorder) -> None:
        """Measure every case of every model in one window; warm-ups lie between the timed calls."""
        with torch.no_grad(), recorder.window(WindowKind.MEASURE) as self._window_id:
            for case in self._cases(self._sizes()):
                self._measure_case(recorder, case)

    def follow(self) -> None:
        with torch.no_grad():
            for case in self._cases(self._sizes()):
                _, failure = attempt(partial(self._follow_case, case), self.device)
                log.info("%s: %s", case.label, failure or "done")

    def _follow_case(self, case: Case) -> None:
        self._shared.follow(self._warm_up(case))

    def _cases(self, sizes: list[tuple[int, int]]) -> Iterator[Case]:
        for name, network in self._resident_networks():
            for size in sizes:
                yield self._case(name, network, *size)

    def _resident_networks(self) -> Iterator[tuple[str, Denoiser]]:
        """Yield each network while it is on the device."""
        for name, network in self.networks.items():
            network.to(self.device)
            yield name, network
            if self.config.models_resident == "one":
                network.to("cpu")

    def profiled_calls(self) -> Iterator[ProfiledCall]:
        """Yield the first batch of each case that a profile shows."""
        seen: set[str] = set()  # a batch larger than all patches is that of all patches
        with torch.no_grad():
            for case in self._cases(self._profiled_sizes()):
                if case.label not in seen:
                    seen.add(case.label)
                    yield ProfiledCall(name=case.label, work=self._work(replace(case, batches=case.batches[:1])))

    def _small_pass(self) -> None:
        """Denoise one small image with every network."""
        with torch.no_grad():
            for name, network in self._resident_networks():
                self._denoise(network, self._source((1, 3, 64, 64))(), self._plan(name, 64, 64))

    def _sizes(self) -> list[tuple[int, int]]:
        """Return what distinguishes the cases of a model, in their order."""
        raise NotImplementedError

    def _profiled_sizes(self) -> list[tuple[int, int]]:
        return self._sizes()

    def _case(self, name: str, network: Denoiser, first: int, second: int) -> Case:
        raise NotImplementedError

    def _update_total(self) -> None:
        config, left = self.config, len(self.networks) * len(self._sizes()) - self._cases_done - self._cases_failed
        per_case: float | None = config.measure_steps
        if config.min_measure_s:  # as many as the cases until now had
            per_case = self._calls_done / self._cases_done if self._cases_done else None
        self.calls_total = None if per_case is None else self._calls_done + round(left * per_case)

    def _measure_case(self, recorder: Recorder, case: Case) -> None:
        weights_mib = torch.cuda.memory_allocated(self.device) / MIB if self.device.type == "cuda" else None
        before = self._calls_done
        _, failure = attempt(partial(self._time_case, recorder, case, weights_mib), self.device)
        if failure is None:
            self._cases_done += 1
        else:
            self._cases_failed += 1
            asked = re.search(r"[Tt]ried to allocate [\d.]+ \w+", failure)
            text = asked[0] if asked else failure.partition("\n")[0][:200]
            calls = pluralize(self._calls_done - before, "call")
            log.warning("%s: out of memory after %s: %s", case.label, calls, text)
            measured = {"window_id": self._window_id, "step": -self._cases_failed, "weights_mib": weights_mib}
            recorder.result(self._row(case, None, **measured, out_of_memory=text))
        self._update_total()

    def _warm_up(self, case: Case) -> Callable[[], None]:
        """Prepare a case and run it before anything is timed. Returns what a call does, on this rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        work = self._shared.together(lambda: self._work(case))
        for _ in range(self.config.warmup_steps):
            self._shared.together(work)
        return work

    def _time_case(self, recorder: Recorder, case: Case, weights_mib: float | None) -> None:
        """Warm up and time one case; tell its last call."""
        work = partial(self._shared.lead, self._warm_up(case))
        for _ in measured_calls(self.config):
            call = recorder.call(work, empty_cache=self.empty_cache_before_calls)
            self._calls_done += 1
            measured = {"window_id": call.window_id, "step": call.step, "weights_mib": weights_mib}
            recorder.result(self._row(case, call.host_ms, **measured, **self._of_ranks(call)))
        self._shared.next()
        peak = "" if call.allocated_peak_mib is None else f", allocated peak {call.allocated_peak_mib:,.0f} MiB"
        log.info("%s: %.1f ms%s", case.label, call.host_ms, peak)

    def _of_ranks(self, call: Call) -> dict[str, Any]:
        """Return the peaks of a call on the rank with the most; of several also time and memory of each."""
        columns: dict[str, Any] = {name: getattr(call, name) for name in PEAKS}
        if self._shared.ranks == 1:
            return columns
        by_rank = self._shared.gather(*columns.values())
        for name, most in zip(PEAKS, by_rank.max(dim=0).values.tolist(), strict=True):
            columns[name] = None if math.isnan(most) else most
        columns["times_by_rank_ms"] = _text(self._shared.times_ms)
        if columns["allocated_peak_mib"] is not None:
            columns["peaks_by_rank_mib"] = _text(by_rank[:, 0].tolist())
        return columns

    def _source(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        """Return the function that gives the input of a call: what it does is part of the timed work.

        device_resident: nothing. pinned: a copy from page-locked memory. host_random: drawn on the CPU, then copied.
        """
        layout, mode = self.execution.memory_format, self.config.input_mode
        draw = partial(torch.randn, shape, generator=self._generator)
        if mode == "host_random":
            return lambda: draw().to(self.device, memory_format=layout)
        image = draw()
        if mode == "pinned":
            page_locked = image.pin_memory() if self.device.type == "cuda" else image
            return lambda: page_locked.to(self.device, non_blocking=True, memory_format=layout)
        resident = image.to(self.device, memory_format=layout)
        return lambda: resident

    def _work(self, case: Case) -> Callable[[], None]:
        """Make the inputs of a case; return what a call does."""
        sources = {batch: self._source((batch, 3, *case.size)) for batch in set(case.batches)}

        def work() -> None:
            for batch in case.batches:
                self._denoise(case.network, sources[batch](), case.tiles)

        return work

    def _denoise(self, network: Denoiser, image: Tensor, tiles: TilePlan) -> Tensor:
        with self.execution.autocast():
            return denoisers.denoise(network, image, self.config.sigma, tiles)

    def _plan(self, name: str, height: int, width: int) -> TilePlan:
        config = self.config
        return denoisers.plan(name, config.tiling, height, width, config.tile_px, config.overlap_px)

    def _row(self, case: Case, time_ms: float | None, **measured: Any) -> Result:
        """Return a row of results; without a time it is of a case that does not fit into memory."""
        rates: dict[str, Any] = {name: time_ms and 1000 * amount / time_ms for name, amount in case.work.items()}
        return self.result(
            published_plan=self.published_plan,
            tiling=self.config.tiling,
            input_mode=self.config.input_mode,
            branch=case.tiles.branch,
            tile_h_px=case.tiles.tile[0],
            tile_w_px=case.tiles.tile[1],
            time_ms=time_ms,
            **case.columns,
            **rates,
            **measured,
        )


class DenoiseShape(Denoisers):
    config: denoise_shape.Config
    result = denoise_shape.Result
    empty_cache_before_calls = True

    def _sizes(self) -> list[tuple[int, int]]:
        config = self.config
        widths = {step: range(config.width_min_px, config.width_max_px + 1, step) for step in config.width_steps_px}
        return [(series, width) for series, each in widths.items() for width in each]

    def _profiled_sizes(self) -> list[tuple[int, int]]:
        return self._sizes()[-1:]  # a width is like the next one

    def _case(self, name: str, network: Denoiser, series: int, width: int) -> Case:
        height, batch = self.config.height_px, self.images_per_step
        tiles = self._plan(name, height, width)
        size = {"series_px": series, "height_px": height, "width_px": width}
        return Case(
            label=f"{name} {height}x{width}, {tiles.branch}",
            network=network,
            batches=[batch],
            size=(height, width),
            tiles=tiles,
            columns={"model": name, "batch": batch, "calls": tiles.calls, **size},
            work={"mpx_per_s": batch * height * width / 1e6},
        )


class DenoisePatch(Denoisers):
    config: denoise_patch.Config
    result = denoise_patch.Result

    def _sizes(self) -> list[tuple[int, int]]:
        return [(patch, batch) for patch in self.config.patches_px for batch in self.config.patch_batches]

    def _case(self, name: str, network: Denoiser, patch: int, batch: int) -> Case:
        config, ranks = self.config, self._shared.ranks
        height, width = config.image_size
        num_patches = denoise_patch.count_patches(height, patch, width, config.patch_overlap_px)
        size = min(patch, height), min(patch, width)
        tiles = self._plan(name, *size)
        # The last batch of a rank may be smaller. A rank without patches waits for the others.
        shares = [len(range(rank, num_patches, ranks)) for rank in range(ranks)]
        batches = [[min(batch, count - first) for first in range(0, count, batch)] for count in shares]
        patches = {"patch_px": patch, "num_patches": num_patches, "height_px": height, "width_px": width}
        return Case(
            label=denoise_patch.CASE_NAME.format(name, patch, batches[0][0]),
            network=network,
            batches=batches[self._shared.rank],
            size=size,
            tiles=tiles,
            columns={"model": name, "batch": batch, "calls": tiles.calls * sum(map(len, batches)), **patches},
            work={"patches_per_s": num_patches, "images_per_s": 1},
        )


def _text(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


class SharedCalls:
    """Calls that several ranks make together, each a part: rank 0 says when, and the slowest decides how long.

    What they tell each other are numbers on the host, with gloo. With one rank a call is the work itself.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.device, self.ranks = device, ranks
        self.rank = dist.get_rank() if ranks > 1 else 0
        self.times_ms: list[float] = []  # times of the last call, by rank; empty with one

    def together(self, part: Callable[[], T]) -> T:
        """Do this rank's part, and wait for all. Raises on every rank if the memory of one does not suffice."""
        if self.ranks == 1:
            return part()
        start_ns, failure = time.monotonic_ns(), None
        try:
            result = part()
            synchronize(self.device)
        except RuntimeError as error:
            if not is_cuda_oom(error):
                raise
            failure = error
        self.times_ms = self.gather(None if failure else (time.monotonic_ns() - start_ns) / 1e6)[:, 0].tolist()
        if failure:
            raise failure
        if failed := [str(rank) for rank, ms in enumerate(self.times_ms) if math.isnan(ms)]:
            raise torch.OutOfMemoryError(f"CUDA out of memory on rank {', '.join(failed)}")
        return result

    def lead(self, part: Callable[[], object]) -> None:
        """Make a call, on rank 0. The others are told within it, so that none of them begins before."""
        if self.ranks > 1:
            announce(Command.STEP)
        self.together(part)

    def next(self) -> None:
        """Tell the others, on rank 0, that these calls were the last of their case."""
        if self.ranks > 1:
            announce(Command.NEXT)

    def follow(self, part: Callable[[], object]) -> None:
        """Make the calls of a case on another rank, as often as rank 0 says."""
        cuda = self.device.type == "cuda"
        peaks = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
        while next_command()[0] is Command.STEP:
            if cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            self.together(part)
            self.gather(*(peak(self.device) / MIB if cuda else None for peak in peaks), used_mib(self.device))

    def gather(self, *values: float | None) -> Tensor:
        """Return the values of every rank, a row each, NaN for None. Waits for the last one."""
        table = torch.zeros(self.ranks, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor([math.nan if value is None else value for value in values])
        dist.all_reduce(table)  # a sum: every row is zero but on its own rank
        return table


def build(config: BenchConfig, device: torch.device) -> Denoisers:
    """Build the networks with random weights."""
    kinds: dict[type, type[Denoisers]] = {denoise_shape.Config: DenoiseShape, denoise_patch.Config: DenoisePatch}
    return kinds[type(config.workload)](config, device)
