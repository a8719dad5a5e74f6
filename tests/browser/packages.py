"""Find the browser, or install its Debian package."""

from __future__ import annotations

import os
import shutil

from tests.testbed.errors import PackagesError
from tests.testbed.packages import apt_get

# The headless shell is smaller (no GTK) and sufficient. The fonts have the metrics of those that the page names.
PACKAGES = ("chromium-headless-shell", "fonts-liberation")
_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
ENV = "INPAINT_BENCH_CHROMIUM"  # the path of another browser
_MISSING = f"NO BROWSER: {', '.join(_PROGRAMS[:3])} not found on the PATH, nor the program in {ENV}"


def find() -> str | None:
    """Return the path of the browser, or None."""
    override = os.environ.get(ENV)
    paths = (shutil.which(program) for program in ([override] if override else _PROGRAMS))
    return next((path for path in paths if path), None)


def require() -> str:
    """Return the path of the browser. Raises PackagesError if there is none."""
    path = find()
    if path is None:
        raise PackagesError(f"{_MISSING}; run `python -m tests.browser install` as root")
    return path


def install() -> str:
    """Install the browser if it is missing; return a message. Raises PackagesError if that is impossible."""
    if path := find():
        return f"A browser is installed: {path}."
    apt_get(PACKAGES, _MISSING)
    return f"Installed {' '.join(PACKAGES)}: {require()}."
