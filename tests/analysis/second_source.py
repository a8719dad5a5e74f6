"""The numbers of a run directory that nothing else confirms, as docs/dataset.md lists them."""

from __future__ import annotations

import re
from functools import cache

from inpaint_bench.core.paths import ROOT

HEADING = "## Numbers that nothing confirms"


@cache
def documented() -> frozenset[tuple[str, str]]:
    """Return file, or table, and field of each number."""
    section = (ROOT / "docs" / "dataset.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \| (.+) \|", section, re.MULTILINE)
    pairs = ((re.findall("`([^`]+)`", files), re.findall("`([^`]+)`", fields)) for files, fields in rows)
    return frozenset((file, field) for files, fields in pairs for file in files for field in fields)
