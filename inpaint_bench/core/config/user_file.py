"""The user's own file, outside git: accounts, mail, container, tracker and price, as overrides of every launch."""

import json
import os
import re
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inpaint_bench.core.console import echo, output

from .validation import did_you_mean, override_key
from .yaml_file import ConfigFileError, read_config_file

VARIABLE = "INPAINT_BENCH_CONFIG"  # another path; empty: no file is read
# Nothing that changes what is measured. config_hash covers none of these keys.
ALLOWED = re.compile(
    r"notify\.mail|track(\.(project|uri|online|every_s))?|budget|datasets"
    r"|sites\.[\w-]+\.(account\.value|qos|reservation|grid_gco2_per_kwh|connect\.(host|folder|ssh_config)"
    r"|environment\.container\.(image|command|python|binds|nv)|charging\.(price_per_unit|currency))"
)
DEMO = "profile=demo"  # runs on this machine, whatever the file says of sites, trackers and budgets
_IN_SWEEPS = ("notify.", "budget", "datasets", "sites.")  # a run without -m reads none of them


def user_file() -> Path | None:
    """Return the path of the file; None if there is none."""
    if (named := os.environ.get(VARIABLE)) is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111 - home may be unknown
    path = Path(base, "inpaint_bench", "config.yaml")
    return path if os.path.lexists(path) else None


def read_user_file(path: Path) -> dict[str, Any]:
    """Return the values by their full keys, written with dots or as blocks. Raises ConfigFileError."""
    _check_permissions(path)
    values: dict[str, Any] = {}

    def add(block: dict[Any, Any], prefix: str) -> None:
        for name, value in block.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict):
                add(value, f"{key}.")
            elif not ALLOWED.fullmatch(key):
                leaves = re.findall("[a-z_]+", ALLOWED.pattern)
                names = [f"{start}{leaf}" for start in (f"{key}.", prefix) for leaf in leaves]
                more = f"docs/sites.md lists the keys that can.{did_you_mean(key, filter(ALLOWED.fullmatch, names))}"
                raise ConfigFileError(f"{path}: {key}: cannot stand here; {more}".removesuffix("."))
            elif key in values:
                raise ConfigFileError(f"{path}: {key}: is given twice; keep one of them")
            else:
                values[key] = value

    add(read_config_file(path, package="user"), "")  # untyped: Hydra checks the values as those of the command line
    return values


def _check_permissions(path: Path) -> None:
    """Raise ConfigFileError if others can write the file, as ssh does: it names programs that run as the user."""
    if not os.path.isfile(path):  # noqa: PTH113 - is_file raises if a folder is closed
        return  # reading it says why
    # A link counts as its target, and whoever can write into the folder of either puts another file there.
    places = {str(place): place.stat() for place in (path.resolve(), path.resolve().parent, path.absolute().parent)}
    for place, status in places.items():
        if status.st_uid not in (0, os.geteuid()):
            advice = "copy what you trust of it into a file of your own"
            raise ConfigFileError(f"{path}: {place} belongs to user {status.st_uid} and not to you; {advice}")
    modes = {place: status.st_mode for place, status in places.items() if status.st_mode & 0o022}
    # In a folder with the sticky bit, such as /tmp, others cannot replace a file.
    safe = {place for place, mode in modes.items() if stat.S_ISDIR(mode) and mode & stat.S_ISVTX}
    if writable := {place: stat.S_IMODE(mode) for place, mode in modes.items() if place not in safe}:
        shown = " and ".join(f"{place} (mode {mode:04o})" for place, mode in writable.items())
        advice = f"look through it, then `{shlex.join(['chmod', 'go-w', *writable])}`"
        raise ConfigFileError(f"{path}: others can write {shown}, and it names programs that run as you; {advice}")


def user_overrides(overrides: Sequence[str], *, multirun: bool = True) -> list[str]:
    """Return the overrides of the user's file for keys that neither `overrides` nor a block in them sets.

    They are composed before `overrides`, and recorded with them: a job or a rerun elsewhere reads no such file.
    Raises ConfigFileError.
    """
    if DEMO in overrides or (path := user_file()) is None:
        return []
    given = set(map(override_key, overrides))
    lines = [
        f"{key}={_as_override(key, value)}"
        for key, value in read_user_file(path).items()
        if not any(key == name or key.startswith(f"{name}.") for name in given)
        and (multirun or not key.startswith(_IN_SWEEPS))
    ]
    if lines and not output.quiet:
        echo(f"{path} sets {' '.join(lines)}", error=True)
    return lines


def _as_override(key: str, value: Any) -> str:
    """Return a value as Hydra's grammar has it; texts in quotes, so that none is taken for a number."""
    if isinstance(value, list):
        return f"[{','.join(_as_override(key, item) for item in value)}]"
    if key == "track":  # the choice of a group is a bare name
        return str(value)
    return "'" + value.replace("'", "\\'") + "'" if isinstance(value, str) else json.dumps(value)
