"""The Debian package with the browser, and how to get it."""

from __future__ import annotations

import os
import shutil

from tests.testbed.errors import PackagesError
from tests.testbed.packages import apt_get

# The shell is the smaller one (no GTK), and as good for this. Fonts: those that the page asks for, by their metrics.
PACKAGES = ("chromium-headless-shell", "fonts-liberation")
_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
ENV = "INPAINT_BENCH_CHROMIUM"  # a program to take instead
_LACKING = f"NO BROWSER: neither {' nor '.join(_PROGRAMS[:3])} is on the PATH, or what {ENV} names"


def find() -> str | None:
    """The browser's path, None where there is none."""
    asked = os.environ.get(ENV)
    found = (shutil.which(program) for program in ([asked] if asked else _PROGRAMS))
    return next((program for program in found if program), None)


def require() -> str:
    """The browser's path; PackagesError where there is none."""
    found = find()
    if found is None:
        raise PackagesError(f"{_LACKING}; run `python -m tests.browser install` as root")
    return found


def install() -> str:
    """Make the browser present; returns a sentence. PackagesError where that cannot be."""
    if found := find():
        return f"A browser is present: {found}."
    apt_get(PACKAGES, _LACKING)
    return f"Installed {' '.join(PACKAGES)}: {require()}."
