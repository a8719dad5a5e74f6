"""Fixtures and settings of all tests."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: tests/kernels runs them on the CPU

pytest_plugins = ["tests.testbed.fixtures", "tests.tiers", "tests.warm.fixtures"]

# One thread, for child processes too: networks as small as the tests' gain nothing from cores, and threads that wait
# for each other become many times slower where other processes use the cores. Read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

os.environ["INPAINT_BENCH_CONFIG"] = ""  # no test reads the file of the user who runs it


@pytest.fixture(autouse=True, scope="session")
def _untouched_hydra() -> Any:
    Plugins.instance()  # our launcher is known to the configuration store once plugins were looked for
    return copy.deepcopy(Singleton.get_state())


@pytest.fixture(autouse=True)
def _hydra_is_as_at_the_start(_untouched_hydra: Any) -> None:
    """Restore Hydra's version base and configuration store, which are singletons, before each test.

    Restoring them after each test is not enough: a fixture of the session may change them before the next one.
    """
    Singleton.set_state(copy.deepcopy(_untouched_hydra))
