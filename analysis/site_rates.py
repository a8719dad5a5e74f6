"""What an hour of a GPU costs at a site, by the charging rule of its file in conf/site as it is today.

A run does not record the rule. The rate is that of the site's default cores and memory per GPU.
"""

import re
from dataclasses import dataclass
from functools import cache

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.config.yaml_file import read_config_file
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import conf_dir


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Units for an hour of one GPU: service units of the site, or GPU-hours if its rule is not known."""

    unit: str
    units_per_gpu_hour: float
    at_most: bool = False  # the site's rate is not public: this is an upper bound
    price_per_unit: float | None = None
    currency: str = ""


GPU_HOURS = Rate(unit="GPU-h", units_per_gpu_hour=1.0)


@cache
def rate(site: str | None, gpu: str) -> Rate:
    """Return the rate of one GPU at a site; GPU-hours if no file here describes both."""
    config = _site(site or "")
    entry = config.gpus.get(gpu) if config else None
    if config is None or entry is None or not config.connection.has_slurm:
        return GPU_HOURS
    rule = config.charging
    units = rule.units_per_hour(gpu, entry, 1, entry.cpus_per_gpu, entry.mem_gb_per_gpu)
    if units is None:
        return GPU_HOURS
    return Rate(
        unit=rule.unit,
        units_per_gpu_hour=units,
        at_most=gpu in rule.upper_bounds,
        price_per_unit=rule.price_per_unit,
        currency=rule.currency,
    )


@cache
def _site(name: str) -> SiteConfig | None:
    # The name comes from a manifest, which is not trusted: it must not lead out of conf/site.
    if not re.fullmatch(r"\w[\w-]*", name, re.ASCII):
        return None
    try:
        content = OmegaConf.create(read_config_file(conf_dir() / "site" / f"{name}.yaml", "site"))
        site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SiteConfig), content))
    except (UserError, OmegaConfBaseException):
        return None
    assert isinstance(site, SiteConfig)
    return site
