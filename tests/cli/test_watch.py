"""`watch`: a program beside the sidecar, which notices nothing of it, and the run that merge and report take."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import polars as pl
import pytest

from analysis.merge import merge
from analysis.report.report import write_report
from analysis.report.tables import DASH
from inpaint_bench.cli import app
from tests.analysis.build import write_run
from tests.run.small_disk import small_disk_on

WATCH = [sys.executable, "-m", "inpaint_bench", "watch"]
REPLAY = ["--telemetry", "replay", "--capture", "h200"]
PATIENCE_S = 60.0


class Shell:
    """A shell at a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self._pid, self.terminal = pty.fork()
        if self._pid == 0:
            # As the shell of a terminal is started: with SIGINT neither blocked nor ignored.
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.chdir(folder)
            os.execv("/bin/bash", ["bash", "--norc", "--noprofile", "-i"])
        self._shown = b""
        self.type("PS1='$ '\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.terminal)  # which hangs up on the shell
        os.waitpid(self._pid, 0)

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def read_until(self, text: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while text.encode() not in self._shown and time.monotonic() < deadline_s:
            if select.select([self.terminal], [], [], 0.1)[0]:
                try:
                    self._shown += os.read(self.terminal, 4096)
                except OSError:  # the other side is closed
                    break
        assert text in self._shown.decode()


def watch(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*WATCH, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def manifest(run_dir: Path) -> dict[str, Any]:
    """Return the manifest of a run."""
    return json.loads((run_dir / "manifest.json").read_text())


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until something is true."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


class TestProgram:
    def test_output_and_exit_code_are_the_programs_own(self, tmp_path: Path) -> None:
        program = "import sys; print('out'); print('err', file=sys.stderr); print(sys.argv[1:]); sys.exit(3)"
        done = watch(*REPLAY, "-o", "run", "--", sys.executable, "-c", program, "--name", "x", "-o", "y", cwd=tmp_path)
        assert done.returncode == 3
        assert done.stdout == "out\n['--name', 'x', '-o', 'y']\n"
        assert "err\n" in done.stderr
        record = manifest(tmp_path / "run")
        assert (record["status"], record["reason"]) == ("failed", "app_error")
        assert record["message"] == "the command exited with 3"
        assert record["workload_facts"]["command"][-4:] == ["--name", "x", "-o", "y"]

    def test_exit_code_is_the_programs_own_on_a_disk_that_it_filled(self, tmp_path: Path) -> None:
        with small_disk_on(tmp_path / "disk", kib=512):
            program = "dd if=/dev/zero of=fill bs=1k count=4096; exit 7"
            done = watch(*REPLAY, "-o", "run", "--", "sh", "-c", program, cwd=tmp_path / "disk")
            record = manifest(tmp_path / "disk" / "run")
        assert done.returncode == 7
        assert "windows.json: No space left on device; this run will not count" in done.stderr
        assert (record["status"], "No space left on device" in record["message"]) == ("failed", True)

    def test_a_program_that_a_signal_ends_gives_the_exit_code_of_a_shell(self, tmp_path: Path) -> None:
        done = watch("--telemetry", "none", "--", "sh", "-c", "kill -KILL $$", cwd=tmp_path)
        assert done.returncode == 137
        (run_dir,) = (tmp_path / "runs").iterdir()
        assert manifest(run_dir)["message"] == "the command was ended by SIGKILL"

    @pytest.mark.parametrize(
        ("name", "code", "message"),
        [
            ("no-such-program", 127, "no-such-program: not found on PATH"),
            ("./missing", 127, "./missing: does not exist"),
            ("./text", 126, "./text: is not an executable file"),
            ("./broken", 126, "./broken: cannot be executed: Exec format error"),
            ("./no-interpreter", 127, "./no-interpreter: cannot be executed: No such file or directory"),
        ],
    )
    def test_a_program_that_cannot_be_executed(self, tmp_path: Path, name: str, code: int, message: str) -> None:
        (tmp_path / "text").write_text("no program")
        for file, content in (("broken", "\x7fELF nothing"), ("no-interpreter", "#!/no/such/interpreter\n")):
            (tmp_path / file).write_text(content)
            (tmp_path / file).chmod(0o755)
        done = watch("--telemetry", "none", "--", name, cwd=tmp_path)
        assert done.returncode == code
        assert message in done.stderr
        assert "Traceback" not in done.stderr

    def test_its_environment_and_folder_are_those_of_the_caller(self, tmp_path: Path) -> None:
        program = (
            "import os; print(os.getcwd(), os.environ.get('MINE'), [name for name in os.environ if 'INPAINT' in name])"
        )
        ours = [name for name in os.environ if "INPAINT" in name]
        done = watch("--telemetry", "none", "--", sys.executable, "-c", program, cwd=tmp_path, MINE="1")
        assert done.stdout == f"{tmp_path} 1 {ours}\n"


# Notes every SIGTERM, and so does a process of its own; both end half a second after the first one.
NOTES_SIGNALS = """
import os, signal, sys, time
child = os.fork()
name = "grandchild" if child == 0 else "child"
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
open(name + ".ready", "w").close()
while not received:
    time.sleep(0.02)
time.sleep(0.5)
open(name, "w").write(str(len(received)))
if child:
    os.waitpid(child, 0)
    sys.exit(7)
"""


class TestSignals:
    def test_sigterm_reaches_every_process_of_the_program_once(self, tmp_path: Path) -> None:
        process = subprocess.Popen(
            [*WATCH, *REPLAY, "-o", "run", "--", sys.executable, "-c", NOTES_SIGNALS], cwd=tmp_path
        )
        wait_for(lambda: (tmp_path / "child.ready").exists() and (tmp_path / "grandchild.ready").exists())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 7
        assert [(tmp_path / name).read_text() for name in ("child", "grandchild")] == ["1", "1"]
        record = manifest(tmp_path / "run")
        assert (record["status"], record["reason"]) == ("interrupted", "cancelled")
        assert record["message"] == "received SIGTERM; the command exited with 7"
        assert record["telemetry"]["status"] == "complete"

    def test_a_signal_that_is_ignored_stays_ignored(self, tmp_path: Path) -> None:
        """As under nohup."""
        program = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
        done = subprocess.run(
            [
                "sh",
                "-c",
                'trap "" HUP; exec "$@"',
                "sh",
                *WATCH,
                "--telemetry",
                "none",
                "--",
                sys.executable,
                "-c",
                program,
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.stdout == "True\n"

    def test_ctrl_c_and_ctrl_z_at_a_terminal_work_as_without_it(self, tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text(
            "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
            "print('answer', input('question'), flush=True)\n"
            "print('received', int(signal.sigwait([signal.SIGINT])))"
        )
        options = ["--telemetry", "none", "--images", "9", "-o", "run"]
        line = shlex.join([*WATCH, *options, "--", sys.executable, "program.py"])
        with Shell(tmp_path) as shell:
            shell.type(f"{line}\n")
            shell.read_until("question")
            job = os.tcgetpgrp(shell.terminal)
            shell.type("typed\n")
            shell.read_until("answer typed")
            shell.type("\x1a")  # Ctrl-Z
            shell.read_until("Stopped")
            shell.type("bg; echo in the back''ground\n")
            shell.read_until("in the background")
            shell.type("fg; echo code $?\n")
            wait_for(lambda: os.tcgetpgrp(shell.terminal) == job)  # until then Ctrl-C is the shell's
            shell.type("\x03")  # Ctrl-C
            shell.read_until("received 2")
            shell.read_until("code 0")
        # It ended as if nothing had happened, but half a run is none.
        assert manifest(tmp_path / "run")["status"] == "interrupted"
        assert manifest(tmp_path / "run")["message"] == "received SIGINT; the command exited with 0"

    def test_a_program_reads_the_terminal_whose_input_is_redirected(self, tmp_path: Path) -> None:
        """Regression: it was stopped for ever, as a job in the background that reads."""
        program = "read answer </dev/tty; echo answer $answer"
        line = shlex.join([*WATCH, "--telemetry", "none", "-o", "run", "--", "bash", "-c", program])
        with Shell(tmp_path) as shell:
            shell.type(f"{line} </dev/null; echo code $?\n")
            wait_for((tmp_path / "run").is_dir)
            shell.type("typed\n")
            shell.read_until("answer typed")
            shell.read_until("code 0")


class TestAttach:
    """A process that runs already is measured until it ends, or until a signal; it notices nothing."""

    def test_until_the_process_ends(self, tmp_path: Path) -> None:
        with subprocess.Popen(["sleep", "4"]) as sleep:
            done = watch(*REPLAY, "-o", "run", "--attach", str(sleep.pid), cwd=tmp_path)
        assert (done.returncode, sleep.returncode) == (0, 0)
        record = manifest(tmp_path / "run")
        assert (record["status"], record["message"]) == ("completed", "the process ended; its exit code is not known")
        assert record["workload_facts"]["command"] == ["sleep", "4"]
        assert record["variant"].startswith("attached command=")
        merge([tmp_path / "run"], tmp_path / "dataset")
        (row,) = pl.read_parquet(tmp_path / "dataset" / "runs.parquet").to_dicts()
        assert row["valid"], row["invalid_reason"]
        assert 0 < row["window_s"] < 4  # short where the machine is busy
        assert row["energy_j"] > 0

    @pytest.mark.parametrize(
        ("signum", "code", "status"), [(signal.SIGINT, 0, "completed"), (signal.SIGTERM, 143, "interrupted")]
    )
    def test_a_signal_ends_the_record_and_not_the_process(
        self, tmp_path: Path, signum: signal.Signals, code: int, status: str
    ) -> None:
        with subprocess.Popen(["sleep", "60"]) as sleep:
            options = ["--telemetry", "none", "--name", "mine", "-o", "run", "--attach", str(sleep.pid)]
            watching = subprocess.Popen(
                [*WATCH, *options],
                cwd=tmp_path,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # `nohup make test &` ignores it
            )
            wait_for((tmp_path / "run" / "windows.json").exists)
            watching.send_signal(signum)
            assert watching.wait(PATIENCE_S) == code
            assert sleep.poll() is None
            sleep.kill()
        record = manifest(tmp_path / "run")
        assert (record["status"], record["recipe"], record["variant"]) == (status, "mine", "attached")

    def test_a_process_that_ends_before_the_first_sample(self, tmp_path: Path) -> None:
        with subprocess.Popen(["sleep", "60"]) as sleep:
            options = [*REPLAY, "-o", "run", "--attach", str(sleep.pid)]
            watching = subprocess.Popen([*WATCH, *options], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
            wait_for((tmp_path / "run" / "manifest.json").exists)
            sleep.kill()
        assert "the process ended before the first sample" in watching.communicate(timeout=PATIENCE_S)[1]
        assert watching.returncode == 2
        assert manifest(tmp_path / "run")["reason"] == "never_started"

    @pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
    def test_another_users_process_is_refused(self) -> None:
        code = (
            "import os; from inpaint_bench.cli import watch; from inpaint_bench.core.errors import UserError\n"
            "os.setuid(65534)\n"
            "try: watch._RunningProcess(os.getppid())\n"
            "except UserError as error: print(error)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "another user's process; attach to one of your own" in done.stdout, done.stderr


class TestRefusals:
    def test_without_a_gpu_there_is_a_sentence_and_the_program_is_not_run(self, tmp_path: Path) -> None:
        if Path("/dev/nvidiactl").exists():
            pytest.skip("there is a GPU")
        done = watch("-o", "run", "--", "touch", "started", cwd=tmp_path)
        assert done.returncode == 2
        assert re.search(r"error: this machine has no working NVIDIA driver .*; --telemetry none runs the", done.stderr)
        assert [*tmp_path.iterdir()] == []

    def test_several_tasks_of_srun_would_charge_a_gpu_several_times(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
        assert app.main(["watch", "--telemetry", "none", "--", "true"]) == 2
        assert "srun started 4 of it: use --ntasks=1" in capsys.readouterr().err


class TestRun:
    @pytest.fixture(scope="class")
    def runs(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a folder with runs of two programs, one with images, and a run of this project."""
        folder = tmp_path_factory.mktemp("runs")
        job = {"SLURM_JOB_ID": "4711", "SLURM_CLUSTER_NAME": "mycluster", "SLURMD_NODENAME": "c001"}
        for name in ("a", "b"):
            options = ["--images", "300", "--name", "mine"]
            done = watch(*REPLAY, "-o", name, *options, "--", "sh", "-c", f"sleep 3; : {name}", cwd=folder, **job)
            assert done.returncode == 0, done.stderr
        assert watch(*REPLAY, "-o", "c", "--", "sh", "train.sh", cwd=folder).returncode != 0
        (folder / "train.sh").write_text("sleep 2\n")
        assert watch(*REPLAY, "-o", "d", "--site", "here", "--", "sh", "train.sh", cwd=folder).returncode == 0
        write_run(folder, "r-01")
        return folder

    @pytest.fixture(scope="class")
    def merged(self, runs: Path) -> pl.DataFrame:
        merge([runs], runs.parent / "dataset")
        return pl.read_parquet(runs.parent / "dataset" / "runs.parquet")

    def test_manifest_has_the_job_the_site_and_the_gpu(self, runs: Path) -> None:
        record = manifest(runs / "a")
        assert (record["slurm"]["job_id"], record["site"], record["gpu"]) == ("4711", "mycluster", "h200")
        assert (record["workload"], record["recipe"], record["variant"]) == ("command", "mine", None)
        assert record["environment"]["hostname"]
        assert record["environment"]["torch"] is None  # this Python's need not be the program's
        assert manifest(runs / "d")["recipe"] == "train.sh"
        assert manifest(runs / "d")["site"] == "here"

    def test_merge_takes_it_with_power_energy_memory_and_duration(self, merged: pl.DataFrame) -> None:
        own = merged.filter(pl.col("workload") == "command")
        valid = own.filter("valid")
        assert valid.height == 3, own["invalid_reason"].to_list()
        for name in ("window_s", "power_w", "energy_j", "gpu_util_pct", "vram_used_mib_peak", "sm_clock_mhz_mean"):
            assert valid[name].null_count() == 0, name
        assert valid["power_w"].to_list() == pytest.approx((valid["energy_j"] / valid["window_s"]).to_list())

    def test_images_per_s_are_known_where_the_user_stated_the_images(self, merged: pl.DataFrame) -> None:
        for row in merged.filter(pl.col("recipe") == "mine").to_dicts():
            assert row["images_per_s"] == pytest.approx(300 / row["window_s"])
            assert row["joules_per_image"] * row["images_per_s_per_w"] == pytest.approx(1)
            assert "the images are those of --images" in row["warnings"]
        (row,) = merged.filter(pl.col("recipe") == "train.sh", "valid").to_dicts()
        assert (row["images"], row["n_steps"], row["images_per_s"], row["joules_per_image"]) == (None,) * 4
        assert "images_per_s=neither steps nor images of the command are known" in row["null_reasons"]

    def test_report_shows_programs_in_a_section_of_their_own(self, runs: Path, merged: pl.DataFrame) -> None:
        assert merged.height == 5
        page = write_report(runs.parent / "dataset", runs.parent / "report", formats=[])
        text = (page.parent / "report.md").read_text()
        table = text.split("External programs: all rows")[-1].split("\n## ")[0]
        assert re.search(rf"\| mine \| {DASH} \| mycluster \| H200 \| 1 \| 2 \|", table)
        assert re.search(r"\| train.sh \| command=\w{8} \| here \| H200 \| 1 \| 1 \|", table)
        assert "| None" not in text
        assert re.search(r"mine took [\d.]+ s and [\d.]+ kJ( \([\d.]+ images/s\))? on an H200", text), "the answer"


def test_curves_of_a_program_are_in_the_tracker(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = watch(*REPLAY, "-o", "run", "--track", "tensorboard", "--name", "nap", "--", "sleep", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    link = manifest(tmp_path / "run")["tracking"]["link"]
    assert "nap" in Path(link).name
    events = EventAccumulator(link)
    events.Reload()
    assert {"power_w", "gpu_util_pct"} <= set(events.Tags()["scalars"])
    assert 3 <= events.Scalars("power_w")[-1].step < PATIENCE_S
    assert watch("--track", "wandbx", "--", "true", cwd=tmp_path).returncode == 2


def test_parent_loads_no_numerical_library(tmp_path: Path) -> None:
    """It lives as long as the program, beside it."""
    code = (
        "import sys; from inpaint_bench.cli import app\n"
        f"assert app.main(['watch', *{REPLAY}, '-o', 'run', '--', 'sleep', '0.2']) == 0\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'polars', 'hydra'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
