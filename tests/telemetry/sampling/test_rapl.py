"""Energy of the processor packages, from a powercap tree as Linux offers it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench.telemetry.sampling.sampler import CpuPackages, Sampler, holds_node
from inpaint_bench.telemetry.sampling.streams import STREAMS
from tests.telemetry.support import FakeNvml

RANGE_UJ = 262_143_328_850
ZONES = {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1", "intel-rapl:2": "psys"}
ZONES |= {"intel-rapl:0:0": "core", "intel-rapl-mmio:0": "package-0"}


def put(root: Path, zone: str, energy_uj: int | str) -> Path:
    (root / zone).mkdir(parents=True, exist_ok=True)
    for name, value in (("name", ZONES[zone]), ("energy_uj", energy_uj), ("max_energy_range_uj", RANGE_UJ)):
        (root / zone / name).write_text(f"{value}\n")
    return root / zone / "energy_uj"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a node with two packages; every other zone counts the same energy again."""
    for zone in ZONES:
        put(tmp_path, zone, 1_000_000)
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def read(packages: CpuPackages) -> tuple[Any, Any]:
    row = packages.row("nvml", 0)
    return row["energy_uj"], row["nulls"]


def test_the_sum_over_the_packages_alone_grows_from_zero_and_goes_on_where_a_counter_wraps_around(root: Path) -> None:
    packages = CpuPackages(root)
    assert read(packages) == (0, None)
    put(root, "intel-rapl:0", 5_000_000)
    put(root, "intel-rapl:1", RANGE_UJ - 10)
    put(root, "intel-rapl:2", 9_000_000)
    assert read(packages) == (4_000_000 + RANGE_UJ - 10 - 1_000_000, None)
    put(root, "intel-rapl:1", 30)
    assert read(packages) == (4_000_000 + RANGE_UJ - 1_000_000 + 30, None)


def test_a_package_that_fails_once_makes_one_null_and_loses_no_energy(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = CpuPackages(root)
    read(packages)
    energy = put(root, "intel-rapl:1", "no number")
    put(root, "intel-rapl:0", 3_000_000)
    assert read(packages) == (None, "energy_uj=error")
    put(root, "intel-rapl:1", 2_000_000)

    def forbid(path: Path, *_: object, **__: object) -> str:  # root may read files of any mode
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", forbid)
        assert read(packages) == (None, "energy_uj=no_permission")
    assert read(packages) == (3_000_000, None)
    energy.unlink()
    assert read(packages) == (None, "energy_uj=error")


@pytest.mark.parametrize(
    ("flags", "reason"), [("fpu vme hypervisor lahf_lm", "virtual_machine"), ("fpu vme", "no_rapl")]
)
def test_without_packages_the_reason_is_in_every_row(tmp_path: Path, flags: str, reason: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    packages = CpuPackages(tmp_path / "powercap", cpuinfo)
    assert [read(packages) for _ in range(2)] == [(None, f"energy_uj={reason}")] * 2


def test_replayed_telemetry_has_no_energy_of_this_machine(root: Path) -> None:
    assert read(CpuPackages(root, replayed=True)) == (None, "energy_uj=not_in_capture")


def test_a_job_holds_its_node_if_slurm_gave_it_every_cpu_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = os.cpu_count() or 1
    for given, held in ((f"{cpus}(x2)", True), (f"{cpus}(x2),{cpus - 1}", False), (f"{cpus - 1}", False)):
        monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", given)
        assert holds_node() is held
    monkeypatch.delenv("SLURM_JOB_CPUS_PER_NODE")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert holds_node() is True
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus - 1)))
    assert holds_node() is False


def test_a_row_is_written_at_every_tick_of_the_slow_stream_and_at_the_end(root: Path) -> None:
    written: list[tuple[str, dict[str, Any]]] = []
    hz = {stream.name: 1.0 for stream in STREAMS}
    sampler = Sampler(FakeNvml(2), [], "nvml", lambda *row: written.append(row), hz, packages=CpuPackages(root))
    sampler.sample_due()
    put(root, "intel-rapl:0", 3_000_000)
    sampler.sample_last()
    rows = [row for table, row in written if table == "samples_cpu"]
    assert [(row["tick_seq"], row["energy_uj"]) for row in rows] == [(0, 0), (1, 2_000_000)]
    assert rows[1]["read_us"] >= 0
