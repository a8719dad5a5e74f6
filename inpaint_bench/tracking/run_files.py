"""What a running attempt has written since the last look, as points of curves.

Everything is read from files that the run writes anyway, so the values are as fresh as these: progress, power and
utilisation some five seconds old; losses in a training too, in a benchmark when its window closes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from inpaint_bench.core.records import Manifest, Progress, TrackingReport, Window, read_record
from inpaint_bench.core.schema import JOURNAL, MANIFEST, NODE, NODE_NAME, PART_NAME, POWERS, WINDOWS, Status
from inpaint_bench.telemetry.storage.parts import read_journal

from .api import Value

SAMPLES, STEPS = "samples_fast", "steps"
MAX_WAITING = 4  # progresses without samples


class TableReader:
    """The rows of one table that were not read yet: of closed parts, and of the journal of the open one."""

    def __init__(self, folder: Path, columns: Sequence[str]) -> None:
        self._folder, self._columns = folder, list(columns)
        self._closed: set[str] = set()  # parts that were read to their end
        self._rows: dict[int, int] = {}  # read of a part, by its number, also from its journal

    def read(self, newer_than: int) -> list[dict[str, Any]]:
        """Return rows whose first column is above `newer_than`, in the order in which they were written."""
        newer = [table.filter(pc.greater(table[self._columns[0]], newer_than)) for table in self._tables()]
        return [row for table in newer for row in table.to_pylist()]

    def _tables(self) -> Iterator[pa.Table]:
        for path in sorted(self._folder.glob("part-*.parquet")):
            match = PART_NAME.fullmatch(path.name)
            if match and path.name not in self._closed:
                self._closed.add(path.name)
                yield self._unread(int(match[1]), pq.read_table(path, columns=self._columns))
        # After the parts: what is closed in between is read from its part the next time.
        try:
            journal = read_journal(self._folder / JOURNAL)
        except OSError:  # none, or its part was closed just now
            return
        if journal:
            yield self._unread(journal.part, journal.table.select(self._columns))

    def _unread(self, part: int, table: pa.Table) -> pa.Table:
        known = self._rows.get(part, 0)
        self._rows[part] = max(known, table.num_rows)
        return table.slice(known)


class RunReader:
    """The files of an attempt. `report` says what an earlier start has logged, and is kept up to date."""

    def __init__(self, run_dir: Path, report: TrackingReport) -> None:
        self._run_dir, self._report = run_dir, report
        # What lies on disk of an earlier start was logged by it; what comes later is told by the readers themselves.
        self._first_step, self._first_unix_ns = report.last_step, report.last_unix_ns
        self._steps = TableReader(run_dir / STEPS, ("step", "t_end_mono_ns", "loss", "lr"))
        self._samplers: dict[Path, TableReader] = {}
        self._samples: list[dict[str, Any]] = []  # after the last logged progress
        self._newest_unix_ns: dict[Path, int] = {}
        self._progress: deque[Progress] = deque()  # whose samples are not all here
        self._noted_unix_ns = report.last_unix_ns  # of the last progress that was seen

    def manifest(self) -> Manifest:
        """Return the manifest. Raises ValueError where it is missing or damaged."""
        if (manifest := read_record(self._run_dir / MANIFEST, Manifest)) is None:
            raise ValueError(f"{self._run_dir / MANIFEST}: no such file")
        return manifest

    def read(self, manifest: Manifest, *, last: bool) -> list[Value]:
        """Return what is new. `last`: the run has ended, nothing will follow."""
        windows = read_record(self._run_dir / WINDOWS, list[Window]) or []
        values: list[Value] = []
        if windows:
            values += self._losses(windows[-1])
            values += self._gpu_values(manifest, windows[0], last=last)
        values += self._validations(manifest)
        if last and manifest.status is not Status.RUNNING:
            values += _judgements(manifest)
        return values

    def picture(self, manifest: Manifest) -> Path | None:
        """Return the file with sample pictures, if there is one."""
        if not (manifest.quality and manifest.quality.pictures):
            return None
        path = self._run_dir / manifest.quality.pictures
        return path if path.is_file() else None

    def _losses(self, window: Window) -> Iterator[Value]:
        unix_minus_mono_ns = window.t_start_unix_ns - window.t_start_mono_ns
        for row in self._steps.read(self._first_step):
            self._report.last_step = max(self._report.last_step, row["step"])
            unix_s = (row["t_end_mono_ns"] + unix_minus_mono_ns) / 1e9
            for name in ("loss", "lr"):
                if row[name] is not None:
                    yield Value(name, row["step"], row[name], unix_s)

    def _gpu_values(self, manifest: Manifest, first_window: Window, *, last: bool) -> Iterator[Value]:
        """Yield the rate of each progress, and the means of the samples since the one before it."""
        progress = manifest.progress
        if progress and progress.t_unix_ns and progress.t_unix_ns > self._noted_unix_ns:
            self._noted_unix_ns = progress.t_unix_ns
            self._progress.append(progress)
        # Of building and compiling there is no step.
        self._read_samples(max(self._first_unix_ns, first_window.t_start_unix_ns))
        newest_ns = min(self._newest_unix_ns.values(), default=math.inf)
        labels = {device.uuid: f"/gpu{index}" for index, device in enumerate(manifest.devices)}
        # A sidecar that has died holds back no rates for long.
        while self._progress and (
            last or len(self._progress) > MAX_WAITING or (self._progress[0].t_unix_ns or 0) <= newest_ns
        ):
            progress = self._progress.popleft()
            t_unix_ns = self._report.last_unix_ns = progress.t_unix_ns or 0
            if progress.images_per_s is not None:
                yield Value("images_per_s", progress.step, progress.images_per_s, t_unix_ns / 1e9)
            for name, value in self._means(t_unix_ns, labels if len(labels) > 1 else {}):
                yield Value(name, progress.step, value, t_unix_ns / 1e9)

    def _read_samples(self, newer_than: int) -> None:
        nodes = [path for path in self._run_dir.glob(NODE.format("*")) if NODE_NAME.fullmatch(path.name)]
        for node in (self._run_dir, *nodes):
            if node not in self._samplers and (node / SAMPLES).is_dir():
                self._samplers[node] = TableReader(node / SAMPLES, ("t_unix_ns", "gpu_uuid", *POWERS, "gpu_util_pct"))
                self._newest_unix_ns[node] = 0
        for node, reader in self._samplers.items():
            for row in reader.read(newer_than):
                self._samples.append(
                    row | {"power_w": next((row[name] for name in POWERS if row[name] is not None), None)}
                )
                self._newest_unix_ns[node] = row["t_unix_ns"]

    def _means(self, until_unix_ns: int, labels: dict[str, str]) -> Iterator[tuple[str, float]]:
        """Yield the mean of each GPU's samples up to a moment, which are then forgotten."""
        due = [sample for sample in self._samples if sample["t_unix_ns"] <= until_unix_ns]
        self._samples = [sample for sample in self._samples if sample["t_unix_ns"] > until_unix_ns]
        for uuid in dict.fromkeys(sample["gpu_uuid"] for sample in due):
            for name in ("power_w", "gpu_util_pct"):
                known = [s[name] for s in due if s["gpu_uuid"] == uuid and s[name] is not None]
                if known:
                    yield f"{name}{labels.get(uuid, '')}", fmean(known)

    def _validations(self, manifest: Manifest) -> Iterator[Value]:
        for entry in manifest.quality.validation if manifest.quality else ():
            if entry["step"] <= self._report.last_validation:
                continue
            self._report.last_validation = entry["step"]
            unix_s = (self._noted_unix_ns or manifest.started_unix_ns or 0) / 1e9
            for name, value in entry.items():
                if name not in ("step", "n") and isinstance(value, int | float):
                    yield Value(f"validation/{name}", entry["step"], value, unix_s)


def _judgements(manifest: Manifest) -> Iterator[Value]:
    """Yield the metrics of a finished training."""
    step = manifest.progress.step if manifest.progress else 0
    for name, metric in ((manifest.quality.metrics if manifest.quality else None) or {}).items():
        if isinstance(value := metric.get("value"), int | float):
            yield Value(f"quality/{name}", step, value, (manifest.ended_unix_ns or 0) / 1e9)
