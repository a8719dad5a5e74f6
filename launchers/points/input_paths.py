"""Data, weights and tracker of a point, looked at before it is queued: a job would wait for hours to miss them.

They are looked at only if this machine runs the point or shares its file systems. The job checks again.
"""

from collections.abc import Callable, Collection
from dataclasses import astuple
from functools import partial
from pathlib import Path

from inpaint_bench.core.config.bench import BenchConfig, ModelConfig
from inpaint_bench.core.config.parse import require_tracker
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.config.validation import file_paths
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path, why_unreadable
from inpaint_bench.core.workloads._volumes import VolumeConfig
from inpaint_bench.data.captions import draw_captions
from inpaint_bench.models.weights_folder import (
    check_channels,
    check_clip_folder,
    check_hub_id,
    check_model,
    check_side,
    check_weights_folder,
    read_header,
    saved_multiple_px,
    weights_path,
)
from inpaint_bench.telemetry.nvml.replay import SUFFIX, load

from .site_catalog import Reachability


class InputPaths:
    """The checks of a sweep, each made once however many points share its paths."""

    def __init__(self) -> None:
        self._checked: set[object] = set()

    def check(self, bench: BenchConfig, site: SiteConfig, reachability: Reachability) -> None:
        """Raise UserError for paths that the point's job would refuse."""
        weights, quality = bench.model.weights, bench.quality
        if weights:
            # An id of the hub is no path at any site.
            self._once(("hub", weights), lambda: check_hub_id("model.weights", weights))
        elif allowed := bench.workload.unet_channels:
            check_channels(bench.model.name, bench.model.input_channels(None), allowed)
            check_side(bench.model.name, bench.data.resolution_px, bench.model.multiple_px)
        if quality.clip_model:
            check_hub_id("quality.clip_model", quality.clip_model)
        capture = bench.telemetry.capture or bench.gpu.capture
        is_packaged = capture and not capture.endswith(SUFFIX)  # the same at every site
        if bench.telemetry.source == "replay" and (is_packaged or is_visible(site, reachability)):
            self._once(("capture", capture), lambda: _check_capture(bench))
        if not is_visible(site, reachability):
            return
        if runs_this_python(site, reachability):
            require_tracker(bench.track)
        _check_binds(bench, site)
        needs = bench.workload.validates, _volumes_needed(bench)
        self._once((astuple(bench.data), astuple(bench.recipe), needs), lambda: _check_data(bench))
        if captions := bench.data.captions:
            count = bench.workload.num_prompts(bench)
            self._once(("captions", captions, count), lambda: draw_captions(captions, count, bench.data.seed))
        if weights:
            self._once(("weights", weights), lambda: check_weights_folder(weights_path(weights), weights))
            if allowed := bench.workload.unet_channels:
                model, folder, side_px = bench.model, weights_path(weights), bench.data.resolution_px
                self._once((repr(model), allowed, side_px), lambda: _check_networks(model, folder, allowed, side_px))
        for key, path in (file_paths("quality", quality) | file_paths("workload", bench.workload)).items():
            if key != "quality.clip_model" and (problem := why_unreadable(expand_path(path))):
                raise UserError(f"{key}={path}: cannot be read ({problem})")
        for key, path in file_paths("workload", bench.workload).items():
            self._once((key, path), partial(_check_weights_file, key, path))
        if clip := quality.clip_model:
            self._once(("clip", clip), lambda: check_clip_folder(clip))

    def _once(self, key: object, check: Callable[[], object]) -> None:
        if key not in self._checked:
            check()
            self._checked.add(key)


def _check_networks(model: ModelConfig, folder: Path, allowed: Collection[int], side_px: int) -> None:
    check_channels(model.name, model.input_channels(check_model(model, folder)), allowed)
    check_side(model.name, side_px, saved_multiple_px(model, folder))


def _check_weights_file(key: str, path: str) -> None:
    try:
        read_header(expand_path(path))
    except ValueError as error:
        raise UserError(f"{key}={path}: is no file of weights ({error})") from None


def _check_capture(bench: BenchConfig) -> None:
    """Raise UserError for a recording that the sidecar could not play."""
    given = bench.telemetry.capture
    try:
        load(given or bench.gpu.capture or "")
    except ValueError as error:
        raise UserError(f"{'telemetry' if given else 'gpu'}.capture={given or bench.gpu.capture}: {error}") from None


def is_visible(site: SiteConfig, reachability: Reachability) -> bool:
    """Return whether this machine sees the file systems of the site: it is the site's, or the site is this machine."""
    return reachability.ok and not site.connection.is_remote


def runs_this_python(site: SiteConfig, reachability: Reachability) -> bool:
    """Return whether jobs run with the packages of this environment: else only they can say what is missing."""
    return is_visible(site, reachability) and not (site.python or site.environment.container.image)


def _check_binds(bench: BenchConfig, site: SiteConfig) -> None:
    """Raise UserError for a path that the site's container does not show."""
    container = site.environment.container
    if not container.image:
        return
    # SOURCE[:DESTINATION[:OPTIONS]]; HOME and /tmp are bound by Apptainer itself
    shown = [Path((bind.split(":")[1:2] or [bind])[0]) for bind in container.binds]
    for given in given_paths(bench):
        path = expand_path(given.partition("=")[2]).absolute()
        if not any(path.is_relative_to(folder) for folder in (*shown, Path.home(), Path("/tmp"))):
            raise UserError(
                f"{given}: the container of site={site.name} does not show it; add its folder to "
                f"sites.{site.name}.environment.container.binds"
            )


def given_paths(bench: BenchConfig) -> list[str]:
    """Return the overrides of a point that name files at its site."""
    paths = {"data.root": bench.data.root} if bench.data.kind != "synthetic" and bench.data.root else {}
    for group in ("data", "model", "quality", "workload"):
        paths |= file_paths(group, getattr(bench, group))
    return [f"{key}={path}" for key, path in paths.items()]


def _volumes_needed(bench: BenchConfig) -> tuple[int, int]:
    workload = bench.workload
    return workload.volumes_needed(bench) if isinstance(workload, VolumeConfig) else (0, 0)


def _check_data(bench: BenchConfig) -> None:
    # Imported here: Pillow and Arrow take a while, and most sweeps use generated images.
    if bench.data.kind == "folder":
        from inpaint_bench.data.folder import check_folder

        check_folder(bench.data.root)
    elif bench.data.kind == "parquet":
        from inpaint_bench.data.parquet import open_shards

        open_shards(bench.data.root)
    elif bench.data.kind == "nifti":
        from inpaint_bench.data.volumes import NiftiFolder

        NiftiFolder(bench.data, *_volumes_needed(bench))
    elif bench.data.kind == "prepared":
        from inpaint_bench.data.prepared import check_caches, data_inputs
        from inpaint_bench.data.prepared_source import check_prepared
        from inpaint_bench.data.source import refuse_unsplit

        root, manifest = check_prepared(bench.data, bench.recipe.format)
        if not manifest.split.validation and bench.workload.validates:
            refuse_unsplit(manifest.num_images, bench.data)
        if bench.recipe.cache_image or bench.recipe.cache_masked or bench.recipe.cache_text:
            check_caches(root, data_inputs(bench, manifest.identity), bench.model)
