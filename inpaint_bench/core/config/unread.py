"""Keys that a configuration does not read. A profile may set them for all; an override that names one is a mistake."""

from collections.abc import Callable, Iterable
from typing import Final

from inpaint_bench.core.errors import UserError

from .bench import BenchConfig
from .validation import override_key

# What keys begin with; whether a configuration reads them; and what does.
_READ_BY: Final[dict[str, tuple[Callable[[BenchConfig], bool], str]]] = {
    **dict.fromkeys(("repeats_target", "repeats_max"), (lambda bench: bench.repeats == "auto", "repeats=auto")),
    "profiler_launches": (lambda bench: bench.profiler == "ncu", "profile=ncu"),
    "profiler_limit_s": (lambda bench: bench.profiler in ("ncu", "nsys"), "profile=ncu or nsys"),
    "telemetry.": (lambda bench: bench.telemetry.source != "none", "telemetry=nvml or replay"),
    "track.": (lambda bench: bool(bench.track.module), "a tracker, such as track=tensorboard"),
}


def refuse_unread(bench: BenchConfig, overrides: Iterable[str]) -> None:
    """Raise UserError for an override of a key that this configuration does not read."""
    for line in overrides:
        key = override_key(line)
        for start, (reads, reader) in _READ_BY.items():
            if key.startswith(start) and not reads(bench):
                raise UserError(f"{line}: only {reader} reads it; leave it out")
        if key.startswith(bench.workload.unread):
            raise UserError(f"{line}: workload={bench.workload.name} does not read it; leave it out")
