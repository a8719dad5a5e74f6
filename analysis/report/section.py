"""A section of the report: text, tables and figures on one subject."""

from __future__ import annotations

from dataclasses import dataclass, field

from .figures.base import Figure
from .tables import Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the report shows of one workload or subject."""

    title: str
    workload: str = ""  # filled in by `sections`
    paragraphs: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
