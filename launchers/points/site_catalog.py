"""The sites of this installation: every YAML file of the `site` group on Hydra's search path."""

from __future__ import annotations

import logging
import re
import shutil
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from inpaint_bench.core.config.site import CHOSEN, SiteConfig, check_connect, check_preempt
from inpaint_bench.core.config.validation import check, did_you_mean, no_such_key, override_key
from inpaint_bench.core.config.yaml_file import ConfigFileError, read_config_file
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import conf_dir

if TYPE_CHECKING:
    from hydra._internal.config_repository import IConfigRepository

EVERY = "*"  # the block of `sites` that holds for every site, before the site's own

log = logging.getLogger(__name__)


class SiteCatalog:
    """Site files by name, each read when it is used. The first file on the search path wins, as in Hydra."""

    def __init__(self, files: IConfigRepository) -> None:
        self._files = files
        self._sites: dict[tuple[str, str, str], SiteConfig] = {}  # by name and what a point changes about it
        self._broken: dict[str, str] = {}  # what was said about files that were left out
        self.names = sorted(set(files.get_group_options("site")) - {*CHOSEN})

    def file(self, name: str) -> Path:
        """Return the file of a site. Raises UserError if it lies in a Python package."""
        for source in self._files.get_sources():
            if source.is_config(f"site/{name}"):
                if source.scheme() != "file":
                    break
                return Path(source.path, "site", f"{name}.yaml")
        raise UserError(f"site {name}: has no file of its own on this machine")

    def sites(self, config: DictConfig, *, needed: Collection[str] = ()) -> list[SiteConfig]:
        """Return all sites for one point, without those whose file is broken, which are named in the log once.

        Raises UserError for a broken file of a site that is `needed`, and for overrides that do not fit.
        """
        sites = []
        for name in self.names:
            try:
                sites.append(self.site(name, config))
            except ConfigFileError as error:
                if name in needed:
                    raise
                if name not in self._broken:
                    self._broken[name] = str(error)
                    log.warning(f"site {name} is left out: {error}")
        return sites

    def site(self, name: str, config: DictConfig) -> SiteConfig:
        """Return the site for one point: its file, then `sites.*` and `sites.<name>` of the point's configuration.

        If the point chose the site itself (`site=grace site.qos=...`), the point's `site` node replaces the file.
        Raises ConfigFileError for a broken file, and UserError for overrides that do not fit.
        """
        overrides = config.get("sites") or {}
        for key in overrides:
            if key not in (*self.names, EVERY):
                guess = did_you_mean(str(key), self.names)
                raise UserError(f"sites.{key}: no such site; have: {', '.join(self.names)}.{guess}".rstrip("."))
        own, chosen = overrides.get(name), config.site.name == name
        if (every := overrides.get(EVERY)) and isinstance(own, DictConfig | None):
            own = OmegaConf.merge(every, own or {})
        cache_key = (name, repr(config.site) if chosen else "", repr(own))
        # Hundreds of points usually share one site: each variant of it is converted and checked once.
        if cache_key not in self._sites:
            base = config.site if chosen else self._load(name)
            try:
                self._sites[cache_key] = self._typed(name, base, own)
            except UserError as error:
                if chosen or overrides.get(name):
                    raise
                raise ConfigFileError(f"{self.file(name)}: {error}") from None
        return self._sites[cache_key]

    def _load(self, name: str) -> DictConfig:
        found = self._files.load_config(f"site/{name}")
        assert found is not None
        assert isinstance(found.config, DictConfig)
        return found.config

    def _typed(self, name: str, base: DictConfig, overrides: Any) -> SiteConfig:
        site = _typed_site(name, base, overrides)
        gpus = self._files.get_group_options("gpu")
        for gpu, entry in site.gpus.items():
            if gpu not in gpus:
                unknown = no_such_key(f"sites.{name}.gpus.{gpu}", gpus)
                raise UserError(f"{unknown}; `inpaint-bench new gpu {gpu}` writes a file of conf/gpu")
            rule = site.charging
            if entry.charge_factor and not (rule.gpus_per_unit or rule.units_per_gpu or rule.cores_per_unit):
                key, needed = f"sites.{name}.gpus.{gpu}.charge_factor", f"sites.{name}.charging.units_per_gpu.{gpu}"
                raise UserError(f"{key} needs a rate: set {needed}")
        for key in ("mem_gb_per_unit", "units_per_gpu", "upper_bounds"):
            for gpu in getattr(site.charging, key):
                if gpu not in site.gpus:
                    raise UserError(no_such_key(f"sites.{name}.charging.{key}.{gpu}", site.gpus))
        return site


def own_site(name: str) -> SiteConfig | None:
    """Return a site as this installation's own file describes it, without Hydra; None if there is no valid file."""
    if not re.fullmatch(r"\w[\w-]*", name, re.ASCII):
        return None
    try:
        content = OmegaConf.create(read_config_file(conf_dir() / "site" / f"{name}.yaml", "site"))
        return _typed_site(name, content, None)
    except UserError:
        return None


def _typed_site(name: str, base: DictConfig, overrides: Any) -> SiteConfig:
    if not isinstance(overrides, DictConfig | None):
        raise UserError(f"sites.{name}={overrides}: needs keys and values, such as sites.{name}.qos=...")
    try:
        site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SiteConfig), base, overrides or {}))
    except OmegaConfBaseException as error:
        from inpaint_bench.core.hydra_support import explain  # Hydra, which `status` does without

        raise UserError(explain(error, prefix=f"sites.{name}.")) from None
    assert isinstance(site, SiteConfig)
    check(site, f"sites.{name}")
    check_connect(site)
    check_preempt(site)
    # The file says how to reach the site from elsewhere; on its own machines sbatch is there.
    if site.connection.is_remote and is_site_host(site):
        site.connect.method = "slurm"
    return site


def refuse_unused_keys(site: SiteConfig, overrides: Sequence[str]) -> None:
    """Raise UserError for keys of `site` with site=auto or soonest, which take each site as its file has it."""
    if site.gpus:
        return
    if site.name not in CHOSEN:
        raise UserError(f"site={site.name}: its file lists no GPU; add a block `gpus`, as docs/sites.md shows")
    default = SiteConfig(name=site.name)
    keys = [key for key in map(override_key, overrides) if key.startswith("site.")]
    keys += [f"site.{key}" for key, value in vars(site).items() if value != getattr(default, key)]
    if keys:
        other = keys[0].removeprefix("site.")
        raise UserError(
            f"{keys[0]}: is not read with site={site.name}, which takes every site as its file describes it; "
            f"set sites.<name>.{other}, or choose the site with site=<name>"
        )


@dataclass(frozen=True, kw_only=True)
class Reachability:
    """Whether this machine can submit to a site."""

    ok: bool
    reason: str
    on_site: bool = False  # this machine is one of the site's own


def reachability(site: SiteConfig) -> Reachability:
    """Check host name, the site's slurm.conf and sbatch on PATH. Contacts no server."""
    if not site.connection.has_slurm:
        return Reachability(ok=True, reason="it is this machine")
    if site.connection.over_ssh:
        if shutil.which("ssh") is None:
            return Reachability(ok=False, reason="ssh is not on PATH")
        return Reachability(ok=True, reason=f"over ssh to {site.connect.host}")
    if site.connection.is_remote:
        return Reachability(ok=False, reason="its points are carried there in a file")
    on_site = is_site_host(site)
    # A login node of several clusters reaches each of them through its slurm.conf, whatever its own name.
    if site.connect.slurm_conf:
        if not Path(site.connect.slurm_conf).is_file():
            return Reachability(ok=False, on_site=on_site, reason=f"{site.connect.slurm_conf} does not exist")
    elif not on_site:
        return Reachability(ok=False, reason=f"{_host_names()[0]} is not a machine of {site.name}")
    if shutil.which("sbatch") is None:
        return Reachability(ok=False, on_site=on_site, reason="sbatch is not on PATH")
    return Reachability(ok=True, on_site=on_site, reason="its Slurm is set up on this machine")


def is_site_host(site: SiteConfig) -> bool:
    """Return whether this machine is a login or compute node of the site."""
    names = _host_names()
    if any(re.fullmatch(pattern, name) for pattern in site.connect.hostnames for name in names):
        return True
    # c001 is a node of many clusters; if the machine has a full name, only that decides.
    full_names = [name for name in names if "." in name and not name.startswith("localhost")]
    return any(re.fullmatch(pattern, name) for pattern in site.connect.compute_nodes for name in full_names or names)


@cache
def _host_names() -> tuple[str, ...]:
    return (socket.gethostname(), socket.getfqdn())
