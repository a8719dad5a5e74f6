"""A headless Chromium driven over the DevTools protocol with the standard library only.

It opens local pages and reports what they draw, what they would load, and their console errors.
"""

from .chromium import Browser, BrowserError, Page
from .packages import find, install

__all__ = ["Browser", "BrowserError", "Page", "find", "install"]
