"""Check at a site, here or over ssh, the paths that its file names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from inpaint_bench.core.config.site import SiteConfig

from .findings import Finding
from .slurm_facts import Cluster

# Prints each of its arguments that exists.
_PRINT_EXISTING = ("sh", "-c", 'for path; do test ! -e "$path" || printf "%s\\n" "$path"; done', "sh")


def compare_paths(site: SiteConfig, cluster: Cluster) -> Iterator[Finding]:
    """Yield a finding per key that names paths at the site. A folder that only compute nodes may have is unknown."""
    container, storage = site.environment.container, site.storage
    keys: dict[str, Any] = {
        "python": site.python,
        "environment.container.image": container.image,
        "environment.container.binds": container.binds if container.image else None,
        "storage.scratch": storage.scratch,
        "storage.node_tmp": storage.node_tmp,
        "storage.file_quotas": storage.file_quotas,
    }
    named = {key: [value] if isinstance(value, str) else value for key, value in keys.items() if value}
    # source:target of a bind; a name without a folder, such as python3, is looked up by the job
    paths = {key: [p for path in each if "/" in (p := path.split(":")[0])] for key, each in named.items()}
    ask = (*_PRINT_EXISTING, *(path for each in paths.values() for path in each))
    for key, each in paths.items():
        yield Finding(key, keys[key]).compare(partial(_compare, each, cluster, ask))


def _compare(paths: list[str], cluster: Cluster, ask: tuple[str, ...], finding: Finding) -> Finding:
    existing = cluster.text(*ask).splitlines()
    if not (missing := ", ".join(path for path in paths if path not in existing)):
        return finding.same("found")
    if finding.key in ("storage.node_tmp", "storage.file_quotas"):
        return finding.unknown("look for it on a compute node", f"not found: {missing}")
    return finding.differs(f"not found: {missing}", "jobs may need it: create it or correct the path")
