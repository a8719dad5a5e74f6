"""`watch` in a job of a real Slurm: what it records of the job, and what scancel does to the program."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.records import Manifest, read_record
from inpaint_bench.core.schema import MANIFEST
from tests.cli.test_watch import NOTES_SIGNALS, REPLAY, WATCH
from tests.testbed.bed import Bed


def test_cancelled_job_ends_its_program_and_leaves_a_run_that_says_so(testbed: Bed, tmp_path: Path) -> None:
    program = [sys.executable, "-c", NOTES_SIGNALS]
    command = shlex.join([*WATCH, *REPLAY, "-o", str(tmp_path / "run"), "--", *program])
    options = ["--parsable", f"--chdir={tmp_path}", f"--output={tmp_path / 'job.out'}", "--ntasks=1"]
    wrapped = f"export PYTHONPATH={shlex.quote(str(ROOT))}; srun --ntasks=1 {command}"
    submitted = testbed.run("delta", "sbatch", *options, f"--wrap={wrapped}")
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip().partition(";")[0]
    testbed.wait(lambda: (tmp_path / "child.ready").exists(), what="the program")
    assert testbed.run("delta", "scancel", job).returncode == 0
    testbed.wait(lambda: (tmp_path / "child").exists(), what="the end of the program")

    def record() -> Manifest:
        manifest = read_record(tmp_path / "run" / MANIFEST, Manifest)
        assert manifest is not None
        return manifest

    testbed.wait(lambda: record().status != "running", what="the final status")
    manifest = record()
    assert (manifest.status, manifest.reason) == ("interrupted", "cancelled")
    assert manifest.message == "received SIGTERM; the command exited with 7"
    assert manifest.slurm is not None
    assert (manifest.slurm.job_id, manifest.slurm.cluster) == (job, "delta")
    assert manifest.telemetry is not None
    assert manifest.telemetry.status == "complete"
