"""`watch`: run any program beside the telemetry sidecar, and leave a run directory that merge and report take.

Nothing of the program is changed: neither its output, which is not read, nor its environment. At a terminal it runs in
our process group, so that Ctrl-C and Ctrl-Z reach both as any job of a shell; elsewhere in a group of its own, to which
the signals that arrive here are sent. With --attach the program runs already; it is neither started nor ended.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from inpaint_bench.commands.exit_codes import print_error
from inpaint_bench.core import environment
from inpaint_bench.core.config.bench import TelemetryConfig, TrackConfig
from inpaint_bench.core.config.yaml_file import read_config_file
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates.rates import gpu_configs
from inpaint_bench.core.files import check_can_be_made
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.records import Device, GpuFacts, Manifest, Window, to_record
from inpaint_bench.core.schema import COMMAND, PRODUCER, SCHEMA_VERSION, UNKNOWN, Reason, Status, WindowKind
from inpaint_bench.run import slurm_job
from inpaint_bench.run.manifest import ManifestFile, new_run_id
from inpaint_bench.run.tracked import RunTracker
from inpaint_bench.run.windows import Windows
from inpaint_bench.telemetry.client import SidecarClient, SidecarError
from inpaint_bench.telemetry.driver import DriverError
from inpaint_bench.telemetry.nvml.real import RealNvml, gpu_uuid
from inpaint_bench.telemetry.visible_gpus import refuse_twice, uuids_of, visible_uuids

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # exit codes, as in a shell
DEFAULT_FOLDER = "runs"
POLL_S = 0.2  # between looks for a signal
# What a shell, a terminal and Slurm send to a program. One that is ignored here is ignored there too (nohup).
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LAUNCHERS = re.compile(r"(python[\d.]*|bash|sh|torchrun|accelerate|deepspeed|env|uv|nice|numactl)$")

log = logging.getLogger(__name__)


def run_watch(
    command: Sequence[str] | None,
    *,
    attach: int | None,
    output: Path | None,
    name: str | None,
    images: int | None,
    site: str | None,
    gpus: str | None,
    telemetry: str,
    capture: str | None,
    hz: float,
    track: str | None,
) -> int:
    """Run the command and return its exit code: 128 + the signal that ended it, 127 or 126 if it cannot be run.

    With `attach`, a process id, the exit code is 0 if the process ended or SIGINT arrived, else 128 + the signal.
    """
    if bool(command) == (attach is not None):
        raise UserError("watch: give either a program, as in watch -- python train.py, or --attach PID")
    if attach is not None and images is not None:
        raise UserError("--images: counts those of a whole command, and --attach measures only what is left of it")
    low, high = TelemetryConfig.__dataclass_fields__["fast_hz"].metadata["range"]
    if not low <= hz <= high:
        raise UserError(f"--hz {hz:g}: must lie between {low:g} and {high:g} readings per second")
    settings = TelemetryConfig(name=telemetry, source=telemetry, capture=capture, fast_hz=hz)
    if capture and telemetry != "replay":
        raise UserError("--capture: only together with --telemetry replay")
    if telemetry == "replay" and not capture:
        raise UserError("--telemetry replay: needs --capture NAME, the name or the file of a recording, such as h200")
    if track and telemetry == "none":
        raise UserError(f"--track {track}: needs telemetry, of which its curves are; leave --telemetry none out")
    tracker = _tracker(track) if track else TrackConfig()
    process = None if attach is None else _RunningProcess(attach)
    command = process.command if process else list(command or ())
    _refuse_several_tasks("" if process else command[0])
    if process is None and (code := _executable_problem(command[0])):
        return code
    uuids = _uuids(gpus, attach) if telemetry == "nvml" else []
    run_id = new_run_id()
    run_dir = output or Path(DEFAULT_FOLDER, run_id)
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UserError(f"-o {run_dir}: is not an empty folder; every run needs one of its own")
    check_can_be_made(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with _Signals() as signals:
        manifest = ManifestFile.create(run_dir, _record(command, run_id, name, images, site, telemetry, attach))
        try:
            sidecar = SidecarClient(run_dir, run_id, uuids, settings, worker=attach)
        except SidecarError as error:
            manifest.finish(Status.FAILED, Reason.TELEMETRY_INCOMPLETE, str(error))
            raise UserError(str(error)) from None
        try:
            _describe_gpus(manifest, sidecar)
            log.info("run directory: %s", run_dir)
            with RunTracker(tracker, manifest) as curves:
                curves.start()
                curves.note_link()
                if process:
                    return _follow(process, manifest, sidecar, signals)
                return _run(command, manifest, sidecar, images or 0, signals)
        except BaseException as error:  # our own bug, or a full disk
            if manifest.record.status == Status.RUNNING:
                manifest.finish(Status.FAILED, Reason.APP_ERROR, f"watch: {error!r}")
            raise
        finally:
            sidecar.stop()


def _run(command: list[str], manifest: ManifestFile, sidecar: SidecarClient, images: int, signals: _Signals) -> int:
    """Run the command in a measure window, and write how both ended."""
    if early := signals.ending():
        manifest.finish(Status.INTERRUPTED, Reason.CANCELLED, f"received {early.name} before the command was started")
        return 128 + early
    windows = Windows(manifest.run_dir)
    window = windows.open(WindowKind.MEASURE)
    try:
        process = subprocess.Popen(command, process_group=None if signals.at_terminal else 0)
    except OSError as error:  # a script without its interpreter, a file of another architecture
        message = f"{command[0]}: cannot be executed: {error.strerror}"
        print_error(message)
        manifest.finish(Status.FAILED, Reason.NEVER_STARTED, message)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    signals.send_to(process)
    code = process.wait()
    windows.stop_clock(window)  # before anything else: this is where the energy ends
    status, reason, ended = _outcome(code, signals.ending())
    window.images = images if status is Status.COMPLETED else 0
    _finish(windows, window, manifest, sidecar, status, reason, ended)
    return code if code >= 0 else 128 - code


def _follow(process: _RunningProcess, manifest: ManifestFile, sidecar: SidecarClient, signals: _Signals) -> int:
    """Record a measure window until the process ends or a signal arrives, and write how it ended."""
    if process.has_ended(0.0):
        message = f"--attach {process.pid}: the process ended before the first sample; nothing was measured"
        manifest.finish(Status.FAILED, Reason.NEVER_STARTED, message)
        raise UserError(message)
    windows = Windows(manifest.run_dir)
    window = windows.open(WindowKind.MEASURE)
    while not (asked := signals.ending()) and not process.has_ended(POLL_S):
        pass
    windows.stop_clock(window)
    if asked in (None, signal.SIGINT):  # Ctrl-C is how one stops to look
        ended = "the process ended; its exit code is not known" if asked is None else "detached by SIGINT"
        _finish(windows, window, manifest, sidecar, Status.COMPLETED, None, ended)
        return 0
    cause = slurm_job.query()
    reason = (cause and cause.reason) or Reason.CANCELLED
    _finish(windows, window, manifest, sidecar, Status.INTERRUPTED, reason, f"received {asked.name}")
    return 128 + asked


def _finish(
    windows: Windows,
    window: Window,
    manifest: ManifestFile,
    sidecar: SidecarClient,
    status: Status,
    reason: Reason | None,
    ended: str | None,
) -> None:
    """Stop the sidecar, and write the window, whose clock is stopped, and the manifest."""
    try:
        state = sidecar.end()
        windows.close(window, status)
        manifest.update(telemetry=state)
        manifest.finish(status, reason, ended)
        if state.status not in ("complete", "none"):
            print_error(f"the telemetry sidecar ended as {state.status}; this run will not count")
        log.info("%s after %.1f s: %s", status, window.seconds, ended or manifest.run_dir)
    except OSError as error:  # a full disk: the exit code of the command is returned all the same
        lost = f"{error.filename or manifest.run_dir}: {error.strerror}; this run will not count"
        with suppress(OSError):
            manifest.finish(Status.FAILED, Reason.APP_ERROR, lost)
        with suppress(OSError):
            print_error(lost)


class _RunningProcess:
    """A process that runs already, by a descriptor: its id may be given to another one when it has ended."""

    def __init__(self, pid: int) -> None:
        """Raises UserError if there is no such process, or it is not ours."""
        self.pid, self._poll = pid, select.poll()
        try:
            self._poll.register(os.pidfd_open(pid), select.POLLIN)
            os.kill(pid, 0)
            text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except PermissionError:
            raise UserError(f"--attach {pid}: another user's process; attach to one of your own") from None
        except (OSError, OverflowError):
            raise UserError(
                f"--attach {pid}: no such process here. Run watch on its node and in its container; in a Slurm job: "
                f"srun --overlap --jobid=JOB --ntasks=1 inpaint-bench watch --attach {pid}"
            ) from None
        if not text or self.has_ended(0.0):
            raise UserError(f"--attach {pid}: has ended, or belongs to the kernel")
        self.command = text.rstrip("\0").split("\0")

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s` for the end of the process."""
        return bool(self._poll.poll(1000 * timeout_s))


class _Signals:
    """Notes the signals that arrive in the block, and sends them on to the command once it runs."""

    def __init__(self) -> None:
        self.at_terminal = False
        with suppress(OSError):  # a shell's job in the foreground, wherever its input comes from
            terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
            self.at_terminal = os.tcgetpgrp(terminal) == os.getpgrp()
            os.close(terminal)
        self._received: list[signal.Signals] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        named = (getattr(signal, name) for name in FORWARDED)
        signums = [signum for signum in named if signal.getsignal(signum) != signal.SIG_IGN]
        self._handlers = {signum: signal.signal(signum, self._handle) for signum in signums}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def ending(self) -> signal.Signals | None:
        """Return the first signal that asked for the end, if one came."""
        return next((signum for signum in self._received if signum in ENDING), None)

    def send_to(self, process: subprocess.Popen[bytes]) -> None:
        """Send what arrives from now on to this process, and what has arrived."""
        self._process = process
        for signum in self._received[:]:
            self._send(process, signum)

    def _handle(self, signum: int, _: Any) -> None:
        self._received.append(signal.Signals(signum))
        # The terminal sends these two to all processes of its group itself.
        if self._process and not (self.at_terminal and signum in (signal.SIGINT, signal.SIGQUIT)):
            self._send(self._process, signum)

    def _send(self, process: subprocess.Popen[bytes], signum: int) -> None:
        with suppress(ProcessLookupError):
            if self.at_terminal:
                process.send_signal(signum)
            else:
                os.killpg(process.pid, signum)


def _outcome(code: int, asked: signal.Signals | None) -> tuple[Status, Reason | None, str | None]:
    """Return status, reason and message by the exit code, and by the signal that asked for the end."""
    ended = f"the command was ended by {signal.Signals(-code).name}" if code < 0 else f"the command exited with {code}"
    if asked:
        cause = slurm_job.query()
        return Status.INTERRUPTED, (cause and cause.reason) or Reason.CANCELLED, f"received {asked.name}; {ended}"
    return (Status.COMPLETED, None, None) if code == 0 else (Status.FAILED, Reason.APP_ERROR, ended)


def _executable_problem(program: str) -> int | None:
    """Print why a program cannot be run and return the exit code for that, None if it can."""
    if shutil.which(program):
        return None
    if os.sep in program and Path(program).exists():
        print_error(f"{program}: is not an executable file")
        return NOT_EXECUTABLE
    where = "does not exist" if os.sep in program else "not found on PATH"
    print_error(f"{program}: {where}; write the command as after a prompt, as in watch -- python train.py")
    return NOT_FOUND


def _refuse_several_tasks(program: str) -> None:
    """Raise UserError if one program would be several, of which each would charge all GPUs."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdecimal() and int(tasks) > 1:
        raise UserError(
            f"watch runs once, on one node, and srun started {tasks} of it: use --ntasks=1, and start the processes "
            "with torchrun or accelerate"
        )
    if Path(program).name == "srun":
        raise UserError("srun starts the program elsewhere: write srun --ntasks=1 inpaint-bench watch -- COMMAND")


def _uuids(gpus: str | None, attach: int | None) -> list[str]:
    """Return the UUIDs of the GPUs to sample: by default those of process `attach`. Raises UserError."""
    if gpus is not None:
        try:
            uuids = [gpu_uuid(text) for text in gpus.split(",")]
        except ValueError as error:
            raise UserError(f"--gpus: {error}") from None
        refuse_twice(uuids, f"--gpus {gpus}")
        return uuids
    try:
        with RealNvml() as nvml:
            return visible_uuids(nvml, os.environ) if attach is None else uuids_of(nvml, attach)
    except DriverError as error:
        raise UserError(
            f"this machine has no working NVIDIA driver ({error}); --telemetry none runs the command without telemetry"
        ) from None


def _tracker(name: str) -> TrackConfig:
    """Return the settings of a tracker. Raises UserError if there is none of this name, or no library for it."""
    from inpaint_bench.core.config.parse import require_tracker

    names = sorted(path.stem for path in (conf_dir() / "track").glob("*.yaml"))
    if name not in names:
        raise UserError(f"--track {name}: must be one of {', '.join(names)}")
    settings = TrackConfig(**read_config_file(conf_dir() / "track" / f"{name}.yaml", "track"))
    require_tracker(settings)
    return settings


def _record(
    command: Sequence[str],
    run_id: str,
    name: str | None,
    images: int | None,
    site: str | None,
    telemetry: str,
    attach: int | None,
) -> Manifest:
    """Return the manifest of a command that begins now, or of process `attach`."""
    # Commands that are written differently are not averaged, unless the user gives them one name.
    digest = hashlib.sha256(shlex.join(command).encode()).hexdigest()[:8]
    stated = {"images_stated": images, "attached_pid": attach}
    facts = {"command": list(command), "uniform_steps": False}
    facts |= {name: value for name, value in stated.items() if value is not None}
    # A part of a run is no replicate of a whole one.
    variants = [*(["attached"] if attach is not None else []), *([] if name else [f"command={digest}"])]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        producer=PRODUCER,
        run_id=run_id,
        status=Status.RUNNING,
        workload=COMMAND,
        recipe=name or _program(command),
        variant=" ".join(variants) or None,
        site=site or _site(),
        gpu=UNKNOWN,
        demonstration=telemetry == "replay",
        started_unix_ns=time.time_ns(),
        boot_id=environment.boot_id(),
        # Versions of libraries are left out: those of this Python need not be the program's.
        environment=environment.machine(),
        slurm=environment.slurm(),
        workload_facts=facts,
    )


def _program(command: Sequence[str]) -> str:
    """Return the name of the program, or of the script that an interpreter or launcher runs."""
    words = iter(command)
    program = Path(next(words)).name
    if not _LAUNCHERS.match(program):
        return program
    for word in words:
        if word == "-m":
            return next(words, program)
        if Path(word).suffix in (".py", ".sh"):
            return Path(word).name
    return program


def _site() -> str:
    """Return the site whose file names this machine, else the cluster by Slurm, else `local`."""
    from launchers.points.site_catalog import is_site_host, own_site

    names = [path.stem for path in sorted((conf_dir() / "site").glob("*.yaml"))]
    here = [site.name for name in names if (site := own_site(name)) and is_site_host(site)]
    return here[0] if len(here) == 1 else os.environ.get("SLURM_CLUSTER_NAME") or "local"


def _describe_gpus(manifest: ManifestFile, sidecar: SidecarClient) -> None:
    """Record the GPUs that the sidecar samples, with the label and the facts that conf/gpu has for them."""
    manifest.note_sidecar(sidecar, sidecar.devices, len(sidecar.devices))
    names = [gpu.name or "" for gpu in sidecar.devices]
    known = (card for card in gpu_configs().values() if card.nvml_name and names)
    config = next((card for card in known if all(re.match(str(card.nvml_name), name) for name in names)), None)
    manifest.update(
        gpu=config.name if config else _label(sidecar.devices),
        gpus=len(sidecar.devices) or None,
        gpu_facts=to_record(asdict(config), GpuFacts) if config else None,
    )


def _label(devices: list[Device]) -> str:
    """Return the name of GPUs without a file in conf/gpu, as a label: "NVIDIA RTX A6000" is rtx-a6000."""
    names = sorted({gpu.name or UNKNOWN for gpu in devices}) or [UNKNOWN]
    words = re.sub(r"[^a-z0-9]+", "-", "+".join(names).lower().replace("nvidia", "")).strip("-")
    return words or UNKNOWN
