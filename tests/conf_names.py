"""The choices that messages list, as the files of conf/ give them."""

from __future__ import annotations

from inpaint_bench.core.paths import conf_dir


def names(group: str, *left_out: str) -> str:
    """Return the names of a group's files, separated by commas."""
    found = {path.stem for path in (conf_dir() / group).glob("*.yaml")}
    return ", ".join(sorted(found - {*left_out}))
