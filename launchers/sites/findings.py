"""The result of comparing one key of a site file with what Slurm reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from .slurm_facts import NotReportedError


class Agreement(StrEnum):
    """How a key compares."""

    SAME = "same"
    DIFFERS = "differs"
    NOT_APPLICABLE = "not applicable"  # this Slurm has nothing that the key could contradict
    UNKNOWN = "unknown"  # Slurm did not report it


@dataclass(frozen=True)
class Finding:
    """One key; `compare` and the methods that it may call return the finding with its result."""

    key: str  # dotted key of the site file, such as gpus.a40.max_minutes
    configured: Any  # the value in force: the file's own, or what overrides it
    agreement: Agreement = Agreement.UNKNOWN
    reported: str = ""  # what Slurm reports, as text
    note: str = ""  # what it means, or why it is unknown
    corrections: Mapping[str, Any] = field(default_factory=dict)  # by key; empty if the right value is not known

    def compare(self, comparison: Callable[[Finding], Finding]) -> Finding:
        """Return what `comparison` finds, or unknown if Slurm did not report what it needs."""
        try:
            return comparison(self)
        except NotReportedError as error:
            return self.unknown(str(error))

    def same(self, reported: object, note: str = "") -> Finding:
        return replace(self, agreement=Agreement.SAME, reported=str(reported), note=note)

    def differs(self, reported: object, note: str = "", corrections: Mapping[str, Any] | None = None) -> Finding:
        result = replace(self, agreement=Agreement.DIFFERS, reported=str(reported), note=note)
        return replace(result, corrections=corrections or {})

    def not_applicable(self, reason: str) -> Finding:
        """Return that this Slurm has nothing to compare the key with."""
        return replace(self, agreement=Agreement.NOT_APPLICABLE, note=reason)

    def unknown(self, reason: str, reported: str = "") -> Finding:
        """Return that Slurm did not report what decides."""
        return replace(self, agreement=Agreement.UNKNOWN, reported=reported, note=reason)

    def exactly(self, reported: Any, note: str = "") -> Finding:
        """Compare a fact, which must match exactly: what Slurm reports is the correction."""
        if self.configured == reported:
            return self.same(reported)
        return self.differs(reported, note, {self.key: reported})

    @property
    def block(self) -> str:
        """Return the block of the file that has a `checked_on` of its own: limits, gpus.a40; "" for top-level keys."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]
