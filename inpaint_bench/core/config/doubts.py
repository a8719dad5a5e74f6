"""Values that are possible and surely not meant. A launch warns of them before anything is submitted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Final

from inpaint_bench.core.console import list_some
from inpaint_bench.core.files import expand_path, read_json
from inpaint_bench.core.schema import PREPARED

from .bench import BenchConfig
from .levers import RecipeConfig
from .site import SiteConfig

_CUDA_GB, _CPU_GB = 4, 2  # host memory of a process with torch and a small model
_HIGHEST_RATE = 0.01  # AdamW trains no diffusion model with more
_WIDEST = 0.2  # relative half width of an interval that says little


def _slow_cpu(bench: BenchConfig, _: SiteConfig) -> str | None:
    model, px, what = bench.model, bench.data.resolution_px, bench.workload.model(bench)
    volumes = getattr(bench.workload, "network", "tiny") != "tiny"
    full = what == model.name and model.text_encoder.get("hidden_size", 0) >= 512 and px >= 256
    if bench.recipe.device != "cpu" or not (full or volumes):
        return None
    smaller = "workload.network=tiny" if volumes else "model=tiny_inpaint"
    return f"gpu={bench.gpu.name}: a step of {what}{'' if volumes else f' at {px} px'} takes minutes; try {smaller}"


def _batch(bench: BenchConfig, _: SiteConfig) -> str | None:
    if bench.searches_batch or "data" not in bench.workload.capabilities:
        return None
    step = bench.batch_size * bench.ranks
    images = min(_count_images(bench, step), bench.data.num_images or step)
    gpus = f" on {bench.ranks} GPUs" if bench.ranks > 1 else ""
    return f"batch={bench.batch}{gpus}: the data has {images:,} images" if step > images else None


def _count_images(bench: BenchConfig, enough: int) -> int:
    """Return how many images the data may have at most, or `enough` if there are as many or it cannot be read here."""
    root = expand_path(bench.data.root or "")
    try:
        if bench.data.kind == "prepared":
            return min(int((read_json(root / PREPARED) or {})["num_images"]), enough)
        if bench.data.kind == "folder" and root.is_dir():
            return sum(1 for _ in islice((name for *_, names in os.walk(root) for name in names), enough))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # opening the data says why
    return enough


def _learning_rate(bench: BenchConfig, _: SiteConfig) -> str | None:
    rate = getattr(bench.workload, "learning_rate", 0.0)
    return f"workload.learning_rate={rate:g}: trainings diverge above 0.01" if rate > _HIGHEST_RATE else None


def _num_workers(bench: BenchConfig, site: SiteConfig) -> str | None:
    entry, here = site.gpus.get(bench.gpu.name), not site.connection.has_slurm
    cores = len(os.sched_getaffinity(0)) if here else entry.cpus_per_gpu if entry else None
    workers = bench.recipe.num_workers
    if cores is None or workers <= max(cores, RecipeConfig.num_workers):
        return None
    where = "this machine has" if here else f"a job at {site.name} has for each GPU"
    return f"recipe.num_workers={workers}: more than the {cores} CPU cores that {where}"


def _mem_gb(bench: BenchConfig, site: SiteConfig) -> str | None:
    needed = (_CPU_GB if bench.recipe.device == "cpu" else _CUDA_GB) * bench.gpus
    if bench.mem_gb is None or bench.mem_gb >= needed or not site.connection.has_slurm:
        return None
    return f"mem_gb={bench.mem_gb}: torch alone takes about {needed} G of a node's memory here"


def _time_min(bench: BenchConfig, site: SiteConfig) -> str | None:
    seconds = bench.workload.min_measure_s + getattr(bench.workload, "min_warmup_s", 0.0)
    if getattr(bench.workload, "train_steps", None) or not site.connection.has_slurm:
        return None
    too_short = isinstance(bench.time_min, int) and 60 * bench.time_min <= seconds
    return f"time_min={bench.time_min}: a run takes more than {seconds:g} s" if too_short else None


def _training(bench: BenchConfig, _: SiteConfig) -> str | None:
    workload = bench.workload
    if not (steps := getattr(workload, "train_steps", None)):
        return None
    for key, reads in {"validate_every": "never validates on the way", "warmup_steps": "measures nothing"}.items():
        if (value := getattr(workload, key, 0)) >= steps + (key == "validate_every"):
            return f"workload.{key}={value}: a training of workload.train_steps={steps} {reads}"
    saved_s = getattr(workload, "checkpoint_every_s", 0.0)
    if isinstance(bench.time_min, int) and saved_s >= 60 * bench.time_min:
        return f"workload.checkpoint_every_s={saved_s:g}: a job ends after time_min={bench.time_min}"
    return None


def _warmup(bench: BenchConfig, _: SiteConfig) -> str | None:
    warms_up = bench.workload.warmup_steps > 0 or getattr(bench.workload, "min_warmup_s", 0.0) > 0
    if warms_up or bench.recipe.device == "cpu" or getattr(bench.workload, "train_steps", None):
        return None
    return "workload.warmup_steps=0: the first steps, which load and tune kernels, are measured too"


def _telemetry(bench: BenchConfig, _: SiteConfig) -> str | None:
    seconds, hz = bench.workload.min_measure_s, bench.telemetry.fast_hz
    if bench.telemetry.source == "none" or not 0 < seconds * hz < 2:
        return None
    return f"telemetry.fast_hz={hz:g}: takes no two samples in workload.min_measure_s={seconds:g}"


def _validation_share(bench: BenchConfig, _: SiteConfig) -> str | None:
    share = bench.data.validation_share
    return f"data.validation_share={share:g}: holds out most of the images (0.1 is 10 %)" if share > 0.5 else None


def _repeats_target(bench: BenchConfig, _: SiteConfig) -> str | None:
    target = bench.repeats_target
    if bench.repeats != "auto" or target <= _WIDEST:
        return None
    return f"repeats_target={target:g}: is {100 * target:g} % of the mean (0.02 is 2 %)"


# By the name that `silence` takes
DOUBTS: Final[Mapping[str, Callable[[BenchConfig, SiteConfig], str | None]]] = MappingProxyType(
    {
        "batch": _batch,
        "learning_rate": _learning_rate,
        "mem_gb": _mem_gb,
        "num_workers": _num_workers,
        "repeats_target": _repeats_target,
        "slow_cpu": _slow_cpu,
        "telemetry": _telemetry,
        "time_min": _time_min,
        "training": _training,
        "validation_share": _validation_share,
        "warmup": _warmup,
    }
)


def warnings(points: Iterable[tuple[int | None, BenchConfig, SiteConfig]]) -> Iterator[str]:
    """Yield a warning for each doubt that a point raises and does not silence; numbers are those of points, or None."""
    raised: dict[str, dict[str, list[str]]] = {}
    for number, bench, site in points:
        for name in DOUBTS.keys() - {*bench.silence}:
            if sentence := DOUBTS[name](bench, site):
                raised.setdefault(name, {}).setdefault(sentence, []).extend([] if number is None else [str(number)])
    for name in sorted(raised):
        sentences = raised[name]
        numbers = sorted({number for each in sentences.values() for number in each}, key=int)
        shown = next(iter(sentences)) + (f", and {len(sentences) - 1} more like it" if len(sentences) > 1 else "")
        where = f" (point{'s' * (len(numbers) > 1)} {list_some(numbers, 12)})" if numbers else ""
        yield f"WARNING: {shown}{where}. If it is meant: silence=[{name}]"
