"""Shared by all tests."""

import copy
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

pytest_plugins = ["tests.testbed.fixtures"]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`: whatever uses Slurm is one process's, and begins first, for it mostly waits; else by file."""

    def on_slurm(item: pytest.Item) -> bool:
        fixtures = getattr(item, "fixturenames", ())
        return item.get_closest_marker("testbed") is not None or not {"testbed", "testbed_light"}.isdisjoint(fixtures)

    for item in items:
        item.add_marker(pytest.mark.xdist_group("slurm" if on_slurm(item) else str(item.path)))
    items.sort(key=lambda item: not on_slurm(item))


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
