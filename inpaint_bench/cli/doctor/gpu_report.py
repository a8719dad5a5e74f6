"""`doctor gpu`: which values a GPU of this machine gives, how often they change and what a call costs; about 20 s."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from rich.console import Console

from inpaint_bench.core.console import console, table
from inpaint_bench.core.errors import UserError
from inpaint_bench.telemetry.driver import DriverError, Fault
from inpaint_bench.telemetry.nvml.probe import GpuFindings, examine_gpu
from inpaint_bench.telemetry.nvml.replay import SUFFIX, save


def run_gpu(uuid: str | None, seconds: float, out: Path | None, note: str) -> None:
    """Examine a GPU, print the findings and save the recording. Raises UserError."""
    if not 2 <= seconds <= 3600:
        raise UserError(f"--seconds {seconds:g}: an examination takes 2 to 3600 s")
    if out and not out.name.endswith(SUFFIX):
        raise UserError(f"--out {out}: the name of a recording ends in {SUFFIX}")
    if out and not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out}: {out.parent} is not a writable folder")
    try:
        findings = examine_gpu(uuid, seconds)
    except ValueError as error:
        raise UserError(str(error)) from None
    except DriverError as error:
        raise UserError(nvml_problem(error)) from None
    # Printed first: a full disk must not cost the findings.
    _show(console(), findings)
    if out:
        findings.capture.meta.note = note
        try:
            save(out, findings.capture)
        except OSError as error:
            raise UserError(f"the recording was not saved: {error}") from None
        print(f"Replay the recording with telemetry=replay telemetry.capture={out}")


def nvml_problem(error: DriverError) -> str:
    """Return the sentence for a user whose GPU cannot be examined."""
    if error.fault is Fault.NO_DRIVER:
        return f"this machine has no working NVIDIA driver ({error}), so there is no GPU to examine"
    return f"the examination failed: {error}"


def _show(out: Console, findings: GpuFindings) -> None:
    nulls = findings.device.nulls
    facts = {"driver": findings.capture.meta.driver, **msgspec.structs.asdict(findings.device)}
    shown = [(name, value) for name, value in facts.items() if name not in ("nulls", "index_visible")]
    out.print(table(("GPU", ""), [(name, f"null: {nulls[name]}" if name in nulls else value) for name, value in shown]))
    calls = [(c.call, c.feeds, c.num_calls, c.num_valid, c.median_us, c.max_us) for c in findings.calls]
    out.print(table(("NVML call", "feeds", "calls", "valid", "median us", "max us"), calls))
    updates = [(column, u.median_ms, u.changes, u.polls, u.failed) for column, u in findings.updates.items()]
    out.print(table(("changes every", "median ms", "changes", "polls", "failed polls"), updates))
    missing = [(call.feeds, call.missing, call.error) for call in findings.calls if call.missing]
    if missing:
        out.print(table(("missing: null in every run", "reason", "NVML"), missing))
