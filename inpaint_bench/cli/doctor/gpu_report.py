"""`doctor gpu`: which values a GPU of this machine gives, how often they change and what a call costs; about 20 s."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pynvml
from rich.console import Console

from inpaint_bench.core.console import console, table
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Device, write_record
from inpaint_bench.telemetry.nvml.api import NvmlError
from inpaint_bench.telemetry.nvml.capture_file import SUFFIX, Capture, save
from inpaint_bench.telemetry.nvml.probe import SECONDS, GpuFindings, choose_gpu, polling_s, probe
from inpaint_bench.telemetry.nvml.real import RealNvml


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to examine, and where to write it."""

    uuid: str | None
    seconds: float
    out: Path | None
    note: str
    loop_from_s: float
    json_file: Path | None


def run_gpu(options: Options) -> None:
    """Examine a GPU and print the findings. Raises UserError for impossible options or without a GPU."""
    _check(options)
    try:
        nvml = RealNvml()
        nvml.open()
        findings, capture = probe(nvml, choose_gpu(nvml, options.uuid), options.seconds)
        nvml.close()
    except ValueError as error:
        raise UserError(str(error)) from None
    except NvmlError as error:
        raise UserError(nvml_problem(error)) from None
    # Printed first: a full disk must not cost the findings.
    show(console(), findings)
    try:
        _write(options, findings, capture)
    except OSError as error:
        raise UserError(f"not written: {error}") from None


def _check(options: Options) -> None:
    """Raise UserError for options that could only fail after the examination."""
    shortest, longest = SECONDS
    if not shortest <= options.seconds <= longest:
        raise UserError(f"--seconds {options.seconds:g}: an examination takes {shortest:g} to {longest:g} s")
    if options.out and not options.out.name.endswith(SUFFIX):
        raise UserError(f"--out {options.out}: the name of a recording ends in {SUFFIX}")
    for path in filter(None, (options.out, options.json_file)):
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise UserError(f"{path} is a folder")
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"{path}: the folder {path.parent} is not writable")
    recorded_s = options.seconds - polling_s(options.seconds)
    if not 0 <= options.loop_from_s < recorded_s:
        raise UserError(f"--loop-from {options.loop_from_s:g}: must lie within the recording of {recorded_s:g} s")


def _write(options: Options, findings: GpuFindings, capture: Capture) -> None:
    if options.json_file:
        write_record(options.json_file, findings)
        print(f"Wrote the findings to {options.json_file}")
    if options.out:
        capture.meta.note, capture.meta.loop_from_ms = options.note, options.loop_from_s * 1000
        save(options.out, capture)
        size_kb = options.out.stat().st_size / 1000
        print(f"Wrote a recording of {findings.recorded_s:g} s to {options.out} ({size_kb:.1f} kB)")
        print(f"Replay it with telemetry=replay telemetry.capture={options.out}")


def nvml_problem(error: NvmlError) -> str:
    """Return the sentence for a user whose GPU cannot be examined."""
    if error.code in (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND):
        return f"this machine has no working NVIDIA driver ({error}), so there is no GPU to examine"
    return f"the examination failed: {error}"


def show(out: Console, findings: GpuFindings) -> None:
    """Print the findings as tables."""
    facts = [(name, _fact(name, value, findings.device)) for name, value in _facts(findings).items()]
    out.print(table(("GPU", ""), facts))
    calls = [
        (c.call, ", ".join(c.columns), c.num_calls, c.num_valid, c.p50_us, c.p99_us, c.max_us) for c in findings.calls
    ]
    out.print(table(("NVML call", "columns", "calls", "valid", "p50 us", "p99 us", "max us"), calls))
    updates = [
        (column, u.median_ms, u.p10_ms, u.p90_ms, u.changes, u.polls, u.failed)
        for column, u in findings.updates.items()
    ]
    out.print(table(("changes every", "median ms", "p10 ms", "p90 ms", "changes", "polls", "failed polls"), updates))
    missing = [(", ".join(c.columns) or c.call, c.missing, c.error) for c in findings.calls if c.missing]
    if missing:
        out.print(table(("missing: null in every run", "reason", "NVML"), missing))
    else:
        print("Nothing is missing: every call gave a value.")


def _facts(findings: GpuFindings) -> dict[str, object]:
    device = msgspec.structs.asdict(findings.device)
    left_out = ("nulls", "index_visible")
    return {"driver": findings.driver, "NVML": findings.nvml} | {k: v for k, v in device.items() if k not in left_out}


def _fact(name: str, value: object, device: Device) -> str:
    if value is None:
        return f"not given: {device.nulls.get(name, 'unknown')}"
    if name in ("persistence_mode", "ecc_mode", "mig_mode"):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
