"""Progress of a run, as its terminal and its Slurm log show it."""

from __future__ import annotations

import logging
import re
import time

import pytest

from inpaint_bench.core.records import ManifestHead, Progress
from inpaint_bench.core.schema import Status
from inpaint_bench.run import progress_log


def manifest(progress: Progress, workload: str | None = "finetune_inpaint") -> ManifestHead:
    return ManifestHead(status=Status.RUNNING, workload=workload, progress=progress)


@pytest.mark.parametrize(
    ("progress", "elapsed_s", "steps", "line"),
    [
        (
            Progress(step=40, steps_total=60, images_per_s=35.71),
            40.0,
            40,
            "step 40 of 60, 35.71 images/s, about 20 s left",
        ),
        (Progress(step=1000, steps_total=2000), 1000.0, 500, "step 1000 of 2000, about 33 min left"),
        (Progress(step=7), 10.0, 0, "step 7"),
    ],
)
def test_a_line_has_step_pace_and_time_left(progress: Progress, elapsed_s: float, steps: int, line: str) -> None:
    assert progress_log.describe(manifest(progress), elapsed_s, steps) == line


def test_a_run_without_a_step_is_told_for_how_long() -> None:
    """Regression: 18 minutes of Nsight Compute, or a search of the batch, were loading packages, data and model."""
    began_ns = time.time_ns() - 40 * 10**9
    line = progress_log.describe(ManifestHead(status=Status.RUNNING, started_unix_ns=began_ns))
    assert re.fullmatch(r"no step yet after 4\d s: loads packages, data and model, compiles or profiles", line)
    assert progress_log.describe(None).startswith("no step yet: ")


@pytest.mark.parametrize(
    ("workload", "unit"),
    [
        (None, "images/s"),  # earlier versions recorded no workload here
        ("sd_inference", "images/s"),
        ("volume3d_train", "volumes/s"),
        ("volume3d_sample", "volumes/s"),
    ],
)
def test_pace_has_the_unit_of_the_workload(workload: str | None, unit: str) -> None:
    """Regression: volumes were counted as images while a run went on."""
    assert progress_log.describe(manifest(Progress(step=7, images_per_s=0.0759), workload)) == f"step 7, 0.0759 {unit}"


def test_lines_are_rarer_than_progress(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_log.time, "monotonic", lambda: now[0])
    lines = progress_log.ProgressLog()
    with caplog.at_level(logging.INFO, logger=progress_log.log.name):
        for step in range(50):
            now[0] = float(step)
            lines.add(manifest(Progress(step=step, steps_total=50)))
    assert [record.message for record in caplog.records] == [
        "step 10 of 50, about 40 s left",
        "step 20 of 50, about 30 s left",
        "step 30 of 50, about 20 s left",
        "step 40 of 50, about 10 s left",
    ]
