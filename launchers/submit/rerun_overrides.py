"""What `rerun` takes as KEY=VALUE: what a point asks for, and not what belongs to a command or to the sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from inpaint_bench.core.errors import UserError

_OF_THE_COMMAND: Mapping[str, str] = {
    "dry_run": "say --dry-run, which submits nothing",
    "wait": "say --wait",
}
_OF_THE_SWEEP: Mapping[str, str] = {
    "out": "a sweep stays in its directory; launch another one",
    "name": "a sweep stays in its directory; launch another one",
    "hydra": "Hydra's own keys stay as they were launched; launch another sweep",
    "identity": "every attempt gets its own",
    "study": "a sweep has the study that it was launched with; launch another one",
    "repeats": "say --repeats N, which sends further repetitions",
    "order_seed": "the order of a sweep is drawn when it is launched; launch another one",
}
_OF_AUTO: Mapping[str, str] = {
    "repeats_target": "only --repeats auto heeds it",
    "repeats_max": "only --repeats auto heeds it",
}
_OF_REPETITIONS: Mapping[str, str] = {"seed": "repetitions have seeds of their own"}


def check_changes(changes: Sequence[str], *, repeating: bool = False) -> None:
    """Raises UserError for a key that a rerun would not heed, or must not, and Hydra's error for what it cannot read.

    `repeating`: further repetitions are asked for.
    """
    refused = {**_OF_THE_COMMAND, **_OF_THE_SWEEP, **(_OF_REPETITIONS if repeating else _OF_AUTO)}
    for change, key in zip(changes, _keys(changes), strict=True):
        if why := refused.get(key):
            raise UserError(f"{change}: {why}")


def _keys(changes: Sequence[str]) -> Iterator[str]:
    """Each change's key at the top, however it is written."""
    for override in OverridesParser.create().parse_overrides(list(changes)):
        yield override.key_or_group.partition(".")[0].partition("/")[0]
