"""What a running attempt has written since the last look, as points of curves.

Everything is read from files that the run writes anyway, so the values are as fresh as these: progress, power and
utilisation some five seconds old; losses in a training too, in a benchmark when its window closes.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from inpaint_bench.core.records import Manifest, Progress, TrackingReport, Window, read_record
from inpaint_bench.core.schema import COMMAND, JOURNAL, NODE, NODE_NAME, PART_NAME, POWERS, WINDOWS, Status
from inpaint_bench.telemetry.storage.parts import read_journal

from .api import Value

SAMPLES, STEPS = "samples_fast", "steps"


class TableReader:
    """The rows of one table that were not read yet: their first column is above `newest`, and grows."""

    def __init__(self, folder: Path, columns: Sequence[str], newest: int) -> None:
        self._folder, self._columns, self.newest = folder, list(columns), newest
        self._closed: set[str] = set()  # parts that were read to their end

    def read(self) -> list[dict[str, Any]]:
        """Return the new rows, in the order in which they were written."""
        rows: list[dict[str, Any]] = []
        for table in self._tables():
            key = table[self._columns[0]]
            rows += table.filter(pc.greater(key, self.newest)).to_pylist()
            self.newest = max(self.newest, pc.max(key).as_py() or 0)
        return rows

    def _tables(self) -> Iterator[pa.Table]:
        for path in sorted(self._folder.glob("part-*.parquet")):
            if PART_NAME.fullmatch(path.name) and path.name not in self._closed:
                self._closed.add(path.name)
                yield pq.read_table(path, columns=self._columns)
        # After the parts: what is closed in between is read from its part the next time.
        try:
            journal = read_journal((self._folder / JOURNAL).read_bytes())
        except (OSError, pa.ArrowException, EOFError):  # none, or its part was closed just now, or not begun
            return
        yield journal.table.select(self._columns)


class RunReader:
    """The files of an attempt. `report` says what an earlier start has logged, and is kept up to date."""

    def __init__(self, run_dir: Path, report: TrackingReport) -> None:
        self._run_dir, self._report = run_dir, report
        self._steps = TableReader(run_dir / STEPS, ("step", "t_end_mono_ns", "loss", "lr"), report.last_step)
        self._samplers: dict[Path, TableReader] = {}  # readers of the samples of each node
        self._samples: list[dict[str, Any]] = []  # after the last logged progress

    def read(self, manifest: Manifest, *, last: bool) -> list[Value]:
        """Return what is new. `last`: the run has ended, nothing will follow."""
        values: list[Value] = []
        if windows := read_record(self._run_dir / WINDOWS, list[Window]):
            values += self._losses(windows[-1])
            values += self._gpu_values(manifest, windows[0], last=last)
        values += self._validations(manifest)
        if last and manifest.status is not Status.RUNNING:
            values += _judgements(manifest)
        return values

    def _losses(self, window: Window) -> Iterator[Value]:
        unix_minus_mono_ns = window.t_start_unix_ns - window.t_start_mono_ns
        for row in self._steps.read():
            unix_s = (row["t_end_mono_ns"] + unix_minus_mono_ns) / 1e9
            yield from (Value(key, row["step"], row[key], unix_s) for key in ("loss", "lr") if row[key] is not None)
        self._report.last_step = self._steps.newest

    def _gpu_values(self, manifest: Manifest, first_window: Window, *, last: bool) -> Iterator[Value]:
        """Yield the rate of a new progress, and the means of the samples since the one before it."""
        # Building and compiling have no step.
        self._read_samples(max(self._report.last_unix_ns, first_window.t_start_unix_ns))
        progress = manifest.progress
        if manifest.workload == COMMAND:  # no step of it is known: its curves are over the seconds of the run
            now_ns = time.time_ns()
            progress = Progress(step=(now_ns - first_window.t_start_unix_ns) // 10**9, t_unix_ns=now_ns)
        if not (progress and progress.t_unix_ns):
            return
        is_new, unix_s = progress.t_unix_ns > self._report.last_unix_ns, progress.t_unix_ns / 1e9
        if is_new and progress.images_per_s is not None:
            yield Value("images_per_s", progress.step, progress.images_per_s, unix_s)
        if is_new or last:
            self._report.last_unix_ns = progress.t_unix_ns
            labels = {device.uuid: f"/gpu{index}" for index, device in enumerate(manifest.devices)}
            for name, value in self._means(progress.t_unix_ns, labels if len(labels) > 1 else {}):
                yield Value(name, progress.step, value, unix_s)

    def _read_samples(self, newest: int) -> None:
        nodes = [path for path in self._run_dir.glob(NODE.format("*")) if NODE_NAME.fullmatch(path.name)]
        for node in (self._run_dir, *nodes):
            columns = ("t_unix_ns", "gpu_uuid", *POWERS, "gpu_util_pct")
            reader = self._samplers.setdefault(node, TableReader(node / SAMPLES, columns, newest))
            for row in reader.read():
                self._samples.append(
                    row | {"power_w": next((row[key] for key in POWERS if row[key] is not None), None)}
                )

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
        unix_ns = (manifest.progress and manifest.progress.t_unix_ns) or manifest.started_unix_ns or 0
        for entry in manifest.quality.validation if manifest.quality else ():
            if entry["step"] > self._report.last_validation:
                self._report.last_validation = entry["step"]
                for name, value in entry.items():
                    if name not in ("step", "n") and isinstance(value, int | float):
                        yield Value(f"validation/{name}", entry["step"], value, unix_ns / 1e9)


def _judgements(manifest: Manifest) -> Iterator[Value]:
    """Yield the metrics of a finished training."""
    step = manifest.progress.step if manifest.progress else 0
    for name, metric in ((manifest.quality.metrics if manifest.quality else None) or {}).items():
        if isinstance(value := metric.get("value"), int | float):
            yield Value(f"quality/{name}", step, value, (manifest.ended_unix_ns or 0) / 1e9)
