"""The table of checks whether a run can be trusted: what can be derived in two ways is compared.

A test gives a sentence for each contradiction. Those of CHECKS make the run invalid, those of WARNINGS do not. What
follows from what a writer declares beside its numbers, i.e. bounds and relations, is checked by `results`.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from analysis.metrics import manifest_facts

from . import board, bounds, identity, kernels, ranks, results, samples, sidecar, windows
from .inputs import Finished, of_all, of_nodes, of_results, of_run, of_sidecars, of_steps, of_telemetry, of_windows

Test = Callable[..., Iterable[str]]
Table = tuple[tuple[Callable[[Finished], Iterable[tuple[Any, ...]]], tuple[Test, ...]], ...]

CHECKS: Table = (
    (of_windows, (windows.check_clocks, windows.check_overlaps, samples.check_clock_offsets)),
    (of_run, (windows.check_names, windows.check_counts, windows.check_run_times, windows.check_progress)),
    (of_steps, (windows.check_places, windows.check_rows, windows.check_device_time, windows.check_losses)),
    (of_run, (samples.check_ticks, samples.check_throttle_counters, samples.check_sources, samples.check_kinds)),
    (of_sidecars, (sidecar.check_identity, sidecar.check_times, sidecar.check_rows, sidecar.check_ticks)),
    (of_nodes, (sidecar.check_incidents, ranks.check_cards)),
    (of_run, (identity.check_footers, identity.check_place, identity.check_required, identity.check_overrides)),
    (of_run, (ranks.check_ranks, identity.check_levers, identity.check_read_back)),
    (of_run, (identity.check_parameters, identity.check_flop, identity.check_data)),
    (of_results, (results.check_rows, results.check_values)),
    (of_run, (results.check_facts, results.check_quality, manifest_facts.check_parity)),
    (of_run, (kernels.check_times, kernels.check_timeline, kernels.check_levers)),
    (of_run, (board.check_label, board.check_samples)),
    (of_run, (bounds.check_samples, bounds.check_memory, bounds.check_manifest)),
    (of_steps, (bounds.check_steps,)),
    (of_telemetry, (samples.check_devices, samples.check_samples, sidecar.check_events, samples.check_energy)),
    (of_all, (samples.check_power, bounds.check_row, bounds.check_use)),
)
WARNINGS: Table = (
    (of_run, (attrgetter("strays"), windows.check_record)),
    (of_windows, (windows.check_length,)),
    (of_nodes, (sidecar.warnings,)),
    (of_run, (identity.warnings, board.warnings, windows.cut_short, manifest_facts.warnings)),
    (of_all, (windows.warnings, samples.warnings)),
    (of_run, (sidecar.driver_errors,)),
)
# Checks of a run in which kernels were counted and nothing was timed.
COUNTED = (kernels.check_times, kernels.check_counters, identity.check_overrides, identity.check_parameters)


def judge(run: Finished) -> tuple[list[str], list[str]]:
    """Return why a completed run is not valid, and what to know about it though it may be."""
    return _sentences(run, CHECKS), _sentences(run, WARNINGS)


def _sentences(run: Finished, table: Table) -> list[str]:
    sentences = []
    for inputs, tests in table:
        for given in inputs(run):
            node = getattr(given[0], "node", "")
            sentences += [f"{node}: {text}" if node else text for test in tests for text in test(*given)]
    return sentences
