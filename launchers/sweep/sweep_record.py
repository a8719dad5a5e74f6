"""The shape of `sweep.json`: checked once, where it is read, so that whoever uses it may rely on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .launch_context import Surroundings

Check = Callable[[Any], bool]


def wrong(value: Any) -> str | None:
    """What is wrong with the content of a sweep's record, in words; None where nothing is."""
    if not isinstance(value, dict):
        return "it holds no keys"
    for key, (fits, words, needed) in _SWEEP.items():
        if key not in value and needed:
            return f"{key} is missing"
        if key in value and not fits(value[key]):
            return f"{key} is not {words}"
    for place, point in enumerate(value["points"]):
        for key, (fits, words, _) in _POINT.items():
            if key not in point or not fits(point[key]):
                return f"entry {place} of points has no {key} that is {words}"
        if point["site"] not in value["sites"]:
            return f"entry {place} of points is for {point['site']}, which is not in sites"
    return None


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _sites(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, dict) for one in value.values())


def _order(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or value.keys() != {"cells", "repeats", "seed", "order_seed"}:
        return False
    drawn = value["order_seed"] is None or _number(value["order_seed"])
    return drawn and all(_number(value[key]) for key in ("cells", "repeats", "seed")) and value["cells"] > 0


def _surroundings(value: Any) -> bool:
    try:
        Surroundings.recorded(value)
    except (TypeError, ValueError):
        return False
    return True


# key: whether a value fits, what does in words, whether it must be there
_SWEEP: Mapping[str, tuple[Check, str, bool]] = {
    "sweep_id": (lambda value: isinstance(value, str), "a word", True),
    "sites": (_sites, "the content of a site file by name", True),
    "points": (_objects, "a list of points", True),
    "overrides": (_texts, "a list of overrides", True),
    "params": (_texts, "a list of overrides", False),
    "order": (_order, "an order of repetitions", False),
    "surroundings": (_surroundings, "what a launch leaves", False),
}
_POINT: Mapping[str, tuple[Check, str, bool]] = {
    "point": (_number, "a number", True),
    "overrides": (_texts, "a list of overrides", True),
    "gpu": (lambda value: isinstance(value, str | None), "a word", True),
    "batch": (lambda value: value is None or value == "auto" or _number(value), "a number", True),
    "site": (lambda value: isinstance(value, str), "a word", True),
}
