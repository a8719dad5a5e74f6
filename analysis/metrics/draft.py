"""A row of runs.parquet while it is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from analysis.columns import SCHEMA


@dataclass(kw_only=True)
class RowDraft:
    """The columns known so far, why others are null, and what the audit found."""

    row: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(SCHEMA))
    null_reasons: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # any of them makes the run invalid

    def set_reason(self, columns: Iterable[str], reason: str) -> None:
        """Give the reason for those columns that are null and have none yet."""
        for name in columns:
            if self.row[name] is None:
                self.null_reasons.setdefault(name, reason)
