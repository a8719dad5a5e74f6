"""Checks whether a run can be trusted: what can be derived in two ways is compared.

Each check is a generator of sentences, and each sentence makes the run invalid, unless the check says that it warns. A
module holds the checks of one thing and lists them in CHECKS; `problems` runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from . import board, bounds, identity, samples, sidecar, steps, windows
from .evidence import Evidence

MODULES = (windows, steps, samples, sidecar, identity, board, bounds)


def problems(evidence: Evidence) -> Iterator[str]:
    """Yield why a completed run is not valid."""
    for module in MODULES:
        # A node has a sidecar of its own, which knows nothing of the others.
        nodes = evidence.by_node() if module is sidecar else [("", evidence)]
        for (name, part), check in product(nodes, module.CHECKS):
            yield from _of_node(name, check(part))


def warnings(evidence: Evidence) -> Iterator[str]:
    """Yield what to know about a run that may be valid all the same."""
    for window, span in evidence.measured:
        yield from windows.check_length(window, span)
    yield from windows.check_record(evidence)
    for name, part in evidence.by_node():
        yield from _of_node(name, sidecar.warnings(part))
    yield from identity.warnings(evidence)
    yield from board.warnings(evidence)


def _of_node(name: str, sentences: Iterator[str]) -> Iterator[str]:
    return (f"{name}: {sentence}" if name else sentence for sentence in sentences)
