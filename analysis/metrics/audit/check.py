"""What a check is: its name, its inputs, and its test, which gives the sentences that it adds to the row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from analysis.metrics.facts import Facts
from analysis.metrics.rates import Rates
from analysis.metrics.telemetry import Telemetry


@dataclass(frozen=True, kw_only=True)
class Finished:
    """All that is known of a run before it is judged; `row` has its columns."""

    facts: Facts
    rates: Rates
    telemetry: Telemetry
    row: Mapping[str, Any]


Inputs = Callable[[Finished], Iterable[tuple[Any, ...]]]  # the test is called with each of them
of_run: Inputs = lambda run: [(run.facts,)]  # noqa: E731
of_all: Inputs = lambda run: [(run,)]  # noqa: E731
# Each measure window and its span, and its steps.
of_windows: Inputs = lambda run: [(run.facts, *pair) for pair in run.facts.measured]  # noqa: E731
of_steps: Inputs = lambda run: [(*given, run.facts.steps_of(given[1])) for given in of_windows(run)]  # noqa: E731
# Each node has a sidecar of its own, and perhaps its telemetry.json.
of_nodes: Inputs = lambda run: [(facts, facts.files.sidecar) for facts in run.facts.by_node()]  # noqa: E731
of_sidecars: Inputs = lambda run: [given for given in of_nodes(run) if given[1] is not None]  # noqa: E731
# The samples around the measure windows, unless telemetry=none.
of_telemetry: Inputs = lambda run: [(run.facts, run.telemetry)] if run.telemetry.requested else []  # noqa: E731


class Check(NamedTuple):
    """An entry of the table."""

    name: str
    inputs: Inputs
    test: Callable[..., Iterable[str]]  # gives a sentence for each contradiction
    warns: bool = False  # the run may be valid all the same


warn = partial(Check, warns=True)
