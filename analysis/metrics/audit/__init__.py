"""The table of checks whether a run can be trusted: what can be derived in two ways is compared.

A test gives a sentence for each contradiction. Those of CHECKS make the run invalid, those of WARNINGS do not. What
follows from what a writer declares beside its numbers, i.e. bounds and relations, is checked by `results`.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from analysis.metrics import manifest_facts

from . import board, bounds, identity, kernels, ranks, results, samples, sidecar, windows
from .inputs import Finished, arguments

Test = Callable[..., Iterable[str]]
Table = tuple[tuple[str, tuple[Test, ...]], ...]  # what is judged, as `arguments` calls it, and how

CHECKS: Table = (
    ("windows", (windows.check_clocks, windows.check_overlaps, samples.check_clock_offsets)),
    ("run", (windows.check_names, windows.check_counts, windows.check_run_times, windows.check_progress)),
    ("steps", (windows.check_places, windows.check_rows, windows.check_device_time, windows.check_losses)),
    ("run", (samples.check_ticks, samples.check_throttle_counters, samples.check_sources, samples.check_kinds)),
    ("sidecars", (sidecar.check_identity, sidecar.check_times, sidecar.check_rows, sidecar.check_ticks)),
    ("nodes", (sidecar.check_incidents, ranks.check_cards)),
    ("run", (identity.check_footers, identity.check_place, identity.check_required, identity.check_overrides)),
    ("run", (ranks.check_ranks, identity.check_levers, identity.check_read_back)),
    ("run", (identity.check_parameters, identity.check_flop, identity.check_data)),
    ("results", (results.check_rows, results.check_values)),
    ("run", (results.check_facts, results.check_quality, manifest_facts.check_parity)),
    ("run", (kernels.check_times, kernels.check_timeline, kernels.check_levers)),
    ("run", (board.check_label, board.check_samples)),
    ("run", (bounds.check_samples, bounds.check_memory, bounds.check_manifest)),
    ("steps", (bounds.check_steps,)),
    ("telemetry", (samples.check_devices, samples.check_samples, sidecar.check_events, samples.check_energy)),
    ("all", (samples.check_power, bounds.check_row, bounds.check_use)),
)
WARNINGS: Table = (
    ("run", (attrgetter("strays"), windows.check_record)),
    ("windows", (windows.check_length,)),
    ("nodes", (sidecar.warnings,)),
    ("run", (identity.warnings, board.warnings, windows.cut_short, manifest_facts.warnings)),
    ("all", (windows.warnings, samples.warnings)),
    ("run", (sidecar.driver_errors,)),
)
# Checks of a run in which kernels were counted and nothing was timed.
COUNTED = (kernels.check_times, kernels.check_counters, identity.check_overrides, identity.check_parameters)


def judge(run: Finished) -> tuple[list[str], list[str]]:
    """Return why a completed run is not valid, and what to know about it though it may be."""
    given = arguments(run)
    return _sentences(given, CHECKS), _sentences(given, WARNINGS)


def _sentences(arguments: Mapping[str, list[tuple[Any, ...]]], table: Table) -> list[str]:
    sentences = []
    for kind, tests in table:
        for given in arguments[kind]:
            node = getattr(given[0], "node", "")
            sentences += [f"{node}: {text}" if node else text for test in tests for text in test(*given)]
    return sentences
