"""A tracker beside jobs of a real Slurm: one that completes, and one that is cancelled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.records import Manifest, TrackingReport, read_record
from inpaint_bench.core.schema import Status
from tests.testbed.bed import Bed

SWEEP = (
    "-m",
    "profile=testbed",
    "gpu=h200",
    "batch=2",
    "workload.module=tests.run.support",
    "workload.warmup_steps=1",
    "track=tensorboard",
    "track.every_s=1",
)


@pytest.mark.faults
@pytest.mark.slurm
def test_curves_of_a_cancelled_job_end_with_it(testbed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("TINY_STEP_S", "0.5")
    folder = tmp_path / "sweep"
    steps = "workload.train_steps=20,2000"
    assert launch.main([*SWEEP, "seed=0", steps, f"hydra.sweep.dir={folder}"]) == 0
    complete, cancelled = (folder / f"{point}/attempt-1" for point in (0, 1))

    def report(run_dir: Path) -> TrackingReport | None:
        return read_record(run_dir / "tracking.json", TrackingReport)

    def manifest(run_dir: Path) -> Manifest | None:
        return read_record(run_dir / "manifest.json", Manifest)

    testbed.wait(lambda: (seen := report(cancelled)) and seen.last_step > 2, timeout_s=200, what="losses")
    running = manifest(cancelled)
    assert running is not None
    assert running.slurm is not None
    assert running.tracking is not None
    testbed.run("delta", "scancel", f"{running.slurm.array_job_id}_{running.slurm.array_task_id}")
    for run_dir, status in ((cancelled, Status.INTERRUPTED), (complete, Status.COMPLETED)):
        testbed.wait(
            lambda run_dir=run_dir: (seen := report(run_dir)) and seen.status == "complete",
            timeout_s=120,
            what="the end of the tracker",
        )
        ended = manifest(run_dir)
        assert ended is not None
        assert ended.status is status
        assert ended.tracking is not None
        assert ended.tracking.problem is None
        assert ended.progress is not None
        events = EventAccumulator(ended.tracking.link or "")
        events.Reload()
        losses = [point.step for point in events.Scalars("loss")]
        assert losses == list(range(ended.progress.step))
