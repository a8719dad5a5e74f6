"""manifest.json: what an attempt is and how far it got, complete at any moment.

Written when the attempt begins, at most every few seconds while steps run (by a thread, so that a slow file system
does not delay steps), and once more when it ends, however it ends.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec
from omegaconf import DictConfig

from inpaint_bench.core import stages
from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.config.validation import override_key
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json, replace_bytes
from inpaint_bench.core.records import (
    Device,
    Environment,
    GpuFacts,
    Manifest,
    Progress,
    Study,
    TelemetryState,
    encode_record,
    read_record,
    to_record,
)
from inpaint_bench.core.schema import MANIFEST, PRODUCER, SCHEDULER, SCHEMA_VERSION, TABLES, Reason, Status
from inpaint_bench.models.weights_folder import weights_digest, weights_path
from inpaint_bench.telemetry.client import SidecarClient

from .progress_log import ProgressLog

WRITE_INTERVAL_S = 5.0
MESSAGE_CHARS = 400
RESERVE = ".reserve"  # space set aside for the final status, in case the disk or quota is full by then
RESERVE_BYTES = 64 * 1024

log = logging.getLogger(__name__)


def new_run_id() -> str:
    """Return `r-<UTC yyyymmddThhmmss>-<8 hex digits>`: sorts by time, and is unique without a registry."""
    return f"r-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


class ManifestFile:
    """The manifest of a running attempt. Methods may be called from one thread; every write is atomic."""

    def __init__(self, path: Path, record: Manifest) -> None:
        self.path, self.run_dir = path, path.parent
        self.record = record
        self._lock = threading.Lock()  # guards the record; never held while waiting for the disk
        self._write_lock = threading.Lock()  # guards the file
        self._writer: threading.Thread | None = None
        self._ended = threading.Event()
        self._progress_log = ProgressLog()
        self._dirty = False  # there is progress that is not on disk yet

    @classmethod
    def start(cls, run_dir: Path, bench: BenchConfig, config: DictConfig, overrides: list[str]) -> Self:
        """Write the manifest of an attempt that begins now. That of an earlier start in the directory is renamed.

        A single run goes on under the id of the earlier one, as a requeued job does. Raises UserError if that was
        another.
        """
        path, number = run_dir / MANIFEST, 1
        record = _initial_record(bench, config, overrides)
        if path.exists():
            if not bench.identity.run_id:
                _take_over(record, path)
            while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
                number += 1
            path.rename(target)
            log.warning("%s of an earlier start was renamed to %s", path, target.name)
        (run_dir / SCHEDULER).unlink(missing_ok=True)  # describes the earlier start
        return cls.create(run_dir, record)

    @classmethod
    def create(cls, run_dir: Path, record: Manifest) -> Self:
        """Write the first state of a record."""
        manifest = cls(run_dir / MANIFEST, record)
        manifest.update()
        with suppress(OSError):
            (run_dir / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))  # zeros may take no space on some file systems
        return manifest

    def update(self, **fields: Any) -> None:
        """Set fields of the record and write the file. Raises AttributeError for a field that a manifest lacks."""
        with self._lock:
            for name, value in fields.items():
                setattr(self.record, name, value)
        self._write()

    def note_sidecar(self, sidecar: SidecarClient, sampled: Sequence[Device], per_node: int) -> None:
        """Record that a sidecar runs, the driver, and the GPUs that are sampled, which each node numbers anew."""
        devices = [msgspec.structs.replace(gpu, index_visible=i % per_node) for i, gpu in enumerate(sampled)]
        software = self.record.environment or Environment()
        # A replayed GPU's driver says nothing about this machine.
        if sidecar.source == "nvml" and sidecar.driver:
            software = msgspec.structs.replace(software, driver=sidecar.driver)
        self.update(devices=devices, environment=software, telemetry=sidecar.state)

    def progress(self, step: int, steps_total: int | None, images_per_s: float | None) -> None:
        """Note how far the run is; on disk within WRITE_INTERVAL_S. Costs the caller a few microseconds."""
        progress = Progress(step=step, steps_total=steps_total, images_per_s=images_per_s, t_unix_ns=time.time_ns())
        with self._lock:
            self.record.progress = progress
            self._dirty = True
        self._progress_log.add(self.record)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_periodically, name="manifest", daemon=True)
            self._writer.start()

    def finish(self, status: Status, reason: Reason | None = None, message: str | None = None) -> None:
        """Write the final status, also on a full disk. The message is cut to one line."""
        self._ended.set()
        if self._writer is not None:
            self._writer.join()
        line = " ".join(message.split())[:MESSAGE_CHARS] if message else None
        spent = stages.seconds(self.record.started_unix_ns or time.time_ns())
        final = {"status": status, "reason": reason, "message": line, "ended_unix_ns": time.time_ns(), "stages": spent}
        try:
            self.update(**final)
        # The disk or quota is full: the file set aside at the start makes room for the final status.
        except OSError:
            self._release_reserve()
            self.update(**final)
        self._release_reserve()

    def earlier_starts(self) -> list[Manifest]:
        """Return the manifests of earlier starts in this directory; unreadable ones are left out."""
        paths = self.path.parent.glob(f"{self.path.stem}.*{self.path.suffix}")
        return [record for record in map(_read, paths) if record is not None]

    def _release_reserve(self) -> None:
        self.path.with_name(RESERVE).unlink(missing_ok=True)

    def _write_periodically(self) -> None:
        while not self._ended.wait(WRITE_INTERVAL_S):
            if not self._dirty:
                continue
            try:
                self._write()
            except OSError as error:  # the run continues without it, and its end is written again
                log.warning("%s: progress could not be written (%s)", self.path, error)

    def _write(self) -> None:
        with self._write_lock:
            with self._lock:
                # Encoded under both locks: of two writes the later one has the newer record.
                content, self._dirty = encode_record(self.record), False
            replace_bytes(self.path, content)


def _initial_record(bench: BenchConfig, config: DictConfig, overrides: list[str]) -> Manifest:
    identity = bench.identity
    # Not the folder's name: that differs between sites, and the values of weights change time and power.
    digest = weights_digest(weights_path(bench.model.weights)) if bench.model.weights else None
    return Manifest(
        schema_version=SCHEMA_VERSION,
        producer=PRODUCER,
        run_id=identity.run_id or new_run_id(),
        sweep_id=identity.sweep_id,
        point=identity.point,
        attempt=identity.attempt,
        status=Status.RUNNING,
        workload=bench.workload.name,
        recipe=recipe.name(bench),
        model=bench.workload.model(bench),
        variant=", ".join(filter(None, [bench.workload.variant(), digest and f"weights={digest}"])) or None,
        # A single point that was not placed by the launcher runs on this machine.
        site="local" if bench.site.name == "auto" else bench.site.name,
        gpu=bench.gpu.name,
        gpu_facts=to_record(asdict(bench.gpu), GpuFacts),
        batch=None if bench.searches_batch else bench.batch_size,
        batch_requested=bench.batch,
        gpus=bench.ranks,
        nodes=bench.nodes,
        seed=bench.seed,
        demonstration=bench.demonstration,
        config_hash=config_hash(config),
        # A person's address is no part of a run, and manifests are published.
        overrides=[override for override in overrides if override_key(override).partition(".")[0] != "notify"],
        started_unix_ns=time.time_ns(),
        study=to_record(asdict(bench.study), Study),
        telemetry=TelemetryState(source=bench.telemetry.source),
    )


def _read(path: Path) -> Manifest | None:
    """Return the manifest in a file, None if it cannot be read."""
    with suppress(OSError, ValueError):
        return read_record(path, Manifest)
    return None


def _take_over(record: Manifest, path: Path) -> None:
    """Give a run the id of an earlier start of it, perhaps on another number of GPUs.

    Raises UserError if that executed something else.
    """
    if (earlier := _read(path)) is None:
        return
    pairs = {name: (getattr(earlier, name), getattr(record, name)) for name in ("workload", "model", "variant", "seed")}
    if earlier.batch and record.batch:
        pairs["images per step"] = earlier.batch * (earlier.gpus or 1), record.batch * (record.gpus or 1)
    for name, (was, now) in pairs.items():
        if was != now:
            other = f"holds a run with {name} {was}, and this has {now}"
            raise UserError(f"{path.parent}: {other}; name another hydra.run.dir")
    record.run_id = earlier.run_id


def check_owner(run_dir: Path, run_id: str) -> None:
    """Raise UserError if the directory holds another run's files, beside which this one would write its own."""
    for path, owner in _owners(run_dir):
        if owner != run_id:
            raise UserError(
                f"{run_dir}: {path.relative_to(run_dir)} belongs to run {owner}, this is run {run_id}; the run was "
                "not started, so that their files do not mix. `rerun` submits the point in a new directory"
            )


def _owners(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Yield the manifest and one part of each table with the run id in them; unreadable files are left out."""
    import pyarrow as pa  # slow to import, and the launcher imports this module without need of it
    import pyarrow.parquet as pq

    with suppress(OSError, ValueError):
        # Not as a Manifest: one of another schema version has an owner too.
        manifest = read_json(run_dir / MANIFEST)
        if isinstance(manifest, dict) and manifest.get("run_id"):
            yield run_dir / MANIFEST, str(manifest["run_id"])
    for table in TABLES:
        for part in sorted((run_dir / table).glob("part-*.parquet"))[:1]:
            with suppress(OSError, pa.ArrowException):
                if owner := (pq.read_schema(part).metadata or {}).get(b"run_id"):
                    yield part, owner.decode()
