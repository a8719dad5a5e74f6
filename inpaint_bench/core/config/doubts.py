"""Values that are possible and surely not meant. A launch warns of them before anything is submitted."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Final

from inpaint_bench.core.console import list_some
from inpaint_bench.core.files import expand_path, read_json

from .bench import PREPARED, BenchConfig
from .levers import RecipeConfig
from .site import SiteConfig

Doubt = str | bool | None  # a sentence, or nothing
NO_IMAGES: Final = (".txt", ".csv", ".json", ".jsonl", ".md")  # what lies beside images: captions, positions


def _slow_cpu(bench: BenchConfig, _: SiteConfig) -> Doubt:
    model, px, what = bench.model, bench.data.resolution_px, bench.workload.model(bench)
    volumes = getattr(bench.workload, "network", "tiny") != "tiny"
    full = what == model.name and model.text_encoder.get("hidden_size", 0) >= 512 and px >= 256
    sentence = f"gpu={bench.gpu.name}: a CPU takes very long for a step of {what}{'' if volumes else f' at {px} px'}"
    return bench.recipe.device == "cpu" and (full or volumes) and sentence


def _batch(bench: BenchConfig, _: SiteConfig) -> Doubt:
    if bench.searches_batch or "data" not in bench.workload.capabilities:
        return None
    step = bench.batch_size * bench.ranks
    images = min(_count_images(bench.data.kind, bench.data.root or "", step), bench.data.num_images or step)
    gpus = f" on {bench.ranks} GPUs" if bench.ranks > 1 else ""
    trained = " for training" if bench.data.kind == "prepared" else ""  # the others are held out
    return step > images and f"batch={bench.batch}{gpus}: the data has {images:,} images{trained}"


@cache  # most points of a sweep have one folder
def _count_images(kind: str, data_root: str, enough: int) -> int:
    """Return how many images the data may have at most, or `enough` if there are as many or it cannot be read here."""
    root = expand_path(data_root)
    with suppress(OSError, ValueError, KeyError, TypeError):  # opening the data says why
        if kind == "prepared":
            return int((read_json(root / PREPARED) or {})["split"]["train"])
        if kind == "folder" and root.is_dir():
            files = (name for *_, names in os.walk(root) for name in names)
            images = (name for name in files if name[0] != "." and not name.lower().endswith(NO_IMAGES))
            return sum(1 for _ in islice(images, enough))
    return enough


def _learning_rate(bench: BenchConfig, _: SiteConfig) -> Doubt:
    rate = getattr(bench.workload, "learning_rate", None) or 0.0
    adamw = getattr(bench.workload, "optimizer", "adamw") != "adafactor"  # Muon's updates are as large as AdamW's
    return adamw and rate > 0.01 and f"workload.learning_rate={rate:g}: trainings with AdamW diverge above 0.01"


def _num_workers(bench: BenchConfig, site: SiteConfig) -> Doubt:
    here, workers = not site.connection.has_slurm, bench.recipe.num_workers
    cores = len(os.sched_getaffinity(0)) if here else site.gpus[bench.gpu.name].cpus_per_gpu or workers
    where = "this machine has" if here else f"a job at {site.name} has for each GPU"
    too_many = workers > max(cores, RecipeConfig.num_workers)
    return too_many and f"recipe.num_workers={workers}: more than the {cores} CPU cores that {where}"


def _mem_gb(bench: BenchConfig, site: SiteConfig) -> Doubt:
    needed = (2 if bench.recipe.device == "cpu" else 4) * bench.gpus
    too_little = bench.mem_gb is not None and bench.mem_gb < needed and site.connection.has_slurm
    return too_little and f"mem_gb={bench.mem_gb}: torch and a small model take about {needed} G of a node's memory"


def _time_min(bench: BenchConfig, site: SiteConfig) -> Doubt:
    seconds = bench.workload.min_measure_s + getattr(bench.workload, "min_warmup_s", 0.0)
    too_short = not bench.workload.resumes and isinstance(bench.time_min, int) and 60 * bench.time_min <= seconds
    return too_short and site.connection.has_slurm and f"time_min={bench.time_min}: a run takes more than {seconds:g} s"


def _training(bench: BenchConfig, _: SiteConfig) -> Doubt:
    steps, saved_s = (getattr(bench.workload, key, None) or 0 for key in ("train_steps", "checkpoint_every_s"))
    for key in ("validate_every", "warmup_steps") if steps else ():
        if (value := getattr(bench.workload, key, None) or 0) >= steps + (key == "validate_every"):
            return f"workload.{key}={value}: the training ends before, after workload.train_steps={steps}"
    too_rare = isinstance(bench.time_min, int) and saved_s >= 60 * bench.time_min
    return too_rare and f"workload.checkpoint_every_s={saved_s:g}: a job ends before, after time_min={bench.time_min}"


def _telemetry(bench: BenchConfig, _: SiteConfig) -> Doubt:
    seconds, hz = bench.workload.min_measure_s, bench.telemetry.fast_hz
    too_slow = bench.telemetry.source != "none" and 0 < seconds * hz < 2
    return too_slow and f"telemetry.fast_hz={hz:g}: takes no two samples in workload.min_measure_s={seconds:g}"


def _repeats_target(bench: BenchConfig, _: SiteConfig) -> Doubt:
    target = bench.repeats_target
    return bench.repeats == "auto" and target > 0.2 and f"repeats_target={target:g}: is {100 * target:g} % of the mean"


_JUDGES = (_batch, _learning_rate, _mem_gb, _num_workers, _repeats_target, _slow_cpu, _telemetry, _time_min, _training)
DOUBTS: Final = {judge.__name__.removeprefix("_"): judge for judge in _JUDGES}  # by the name that `silence` takes


def warnings(points: Iterable[tuple[int | None, BenchConfig, SiteConfig]]) -> Iterator[str]:
    """Yield a warning for each doubt that a point raises and does not silence; numbers are those of points, or None."""
    raised: dict[str, dict[str, list[int]]] = {}
    for number, bench, site in points:
        for name in DOUBTS.keys() - {*bench.silence}:
            if sentence := DOUBTS[name](bench, site):
                raised.setdefault(name, {}).setdefault(str(sentence), []).extend([] if number is None else [number])
    for name, sentences in sorted(raised.items()):
        numbers = [str(number) for number in sorted({number for each in sentences.values() for number in each})]
        more = f", and {len(sentences) - 1} more like it" if len(sentences) > 1 else ""
        where = f" (point{'s' * (len(numbers) > 1)} {list_some(numbers, 12)})" if numbers else ""
        yield f"WARNING: {next(iter(sentences))}{more}{where}. If it is meant: silence=[{name}]"
