"""Following one run: read its files every few seconds and hand on what is new, until it ends."""

from __future__ import annotations

import importlib
import os
import select
import sys
import traceback
from pathlib import Path

import msgspec

from inpaint_bench.core.config.bench import TrackConfig
from inpaint_bench.core.records import Manifest, TrackingReport, decode_record, read_record, write_record
from inpaint_bench.core.schema import TRACKING, TRACKING_FILES, Status

from .api import TrackedRun, Tracker
from .run_files import RunReader

_FIRST_WAIT_S = 0.2  # while batch=auto searches
PROBLEM_CHARS = 400
# Fields of the manifest that are tags of the run; further ones have other names.
TAGS = ("gpu", "gpus", "nodes", "site", "recipe", "seed", "point", "attempt", "workload", "model", "variant")
PICTURES = "samples"  # name of the sample pictures in a tracker


def follow(folder: str, settings_json: str) -> int:
    """Follow the run in a folder to its end. Returns the exit code; whatever fails is in tracking.json."""
    run_dir, settings = Path(folder), decode_record(settings_json, TrackConfig)
    report = _report(run_dir, settings)
    try:
        write_record(run_dir / TRACKING, report)
        _follow(run_dir, settings, report)
        report.status = "complete"
    except Exception as error:
        traceback.print_exc()
        report.status = "failed"
        report.problem = " ".join(f"{type(error).__name__}: {error}".split())[:PROBLEM_CHARS]
    times = os.times()
    report.cpu_s = round(times.user + times.system + times.children_user + times.children_system, 3)
    write_record(run_dir / TRACKING, report)
    return 0 if report.status == "complete" else 1


def _report(run_dir: Path, settings: TrackConfig) -> TrackingReport:
    """Return the report to go on with: that of an earlier start with the same tracker, or a new one."""
    try:
        earlier = read_record(run_dir / TRACKING, TrackingReport)
    except ValueError:
        earlier = None
    if earlier is None or earlier.name != settings.name:
        earlier = TrackingReport(status="running", name=settings.name)
    return msgspec.structs.replace(earlier, status="running", problem=None, link=None, pid=os.getpid(), cpu_s=None)


def _follow(run_dir: Path, settings: TrackConfig, report: TrackingReport) -> None:
    module = importlib.import_module(settings.module or "")
    files = RunReader(run_dir, report)
    tracker: Tracker | None = None
    wait_s = 0.0
    while True:
        # A line, or the end of the file: the run has ended, or the worker is gone.
        ended = bool(select.select([sys.stdin], [], [], wait_s)[0])
        manifest = files.manifest()
        # batch=auto: the name of the run has the batch that the search finds.
        if tracker is None and not ended and manifest.batch is None:
            wait_s = _FIRST_WAIT_S
            continue
        if tracker is None:
            tracker = module.start(_tracked_run(run_dir, settings, manifest, report))
            report.link, report.tracked_run = tracker.link, tracker.tracked_run
        if values := files.read(manifest, last=ended):
            tracker.log(values)
            report.values += len(values)
        if ended and (path := files.picture(manifest)):
            tracker.picture(PICTURES, path, manifest.progress.step if manifest.progress else 0)
            report.pictures += 1
        write_record(run_dir / TRACKING, report)
        if ended:
            running = manifest.status is Status.RUNNING  # its process died and wrote no status
            tracker.finish(Status.INTERRUPTED if running else manifest.status)
            return
        wait_s = settings.every_s


def _tracked_run(run_dir: Path, settings: TrackConfig, manifest: Manifest, report: TrackingReport) -> TrackedRun:
    gpu = f"{manifest.gpus}x{manifest.gpu}" if (manifest.gpus or 1) > 1 else str(manifest.gpu)
    batch = manifest.batch or manifest.batch_requested
    tags = {name: getattr(manifest, name) for name in TAGS}
    tags |= {"batch": batch, "sweep": manifest.sweep_id, "run": manifest.run_id}
    return TrackedRun(
        run_id=manifest.run_id,
        name=f"{gpu} batch={batch} {manifest.recipe} seed={manifest.seed}",
        tags={key: str(value) for key, value in tags.items() if value is not None},
        settings=settings,
        files=run_dir / TRACKING_FILES,
        # <sweep>/<point>/attempt-<k>
        sweep_dir=run_dir.parent.parent if manifest.sweep_id else run_dir,
        tracked_run=report.tracked_run,
    )
