"""Checks whether a run can be trusted: what can be derived in two ways is compared.

Each check is a generator of sentences, and each sentence makes the run invalid, unless the check says that it warns. A
module holds the checks of one thing and lists them in CHECKS; `problems` runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import board, bounds, identity, samples, sidecar, steps, windows
from .evidence import Evidence

MODULES = (windows, steps, samples, sidecar, identity, board, bounds)


def problems(evidence: Evidence) -> Iterator[str]:
    """Yield why a completed run is not valid."""
    for module in MODULES:
        for check in module.CHECKS:
            yield from check(evidence)


def warnings(evidence: Evidence) -> Iterator[str]:
    """Yield what to know about a run that may be valid all the same."""
    for window, span in evidence.measured:
        yield from windows.check_length(window, span)
    yield from windows.check_record(evidence)
    yield from sidecar.warnings(evidence)
    yield from identity.warnings(evidence)
    yield from board.warnings(evidence)
