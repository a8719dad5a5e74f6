"""Folders of the configuration and the templates: in a checkout, in a wheel, or in a sweep's code snapshot."""

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent  # folder of the packages; in a checkout also of conf/ and slurm_templates/


def conf_dir() -> Path:
    return _find("conf")


def templates_dir() -> Path:
    return _find("slurm_templates")


def testbed_dir() -> Path:
    """Return the folder of the two-site test bed's state; `INPAINT_BENCH_TESTBED` moves it."""
    return Path(os.environ.get("INPAINT_BENCH_TESTBED") or ROOT / ".testbed")


def _find(name: str) -> Path:
    # Beside the packages in a checkout and in a snapshot, inside the package in a wheel.
    for candidate in (ROOT / name, PACKAGE / "_data" / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"{name}/ is missing beside {PACKAGE} and inside it: the installation is incomplete")


def import_path() -> str:
    """Return the folder that this package was imported from, then the rest of the caller's path, all absolute."""
    # First in the path: a job that runs a sweep's code snapshot must get the sidecar of that snapshot.
    paths = [str(ROOT), *(os.path.abspath(entry) for entry in sys.path)]  # noqa: PTH100 - "" is the working directory
    return os.pathsep.join(dict.fromkeys(paths))
