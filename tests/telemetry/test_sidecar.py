"""The sidecar as a process: what it writes, and how it starts and ends."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import inpaint_bench
from inpaint_bench.core import schema
from inpaint_bench.core.config.validation import check
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import read_record
from inpaint_bench.core.tables import SAMPLES_FAST, SAMPLES_SLOW
from inpaint_bench.telemetry.client import SidecarClient, SidecarError
from inpaint_bench.telemetry.report import TelemetryReport
from inpaint_bench.telemetry.storage.parts import recover_run

from .support import CAPTURE, leftovers, part_schema, pid_of, rows, settings, start


def _ends(pid: int, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def _report(run_dir: Path) -> TelemetryReport:
    report = read_record(run_dir / schema.TELEMETRY, TelemetryReport)
    assert report is not None
    return report


class TestSampling:
    def test_two_seconds_at_ten_hertz_give_twenty_rows_of_the_schema(self, tmp_path: Path) -> None:
        sidecar = start(tmp_path)
        time.sleep(2)
        report = sidecar.stop()
        fast, slow = rows(tmp_path, "samples_fast"), rows(tmp_path, "samples_slow")
        assert 18 <= len(fast) <= 23
        assert 3 <= len(slow) <= 4
        assert part_schema(tmp_path, "samples_fast").equals(SAMPLES_FAST)
        assert part_schema(tmp_path, "samples_slow").equals(SAMPLES_SLOW)
        assert fast["run_id"].unique().to_list() == ["r-test"]
        assert fast["power_instant_w"].null_count() == 0
        stream = report.streams["fast"]
        assert stream.ticks_done == len(fast)
        assert stream.ticks_due == stream.ticks_done + stream.ticks_skipped
        assert report.tables["samples_fast"].rows == len(fast)
        gaps_ms = fast["t_mono_ns"].diff().drop_nulls() / 1e6
        assert gaps_ms.median() == pytest.approx(100, abs=2)
        assert gaps_ms.min() > 39  # MIN_INTERVAL_NS; the time is the middle of the read

    def test_reported_memory_is_not_that_of_the_parent(self, tmp_path: Path) -> None:
        ballast = bytearray(600 * 2**20)  # touched: zeroed memory of a bytearray is written
        ballast[::4096] = b"x" * len(ballast[::4096])
        sidecar = start(tmp_path)
        report = sidecar.stop()
        del ballast
        assert report.max_rss_mib is not None
        assert 10 < report.max_rss_mib < 400

    def test_replayed_rows_cannot_be_taken_for_a_real_gpu(self, tmp_path: Path) -> None:
        sidecar = start(tmp_path)
        report = sidecar.stop()
        fast = rows(tmp_path, "samples_fast")
        assert fast["source"].unique().to_list() == ["replay:h200-synthetic"] == [sidecar.source]
        assert fast["gpu_uuid"].unique().to_list() == ["REPLAY-h200-synthetic"]
        assert sidecar.devices[0].uuid == "REPLAY-h200-synthetic"
        assert report.capture is not None
        assert report.capture.synthetic is True
        metadata = part_schema(tmp_path, "samples_fast").metadata
        assert metadata[b"source"] == b"replay:h200-synthetic"
        assert {b"schema_version", b"run_id", b"producer", b"driver", b"nvml"} <= metadata.keys()

    def test_first_sample_is_taken_within_a_second_of_the_start(self, tmp_path: Path) -> None:
        waits = []
        for attempt in range(3):  # a busy machine
            start_ns = time.time_ns()
            sidecar = start(tmp_path / str(attempt))
            sidecar.stop()
            first = rows(tmp_path / str(attempt), "samples_fast")["t_unix_ns"][0]
            waits.append((first - start_ns) / 1e9)
            if waits[-1] < 1.0:
                return
        pytest.fail(f"{waits} s")

    def test_ticks_missed_by_a_stopped_process_are_counted_and_not_made_up_for(self, tmp_path: Path) -> None:
        sidecar = start(tmp_path)
        os.kill(pid_of(sidecar), signal.SIGSTOP)
        time.sleep(0.75)
        os.kill(pid_of(sidecar), signal.SIGCONT)
        time.sleep(0.3)
        stream = sidecar.stop().streams["fast"]
        fast = rows(tmp_path, "samples_fast")
        assert stream.ticks_skipped >= 5
        assert stream.ticks_due == stream.ticks_done + stream.ticks_skipped
        assert fast["tick_seq"].max() - len(fast) + 1 == stream.ticks_skipped
        assert fast["t_mono_ns"].diff().drop_nulls().min() > 39e6  # no burst afterwards

    def test_neither_torch_nor_hydra_is_imported(self) -> None:
        code = (
            "import sys, inpaint_bench.telemetry.process, inpaint_bench.telemetry.client\n"
            "print(*{m.partition('.')[0] for m in sys.modules} & {'torch', 'diffusers', 'hydra', 'omegaconf'})"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out.strip() == ""


class TestEnding:
    def test_sigterm_leaves_only_closed_parts(self, tmp_path: Path) -> None:
        sidecar = start(tmp_path, journal_s=0.2)
        time.sleep(0.5)
        report = sidecar.stop()
        assert report.status == "complete"
        assert report.reason == "SIGTERM"
        (device,) = report.devices
        assert device.energy_start_mj is not None
        assert rows(tmp_path, "samples_fast")["energy_mj"].max() > device.energy_start_mj > 0
        assert report == read_record(tmp_path / schema.TELEMETRY, TelemetryReport)
        assert sidecar.stop() == report
        assert _ends(pid_of(sidecar), 1)
        assert leftovers(tmp_path) == []

    def test_slurms_warning_of_the_time_limit_does_not_end_it(self, tmp_path: Path) -> None:
        """Slurm sends it to every process of a step, and the worker still has a checkpoint to write."""
        sidecar = start(tmp_path)
        os.kill(pid_of(sidecar), signal.SIGUSR2)
        time.sleep(0.3)
        assert not _ends(pid_of(sidecar), 0.1)
        assert sidecar.stop().status == "complete"

    def test_only_the_main_thread_can_receive_the_signal_to_stop(self, tmp_path: Path) -> None:
        """Regression: a thread that Arrow starts on import received SIGTERM now and then, and nothing was closed."""
        sidecar = start(tmp_path)
        pid = pid_of(sidecar)
        for task in Path(f"/proc/{pid}/task").iterdir():
            lines = (task / "status").read_text().splitlines()
            blocked = int(next(line for line in lines if line.startswith("SigBlk")).split()[1], 16)
            if int(task.name) != pid:
                assert blocked >> (signal.SIGTERM - 1) & 1
                assert blocked >> (signal.SIGINT - 1) & 1
        assert sidecar.stop().status == "complete"

    @pytest.mark.parametrize("part_s", [1.0, 60.0])
    def test_kill_9_loses_at_most_the_journal_interval(self, tmp_path: Path, part_s: float) -> None:
        sidecar = start(tmp_path, journal_s=0.5, part_s=part_s)
        time.sleep((1.5 if part_s == 1 else 0.8) + 0.5 * random.random())
        killed_ns = time.monotonic_ns()
        os.kill(pid_of(sidecar), signal.SIGKILL)
        assert sidecar._child is not None
        sidecar._child.process.wait()
        report = _report(tmp_path)
        assert report.status == "running"
        if part_s == 1:  # the report is at most as old as a part
            assert report.streams["fast"].ticks_done > 5
        recover_run(tmp_path)
        assert leftovers(tmp_path) == []
        fast = rows(tmp_path, "samples_fast")
        lost_s = (killed_ns - fast["t_mono_ns"][-1]) / 1e9
        assert lost_s <= 0.5 + 0.1 + 0.1  # the interval, one period, the scheduler
        assert fast["tick_seq"].is_unique().all()
        assert fast["tick_seq"][0] == 0
        assert fast["energy_mj"].diff().drop_nulls().min() >= 0
        assert fast["power_instant_w"].min() > 50
        assert recover_run(tmp_path) == []
        assert rows(tmp_path, "samples_fast").equals(fast)

    def test_client_of_a_killed_sidecar_recovers_the_rows(self, tmp_path: Path) -> None:
        sidecar = start(tmp_path, journal_s=0.2)
        time.sleep(0.6)
        os.kill(pid_of(sidecar), signal.SIGKILL)
        assert sidecar._child is not None
        sidecar._child.process.wait(60)
        report = sidecar.stop()
        assert report.status == "died"
        assert _report(tmp_path).status == "died"
        assert {record.table for record in report.recovered} == {"samples_fast", "samples_slow", "samples_cpu"}
        assert len(rows(tmp_path, "samples_fast")) >= 3

    def test_sidecar_ends_with_its_parent_and_loses_no_row(self, tmp_path: Path) -> None:
        code = (
            "import os, pathlib, sys, time\n"
            "from tests.telemetry.support import pid_of, start\n"
            "print(pid_of(start(pathlib.Path(sys.argv[1]))), flush=True)\n"
            "time.sleep(0.5)\n"
            "os.kill(os.getpid(), 9)\n"
        )
        root = Path(__file__).parents[2]
        out = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True, check=False
        )
        assert _ends(int(out.stdout), 2)
        report = _report(tmp_path)
        assert (report.status, report.reason) == ("complete", "parent_gone")
        assert report.tables["samples_fast"].rows == len(rows(tmp_path, "samples_fast")) >= 5
        assert leftovers(tmp_path) == []

    def test_failing_disk_is_reported_and_the_rows_are_saved_later(self, tmp_path: Path) -> None:
        sidecar = start(tmp_path, journal_s=0.2)
        _, hard = resource.prlimit(pid_of(sidecar), resource.RLIMIT_FSIZE)
        resource.prlimit(pid_of(sidecar), resource.RLIMIT_FSIZE, (0, hard))
        time.sleep(0.8)
        assert not _ends(pid_of(sidecar), 0.1)
        resource.prlimit(pid_of(sidecar), resource.RLIMIT_FSIZE, (hard, hard))
        time.sleep(0.6)
        report = sidecar.stop()
        assert report.status == "complete"
        assert report.storage.errors >= 1
        assert report.problems[0].startswith("storage_failed")
        assert report.storage.error is None
        assert rows(tmp_path, "events")["kind"].to_list() == ["storage_failed", "storage_recovered"]
        assert rows(tmp_path, "samples_fast")["tick_seq"].to_list() == list(range(report.tables["samples_fast"].rows))

    def test_disk_full_to_the_end_makes_the_report_incomplete(self, tmp_path: Path) -> None:
        sidecar = start(tmp_path, journal_s=0.2)
        resource.prlimit(pid_of(sidecar), resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        time.sleep(0.4)
        report = sidecar.stop()
        assert report.status == "incomplete"
        assert "File too large" in str(report.storage.error)
        assert _report(tmp_path).status == "running"  # the disk had no room for more

    def test_internal_error_in_the_last_check_is_reported_and_no_row_is_lost(self, tmp_path: Path) -> None:
        code = (
            "import json, sys\n"
            "from inpaint_bench.telemetry import runtime\n"
            "runtime.block_signals()\n"
            "from inpaint_bench.telemetry import process\n"
            "from inpaint_bench.telemetry.sampling import checks\n"
            "def broken(*_): raise KeyError('mistake')\n"
            "checks.worsened = broken\n"
            "sys.exit(process.run_sidecar(sys.argv[1]))\n"
        )
        replay = {"name": "test", "source": "replay", "capture": CAPTURE}
        spec = {"run_id": "r-test", "run_dir": str(tmp_path), "settings": replay, "parent": os.getpid()}
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(spec)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["type"] == "ready"
        time.sleep(0.3)
        process.terminate()
        assert process.wait(60) == 1
        process.stdout.close()
        report = _report(tmp_path)
        assert (report.status, report.reason) == ("failed", "internal error: KeyError('mistake')")
        assert report.tables["samples_fast"].rows == len(rows(tmp_path, "samples_fast")) >= 3
        assert leftovers(tmp_path) == []


class TestStarting:
    def test_unknown_capture_is_refused_with_the_available_ones(self, tmp_path: Path) -> None:
        with pytest.raises(SidecarError, match=r"no capture 'gtx'; available: .*a100-synthetic, a40-synthetic"):
            start(tmp_path, capture="gtx")

    @pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is an NVIDIA driver here")
    def test_error_without_a_driver_says_what_would_run(self, tmp_path: Path) -> None:
        uuids = ["12345678-1234-1234-1234-123456789abc"]
        with pytest.raises(SidecarError, match=r"no working NVIDIA driver .* telemetry=replay"):
            SidecarClient(tmp_path, "r-test", uuids, settings(source="nvml"))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"part_s": 0.0}, "telemetry.part_s=0"),
            ({"journal_s": float("nan")}, "telemetry.journal_s=nan"),
            ({"fast_hz": 20.5}, "telemetry.fast_hz=20.5"),
            ({"slow_hz": 0.0}, "telemetry.slow_hz=0"),
            ({"source": "amd"}, "telemetry.source=amd"),
        ],
    )
    def test_configuration_refuses_impossible_settings(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            check(settings(**changes), "telemetry")

    def test_several_gpus_are_several_replayed_devices(self, tmp_path: Path) -> None:
        sidecar = SidecarClient(tmp_path, "r-test", ["a", "b"], settings())
        report = sidecar.stop()
        assert [device.uuid for device in sidecar.devices] == [
            "REPLAY-h200-synthetic",
            "REPLAY-h200-synthetic-1",
        ]
        fast = rows(tmp_path, "samples_fast")
        assert len(fast) == 2 * report.streams["fast"].ticks_done

    def test_second_sidecar_for_a_run_directory_is_refused(self, tmp_path: Path) -> None:
        """Regression: before the first journal, and after every closed part, a second one was admitted, and the parts
        of one replaced those of the other."""
        first = start(tmp_path)
        with pytest.raises(SidecarError, match="another sidecar is writing to this folder"):
            start(tmp_path)
        assert first.stop().status == "complete"
        assert start(tmp_path).stop().status == "complete"  # an attempt that continues in its directory
        assert len(list((tmp_path / "samples_fast").glob("part-*.parquet"))) == 2

    def test_closing_sidecar_is_waited_for(self, tmp_path: Path) -> None:
        """A job that continues in its directory may start before the sidecar of the killed one has closed its parts."""
        first = start(tmp_path)
        threading.Timer(0.3, first.stop).start()
        assert start(tmp_path).stop().status == "complete"
        assert _ends(pid_of(first), 5)

    def test_source_none_starts_no_process(self, tmp_path: Path) -> None:
        sidecar = start(tmp_path, source="none")
        assert (sidecar.source, sidecar.devices) == ("none", [])
        assert sidecar.stop().status == "none"
        assert list(tmp_path.iterdir()) == []

    def test_sidecar_runs_the_code_of_its_caller(self, tmp_path: Path) -> None:
        """The working directory may hold another version of the package, which must not run."""
        package = Path(inpaint_bench.__file__).parent
        for place, version in (("snapshot", "1.snapshot"), ("elsewhere", "2.elsewhere")):
            shutil.copytree(package, tmp_path / place / "inpaint_bench")
            (tmp_path / place / "inpaint_bench" / "core" / "__init__.py").write_text(f"__version__ = {version!r}\n")
        code = (
            "import pathlib\n"
            "from inpaint_bench.core.config.bench import TelemetryConfig\n"
            "from inpaint_bench.telemetry.client import SidecarClient\n"
            "settings = TelemetryConfig(name='test', source='replay', capture='a40-synthetic')\n"
            f"run = pathlib.Path({str(tmp_path / 'run')!r})\n"
            "print(SidecarClient(run, 'r-1', [], settings).stop().producer)\n"
        )
        (tmp_path / "job.py").write_text(code)
        out = subprocess.run(
            [sys.executable, str(tmp_path / "job.py")],
            cwd=tmp_path / "elsewhere",
            env={**os.environ, "PYTHONPATH": str(tmp_path / "snapshot")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == "inpaint_bench 1.snapshot"
