"""Hydra's private API is as it was in the versions that launchers/points/hydra_internals.py was tested with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path

TESTED_SERIES = (1, 3)
PARAMETERS: dict[Callable[..., Any], list[str]] = {
    ConfigLoaderImpl._apply_overrides_to_config: ["overrides", "cfg"],
    ConfigLoaderImpl._parse_overrides_and_create_caching_repo: ["self", "config_name", "overrides"],
    CachingConfigRepository.group_exists: ["self", "config_path"],
    get_overrides_dirname: ["overrides", "exclude_keys", "item_sep", "kv_sep"],
    BasicSweeper.split_arguments: ["overrides", "max_batch_size"],
    Hydra.create_main_hydra2: ["task_name", "config_search_path"],
    create_config_search_path: ["search_path_dir"],
    Callbacks: ["config"],
}


def test_installed_version_is_of_the_tested_series():
    """For another series, check every use in hydra_internals.py, run test_composition.py, then extend this."""
    assert tuple(map(int, version("hydra-core").split(".")[:2])) == TESTED_SERIES


@pytest.mark.parametrize("function", PARAMETERS, ids=lambda function: function.__qualname__)
def test_signature_is_the_tested_one(function):
    assert list(inspect.signature(function).parameters) == PARAMETERS[function]
