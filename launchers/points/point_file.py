"""The file of a point, `points/<n>.yaml` in the sweep directory: the composed configuration that its job runs."""

from pathlib import Path

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.composed_file import find_secret, plain_config, read_yaml, typed_config, write_yaml
from inpaint_bench.core.schema import POINTS
from launchers.sweep import private_dirs

from .point import Point


def path(point: Point, sweep: Path) -> Path:
    """Return the file of a point's attempt: each has its own, so that a job that starts late runs no later attempt."""
    return sweep / POINTS / (f"{point.num}-{point.attempt}.yaml" if point.attempt > 1 else f"{point.num}.yaml")


def write(point: Point, sweep: Path, job_id: str) -> Path:
    """Write the file of a point's attempt; `job_id` becomes `hydra.job.id`. Raises UserError and OSError."""
    config = point.composed.with_edits({"hydra.job.id": job_id}).build()
    file = path(point, sweep)
    private_dirs.make(file.parent)
    # Hydra's own node is resolved in the job.
    content = {**plain_config(config), "hydra": OmegaConf.to_container(config.hydra, enum_to_str=True)}
    overrides, job = content["hydra"]["overrides"], content["hydra"]["job"]
    if find_secret(overrides["task"]):
        masked = (f"{line.partition('=')[0]}=..." if find_secret([line]) else line for line in overrides["task"])
        overrides["task"] = list(masked)
        job["override_dirname"] = ",".join(overrides["task"])
    write_yaml(file, content)
    return file


def read(file: Path) -> DictConfig:
    """Return the configuration in the file of a point, with Hydra's own node. Raises OSError."""
    return typed_config(read_yaml(file), hydra=HydraConf)
