"""The browser in which pages are looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.browser import Browser, Page, packages
from tests.testbed.errors import PackagesError

REQUIRE = "INPAINT_BENCH_REQUIRE_BROWSER"  # 1: fail instead of skip without a browser


@pytest.fixture(scope="session")  # session scope: skips before a report is written if there is no browser
def browser() -> Iterator[Browser]:
    """Start the browser, or skip."""
    try:
        program = packages.require()
    except PackagesError as error:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, yet: {error}", pytrace=False)
        pytest.skip(str(error))
    with Browser(program) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Open an empty tab."""
    tab = browser.page()
    yield tab
    tab.close()
