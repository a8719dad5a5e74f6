"""A section of the report: text, tables and figures on one subject."""

from __future__ import annotations

from dataclasses import dataclass, field

from .figures.base import Figure
from .tables import Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the report shows of one workload or subject.

    With an answer it is no fold: the answer, the first rows of its first table and its first figure are shown.
    """

    title: str
    workload: str = ""  # filled in by `sections`
    kind: str = ""  # kind of the study, for the report's title: `ladder of levers`
    answer: str = ""
    best: str = ""  # the figure of the answer, for an index: `173 images/s`
    facts: dict[str, str] = field(default_factory=dict)
    paragraphs: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
