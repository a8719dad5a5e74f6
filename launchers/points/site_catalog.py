"""The sites of this installation: every YAML file of the `site` group on Hydra's search path."""

from __future__ import annotations

import re
import shutil
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.site import SiteConfig, check_connect
from inpaint_bench.core.validation import check

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader


class SiteCatalog:
    """Site files by name, each read once. The first file on the search path wins, as in Hydra."""

    def __init__(self, config_loader: ConfigLoader) -> None:
        self._files: dict[str, tuple[Path, DictConfig]] = {}
        self._sites: dict[tuple[str, str, str], SiteConfig] = {}  # by name and what a point changes about it
        for entry in config_loader.get_search_path().get_path():
            # The search path also has entries such as pkg:// and structured://, which hold no site files.
            scheme, separator, path = (entry.path or "").rpartition("://")
            if separator and scheme != "file":
                continue
            for file in sorted(Path(path, "site").glob("*.yaml")):
                # auto.yaml describes no site: it says that one is to be chosen.
                if file.stem != "auto":
                    self._files.setdefault(file.stem, (file, _read(file)))

    @property
    def names(self) -> list[str]:
        """Names of all sites."""
        return sorted(self._files)

    def file(self, name: str) -> Path:
        """Return the file of a site."""
        return self._files[name][0]

    def site(self, name: str, config: DictConfig) -> SiteConfig:
        """Return the site for one point: its file, then `sites.<name>` of the point's configuration. Raises UserError.

        Where the point chose the site itself (`site=grace site.qos=...`), the point's `site` node replaces the file.
        """
        overrides = OmegaConf.select(config, "sites") or {}
        for key in overrides:
            if key not in self._files:
                raise UserError(f"sites.{key}: no such site; have: {', '.join(self.names)}")
        chosen = config.site.name == name
        cache_key = (name, repr(config.site) if chosen else "", repr(overrides.get(name)))
        # Hundreds of points usually share one site: each variant of it is converted and checked once.
        if cache_key not in self._sites:
            base = config.site if chosen else self._files[name][1]
            self._sites[cache_key] = _typed_site(name, base, overrides.get(name) or {})
        return self._sites[cache_key]


def own_site(name: str) -> SiteConfig | None:
    """Return a site as this installation's own file describes it, without Hydra; None where there is no valid file."""
    if not re.fullmatch(r"\w[\w-]*", name, re.ASCII):
        return None
    try:
        return _typed_site(name, _read(conf_dir() / "site" / f"{name}.yaml"), {})
    except UserError:
        return None


def _read(file: Path) -> DictConfig:
    """Read a site file. Raises UserError where it is none, or where a copy still has the name of the old site."""
    try:
        content = OmegaConf.load(file)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{file}: not a site file ({' '.join(str(error).split())})") from None
    if not isinstance(content, DictConfig):
        raise UserError(f"{file}: not a site file (it needs keys and values)")
    if (name := content.get("name")) != file.stem:
        raise UserError(f"{file}: name is {name}, it must be {file.stem}, as the file")
    return content


def _typed_site(name: str, base: DictConfig, overrides: Any) -> SiteConfig:
    try:
        site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SiteConfig), base, overrides))
    except OmegaConfBaseException as error:
        from inpaint_bench.core.hydra_support import explain  # Hydra, which `status` does without

        raise UserError(explain(error, prefix=f"sites.{name}.")) from None
    assert isinstance(site, SiteConfig)
    check(site, f"site.{name}")
    check_connect(site)
    # The file says how to reach the site from elsewhere; on its own machines sbatch is there.
    if site.connect.method in ("ssh", "bundle") and is_site_host(site):
        site.connect.method = "slurm"
    return site


@dataclass(frozen=True, kw_only=True)
class Reachability:
    """Whether this machine can submit to a site."""

    ok: bool
    reason: str
    on_site: bool = False  # this machine is one of the site's own


def reachability(site: SiteConfig) -> Reachability:
    """Check host name, the site's slurm.conf and sbatch on PATH. Contacts no server."""
    if site.connect.method == "local":
        return Reachability(ok=True, reason="it is this machine")
    if site.connect.method == "bundle":
        return Reachability(ok=False, reason="its points are carried there in a file")
    if site.connect.method == "ssh":
        if shutil.which("ssh") is None:
            return Reachability(ok=False, reason="ssh is not on PATH")
        return Reachability(ok=True, reason=f"over ssh to {site.connect.host}")
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
    # c001 is a node of many clusters; where the machine has a full name, only that decides.
    full_names = [name for name in names if "." in name and not name.startswith("localhost")]
    return any(re.fullmatch(pattern, name) for pattern in site.connect.compute_nodes for name in full_names or names)


@cache
def _host_names() -> tuple[str, ...]:
    return (socket.gethostname(), socket.getfqdn())
