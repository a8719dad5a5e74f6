"""What `prepare` does for a configuration: write a new dataset, or add formats to one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from inpaint_bench.core.config import BenchConfig, PrepareConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.source import open_source

from . import layout
from .formats import ReportProgress
from .layout import DatasetManifest
from .source import PreparedSource
from .write import add_formats, dataset_identity, write_dataset

log = logging.getLogger(__name__)


def prepare_dataset(bench: BenchConfig, report: ReportProgress) -> tuple[Path, DatasetManifest]:
    """Write what is missing of the dataset that `bench` describes, and return its folder and manifest.

    Raises UserError for settings that contradict each other, and if prepare.out holds anything else.
    """
    data, settings = bench.data, bench.prepare
    unknown = sorted(set(settings.formats) - set(layout.FORMATS))
    if unknown:
        raise UserError(f"prepare.formats={','.join(unknown)}: not one of {', '.join(layout.FORMATS)}")
    if data.kind == "prepared":
        if settings.out is not None:
            raise UserError("prepare.out: data=prepared adds formats to data.root itself; do not set prepare.out")
        root = Path(data.root or "").resolve()
        return root, _add_missing(root, PreparedSource.open(data).manifest, settings, settings.formats, report)
    if not settings.out:
        raise UserError("prepare.out is empty: prepare needs prepare.out=<the folder to make>")
    out = Path(settings.out).resolve()
    if data.kind == "folder" and Path(data.root or "").resolve() in (out, *out.parents):
        raise UserError(f"prepare.out={out}: lies inside data.root={data.root}, whose images it would join")
    existing = _read_existing(out)
    source = open_source(data)
    formats = list(dict.fromkeys(["files", *settings.formats]))
    if existing is None:
        try:
            return out, write_dataset(source, bench, out, formats, report)
        except RuntimeError as error:  # a file that became unreadable
            raise UserError(f"{error}; nothing was written") from error
    if existing.identity != dataset_identity(source, bench):
        raise UserError(
            f"prepare.out={out}: holds another dataset ({existing.num_images:,} images at {existing.resolution_px} px "
            f"of {existing.source.root or existing.source.kind}, identity {existing.identity[:12]}); choose another "
            "prepare.out, or remove it"
        )
    return out, _add_missing(out, existing, settings, formats, report)


def _read_existing(out: Path) -> DatasetManifest | None:
    """Return the manifest of a dataset at `out`, or None. Raises UserError if something else is there."""
    manifest = layout.read_manifest(out)
    if manifest is None and out.is_mount():
        raise UserError(f"prepare.out={out}: is a mount point, which cannot be replaced; name a folder in it")
    if manifest is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"prepare.out={out}: exists and is not a prepared dataset; nothing was written")
    return manifest


def _add_missing(
    root: Path, manifest: DatasetManifest, settings: PrepareConfig, formats: Sequence[str], report: ReportProgress
) -> DatasetManifest:
    layout.check_sizes(root, layout.list_entries(manifest))
    if "webdataset" in formats and "webdataset" in manifest.formats:
        shard_images = manifest.formats["webdataset"].shard_images
        if shard_images != settings.shard_images:
            raise UserError(
                f"{root}: has shards of {shard_images} images; set prepare.shard_images={shard_images}, or prepare it "
                "anew"
            )
    missing = [name for name in formats if name not in manifest.formats]
    if not missing:
        log.info("%s is complete; nothing was written", root)
        return manifest
    return add_formats(root, manifest, settings, missing, report)
