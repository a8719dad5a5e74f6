"""Energy of the node's processor packages, by RAPL: the counters that Linux offers below /sys/class/powercap.

AMD's processors appear in the same tree. Since Linux 5.10 only root may read the counters, unless the site allows it.
A package is the whole socket without its memory, and all jobs of the node share it.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, Final

from inpaint_bench.core.schema import Null

COLUMN: Final = "energy_uj"
POWERCAP: Final = Path("/sys/class/powercap")
CPUINFO: Final = Path("/proc/cpuinfo")
# Not intel-rapl:0:0, a part of a package, and not intel-rapl-mmio:0, the same package once more.
_ZONE: Final = re.compile(r"intel-rapl:\d+", re.ASCII)


class CpuPackages:
    """Reads the energy of all packages, as a sum that grows from 0: a counter that wraps around is continued."""

    def __init__(self, root: Path = POWERCAP, cpuinfo: Path = CPUINFO, *, replayed: bool = False) -> None:
        self._zones, self._missing = [], Null.NOT_IN_CAPTURE
        if not replayed:
            self._zones, self._missing = _find_packages(root), _why_missing(cpuinfo)
        self._whole_node = holds_node()
        self._last_uj: dict[Path, int] = {}
        self._total_uj = 0

    def row(self, source: str, seq: int) -> dict[str, Any]:
        """Return a row of samples_cpu without run_id; the energy is null with a reason where a package gives none."""
        unix_ns, start_ns = time.time_ns(), time.monotonic_ns()
        energy_uj, reason = self._read()
        duration_ns = time.monotonic_ns() - start_ns
        return {
            "source": source,
            "tick_seq": seq,
            "t_mono_ns": start_ns + duration_ns // 2,
            "t_unix_ns": unix_ns + duration_ns // 2,
            "read_us": duration_ns / 1000,
            COLUMN: energy_uj,
            "packages": len(self._zones),
            "whole_node": self._whole_node,
            "nulls": reason and f"{COLUMN}={reason.value}",
        }

    def _read(self) -> tuple[int | None, Null | None]:
        if not self._zones:
            return None, self._missing
        try:
            # All before any is counted: what one package fails to give is in the next sum.
            readings = {zone: (_number(zone / COLUMN), _number(zone / "max_energy_range_uj")) for zone in self._zones}
        except PermissionError:
            return None, Null.NO_PERMISSION
        except (OSError, ValueError):
            return None, Null.ERROR
        for zone, (now_uj, range_uj) in readings.items():
            grown_uj = now_uj - self._last_uj.get(zone, now_uj)
            self._total_uj += grown_uj if grown_uj >= 0 else grown_uj + range_uj
            self._last_uj[zone] = now_uj
        return self._total_uj, None


def holds_node() -> bool:
    """Return whether the job may use every CPU of the node: by Slurm's allocation, else by the affinity mask."""
    allocated = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # "72(x2),36"
    least = min(map(int, allocated)) if allocated else len(os.sched_getaffinity(0))
    return least >= (os.cpu_count() or 1)


def _find_packages(root: Path) -> list[Path]:
    """Return the zones of packages, without those of the platform (psys), which contain them."""
    try:
        zones = sorted(path for path in root.iterdir() if _ZONE.fullmatch(path.name))
        return [zone for zone in zones if (zone / "name").read_text().startswith("package")]
    except OSError:
        return []


def _why_missing(cpuinfo: Path) -> Null:
    try:
        flags = re.search(r"^flags\s*:.*$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return Null.NO_RAPL
    return Null.VIRTUAL_MACHINE if flags and "hypervisor" in flags[0].split() else Null.NO_RAPL


def _number(path: Path) -> int:
    return int(path.read_text())
