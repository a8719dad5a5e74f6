"""The table of checks whether a run can be trusted: what can be derived in two ways is compared.

A check is an entry of CHECKS: its name, its inputs (check.py), and its test, which gives a sentence for each
contradiction. A sentence makes the run invalid, unless the check only warns. The order is that of the sentences.
"""

from __future__ import annotations

from operator import attrgetter

from analysis.metrics import manifest_facts

from . import board, bounds, figures, identity, kernels, ranks, results, samples, sidecar, steps, windows
from .check import (
    Check,
    Finished,
    of_all,
    of_nodes,
    of_run,
    of_sidecars,
    of_steps,
    of_telemetry,
    of_windows,
    warn,
)

CHECKS = (
    Check("length of a window, by the wall clock and the monotonic clock", of_windows, windows.check_clocks),
    Check("time that a window shares with another one", of_windows, windows.check_overlaps),
    Check("names of windows, and windows of steps", of_run, windows.check_names),
    Check("images of a window, by steps, batch and GPUs", of_run, windows.check_counts),
    Check("windows between start and end of the run", of_run, windows.check_run_times),
    Check("last window, and the rate and step that the manifest recorded", of_run, windows.check_progress),
    Check("steps inside their window, one after the other", of_steps, steps.check_places),
    Check("number and images of the steps, by table and window", of_steps, steps.check_rows),
    Check("time of the steps, and of their window", of_steps, steps.check_device_time),
    Check("finite losses; NaNs draw less power than numbers", of_steps, steps.check_losses),
    Check("clocks of worker and sidecar", of_windows, samples.check_clock_offsets),
    Check("time of a sample, by its tick and the rate", of_run, samples.check_ticks),
    Check("throttled time, and the time of the window", of_run, samples.check_throttle_counters),
    Check("source of the samples, by rows and manifest", of_run, samples.check_sources),
    Check("run, boot, host, source, rate and GPUs of the sidecar", of_sidecars, sidecar.check_identity),
    Check("sidecar from before the windows to after them", of_sidecars, sidecar.check_times),
    Check("rows and parts, by the sidecar and on disk", of_sidecars, sidecar.check_rows),
    Check("ticks taken and skipped, by the sidecar and in the rows", of_sidecars, sidecar.check_ticks),
    Check("co-tenants and power limits, by telemetry.json alone", of_nodes, sidecar.check_incidents),
    Check("run id, in rows, parts and manifest", of_run, identity.check_run_id),
    Check("source and boot, in parts and manifest", of_run, identity.check_footers),
    Check("point and attempt, by path and manifest", of_run, identity.check_place),
    Check("facts that every worker records", of_run, identity.check_required),
    Check("overrides, and what the manifest says that was run", of_run, identity.check_overrides),
    Check("ranks of one run, with numbers of GPUs and nodes and with each other", of_run, ranks.check_ranks),
    Check("cards of one node, with each other", of_nodes, lambda facts, _: ranks.check_cards(facts)),
    Check("samples of two cards", of_run, ranks.check_copies),
    Check("levers, and the facts of workload and loader", of_run, identity.check_levers),
    Check("levers called active, and what was read back", of_run, identity.check_read_back),
    Check("parameters, by model, networks and training", of_run, identity.check_parameters),
    Check("FLOP of an image, and of its parts", of_run, identity.check_flop),
    Check("rows of results, and the steps", results.of_results, results.check_rows),
    Check("values of results, and what they follow from", results.of_results, results.check_values),
    Check("losses, validations and metrics of quality", of_run, results.check_quality),
    Check("agreement with the reference", of_run, manifest_facts.check_parity),
    Check("images of the data set, and what became of them", of_run, identity.check_data),
    Check("times of kernels, and the calls that were profiled", of_run, kernels.check_times),
    Check("sums of a timeline, and their parts", of_run, kernels.check_timeline),
    Check("profiled kernels, and the levers called active", of_run, kernels.check_levers),
    Check("label of the GPU, and its board", of_run, board.check_label),
    Check("memory of the GPU, sampled and in the manifest", of_run, board.check_samples),
    Check("bounds of samples in the windows", of_run, bounds.check_samples),
    Check("sum of used, free and reserved memory", of_run, bounds.check_memory),
    Check("bounds of steps", of_steps, bounds.check_steps),
    Check("bounds of what the manifest says of GPUs and memory", of_run, bounds.check_manifest),
    Check("a recording beside a GPU", of_run, figures.several_sources),
    Check("GPUs, sampled and in the manifest", of_telemetry, samples.check_devices),
    Check("edges, order, gaps, clocks and counter of the samples", of_telemetry, samples.check_samples),
    Check("co-tenants and power limits, by events", of_telemetry, sidecar.check_events),
    Check("energy, by counter and by power", of_telemetry, figures.contradiction),
    Check("mean power, and its limit", of_all, samples.check_power),
    Check("bounds of figures", of_all, bounds.check_row),
    Check("memory and utilisation, by NVML and by PyTorch", of_all, bounds.check_use),
    warn("readings that no card gives", of_run, attrgetter("strays")),
    warn("a window that is too short", of_windows, windows.check_length),
    warn("a window that was recorded late", of_run, windows.check_record),
    warn("what the sidecar reports and no table shows", of_nodes, sidecar.warnings),
    warn("levers that were not found active", of_run, identity.warnings),
    warn("a label or an architecture that is unknown", of_run, board.warnings),
    warn("measure windows that were cut short", of_run, figures.cut_short),
    warn("losses and checkpoints, by the manifest", of_run, manifest_facts.warnings),
    warn("steps in the table, steady state and stalls", of_all, figures.warnings_of_steps),
    warn("telemetry, energy and throttling", of_all, figures.warnings_of_telemetry),
    warn("errors that the driver reported while it was measured", of_run, sidecar.driver_errors),
)


# Checks of a run in which kernels were counted and nothing was timed.
COUNTED = (kernels.check_times, kernels.check_counters, identity.check_overrides, identity.check_parameters)


def judge(run: Finished) -> tuple[list[str], list[str]]:
    """Return why a completed run is not valid, and what to know about it though it may be."""
    problems: list[str] = []
    warnings: list[str] = []
    for check in CHECKS:
        for inputs in check.inputs(run):
            node = getattr(inputs[0], "node", "")
            sentences = [f"{node}: {text}" if node else text for text in check.test(*inputs)]
            (warnings if check.warns else problems).extend(sentences)
    return problems, warnings
