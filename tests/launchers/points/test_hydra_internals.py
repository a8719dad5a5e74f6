"""Hydra's private API is as it was in the versions that hydra_internals.py and hydra_support.py were tested with."""

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
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path

from inpaint_bench.core.hydra_support import CheckedFiles, register
from launchers.points.hydra_internals import args_parser

TESTED_SERIES = (1, 3)
PARAMETERS: dict[Callable[..., Any], list[str]] = {
    ConfigLoaderImpl._apply_overrides_to_config: ["overrides", "cfg"],
    ConfigLoaderImpl._parse_overrides_and_create_caching_repo: ["self", "config_name", "overrides"],
    CachingConfigRepository.group_exists: ["self", "config_path"],
    CachingConfigRepository.load_config: ["self", "config_path"],
    CachingConfigRepository.get_group_options: ["self", "group_name", "results_filter"],
    FileConfigSource.load_config: ["self", "config_path"],
    FileConfigSource._get_header_dict: ["config_text"],
    FileConfigSource._normalize_file_name: ["filename"],
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


def test_help_of_every_option_of_hydra_can_be_searched():
    """Python 3.14 searches it for a percent sign; that of --shell-completion is an object in Hydra 1.3."""
    assert not any("%" in (action.help or "") for action in args_parser()._actions)


def test_our_source_of_files_is_the_one_that_hydra_takes():
    register()
    SourcesRegistry.instance().register(FileConfigSource)  # as Hydra does when it looks for plugins
    assert SourcesRegistry.instance().resolve("file") is CheckedFiles
