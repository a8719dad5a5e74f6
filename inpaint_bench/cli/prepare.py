"""`prepare`: a folder of images or the generator -> a dataset with a manifest, checksums and a split."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from inpaint_bench.core.config import BenchConfig, parse_config
from inpaint_bench.core.console import console
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.data.open_source import open_source
from inpaint_bench.data.prepared import layout, write
from inpaint_bench.data.prepared.source import PreparedSource

SAY_EVERY_S = 10.0  # where there is no terminal
NAMED = 3  # files named per reason

log = logging.getLogger(__name__)


def run_prepare(overrides: Sequence[str], *, verify: Path | None) -> None:
    """Write the dataset that the overrides describe, or compare the one at `verify` with its checksums."""
    if verify:
        if overrides:
            raise UserError(f"--verify {verify}: takes no configuration, and {overrides[0]} was given")
        with _progress() as report:
            manifest = write.verify(verify, report)
        log.info("%s: all %s files are as they were written", verify, f"{len(layout.entries(manifest)):,}")
        return
    bench = _compose(list(overrides))
    _check(bench)
    root = _add(bench) if bench.data.kind == "prepared" else _make(bench)
    if bench.prepare.caches:
        _cache(bench, root)


def _make(bench: BenchConfig) -> Path:
    """Write the dataset at prepare.out, or what is missing of it. Returns its folder."""
    began = time.monotonic()
    out = Path(bench.prepare.out or "").resolve()
    existing = _existing(out)
    source = open_source(bench.data)
    formats = list(dict.fromkeys(["files", *bench.prepare.formats]))
    if existing is None:
        try:
            with _progress() as report:
                manifest = write.write(source, bench.data, bench.prepare, out, formats, report)
        except RuntimeError as error:
            raise UserError(f"{error}; nothing was written") from error
    else:
        if existing["identity"] != write.identity(source, bench.data, bench.prepare):
            raise UserError(
                f"prepare.out={out}: holds another dataset ({existing['num_images']:,} images at "
                f"{existing['resolution_px']} px of {existing['source']['root'] or existing['source']['kind']}, "
                f"identity {existing['identity'][:12]}); choose another prepare.out, or remove it"
            )
        manifest = _complete(out, existing, bench, formats)
    _tell(out, manifest, time.monotonic() - began)
    return out


def _compose(overrides: list[str]) -> BenchConfig:
    from hydra import compose, initialize_config_dir

    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir()), job_name="prepare"):
        return parse_config(compose("config", overrides=overrides))


def _check(bench: BenchConfig) -> None:
    unknown = sorted(set(bench.prepare.formats) - set(layout.FORMATS))
    if unknown:
        raise UserError(f"prepare.formats={','.join(unknown)}: not one of {', '.join(layout.FORMATS)}")
    if bench.data.kind == "prepared":
        if bench.prepare.out is not None:
            raise UserError("prepare.out: data=prepared adds formats to data.root itself; leave prepare.out away")
        return
    if not bench.prepare.out:
        raise UserError("prepare.out is empty: prepare needs prepare.out=<the folder to make>")
    if bench.data.kind == "folder":
        root, out = Path(bench.data.root or "").resolve(), Path(bench.prepare.out).resolve()
        if root in (out, *out.parents):
            raise UserError(f"prepare.out={out}: lies inside data.root={root}, whose images it would join")


def _existing(out: Path) -> dict[str, Any] | None:
    """The manifest of a dataset at `out`. Raises UserError where something else is there."""
    manifest = layout.read_manifest(out)
    if manifest is None and out.is_mount():
        raise UserError(
            f"prepare.out={out}: is a mount point, which the finished folder cannot replace; name one in it"
        )
    if manifest is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"prepare.out={out}: exists and is not a prepared dataset; nothing was touched")
    return manifest


def _add(bench: BenchConfig) -> Path:
    """Write the formats that the dataset at data.root lacks. Returns its folder."""
    began = time.monotonic()
    root = Path(bench.data.root or "").resolve()
    manifest = PreparedSource.open(bench.data).manifest
    _tell(root, _complete(root, manifest, bench, bench.prepare.formats), time.monotonic() - began)
    return root


def _cache(bench: BenchConfig, root: Path) -> None:
    """Run the model's frozen networks over the dataset at `root`. Raises UserError where the device is missing."""
    import torch  # after the processes of `write` are gone, and only for this

    from inpaint_bench.models import build_latent_cache

    if bench.recipe.device == "cuda" and not torch.cuda.is_available():
        raise UserError("prepare.caches=true needs a GPU, none can be used here; recipe=cpu runs on the processor")
    data = replace(bench.data, kind="prepared", root=str(root), num_images=None)
    source = PreparedSource.open(data)
    with _progress() as report:
        folder, description = build_latent_cache.build(
            replace(bench, data=data), source, torch.device(bench.recipe.device), partial(report, "caches")
        )
    log.info("cache of the frozen networks: %s (%.1f s)", folder, description.encoding_s)


def _complete(root: Path, manifest: dict[str, Any], bench: BenchConfig, formats: Sequence[str]) -> dict[str, Any]:
    """Add what is missing of `formats`, after a look at what is there."""
    layout.check_sizes(root, layout.entries(manifest))
    have, missing = manifest["formats"], [name for name in formats if name not in manifest["formats"]]
    shards = have.get("webdataset", {}).get("shard_images", bench.prepare.shard_images)
    if "webdataset" in formats and shards != bench.prepare.shard_images:
        raise UserError(f"{root}: has shards of {shards} images; set prepare.shard_images={shards}, or prepare it anew")
    if not missing:
        log.info("%s is already there and complete; nothing was written", root)
        return manifest
    with _progress() as report:
        return write.add_formats(root, manifest, bench.prepare, missing, report)


def _tell(root: Path, manifest: dict[str, Any], seconds: float) -> None:
    """The short account at the end."""
    account, split = manifest["account"], manifest["split"]
    beyond = f", {account['beyond_limit']:,} beyond data.num_images" if account["beyond_limit"] else ""
    log.info(
        "%s found, %s used, %s skipped%s",
        f"{account['found']:,}",
        f"{account['used']:,}",
        f"{len(account['skipped']):,}",
        beyond,
    )
    reasons = Counter(one["reason"] for one in account["skipped"])
    for reason, count in reasons.most_common():
        names = [one["file"] for one in account["skipped"] if one["reason"] == reason]
        more = f" and {count - NAMED} more" if count > NAMED else ""
        log.info("  %d skipped: %s (%s%s)", count, reason, ", ".join(names[:NAMED]), more)
    log.info(
        "%s for training, %s for validation: %d of %d blocks of %g m",
        f"{split['train']:,}",
        f"{split['validation']:,}",
        split["validation_blocks"],
        split["blocks"],
        split["block_m"],
    )
    if split["validation"] > 2 * split["share"] * manifest["num_images"]:
        log.warning(
            "far more than data.validation_share=%g: blocks are held out whole; a smaller data.block_m is finer",
            split["share"],
        )
    total = sum(entry.bytes for entry in layout.entries(manifest))
    rate = manifest["images_per_s"]
    log.info("%.1f MB as %s; %.1f s now, images at %.0f/s", total / 1e6, ", ".join(manifest["formats"]), seconds, rate)
    log.info("use it: %s", layout.how_to_use(root, manifest))


@contextmanager
def _progress() -> Iterator[write.Report]:
    """A bar per kind of work on a terminal; elsewhere a line every ten seconds."""
    screen = console()
    if not screen.is_terminal:
        yield _Lines()
        return
    columns = TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=screen) as progress:
        tasks: dict[str, TaskID] = {}

        def report(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = progress.add_task(doing, total=total)
            progress.update(tasks[doing], completed=done)

        yield report


class _Lines:
    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, doing: str, done: int, total: int) -> None:
        if time.monotonic() - self._said > SAY_EVERY_S:
            self._said = time.monotonic()
            log.info("%s: %s of %s", doing, f"{done:,}", f"{total:,}")
