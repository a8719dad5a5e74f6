"""Makes synthetic captures of GPUs that have not been recorded yet.

usage: python -m benchmarks.make_synthetic_captures [FOLDER]     (default: the packaged captures)

Which calls fail follows each chip's documented behaviour. Levels come from the sources in `note`; what the note calls
assumed has no source. Equal seeds give equal bytes: 3 s idle, 1 s of ramp, then 30 s of load that replay loops over.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pynvml import NVML_ERROR_NOT_SUPPORTED

from inpaint_bench.telemetry.nvml.real import METRICS
from inpaint_bench.telemetry.nvml.replay import (
    FORMAT,
    PACKAGED,
    SUFFIX,
    Capture,
    Series,
    field_key,
    gpm_key,
    save,
)
from inpaint_bench.telemetry.report import CaptureMeta
from inpaint_bench.telemetry.sampling.streams import SLOW

_IDLE_S, _RAMP_S, _LOAD_S = 3.0, 1.0, 30.0
_THROTTLE_COUNTERS = [item.name for item in SLOW.fields if item.columns[0].startswith("throttle_")]
Levels = tuple[float, float]  # idle, load


@dataclass(frozen=True, kw_only=True)
class Card:
    """Idle and load levels of one GPU; None: the card has no such sensor."""

    name: str
    gpu: str
    driver: str
    note: str
    limit_w: float
    power_w: Levels
    has_average: bool  # NVML_FI_DEV_POWER_AVERAGE of the GPU
    power_mem_w: Levels | None
    util_pct: Levels
    mem_active_pct: Levels
    temp_c: Levels
    temp_mem_c: Levels | None
    sm_mhz: Levels
    max_sm_mhz: int
    mem_mhz: Levels
    total_mib: int
    reserved_mib: int
    used_mib: Levels
    ecc: int | None
    mig: int | None
    gpm_pct: tuple[float, float, float, float] | None  # under load; SM, occupancy, tensor, DRAM. None: before Hopper
    recovery: int | None  # recovery action; None: unknown whether this driver has it, so not in the capture
    wobble_w: float  # how much a training step makes power swing: assumed
    unknown: tuple[str, ...] = ()  # calls whose result is unknown: not in the capture


_COMMON = "Clocks and idle levels without another source are assumed. Not a measurement."

CARDS = (
    Card(
        name="a40-synthetic",
        gpu="NVIDIA A40",
        driver="550.90.07",
        note="Load power, utilisation and VRAM: the poster, A40 batch 16 (286 W, 99.92 %, 60 % of memory); "
        "memory activity 58 % as the poster's discussion; temperature 66 C from its ambiguous cells. No "
        f"memory temperature and no memory power: GA102. {_COMMON}",
        limit_w=300,
        power_w=(31, 286),
        has_average=True,
        power_mem_w=None,
        util_pct=(0, 99.9),
        mem_active_pct=(0, 58),
        temp_c=(34, 66),
        temp_mem_c=None,
        sm_mhz=(210, 1560),
        max_sm_mhz=1740,
        mem_mhz=(405, 7251),
        total_mib=46068,
        reserved_mib=609,
        used_mib=(0, 27641),
        ecc=1,
        mig=None,
        gpm_pct=None,
        recovery=None,
        wobble_w=8,
    ),
    Card(
        name="a100-synthetic",
        gpu="NVIDIA A100-PCIE-40GB",
        driver="550.90.07",
        note="Load power and utilisation: the poster, A100 batch 4 (228 W, 94.96 %; its higher cells exceed "
        "this board's 250 W); memory activity 70 % and VRAM 73 % as its discussion; temperature 57.6 C from "
        "its ambiguous cells. No 1-s average and no memory power: GA100 answers NOT_SUPPORTED; memory "
        f"temperature left out, not known. {_COMMON}",
        limit_w=250,
        power_w=(36, 228),
        has_average=False,
        power_mem_w=None,
        util_pct=(0, 95),
        mem_active_pct=(0, 70),
        temp_c=(33, 57.6),
        temp_mem_c=None,
        sm_mhz=(210, 1380),
        max_sm_mhz=1410,
        mem_mhz=(1215, 1215),
        total_mib=40960,
        reserved_mib=571,
        used_mib=(0, 29901),
        ecc=1,
        mig=0,
        gpm_pct=None,
        recovery=None,
        wobble_w=10,
        unknown=(field_key("temp_mem_c"),),
    ),
    Card(
        name="h200-synthetic",
        gpu="NVIDIA H200",
        driver="590.48.01",
        note="Idle and load power, memory power, utilisation, memory temperature and VRAM: the one-moment "
        "H200 captures of nvidia_gpu_exporter (77.88 and 625.24 W); GPU temperature 58.5 C: the poster, "
        f"H200 batch 16; GPM and health are assumed. {_COMMON}",
        limit_w=700,
        power_w=(77.9, 625.2),
        has_average=True,
        power_mem_w=(46.6, 97.7),
        util_pct=(0, 100),
        mem_active_pct=(0, 7),
        temp_c=(30, 58.5),
        temp_mem_c=(32, 41),
        sm_mhz=(345, 1905),
        max_sm_mhz=1980,
        mem_mhz=(3201, 3201),
        total_mib=143771,
        reserved_mib=614,
        used_mib=(0, 32362),
        ecc=1,
        mig=0,
        gpm_pct=(88, 34, 41, 52),
        recovery=0,
        wobble_w=14,
    ),
)


def make(card: Card) -> Capture:
    """Return the capture of a card."""
    rng = random.Random(card.name)
    length_s = _IDLE_S + _RAMP_S + _LOAD_S
    fast = [round(0.1 * i, 1) for i in range(round(length_s * 10))]
    slow = [float(i) for i in range(round(length_s))]
    power_w = [_level(card.power_w, t) + rng.gauss(0, card.wobble_w) * _share(t) for t in fast]
    power_w = [min(max(p, 5.0), card.limit_w) for p in power_w]
    average_w = [sum(power_w[max(0, i - 9) : i + 1]) / len(power_w[max(0, i - 9) : i + 1]) for i in range(len(fast))]
    energy_mj, total = [], 1_000_000_000
    for p in power_w:
        energy_mj.append(total)
        total += round(p * 100)  # 0.1 s in mJ

    def near(levels: Levels, t: float, spread: float) -> int:
        """Return a level with noise, which is proportional to the load."""
        return round(_level(levels, t) + rng.uniform(-spread, spread) * _share(t))

    utilization = [[min(100, near(card.util_pct, t, 1)), min(100, near(card.mem_active_pct, t, 2))] for t in fast]
    used = [near(card.used_mib, t, 0) for t in slow]
    memory = [
        [m * 2**20 for m in (card.total_mib, card.reserved_mib, u, card.total_mib - card.reserved_mib - u)]
        for u in used
    ]
    calls = {
        "driver_version": _always(card.driver),
        "nvml_version": _always(f"12.{card.driver}"),
        "name": _always(card.gpu),
        "pci_bus_id": _always("00000000:01:00.0"),
        "minor": _always(0),
        "power_limit_mw": _always(round(card.limit_w * 1000)),
        "persistence_mode": _always(1),
        "ecc_mode": _always(card.ecc),
        "mig_mode": _always(card.mig),
        "max_sm_clock_mhz": _always(card.max_sm_mhz),
        field_key("power_instant_mw"): _over(fast, [round(p * 1000) for p in power_w]),
        field_key("power_avg1s_mw"): _over(fast, [round(p * 1000) for p in average_w] if card.has_average else None),
        field_key("energy_mj"): _over(fast, energy_mj),
        "total_energy_mj": _over(fast, energy_mj),
        "utilization": _over(fast, utilization),
        field_key("power_mem_avg_mw"): _over(slow, _sensor(card.power_mem_w, slow, 1000)),
        field_key("temp_mem_c"): _over(slow, _sensor(card.temp_mem_c, slow, 1)),
        "sm_clock_mhz": _over(slow, [15 * round(near(card.sm_mhz, t, 20) / 15) for t in slow]),
        "mem_clock_mhz": _over(slow, [near(card.mem_mhz, t, 0) for t in slow]),
        "throttle_reasons": _over(slow, [0 if _share(t) else 1 for t in slow]),
        "temperature_c": _over(slow, [near(card.temp_c, t, 0.6) for t in slow]),
        "memory": _over(slow, memory),
        **{field_key(name): _over(slow, [0] * len(slow)) for name in _THROTTLE_COUNTERS},
    }
    calls.update(_gpm(card, slow))
    calls.update(
        ecc_volatile=_always([0, 0]),
        ecc_aggregate=_always([0, 0]),
        remapped_rows=_always([0, 0, 0, 0]),
    )
    calls[field_key("pcie_replays")] = _always(0)
    if card.recovery is not None:
        calls[field_key("recovery_action")] = _always(card.recovery)
    for key in card.unknown:
        del calls[key]
    meta = CaptureMeta(
        gpu=card.gpu,
        driver=card.driver,
        tool="benchmarks.make_synthetic_captures",
        synthetic=True,
        note=card.note,
        duration_ms=length_s * 1000,
        loop_from_ms=(_IDLE_S + _RAMP_S) * 1000,
    )
    return Capture(format=FORMAT, meta=meta, calls=calls)


def _gpm(card: Card, times_s: list[float]) -> dict[str, Series]:
    """Return the series of the GPM metrics; PCIe and NVLink are those of a card that works alone."""
    metrics = sorted(METRICS, key=METRICS.__getitem__)  # SM, occupancy, tensor, DRAM, PCIe TX and RX, NVLink RX and TX
    if card.gpm_pct is None:
        return {gpm_key(metric): _always(None) for metric in metrics}
    rng = random.Random(f"{card.name} gpm")
    loads = (*card.gpm_pct, 60.0, 450.0, 0.0, 0.0)
    series = {}
    for metric, load in zip(metrics, loads, strict=True):
        values = [round(load * _share(t) * rng.uniform(0.97, 1.03), 2) for t in times_s]
        series[gpm_key(metric)] = _over(times_s, values)
    return series


def _share(t_s: float) -> float:
    """Return 0 at idle, 1 under load."""
    return min(max((t_s - _IDLE_S) / _RAMP_S, 0.0), 1.0)


def _level(levels: Levels, t_s: float) -> float:
    return levels[0] + (levels[1] - levels[0]) * _share(t_s)


def _sensor(levels: Levels | None, times_s: list[float], scale: int) -> list[int] | None:
    return None if levels is None else [round(_level(levels, t) * scale) for t in times_s]


def _over(times_s: list[float], values: list[Any] | None) -> Series:
    """Return a series over time; None: the card returns NOT_SUPPORTED."""
    return _always(None) if values is None else Series([round(t * 1000) for t in times_s], 0, values)


def _always(value: Any) -> Series:
    return Series([0], NVML_ERROR_NOT_SUPPORTED if value is None else 0, [value])


def main() -> int:
    """Write the captures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGED
    for card in CARDS:
        path = folder / f"{card.name}{SUFFIX}"
        save(path, make(card))
        print(f"{path}: {path.stat().st_size / 1000:.1f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
