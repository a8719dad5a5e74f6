"""The environment of Slurm's commands and of jobs: what they may inherit from the shell that submits."""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from inpaint_bench.core.config.site import SiteConfig

# A sweep is often submitted from inside another job; its allocation must not become the new job's.
_JOB_PREFIXES = (
    *("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "SCANCEL_", "SACCT_", "SQUEUE_", "SINFO_", "SCONTROL_"),
    *("SUBMITIT_", "PMI_", "PMIX_"),
)
_JOB_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HYDRA_FULL_ERROR"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
)

# How Slurm's commands reach its controller, also without a slurm.conf, and with auth/jwt and auth/slurm
_TO_CONTROLLER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET")

# What sbatch would read from the shell, by option, and the keys that do the same
_KEYS = {
    "account": "sites.{site}.account.value",
    "clusters": "sites.{site}.cluster",
    "constraint": "sites.{site}.constraint",
    "export": "sites.{site}.environment.export",
    "partition": "sites.{site}.gpus.{gpu}.partition",
    "qos": "sites.{site}.qos",
    "reservation": "sites.{site}.reservation",
    "timelimit": "time_min",
}
_READ = re.compile("SLURM_CLUSTERS|SBATCH_(?!(ARRAY_INX|DEBUG|IGNORE_PBS|WAIT)$)[A-Z0-9_]+")

_DEFAULT_CONF = "/etc/slurm/slurm.conf"


def unused_settings(site: SiteConfig, gpu: str, script: str) -> dict[str, str]:
    """Return NAME=VALUE of what the shell sets for sbatch and the script does not request, with what does the same."""
    unused, lines = {}, script.splitlines()
    for name, value in sorted(os.environ.items()):
        option = name.partition("_")[2].lower().replace("_", "-")
        directive = f"#SBATCH --{option}"
        requested = directive in lines or f"{directive}={shlex.quote(value)}" in lines
        # A script that sets another option itself has a value of each job's own, such as its log.
        if value and _READ.fullmatch(name) and not requested and (option in _KEYS or f"{directive}=" not in script):
            key = _KEYS.get(option, f"`{directive}` in the template of {{site}}")
            unused[f"{name}={value}"] = key.format(site=site.name, gpu=gpu)
    return unused


def job_environment() -> dict[str, str]:
    """Return this process's environment without the variables that belong to another job or Slurm command."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_JOB_PREFIXES) and name not in _JOB_VARIABLES
    }


def slurm_environment(site: SiteConfig) -> dict[str, str]:
    """Return the environment for Slurm's commands at one site: of Slurm's variables those alone that lead to it."""
    own = {name: os.environ[name] for name in _TO_CONTROLLER if os.environ.get(name)}
    return job_environment() | own | ({"SLURM_CONF": site.connect.slurm_conf} if site.connect.slurm_conf else {})


def shell_conf(site: SiteConfig) -> str | None:
    """Return the SLURM_CONF by which a shell chooses a site's cluster; None if none does: the site file, or a job."""
    chosen = site.connection.submits_here and not site.connect.slurm_conf and "SLURM_JOB_ID" not in os.environ
    return os.environ.get("SLURM_CONF", "") if chosen else None


def other_conf(site: SiteConfig, submitted: Iterable[str | None]) -> str | None:
    """Say that a `shell_conf` of the submissions is not that of this shell: another Slurm may not know the jobs."""
    current = shell_conf(site)
    for conf in {conf for conf in submitted if None not in (conf, current) and conf != current}:
        with suppress(OSError, ValueError):  # what a damaged ledger says may be no path
            if Path(conf or _DEFAULT_CONF).resolve() == Path(current or _DEFAULT_CONF).resolve():
                continue
        recorded, other = (f"SLURM_CONF={text}" if text else "no SLURM_CONF" for text in (conf, current))
        cure = f"`export {recorded}`" if conf else "`unset SLURM_CONF`"
        sentence = f"its jobs were submitted with {recorded}, and this shell has {other}, perhaps of another cluster"
        return f"{sentence}: {cure} first"
    return None


def at_cluster(site: SiteConfig, command: Sequence[str]) -> list[str]:
    """Return a command of Slurm, sent to the site's cluster if that is not the local one."""
    return [command[0], *(["-M", site.cluster] if site.cluster else []), *command[1:]]


def python_path(code: Path) -> str:
    """Return a PYTHONPATH with the snapshot first, then what the submitting shell had."""
    return os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))


@contextmanager
def replaced_environ(environment: Mapping[str, str]) -> Iterator[None]:
    """Replace `os.environ` by `environment` inside the block: submitit starts local jobs with it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
