"""The sidecar's account of itself: telemetry.json, what it was told, what it did and what that cost."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inpaint_bench.core import schema
from inpaint_bench.core.environment import boot_id
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.sampling.streams import GPM, GPM_MAX_HZ
from inpaint_bench.telemetry.sampling.ticker import Ticker
from inpaint_bench.telemetry.storage.writer import Storage

from .spec import Spec

if TYPE_CHECKING:
    from inpaint_bench.telemetry.sources.dcgm import DcgmWatch

_MOST_PROBLEMS: Final = 200  # a flapping disk has thousands in a week; events have each one


def identity(spec: Spec, source: str, driver: str | None, nvml: str | None) -> dict[str, Any]:
    """What telemetry.json and every part's metadata say alike."""
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "producer": schema.PRODUCER,
        "run_id": spec.run_id,
        "source": source,
        "driver": driver,
        "nvml": nvml,
        "boot_id": boot_id(),
    }


def part_metadata(facts: Mapping[str, Any], spec: Spec) -> dict[str, dict[str, str]]:
    """Schema metadata of each table's parts."""
    common = {key: str(value) for key, value in facts.items() if value is not None}
    common["clock"] = "CLOCK_MONOTONIC"
    fast = {
        "period_ms": f"{1000 / spec.fast_hz:g}",
        "fields": "power_instant_w=186/0 power_avg1s_w=185/0 energy_mj=83 (NVML field/scope)",
        "energy_scope": "gpu_board",
    }
    slow = {
        "period_ms": f"{1000 / spec.slow_hz:g}",
        "fields": "power_mem_avg_w=185/2 temp_mem_c=82 throttle_*_ns=74,269,270,271 (NVML field/scope)",
    }
    gpm = {
        "period_ms": f"{1000 / gpm_hz(spec):g}",
        "fields": " ".join(f"{item.column}={item.field_id}" for item in GPM.metrics) + " (GPM metric)",
    }
    return {
        "samples_fast": {**common, **fast},
        "samples_slow": {**common, **slow},
        "samples_gpm": {**common, **gpm},
        "events": common,
    }


def gpm_hz(spec: Spec) -> float:
    """The slow lane's rate, less where that leaves no GPM window."""
    return min(spec.slow_hz, GPM_MAX_HZ)


class Account:
    """Everything telemetry.json says, at any moment of a run."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        spec: Spec,
        capture: Mapping[str, Any] | None,
        sampler: Sampler,
        storage: Storage,
        tickers: Mapping[str, Ticker],
        dcgm: DcgmWatch | None = None,
    ) -> None:
        self._facts = facts
        self._spec = spec
        self._capture = capture
        self._sampler = sampler
        self._storage = storage
        self._tickers = tickers
        self._dcgm = dcgm
        self._problems: list[str] = []
        self._problems_more = 0
        self._start = {"t_unix_ns": time.time_ns(), "t_mono_ns": time.monotonic_ns()}

    def problem(self, sentence: str) -> bool:
        """Take what was reported while the run lasted; False from the 201st on, which is only counted."""
        if len(self._problems) >= _MOST_PROBLEMS:
            self._problems_more += 1
            return False
        self._problems.append(sentence)
        return True

    def state(self, status: str, reason: str | None = None) -> dict[str, Any]:
        """telemetry.json. Status: running, complete, incomplete (rows not on disk), failed.

        Reason: why it ended. problems: the first 200 events as "kind: detail"; problems_more: how many came after,
        which are in `events` alone. ticks_late were skipped: ticks_due =
        ticks_done + ticks_late. dcgm: null where no exporter was named. cpu_s and max_rss_mib are the sidecar's own.
        """
        ended = status != "running"
        return {
            **self._facts,
            "status": status,
            "reason": reason,
            "capture": self._capture,
            "pid": os.getpid(),
            "host": platform.node(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "started_unix_ns": self._start["t_unix_ns"],
            "started_mono_ns": self._start["t_mono_ns"],
            "updated_unix_ns": time.time_ns(),
            "ended_unix_ns": time.time_ns() if ended else None,
            "ended_mono_ns": time.monotonic_ns() if ended else None,
            "part_s": self._spec.part_s,
            "journal_s": self._spec.journal_s,
            "devices": [self._device(index) for index in range(len(self._sampler.devices))],
            "lanes": {name: self._lane(name, ticker) for name, ticker in self._tickers.items()},
            "dcgm": self._dcgm.account() if self._dcgm else None,
            "tables": self._storage.counts(),
            "storage": {"errors": self._storage.errors, "error": self._storage.error},
            "problems": list(self._problems),
            "problems_more": self._problems_more,
            "cpu_s": round(time.process_time(), 3),
            "max_rss_mib": _peak_rss_mib(),
        }

    def _device(self, index: int) -> dict[str, Any]:
        device = self._sampler.devices[index]
        errors: dict[str, dict[str, int]] = {}
        absent: list[str] = []
        for reader in device.readers.values():
            absent += sorted(reader.absent)
            for (column, code), count in sorted(reader.errors.items()):
                if column not in reader.absent:
                    errors.setdefault(column, {})[str(code)] = count
        return {
            **device.facts,
            "power_limit_last_w": device.power_limit_w,
            "lost": device.lost,
            "absent": absent,
            "errors": errors,
            "health": device.health,
            "processes": device.processes.account(),
            "xids": device.xids.account(),
        }

    def _lane(self, name: str, ticker: Ticker) -> dict[str, Any]:
        took = self._sampler.durations[name]
        return {
            "hz": 1e9 / ticker.period_ns,
            "ticks_due": ticker.due,
            "ticks_done": ticker.done,
            "ticks_late": ticker.late,
            "read_us_p50": took.quantile_us(0.5),
            "read_us_p99": took.quantile_us(0.99),
            "read_us_max": round(took.max_us, 1),
        }


def _peak_rss_mib() -> float | None:
    """Since this program began; getrusage's maximum also holds the parent's, from before exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next((line.split() for line in lines if line.startswith("VmHWM:")), None)
    return round(int(found[1]) / 1024, 1) if found else None
