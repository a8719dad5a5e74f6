"""A headless Chromium driven over the DevTools protocol, with nothing but the standard library.

For pages on this machine: what it draws, what it would load, what it complains about.
"""

from .chromium import Browser, BrowserError, Page
from .packages import find, install

__all__ = ["Browser", "BrowserError", "Page", "find", "install"]
