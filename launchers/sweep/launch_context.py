"""Where and how a sweep was launched, as far as the meaning of its overrides hangs on it.

Kept in `sweep.json`, so that whatever composes its points again reads the same files and starts its jobs in the same
folder, wherever it is called from. A sweep from before this was kept has none, and is composed as if called by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import conf_dir

CONFIG_NAME = "config"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    working_dir: str | None = None  # relative paths lead from it, and Slurm starts jobs in it; None: wherever we are
    config_dirs: tuple[str, ...] = ()  # Hydra's --config-dir
    config_path: str | None = None  # Hydra's --config-path, where it is not the project's own
    config_name: str = CONFIG_NAME
    hydra_overrides: tuple[str, ...] = ()  # `hydra.job.chdir=true` and the like

    @classmethod
    def of(cls, config: DictConfig) -> Surroundings:
        """From a composed configuration with Hydra's own node."""
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

    @classmethod
    def read(cls, record: Path) -> Surroundings:
        """From Hydra's own record of a sweep."""
        config = OmegaConf.load(record)
        assert isinstance(config, DictConfig)
        return cls.of(config)

    @classmethod
    def recorded(cls, content: Any) -> Surroundings:
        """Raises TypeError or ValueError for what `record` did not write."""
        if content is None:
            return cls()
        found = cls(**content)
        for several in (found.config_dirs, found.hydra_overrides):
            if not isinstance(several, list | tuple) or not all(isinstance(one, str) for one in several):
                raise ValueError("not a list of words")
        for one in (found.working_dir, found.config_path, found.config_name):
            if not isinstance(one, str | None):
                raise ValueError("not a word")
        lists = {"config_dirs": tuple(found.config_dirs), "hydra_overrides": tuple(found.hydra_overrides)}
        return cls(**{**asdict(found), **lists})

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "config_dirs": list(self.config_dirs), "hydra_overrides": list(self.hydra_overrides)}

    def elsewhere(self) -> Surroundings:
        """Without what another machine's disk does not have: the folders."""
        return Surroundings(config_name=self.config_name, hydra_overrides=self.hydra_overrides)

    @property
    def folders(self) -> tuple[str, ...]:
        """Of configuration files that are not the project's own."""
        return (*self.config_dirs, *([self.config_path] if self.config_path else []))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """In the working directory. Raises UserError where a folder is gone."""
        for folder in self.folders:
            if not Path(folder).is_dir():
                raise UserError(f"{folder}: is gone, and the sweep was launched with the configuration in it")
        if self.working_dir is None:
            yield
            return
        if not Path(self.working_dir).is_dir():
            raise UserError(
                f"{self.working_dir}: is gone, and the sweep was launched there: relative paths lead from it, and jobs "
                "start in it. Make the folder again"
            )
        with contextlib.chdir(self.working_dir):
            yield


def here() -> Surroundings:
    """For points that come from no command line of Hydra's."""
    return Surroundings(working_dir=str(Path.cwd()))
