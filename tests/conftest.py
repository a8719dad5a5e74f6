"""Fixtures and settings of all tests."""

import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: tests/kernels runs them on the CPU

sys.dont_write_bytecode = False  # else each session compiles all test files and rewrites their assertions

pytest_plugins = ["tests.testbed.fixtures", "tests.tiers", "tests.warm.fixtures"]

# One thread, for child processes too: networks as small as the tests' gain nothing from cores, and threads that wait
# for each other become many times slower where other processes use the cores. Read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

os.environ["INPAINT_BENCH_CONFIG"] = ""  # no test reads the file of the user who runs it


@pytest.fixture(autouse=True, scope="session")
def _untouched_hydra() -> tuple[Any, dict[int, Any]]:
    """Return Hydra's state, and the parts of it that copies share: nobody writes to them."""
    plugins = Plugins.instance()  # our launcher is known to the configuration store once plugins were looked for
    state = copy.deepcopy(Singleton.get_state())
    state["instances"][Plugins] = plugins
    nodes = _leaves(state["instances"][ConfigStore].repo)
    return state, {id(part): part for part in (plugins, *nodes)}


def _leaves(tree: dict[str, Any]) -> Iterator[Any]:
    for value in tree.values():
        yield from _leaves(value) if isinstance(value, dict) else (value,)


@pytest.fixture(autouse=True)
def _hydra_is_as_at_the_start(_untouched_hydra: tuple[Any, dict[int, Any]]) -> None:
    """Restore Hydra's version base and configuration store, which are singletons, before each test.

    Restoring them after each test is not enough: a fixture of the session may change them before the next one.
    """
    state, shared = _untouched_hydra
    Singleton.set_state(copy.deepcopy(state, dict(shared)))
