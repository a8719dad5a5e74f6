"""The sites that this installation knows: every YAML of the `site` group on Hydra's search path."""

from __future__ import annotations

import re
import shutil
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import explain
from inpaint_bench.core.site import SiteConfig, check_connect
from inpaint_bench.core.validation import check


class Catalogue:
    """Site files by name, read once; a file found first on the search path wins, as in Hydra."""

    def __init__(self, config_loader: ConfigLoader) -> None:
        self._files: dict[str, Path] = {}
        self._sites: dict[tuple[str, str, str], SiteConfig] = {}  # by name and what a point changes about it
        for entry in config_loader.get_search_path().get_path():
            scheme, mark, rest = (entry.path or "").rpartition("://")
            if mark and scheme != "file":
                continue
            for file in sorted(Path(rest, "site").glob("*.yaml")):
                if file.stem != "auto":
                    _check_name(file)
                    self._files.setdefault(file.stem, file)

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    def file(self, name: str) -> Path:
        return self._files[name]

    def site(self, name: str, config: DictConfig) -> SiteConfig:
        """The site as one point sees it: its file, then `sites.<name>` of the point's configuration.

        Where the point chose the site itself (`site=grace site.qos=...`) its own node is the base.
        """
        overrides = OmegaConf.select(config, "sites") or {}
        for key in overrides:
            if key not in self._files:
                raise UserError(f"sites.{key}: no such site; have: {', '.join(self.names)}")
        chosen = config.site.name == name
        asked = (name, repr(config.site) if chosen else "", repr(overrides.get(name)))
        if asked not in self._sites:
            base: Any = config.site if chosen else _loaded(self._files[name])
            self._sites[asked] = self._site(name, base, overrides.get(name) or {})
        return self._sites[asked]

    @staticmethod
    def _site(name: str, base: Any, overrides: Any) -> SiteConfig:
        try:
            merged = OmegaConf.merge(OmegaConf.structured(SiteConfig), base, overrides)
            site = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            raise UserError(explain(error, prefix=f"sites.{name}.")) from None
        assert isinstance(site, SiteConfig)
        check(site, f"site.{name}")
        check_connect(site)
        if site.connect.method in ("ssh", "bundle") and standing_on(site):
            site.connect.method = "slurm"
        return site


def _check_name(file: Path) -> None:
    """A copied site file that keeps the old name would pass for the old site."""
    name = OmegaConf.select(_loaded(file), "name")
    if name != file.stem:
        raise UserError(f"{file}: name is {name}, it must be {file.stem}, as the file")


def _loaded(file: Path) -> DictConfig:
    """Raises UserError where it is no YAML of keys and values."""
    try:
        content = OmegaConf.load(file)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{file}: not a site file ({' '.join(str(error).split())})") from None
    if not isinstance(content, DictConfig):
        raise UserError(f"{file}: not a site file (it needs keys and values)")
    return content


@dataclass(frozen=True, kw_only=True)
class Reachable:
    """Whether this machine can submit to a site, and if not, why."""

    yes: bool
    standing: bool  # we are on one of the site's own machines
    why: str


def reachable(site: SiteConfig) -> Reachable:
    """Looks at the host name, the site's slurm.conf and sbatch on PATH; asks no server."""
    if site.connect.method == "local":
        return Reachable(yes=True, standing=False, why="runs on this machine")
    if site.connect.method == "bundle":
        return Reachable(yes=False, standing=False, why="its points are carried there")
    if site.connect.method == "ssh":
        if shutil.which("ssh") is None:
            return Reachable(yes=False, standing=False, why="ssh is not on PATH")
        return Reachable(yes=True, standing=False, why=f"by ssh to {site.connect.host}")
    standing = standing_on(site)
    if site.connect.slurm_conf:
        if not Path(site.connect.slurm_conf).is_file():
            return Reachable(yes=False, standing=standing, why=f"{site.connect.slurm_conf} does not exist")
    elif not standing:
        return Reachable(yes=False, standing=False, why=f"{_host_names()[0]} is not a machine of {site.name}")
    if shutil.which("sbatch") is None:
        return Reachable(yes=False, standing=standing, why="sbatch is not on PATH")
    return Reachable(yes=True, standing=standing, why="its Slurm is set up here")


def standing_on(site: SiteConfig) -> bool:
    """This machine is one of the site's own."""
    return any(re.fullmatch(p, host) for p in site.connect.hostnames for host in _host_names())


@cache
def _host_names() -> tuple[str, ...]:
    return (socket.gethostname(), socket.getfqdn())
