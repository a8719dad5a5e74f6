"""Where the configuration and the templates lie: in a checkout, in a wheel, or in a sweep's code snapshot."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent  # holds the packages; in a checkout also conf/ and slurm_templates/


def conf_dir() -> Path:
    return _beside_or_inside("conf")


def templates_dir() -> Path:
    return _beside_or_inside("slurm_templates")


def testbed_dir() -> Path:
    """State of the two-site test bed; `INPAINT_BENCH_TESTBED` moves it."""
    return Path(os.environ.get("INPAINT_BENCH_TESTBED") or ROOT / ".testbed")


def _beside_or_inside(name: str) -> Path:
    for candidate in (ROOT / name, PACKAGE / "_data" / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"{name}/ is missing beside {PACKAGE} and inside it: the installation is incomplete")
