"""Limits on configuration values beyond their type, declared with the field, and the check of a whole tree of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from inpaint_bench.core.errors import UserError

if TYPE_CHECKING:
    Minutes = int
else:
    Minutes = Any  # `check` makes minutes of Slurm's formats; OmegaConf 2.3 cannot merge `int | str` in a nested block

REGULAR_EXPRESSIONS: Final = {"regular_expressions": True}
UNLIMITED: Final = frozenset({"unlimited", "infinite"})
FORMATS: Final = "MIN, MIN:SEC, HOUR:MIN:SEC, DAY-HOUR, DAY-HOUR:MIN or DAY-HOUR:MIN:SEC"  # forms of sbatch --time
MOST_LISTED: Final = 12  # names of a long list are left to the help if there is a close one
# The name of a site or GPU that `new` adds. Other words are no text for Hydra, or mean no single site.
NEW_NAME: Final = re.compile(r"(?!(?i:null|true|false|nan|inf|auto|soonest|all)$)[A-Za-z][\w-]*", re.ASCII)
REMOVED: Final = {  # keys of earlier versions, and what does their job now
    "webhook_file": "notify.mail has Slurm write at the end",
    "decode": "Pillow decodes all images: docs/levers.md",
    "cpu_jobs": "nothing needs jobs without a GPU any more, since no webhook is sent; leave it out",
    **dict.fromkeys(("dcgm_url", "dcgm_every_s"), "profile=ncu counts the kernels of GPUs without GPM (A40, A100)"),
}


def within(low: float, high: float, default: Any = MISSING) -> Any:
    """Declare a number in the closed range [low, high]; a field of type `int | str` also takes `auto`."""
    return field(default=default, metadata=bounds(low, high))


def bounds(low: float, high: float) -> dict[str, Any]:
    """Return the metadata of a field with a range; of a dict field, every value must lie in it."""
    return {"range": (low, high)}


def time_limit(low: int, high: int, default: Any, *, unlimited: bool = False) -> Any:
    """Declare minutes, which may be given in any of Slurm's formats; `unlimited`: its UNLIMITED is the highest."""
    return field(default=default, metadata={**bounds(low, high), "time_limit": True, "unlimited": unlimited})


def matching(pattern: str, description: str) -> dict[str, Any]:
    """Return the metadata of texts, or a list or the keys of a dict of them, that must match a pattern as a whole."""
    return {"pattern": (re.compile(pattern, re.ASCII), description)}


def one_of(*allowed: str, default: Any = MISSING) -> Any:
    """Declare a string out of a fixed list."""
    return field(default=default, metadata={"choices": allowed})


def regular_expression() -> Any:
    """Declare a regular expression, or null."""
    return field(default=None, metadata=REGULAR_EXPRESSIONS)


_PATH = matching(r"[\s\S]+", "a path, or null")


def file_path() -> Any:
    """Declare a path, or null; an empty one, as of `key=$UNSET` in a shell, would pass for null."""
    return field(default=None, metadata=_PATH)


def file_paths(group: str, config: Any) -> dict[str, str]:
    """Return the paths that are set among the keys of a group, which is a dataclass, by key."""
    names = [field.name for field in fields(config) if field.metadata == _PATH]
    return {f"{group}.{name}": path for name in names if (path := getattr(config, name))}


def no_such_key(key: str, valid: Iterable[str], *, elsewhere: str | None = None, group: str = "") -> str:
    """Return the sentence about a key that nothing reads, with the closest one that something does.

    `elsewhere` is a key of that name in another block, `group` that of the file whose key it is.
    """
    if removed := REMOVED.keys() & key.split("."):
        return f"{key}: was removed; {REMOVED[removed.pop()]}"
    where, names = key.rpartition(".")[0], list(valid)
    guess = f" Did you mean {elsewhere}?" if elsewhere else did_you_mean(key.rpartition(".")[2], names)
    listing = "" if guess and len(names) > MOST_LISTED else f" Valid: {', '.join(sorted(names))}"
    listing = listing or _how_to_list(group or where)
    return f"{key}: no such key {f'in {where}' if where else 'at the top'}.{guess}{listing}"


def no_such_choice(choice: str, valid: Iterable[str]) -> str:
    """Return the sentence about a `key=name` that cannot be chosen, with the closest name that can."""
    key, _, word = choice.rpartition("=")
    names = sorted(valid)
    guess = did_you_mean(word, names)
    listing = "" if guess and len(names) > MOST_LISTED else f"; have: {', '.join(names)}"
    can_be_added = key in ("gpu", "site") and NEW_NAME.fullmatch(word)
    add = f" `inpaint-bench new {key} {word}` adds one." if can_be_added else ""
    return f"{choice}: no such choice{listing}.{guess}{'' if listing else _how_to_list(key)}{add}".removesuffix(".")


def without_removed(content: dict[str, Any]) -> dict[str, Any]:
    """Return recorded configuration without the keys that were removed since."""
    return {
        key: without_removed(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if key not in REMOVED
    }


def _how_to_list(key: str) -> str:
    group = key.partition(".")[0]
    return f" `inpaint-bench launch --help {'site' if group == 'sites' else group}".rstrip() + "` lists all."


def override_key(override: str) -> str:
    """Return the key that an override sets, adds or removes."""
    return override.lstrip("+~").partition("=")[0]


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return a question with the closest name, upper case or lower, which may also be a part of it; or nothing."""
    names = {name.lower(): name for name in sorted(valid, reverse=True)}
    close = get_close_matches(word.lower(), names, n=1) or [
        name for name in sorted(names) if len(word) > 3 and word.lower() in name.replace("_", "")
    ]
    return f" Did you mean {names[close[0]]}?" if close else ""


def check(value: Any, path: str = "") -> None:
    """Raise UserError for the first value out of its limits. Time limits become minutes."""
    prefix = f"{path}." if path else ""
    if isinstance(value, dict):
        for key, item in value.items():
            check(item, f"{prefix}{key}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            check(item, f"{path}[{index}]")
    # YAML has .nan and .inf, and floats of the free-form groups (model.unet, ...) have no range to refuse them.
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path}={value}: must be a finite number")
    if not is_dataclass(value):
        return
    names = [spec.name for spec in fields(value)]
    # OmegaConf adds the key of `+key=value` to any object, where nothing reads it.
    for name in vars(value).keys() - set(names):
        raise UserError(no_such_key(f"{prefix}{name}", names))
    for spec in fields(value):
        item = getattr(value, spec.name)
        # OmegaConf lets an interpolation give it anything. The type is a text if its module postpones annotations.
        if str(spec.type) == "int | str" and (isinstance(item, bool) or not isinstance(item, int | str)):
            raise UserError(f"{prefix}{spec.name}={item}: must be an integer, or auto")
        if item is not None or "time_limit" in spec.metadata:
            setattr(value, spec.name, check_field(f"{prefix}{spec.name}", item, spec.metadata))
            check(item, f"{prefix}{spec.name}")


def check_field(key: str, item: Any, limits: Mapping[str, Any]) -> Any:
    """Return a field's value, minutes for a time limit. Raises UserError if it is outside the declared limits."""
    if "time_limit" in limits and (not isinstance(item, int) or isinstance(item, bool)):
        item = _minutes(key, "null" if item is None else str(item), limits)
    if "choices" in limits and item not in limits["choices"]:
        guess = did_you_mean(str(item), limits["choices"])
        raise UserError(f"{key}={item}: not one of {', '.join(limits['choices'])}.{guess}".removesuffix("."))
    if "pattern" in limits:
        pattern, description = limits["pattern"]
        for text in item if isinstance(item, list | dict) else [item]:
            if not pattern.fullmatch(str(text)):
                raise UserError(f"{key}={text!r}: must be {description}")
    if "range" in limits:
        low, high = limits["range"]
        for name, value in item.items() if isinstance(item, dict) else [(None, item)]:
            shown = f"{key}.{name}={value}" if name else f"{key}={value}"
            # OmegaConf accepts any text for a field of type `int | str`.
            if isinstance(value, str) and value != "auto":
                raise UserError(f"{shown}: must be an integer between {low:,} and {high:,}, or auto")
            if not isinstance(value, str) and not low <= value <= high:
                raise UserError(f"{shown}: must lie between {low:,} and {high:,}")
    if "regular_expressions" in limits:
        for pattern in item if isinstance(item, list) else [item]:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"{key}={pattern}: not a regular expression ({error})") from None
    return item


def _minutes(key: str, text: str, limits: Mapping[str, Any]) -> int | str:
    if limits["unlimited"] and text.lower() in UNLIMITED:
        return int(limits["range"][1])
    if text == "auto" and not limits["unlimited"]:
        return text
    if (minutes := limit_min(text)) is None:
        other = "UNLIMITED" if limits["unlimited"] else "auto"
        raise UserError(f"{key}={text}: must be a time limit in minutes or as {FORMATS}, or {other}")
    return minutes


# --- durations as Slurm writes and reads them -----------------------------------------------------


def duration_s(text: str) -> float | None:
    """Parse [days-]hours:minutes:seconds, days-hours, minutes:seconds or minutes; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        return None
    first, second, third = (int(group or 0) for group in match.groups()[1:])
    if match[1] is None and match[4] is None:  # it starts with minutes, else with hours
        return 60.0 * first + second
    return 86400.0 * int(match[1] or 0) + 3600.0 * first + 60.0 * second + third


def limit_min(text: str) -> int | None:
    """Parse a time limit into minutes, rounded up as Slurm does; None for any other text, UNLIMITED included.

    Nor are 1:90:00 and 1-30 accepted, which Slurm takes: a part that exceeds its unit is a slip of the pen.
    """
    seconds = duration_s(text)
    parts = [int(part) for part in re.split("[-:]", text)[1:]] if seconds is not None else []
    largest = [23, 59, 59] if "-" in text else [59, 59]
    if seconds is None or any(part > limit for part, limit in zip(parts, largest, strict=False)):
        return None
    return math.ceil(seconds / 60)
