"""manifest.json: what an attempt is and where it stands, whole at any moment.

Written when the attempt begins, rewritten at most every few seconds while steps run (by a thread, so a slow
file system does not show up in the steps), and once more when it ends, however it ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from inpaint_bench.core import recipe
from inpaint_bench.core.config import BenchConfig, config_hash
from inpaint_bench.core.files import read_json, replace_json
from inpaint_bench.core.schema import MANIFEST, MANIFEST_FIELDS, PRODUCER, SCHEDULER, SCHEMA_VERSION, Reason, Status

PROGRESS_S = 5.0
MESSAGE_CHARS = 400
RESERVE = ".reserve"  # room that a full disk or quota leaves for the last word
RESERVE_BYTES = 64 * 1024
GPU_FACTS = ("architecture", "memory_gb", "memory_type", "bandwidth_gb_s", "bf16_dense_tflops", "power_limit_w")

log = logging.getLogger(__name__)


def new_run_id() -> str:
    """`r-<UTC yyyymmddThhmmss>-<8 hex digits>`: sorts by time, and is unique without a registry."""
    return f"r-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


class Manifest:
    """The file of one attempt. Methods may be called from one thread; every write is whole or not there."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values
        self._lock = threading.Lock()  # the values; never held while the disk is waited for
        self._writing = threading.Lock()  # the file
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._fresh = False  # progress that is not on disk yet

    @classmethod
    def start(cls, run_dir: Path, bench: BenchConfig, config: DictConfig, overrides: list[str]) -> Manifest:
        """Write the manifest of an attempt that begins now. An earlier one here keeps its content aside."""
        path = run_dir / MANIFEST
        _set_aside(path)
        (run_dir / SCHEDULER).unlink(missing_ok=True)  # a word on the earlier start, not on this one
        identity = bench.identity
        values: dict[str, Any] = dict.fromkeys(MANIFEST_FIELDS)
        values.update(
            schema_version=SCHEMA_VERSION,
            producer=PRODUCER,
            run_id=identity.run_id or new_run_id(),
            sweep_id=identity.sweep_id,
            point=identity.point,
            attempt=identity.attempt,
            status=Status.RUNNING.value,
            workload=bench.workload.name,
            recipe=recipe.name(bench.recipe),
            model=bench.model.name,
            # a single point that nobody placed runs on this machine
            site="local" if bench.site.name == "auto" else bench.site.name,
            gpu=bench.gpu.name,
            gpu_facts={name: getattr(bench.gpu, name) for name in GPU_FACTS},
            batch=bench.batch,
            gpus=bench.gpus,
            demonstration=bench.demonstration,
            config_hash=config_hash(config),
            overrides=overrides,
            started_unix_ns=time.time_ns(),
            devices=[],
            study=asdict(bench.study),
            telemetry={"source": bench.telemetry.source, "hz": None, "status": None},
        )
        manifest = cls(path, values)
        manifest.update()
        with suppress(OSError):
            (run_dir / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))  # zeros would take no room on some disks
        return manifest

    @property
    def run_id(self) -> str:
        return str(self._values["run_id"])

    def update(self, **fields: Any) -> None:
        """Set fields of the contract and write the file."""
        if unknown := fields.keys() - set(MANIFEST_FIELDS):
            raise KeyError(f"not fields of a manifest: {', '.join(sorted(unknown))}")
        with self._lock:
            self._values.update(fields)
        self._write()

    def progress(self, step: int, steps_total: int | None, images_per_s: float | None) -> None:
        """Note how far the run is; on disk within PROGRESS_S. Costs the caller a few microseconds."""
        note = {
            "step": step,
            "steps_total": steps_total,
            "images_per_s": images_per_s,
            "t_unix_ns": time.time_ns(),
        }
        with self._lock:
            self._values["progress"] = note
            self._fresh = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_written, name="manifest", daemon=True)
            self._thread.start()

    def finish(self, status: Status, reason: Reason | None = None, message: str | None = None) -> None:
        """Close the account, also on a full disk. The message is cut to one line."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        line = " ".join(message.split())[:MESSAGE_CHARS] if message else None
        last = {
            "status": status.value,
            "reason": reason.value if reason else None,
            "message": line,
            "ended_unix_ns": time.time_ns(),
        }
        try:
            self.update(**last)
        except OSError:
            self._release()
            self.update(**last)
        self._release()

    def earlier(self) -> list[dict[str, Any]]:
        """Those of earlier starts in this directory, which `start` set aside; what cannot be read is left out."""
        found = []
        for path in self.path.parent.glob(f"{self.path.stem}.*{self.path.suffix}"):
            with suppress(OSError, ValueError):
                found.append(dict(read_json(path) or {}))
        return found

    def _release(self) -> None:
        self.path.with_name(RESERVE).unlink(missing_ok=True)

    def as_dict(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._values)

    def _keep_written(self) -> None:
        while not self._ended.wait(PROGRESS_S):
            if not self._fresh:
                continue
            try:
                self._write()
            except OSError as error:  # progress is a courtesy: the run goes on, its end is written again
                log.warning("%s: progress could not be written (%s)", self.path, error)

    def _write(self) -> None:
        with self._writing:
            with self._lock:
                values, self._fresh = dict(self._values), False
            replace_json(self.path, values)


def _set_aside(path: Path) -> None:
    """A requeued job starts again in its directory: what it said the first time is kept."""
    if not path.exists():
        return
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
    log.warning("%s was here before; kept as %s", path, target.name)
