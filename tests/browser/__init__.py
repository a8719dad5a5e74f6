"""A headless Chromium driven over the DevTools protocol, with nothing but the standard library.

For pages on this machine: what it draws, what it would load, what it complains about.
"""

from tests.browser.chromium import Browser, BrowserError, Page
from tests.browser.packages import find, install

__all__ = ["Browser", "BrowserError", "Page", "find", "install"]
