"""Checks of the GPU's label, `gpu=a100`, against the board that NVML describes, by the facts in conf/gpu."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from analysis.metrics.facts import Facts
from inpaint_bench.core.config.bench import GpuConfig
from inpaint_bench.core.estimates.rates import gpu_configs
from inpaint_bench.core.records import Device

# NVML's total over the GiB on the label: H100 0.996, H200 0.997, A100 40 GB 1.0; A40 and L40S 0.937, because ECC takes
# a sixteenth of GDDR6.
MEMORY_SHARE = 0.92, 1.03
MIN_POWER_LIMIT_SHARE = 0.2  # NVML accepts limits down to 25 to 35 % of a board's default
MAX_POWER_LIMIT_SHARE = 1.01
CLOCK_TOLERANCE = 0.05  # the limits of two types are at least 14 % apart, but for H100 and H200
MIB_PER_GB = 1024  # the labels are GiB


def check_label(run: Facts) -> Iterator[str]:
    manifest = run.manifest
    config = gpu_configs().get(manifest.gpu or "")
    if config is None or run.replayed:
        return
    if config.nvml_name is None and manifest.devices:
        yield f"gpu={manifest.gpu} is no GPU, and the manifest lists {len(manifest.devices)}"
        return
    for device in manifest.devices:
        for problem in _problems(device, config):
            yield f"gpu={manifest.gpu}: GPU {device.uuid} {problem}"


def _problems(device: Device, config: GpuConfig) -> Iterator[str]:
    if device.name is not None and config.nvml_name and not re.match(config.nvml_name, device.name):
        yield f"is named {device.name!r}, not {config.nvml_name!r}"
    if device.mig_mode:
        yield "is in MIG mode: power and utilisation belong to no single slice"
    low_gb, high_gb = (share * config.memory_gb for share in MEMORY_SHARE)
    if device.memory_mib is not None and config.memory_gb and not low_gb <= device.memory_mib / MIB_PER_GB <= high_gb:
        yield f"has {device.memory_mib / MIB_PER_GB:.1f} GiB, not about {config.memory_gb:g}"
    clocks = device.max_sm_clock_mhz, config.max_sm_clock_mhz
    if clocks[0] is not None and clocks[1] and not math.isclose(*clocks, rel_tol=CLOCK_TOLERANCE):  # type: ignore[arg-type]
        yield f"has a clock limit of {device.max_sm_clock_mhz} MHz, not {config.max_sm_clock_mhz} MHz"
    low_w, high_w = MIN_POWER_LIMIT_SHARE * config.power_limit_w, MAX_POWER_LIMIT_SHARE * config.power_limit_w
    if device.power_limit_w is not None and config.power_limit_w and not low_w <= device.power_limit_w <= high_w:
        yield f"has a power limit of {device.power_limit_w:g} W, outside {low_w:g} to {config.power_limit_w:g} W"


def check_samples(run: Facts) -> Iterator[str]:
    totals = {device.uuid: device.memory_mib for device in run.manifest.devices}
    for uuid, total in run.samples["samples_slow"].select("gpu_uuid", "vram_total_mib").unique().rows():
        listed = totals.get(str(uuid))
        if listed is not None and total is not None and not math.isclose(total, listed, rel_tol=0.01):
            yield f"GPU {uuid}: {total:.0f} MiB of memory were sampled, and the manifest has {listed:.0f} MiB"


def warnings(run: Facts) -> Iterator[str]:
    facts, config = run.manifest.gpu_facts, gpu_configs().get(run.manifest.gpu or "")
    for name in facts.__struct_fields__ if config is not None and facts is not None else ():
        if getattr(facts, name) not in (None, getattr(config, name)):
            yield f"the manifest has a GPU with {name} {getattr(facts, name)}, conf/gpu {getattr(config, name)}"
    if config is None:
        yield f"gpu={run.manifest.gpu} has no file in conf/gpu: nothing says whether the board has this label"


def peak_problem(run: Facts) -> str | None:
    """Return why no share of a peak can be known: the manifest's peak of the GPU is not that of conf/gpu."""
    facts, config = run.manifest.gpu_facts, gpu_configs().get(run.manifest.gpu or "")
    stated, known = facts and facts.bf16_dense_tflops, config and config.bf16_dense_tflops
    if not stated or not known or math.isclose(stated, known, rel_tol=0.01):
        return None
    return f"the manifest has a peak of {stated:g} TFLOP/s, conf/gpu {known:g}"


def uses_tensor_cores(row: Mapping[str, Any]) -> bool:
    """Return whether a run's products are in TF32 or in 16 bits."""
    levers = {lever["name"] for lever in json.loads(row["levers"] or "[]")} | {*(row["recipe"] or "").split("+")}
    return row["precision"] != "fp32" or bool(levers & {"tf32", "tf32_convolutions"})


def fp32_mfu_pct(row: Mapping[str, Any]) -> float | None:
    """Return the MFU of a run in fp32, whose peak conf/gpu has and no manifest; None if it is not known."""
    config = gpu_configs().get(row["gpu"] or "")
    peak = config and (config.tf32_dense_tflops if uses_tensor_cores(row) else config.fp32_tflops)
    if not peak or not row["flop_per_image"] or not row["images_per_s"]:
        return None
    return float(100 * row["flop_per_image"] * row["images_per_s"] / (peak * 1e12 * (row["gpus"] or 1)))
