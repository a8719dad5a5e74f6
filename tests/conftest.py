"""Shared by all tests."""

import copy
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

pytest_plugins = ["tests.testbed.fixtures"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests on Slurm begin first, for they mostly wait: what needs the processor goes beside them."""

    def on_slurm(item: pytest.Item) -> bool:
        fixtures = getattr(item, "fixturenames", ())
        return item.get_closest_marker("testbed") is not None or not {"testbed", "testbed_light"}.isdisjoint(fixtures)

    first = {item.path for item in items if on_slurm(item)}
    items.sort(key=lambda item: item.path not in first)


@pytest.fixture(autouse=True, scope="session")
def _untouched_hydra() -> Any:
    Plugins.instance()  # our launcher is known to the configuration store once plugins were looked for
    return copy.deepcopy(Singleton.get_state())


@pytest.fixture(autouse=True)
def _hydra_is_as_at_the_start(_untouched_hydra: Any) -> None:
    """Hydra's version base and configuration store are singletons that one test would pass on to the next.

    Restoring them after each test is not enough: a fixture of a whole session changes them before that test's
    state is looked at.
    """
    Singleton.set_state(copy.deepcopy(_untouched_hydra))
