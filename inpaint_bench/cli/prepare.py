"""`prepare`: make a dataset from a folder of images or the generator, with progress and a summary."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.config.recipe import name as recipe_name
from inpaint_bench.core.console import console, pluralize, sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path
from inpaint_bench.core.hydra_support import refuse_wrong_overrides, register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import split_choices
from inpaint_bench.core.workloads._volumes import VolumeConfig
from inpaint_bench.data import prepared
from inpaint_bench.data.prepare import prepare_dataset, verify_dataset
from inpaint_bench.data.prepared import DatasetManifest, ReportProgress, Split
from inpaint_bench.data.prepared_source import PreparedSource, read_index
from inpaint_bench.data.source import METRES_PER_DEGREE, unwrap
from inpaint_bench.data.volumes import SyntheticVolumes, write_synthetic
from inpaint_bench.kernels.cache import check_given

if TYPE_CHECKING:
    import torch

LOG_INTERVAL_S = 10.0  # between lines of progress if there is no terminal
NAMES_PER_REASON = 3
REASONS = 20

log = logging.getLogger(__name__)


def run_prepare(overrides: Sequence[str] | None, *, verify: Path | None) -> None:
    """Write the dataset that the overrides describe, or compare the one at `verify` with its checksums."""
    if verify:
        if overrides:
            raise UserError(f"--verify {verify}: takes no configuration, but {overrides[0]} was given")
        with _progress() as report:
            manifest = verify_dataset(verify, report)
        log.info("%s: all %s files are as they were written", verify, f"{len(prepared.list_entries(manifest)):,}")
        return
    bench = _compose(list(overrides or ()))
    if isinstance(bench.workload, VolumeConfig):
        _write_volumes(bench, bench.workload)
        return
    start = time.monotonic()
    with _progress() as report:
        root, manifest = prepare_dataset(bench, report)
    _log_summary(root, manifest, time.monotonic() - start)
    if bench.prepare.caches:
        _build_caches(bench, root)
    if bench.prepare.kernels:
        _compile_kernels(bench, root)


def _write_volumes(bench: BenchConfig, workload: VolumeConfig) -> None:
    """Write the synthetic volumes of a run as NIfTI files."""
    train, held_out = workload.volumes_needed(bench)
    if not train or bench.data.kind != "synthetic" or not bench.prepare.out:
        raise UserError(
            "prepare writes volumes for workload=volume3d_train, with data=synthetic and prepare.out=<folder>"
        )
    if bench.prepare.caches or bench.prepare.kernels:
        raise UserError("prepare.caches and prepare.kernels are for images, and these are volumes: leave them out")
    out = expand_path(bench.prepare.out)
    source = SyntheticVolumes(bench.data, train + held_out, 0)
    write_synthetic(out, source.read(workload.shape, workload.sides, held_out=False))
    root, share = out.resolve(), held_out / (train + held_out)
    log.info("%s of %s voxels: %s", pluralize(train + held_out, "volume"), "x".join(map(str, workload.sides)), root)
    log.info("use it: %s data.validation_share=%.4g", prepared.usage_overrides(root, "nifti"), share)


def _compose(overrides: list[str]) -> BenchConfig:
    from hydra import compose, initialize_config_dir

    # Hydra has to know our schema and resolvers before it composes.
    register()
    refuse_wrong_overrides(overrides, [conf_dir()], multirun=None)
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir()), job_name="prepare"):
        return parse_config(compose("config", overrides=split_choices(overrides)), trains=False)


def _build_caches(bench: BenchConfig, root: Path) -> None:
    """Run the model's frozen networks over the dataset at `root`. Raises UserError if the device is missing."""
    bench, device = _of_dataset(bench, root, "caches")
    from inpaint_bench.models.cache_builder import build_cache

    with _progress() as report:
        folder, description = build_cache(bench, PreparedSource(bench.data), device, partial(report, "caches"))
    log.info("cache of the frozen networks: %s (%.1f s)", folder, description.encoding_s)


def _compile_kernels(bench: BenchConfig, root: Path) -> None:
    """Train as many steps on the dataset at `root` as a run warms up with. Raises UserError, as a run does."""
    bench, device = _of_dataset(bench, root, "kernels")
    from inpaint_bench import workloads

    start = time.monotonic()
    with closing(workloads.load(bench, device)) as workload:
        if isinstance(workload, workloads.MeasuringWorkload):
            raise UserError(f"prepare.kernels=true: workload={bench.workload.name} trains nothing")
        for _ in range(bench.workload.warmup_steps):
            workload.step(workload.next_batch())
    log.info("the kernels of recipe=%s are compiled (%.1f s)", recipe_name(bench), time.monotonic() - start)


def _of_dataset(bench: BenchConfig, root: Path, key: str) -> tuple[BenchConfig, torch.device]:
    """Return the configuration of runs on the dataset, whose key covers the data, and the device."""
    check_given()
    import torch  # slow to import, and only now: the processes that write images are forks of this one

    if bench.recipe.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"prepare.{key}=true needs a GPU, and none can be used here; recipe=cpu runs without one")
    data = replace(bench.data, kind="prepared", root=str(root), num_images=None)
    return replace(bench, data=data), torch.device(bench.recipe.device)


def _log_summary(root: Path, manifest: DatasetManifest, seconds: float) -> None:
    inventory, split = manifest.inventory, manifest.split
    beyond = f", {inventory.beyond_limit:,} beyond data.num_images" if inventory.beyond_limit else ""
    counts = f"{inventory.found:,} found, {inventory.used:,} used, {len(inventory.skipped):,} left out"
    log.info("%s%s", counts, beyond)
    reasons = Counter(image.reason for image in inventory.skipped).most_common()
    for reason, count in reasons[:REASONS]:
        names = [sanitize(image.file) for image in inventory.skipped if image.reason == reason]
        more = f" and {count - NAMES_PER_REASON:,} more" if count > NAMES_PER_REASON else ""
        log.info("  %d left out: %s (%s%s)", count, sanitize(reason), ", ".join(names[:NAMES_PER_REASON]), more)
    if others := sum(count for _, count in reasons[REASONS:]):
        log.info("  %d left out for other reasons; all are in %s", others, root / prepared.MANIFEST)
    index = read_index(root, manifest)
    log.info("%s", _describe_positions(index, split))
    blocks = f"{split.validation_blocks} of {pluralize(split.blocks, 'block')} of {split.block_m:g} m"
    log.info("%s for training, %s for validation: %s", f"{split.train:,}", f"{split.validation:,}", blocks)
    texts, masks = sum(map(bool, index["text"].to_pylist())), len(manifest.masks)
    log.info("%s with a position, %s with a text, %s with a mask", f"{len(index):,}", f"{texts:,}", f"{masks:,}")
    if split.validation > 2 * split.share * manifest.num_images:
        log.warning(
            "far more than data.validation_share=%g: blocks are held out as a whole; a smaller data.block_m is finer",
            split.share,
        )
    total = sum(entry.bytes for entry in prepared.list_entries(manifest))
    formats, rate = ", ".join(manifest.formats), manifest.images_per_s
    log.info("%.1f MB as %s; %.1f s now, images at %.0f/s", total / 1e6, formats, seconds, rate)
    log.info("use it: %s", prepared.usage_overrides(root))


def _describe_positions(index: pa.Table, split: Split) -> str:
    """Say how many positions there are and where they lie."""
    latitude, longitude = index["latitude"].to_numpy(), unwrap(index["longitude"].to_numpy())
    middle = (latitude.min() + latitude.max()) / 2
    north_km = np.ptp(latitude) * METRES_PER_DEGREE / 1000
    east_km = np.ptp(longitude) * METRES_PER_DEGREE / 1000 * math.cos(math.radians(middle))
    centre = np.median(latitude), (np.median(longitude) + 180) % 360 - 180
    low, high = ((edge + 180) % 360 - 180 for edge in (longitude.min(), longitude.max()))
    return (
        f"{pluralize(len(index), 'position')}: latitude {latitude.min():.4f} to {latitude.max():.4f}, longitude "
        f"{low:.4f} to {high:.4f} degrees ({north_km:.3g} km from south to north, {east_km:.3g} km from west to east), "
        f"centre {centre[0]:.4f}, {centre[1]:.4f}, in {pluralize(split.blocks, 'block')} of {split.block_m:g} m"
    )


@contextmanager
def _progress() -> Iterator[ReportProgress]:
    """Yield a callback that shows a bar per activity on a terminal, and elsewhere logs a line every ten seconds."""
    terminal = console()
    if not terminal.is_terminal:
        last_log_s = time.monotonic()

        def log_progress(activity: str, done: int, total: int) -> None:
            nonlocal last_log_s
            if time.monotonic() - last_log_s > LOG_INTERVAL_S:
                last_log_s = time.monotonic()
                log.info("%s: %s of %s", activity, f"{done:,}", f"{total:,}")

        yield log_progress
        return
    columns = TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def report(activity: str, done: int, total: int) -> None:
            if activity not in tasks:
                tasks[activity] = progress.add_task(activity, total=total)
            progress.update(tasks[activity], completed=done)

        yield report
