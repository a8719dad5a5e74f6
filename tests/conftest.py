"""Shared by all tests."""

import pytest

pytest_plugins = ["tests.testbed.fixtures"]


@pytest.fixture(autouse=True)
def _hydra_is_left_as_it_was(hydra_restore_singletons):
    """Hydra's version base and configuration store are singletons that one test would pass on to the next."""
