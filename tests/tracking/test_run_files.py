"""What is read of a run that goes on: each row once, from journals and parts, and nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inpaint_bench.core.records import Device, Manifest, Progress, TrackingReport, Window, write_record
from inpaint_bench.core.schema import NODE, PRODUCER, SCHEMA_VERSION, Status, WindowKind, file_metadata
from inpaint_bench.core.tables import SAMPLES_FAST, STEPS
from inpaint_bench.telemetry.storage.parts import PartWriter
from inpaint_bench.tracking.run_files import RunReader, TableReader

T0_NS = 1_800_000_000_000_000_000
S_NS = 10**9


def steps(folder: Path) -> PartWriter:
    return PartWriter(folder / "steps", STEPS, file_metadata("r-1"), part_s=3600)


def add_steps(writer: PartWriter, *numbers: int) -> None:
    for number in numbers:
        writer.append(
            window_id="measure-0",
            step=number,
            t_start_mono_ns=number * S_NS,
            t_end_mono_ns=number * S_NS,
            data_wait_ns=0,
            images=2,
            loss=number / 10,
        )


def test_each_row_is_read_once_from_journal_or_part(tmp_path: Path) -> None:
    writer, reader = steps(tmp_path), TableReader(tmp_path / "steps", ("step", "loss"), -1)

    def new() -> list[int]:
        return [row["step"] for row in reader.read()]

    assert new() == []
    add_steps(writer, 0, 1)
    writer.save(0.0)
    assert new() == [0, 1]
    assert new() == []
    add_steps(writer, 2)
    writer.save(0.0)
    add_steps(writer, 3)
    writer.close()  # step 3 was never in a journal that was read
    assert new() == [2, 3]
    add_steps(writer, 4)
    writer.save(0.0)
    assert new() == [4]
    writer.close()
    add_steps(writer, 5)
    writer.close()
    assert new() == [5]


def test_part_that_closed_between_two_looks_is_not_lost(tmp_path: Path) -> None:
    writer, reader = steps(tmp_path), TableReader(tmp_path / "steps", ("step",), -1)
    add_steps(writer, 0)
    writer.save(0.0)
    assert len(reader.read()) == 1
    add_steps(writer, 1)
    writer.close()
    add_steps(writer, 2)
    writer.save(0.0)
    assert [row["step"] for row in reader.read()] == [1, 2]


class Run:
    """A run directory whose progress and samples are written by hand; seconds count from its first window."""

    def __init__(self, folder: Path, num_gpus: int) -> None:
        self.folder = folder
        self.devices = [Device(uuid=f"GPU-{index}") for index in range(num_gpus)]
        self.writers: dict[Path, PartWriter] = {}
        window = Window(
            window_id="measure-0",
            kind=WindowKind.MEASURE,
            status=Status.RUNNING,
            t_start_mono_ns=0,
            t_start_unix_ns=T0_NS,
        )
        write_record(folder / "windows.json", [window])

    def sample(self, second: float, gpu: int, watts: float | None, *, node: int = 0, **values: Any) -> None:
        folder = self.folder / NODE.format(node) if node else self.folder
        metadata = file_metadata("r-1")
        if folder not in self.writers:
            self.writers[folder] = PartWriter(folder / "samples_fast", SAMPLES_FAST, metadata, part_s=3600)
        self.writers[folder].append(
            gpu_uuid=f"GPU-{gpu}",
            source="nvml",
            tick_seq=0,
            t_mono_ns=0,
            t_unix_ns=T0_NS + round(second * S_NS),
            read_us=1.0,
            power_instant_w=watts,
            **values,
        )
        self.writers[folder].save(0.0)

    def at(self, second: float, step: int) -> Manifest:
        return Manifest(
            schema_version=SCHEMA_VERSION,
            producer=PRODUCER,
            run_id="r-1",
            status=Status.RUNNING,
            devices=self.devices,
            progress=Progress(step=step, images_per_s=8.0, t_unix_ns=T0_NS + round(second * S_NS)),
        )


def named(values: Any) -> list[tuple[str, int, float]]:
    return [(value.name, value.step, round(value.value, 3)) for value in values]


def test_samples_are_averaged_between_two_progresses_and_those_before_the_first_window_left_out(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, 1)
    files = RunReader(tmp_path, TrackingReport(status="running", name="x"))
    for second, watts in ((-1, 50), (1, 100), (2, 200)):
        run.sample(second, 0, watts, gpu_util_pct=90.0)
    assert named(files.read(run.at(3, 6), last=False)) == [
        ("images_per_s", 6, 8),
        ("power_w", 6, 150),
        ("gpu_util_pct", 6, 90),
    ]
    run.sample(2.5, 0, 300)  # late: it counts at the next progress
    assert files.read(run.at(3, 6), last=False) == []
    assert named(files.read(run.at(8, 16), last=True)) == [("images_per_s", 16, 8), ("power_w", 16, 300)]


def test_several_gpus_have_a_curve_each_also_on_another_node(tmp_path: Path) -> None:
    run = Run(tmp_path, 3)
    files = RunReader(tmp_path, TrackingReport(status="running", name="x"))
    run.sample(1, 0, 100)
    run.sample(1, 1, 200)
    run.sample(1, 2, 300, node=1)
    assert named(files.read(run.at(2, 4), last=True)) == [
        ("images_per_s", 4, 8),
        ("power_w/gpu0", 4, 100),
        ("power_w/gpu1", 4, 200),
        ("power_w/gpu2", 4, 300),
    ]


def test_averaged_power_stands_in_where_the_card_has_no_instant_power(tmp_path: Path) -> None:
    run = Run(tmp_path, 1)
    files = RunReader(tmp_path, TrackingReport(status="running", name="x"))
    run.sample(1, 0, None, power_avg1s_w=120.0)
    assert ("power_w", 4, 120) in named(files.read(run.at(2, 4), last=True))
