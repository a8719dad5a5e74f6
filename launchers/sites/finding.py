"""One fact of a site file beside what its cluster says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .slurm_facts import NotKnownError


class Agreement(StrEnum):
    SAME = "same"
    DIFFERS = "differs"
    ONLY_HERE = "only here"  # the cluster has nothing that it could be held against
    NOT_KNOWN = "not known"  # the cluster did not say, and why


@dataclass(frozen=True, kw_only=True)
class Finding:
    place: str  # key of the site file, such as gpus.a40.max_minutes
    here: Any  # its value as it is in force: the file's own, or what overrides it
    there: str  # what the cluster says, in words
    agreement: Agreement
    note: str = ""  # what it means, or why it is not known
    fix: Mapping[str, Any] = field(default_factory=dict)  # right values by place; empty where none can be told

    @property
    def block(self) -> str:
        """The part of the file that has a `checked_on` of its own: limits, gpus.a40; "" for keys at the top."""
        return self.place.rpartition(".")[0]

    @property
    def key(self) -> str:
        """The fact's name within its block."""
        return self.place.rpartition(".")[2]


def same(place: str, here: Any, there: object, note: str = "") -> Finding:
    return Finding(place=place, here=here, there=str(there), agreement=Agreement.SAME, note=note)


def differs(place: str, here: Any, there: object, note: str = "", fix: Mapping[str, Any] | None = None) -> Finding:
    found = Agreement.DIFFERS
    return Finding(place=place, here=here, there=str(there), agreement=found, note=note, fix=fix or {})


def only_here(place: str, here: Any, note: str) -> Finding:
    return Finding(place=place, here=here, there="", agreement=Agreement.ONLY_HERE, note=note)


def not_known(place: str, here: Any, why: str, there: object = "") -> Finding:
    return Finding(place=place, here=here, there=str(there), agreement=Agreement.NOT_KNOWN, note=why)


def equal(place: str, here: Any, there: Any, note: str = "") -> Finding:
    """For a key that states a fact: what the cluster says is right."""
    return same(place, here, there) if here == there else differs(place, here, there, note, {place: there})


def judged(place: str, here: Any, judge: Callable[[], Finding]) -> Finding:
    """What `judge` finds; not known where the cluster did not say what it needs."""
    try:
        return judge()
    except NotKnownError as error:
        return not_known(place, here, str(error))
