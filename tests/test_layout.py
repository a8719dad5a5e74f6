"""The layout of the source: folders stay small enough to be read at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("inpaint_bench", "launchers", "analysis")
MAX_MODULES = 20  # `__init__` is not counted


def test_no_folder_has_more_modules_than_allowed() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in modules)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}
