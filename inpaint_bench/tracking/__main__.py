"""The tracker's process: `python -m inpaint_bench.tracking RUN_DIR '<TrackConfig as JSON>'`.

It follows one run: reads its files every few seconds and hands on what is new. A line on stdin, or its end if the
worker has died, ends it after a last reading. Exit code 0; 1: the tracker failed, tracking.json says why.
"""

import importlib
import os
import select
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from inpaint_bench.core.config.bench import TrackConfig
from inpaint_bench.core.records import Manifest, TrackingReport, decode_record, read_record, write_record
from inpaint_bench.core.schema import MANIFEST, TRACKING, TRACKING_FILES, Status

from .api import TrackedRun, Tracker

NICENESS = 10  # the run's own processes come first if cores are few
_FIRST_WAIT_S = 0.2  # while batch=auto searches
PROBLEM_CHARS = 400
# Fields of the manifest that are tags of the run; further ones have other names.
TAGS = ("gpu", "gpus", "nodes", "site", "recipe", "seed", "point", "attempt", "workload", "model", "variant")
PICTURES = "samples"  # name of the sample pictures in a tracker


def main(folder: str, settings_json: str) -> int:
    """Follow the run in a folder to its end. Returns the exit code; whatever fails is in tracking.json."""
    os.nice(NICENESS)
    # Slurm signals every process of a step. What the worker makes of it must still be read.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    run_dir, settings = Path(folder), decode_record(settings_json, TrackConfig)
    try:
        report = read_record(run_dir / TRACKING, TrackingReport)
    except ValueError:
        report = None
    if report is None or report.name != settings.name:
        report = TrackingReport(status="running", name=settings.name)
    # An earlier start with the same tracker is continued.
    report = msgspec.structs.replace(report, status="running", problem=None, link=None, pid=os.getpid(), cpu_s=None)
    try:
        write_record(run_dir / TRACKING, report)
        _follow(run_dir, settings, report)
        report.status = "complete"
    except Exception as error:
        traceback.print_exc()
        report.status = "failed"
        report.problem = " ".join(f"{type(error).__name__}: {error}".split())[:PROBLEM_CHARS]
    report.cpu_s = round(sum(os.times()[:4]), 3)
    write_record(run_dir / TRACKING, report)
    return 0 if report.status == "complete" else 1


def _follow(run_dir: Path, settings: TrackConfig, report: TrackingReport) -> None:
    from .run_files import RunReader  # loads pyarrow, while the signals above are ignored

    module = importlib.import_module(settings.module or "")
    files = RunReader(run_dir, report)
    tracker: Tracker | None = None
    ended, wait_s = False, 0.0
    while not ended:
        # A line, or the end of the file: the run has ended, or the worker is gone.
        ended = bool(select.select([sys.stdin], [], [], wait_s)[0])
        manifest = read_record(run_dir / MANIFEST, Manifest)
        if manifest is None:
            raise FileNotFoundError(f"{run_dir / MANIFEST}: no such file")
        # batch=auto: the name of the run has the batch that the search finds.
        if tracker is None and not ended and manifest.batch is None and manifest.batch_requested == "auto":
            wait_s = _FIRST_WAIT_S
            continue
        if tracker is None:
            tracker = module.start(_tracked_run(run_dir, settings, manifest, report))
            report.link, report.tracked_run = tracker.link, tracker.tracked_run
        if values := files.read(manifest, last=ended):
            tracker.log(values)
            report.values += len(values)
        pictures = manifest.quality and manifest.quality.pictures
        if ended and pictures and (run_dir / pictures).is_file():
            tracker.picture(PICTURES, run_dir / pictures, manifest.progress.step if manifest.progress else 0)
            report.pictures += 1
        write_record(run_dir / TRACKING, report)
        if ended:
            running = manifest.status is Status.RUNNING  # its process died and wrote no status
            tracker.finish(Status.INTERRUPTED if running else manifest.status)
        wait_s = settings.every_s


def _tracked_run(run_dir: Path, settings: TrackConfig, manifest: Manifest, report: TrackingReport) -> TrackedRun:
    gpu = f"{manifest.gpus}x{manifest.gpu}" if (manifest.gpus or 1) > 1 else str(manifest.gpu)
    batch = manifest.batch or manifest.batch_requested
    seed = None if manifest.seed is None else f"seed={manifest.seed}"
    tags = {name: getattr(manifest, name) for name in TAGS}
    tags |= {"batch": batch, "sweep": manifest.sweep_id, "run": manifest.run_id}
    return TrackedRun(
        run_id=manifest.run_id,
        # A command has neither batch nor seed.
        name=" ".join(filter(None, (gpu, f"batch={batch}" if batch else None, manifest.recipe, seed))),
        tags={key: str(value) for key, value in tags.items() if value is not None},
        settings=settings,
        files=run_dir / TRACKING_FILES,
        # <sweep>/<point>/attempt-<k>
        sweep_dir=run_dir.parent.parent if manifest.sweep_id else run_dir,
        tracked_run=report.tracked_run,
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
