"""Where and how a sweep was launched, as far as it decides what the sweep's overrides mean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from omegaconf import DictConfig

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import conf_dir

CONFIG_NAME = "config"


class LaunchContext(msgspec.Struct, frozen=True, kw_only=True):
    """Working directory, configuration folders and Hydra overrides of a launch.

    Kept in `sweep.json`: a rerun composes the same files and starts its jobs in the same directory, wherever it is
    called from.
    """

    working_dir: str | None = None  # base of relative paths and start directory of jobs; None: the current one
    config_dirs: tuple[str, ...] = ()  # Hydra's --config-dir
    config_path: str | None = None  # Hydra's --config-path, None for the project's own conf/
    config_name: str = CONFIG_NAME
    hydra_overrides: tuple[str, ...] = ()  # overrides of Hydra's own node, such as hydra.job.chdir=true

    @classmethod
    def from_config(cls, config: DictConfig) -> LaunchContext:
        """Read the context from a composed configuration that still has Hydra's own node."""
        runtime = config.hydra.runtime
        files = [source for source in runtime.config_sources if source.schema == "file"]
        main = next((source.path for source in files if source.provider == "main"), None)
        return cls(
            working_dir=str(runtime.cwd),
            config_dirs=tuple(source.path for source in files if source.provider == "command-line"),
            config_path=main if main and Path(main) != conf_dir() else None,
            config_name=str(config.hydra.job.config_name),
            hydra_overrides=tuple(config.hydra.overrides.hydra),
        )

    def without_paths(self) -> LaunchContext:
        """Return the part that holds on another machine."""
        return LaunchContext(config_name=self.config_name, hydra_overrides=self.hydra_overrides)

    @property
    def extra_config_dirs(self) -> tuple[str, ...]:
        """Folders with configuration files that are not the project's own."""
        return (*self.config_dirs, *([self.config_path] if self.config_path else []))

    @contextlib.contextmanager
    def activated(self) -> Iterator[None]:
        """Change to the working directory of the launch. Raises UserError where one of its folders is gone."""
        for folder in self.extra_config_dirs:
            if not Path(folder).is_dir():
                raise UserError(f"{folder} does not exist any more, and the sweep was launched with its configuration")
        if self.working_dir is None:
            yield
            return
        if not Path(self.working_dir).is_dir():
            raise UserError(
                f"{self.working_dir} does not exist any more, and the sweep was launched there: relative paths and the "
                "jobs start from it. Create it again"
            )
        with contextlib.chdir(self.working_dir):
            yield
