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


class CpuPackages:
    """Reads the energy of all packages, as a sum that grows from 0: a counter that wraps around is continued."""

    def __init__(self, root: Path = POWERCAP, cpuinfo: Path = CPUINFO, *, replayed: bool = False) -> None:
        # Other zones (core, psys) are a part of a package or contain it, and intel-rapl-mmio:0 is the same one again.
        names = [] if replayed else sorted(root.glob("intel-rapl:*/name"))
        self._zones = [name.parent for name in names if name.read_text().startswith("package")]
        virtual = " hypervisor" in cpuinfo.read_text()
        self._missing = Null.NOT_IN_CAPTURE if replayed else Null.VIRTUAL_MACHINE if virtual else Null.NO_RAPL
        self._whole_node = holds_node()
        self._last_uj: dict[Path, int] = {}
        self._total_uj = 0

    def row(self, source: str, seq: int) -> dict[str, Any]:
        """Return a row of samples_cpu without run_id; the energy is null with a reason if a package gives none."""
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
            "whole_node": self._whole_node,
            "nulls": reason and f"{COLUMN}={reason}",
        }

    def _read(self) -> tuple[int | None, Null | None]:
        if not self._zones:
            return None, self._missing
        try:
            # All before any is counted: what one package fails to give is in the next sum.
            now_uj = {zone: int((zone / COLUMN).read_text()) for zone in self._zones}
            range_uj = {zone: int((zone / "max_energy_range_uj").read_text()) for zone in self._zones}
        except PermissionError:
            return None, Null.NO_PERMISSION
        except (OSError, ValueError):
            return None, Null.ERROR
        for zone, last_uj in self._last_uj.items():
            grown_uj = now_uj[zone] - last_uj
            self._total_uj += grown_uj if grown_uj >= 0 else grown_uj + range_uj[zone]
        self._last_uj = now_uj
        return self._total_uj, None


def holds_node() -> bool:
    """Return whether the job may use every CPU of its nodes: by Slurm's allocation, else by the affinity mask."""
    allocated = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # "72(x2),36"
    return min(map(int, allocated or [len(os.sched_getaffinity(0))])) >= (os.cpu_count() or 1)
