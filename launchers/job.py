"""What a submitted job executes: one point, by Hydra's own `run_job`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass(kw_only=True)
class PointJob:
    """Picklable; carries the configuration composed at submission, so later edits do not reach the job.

    A failing application raises out of the job where `raise_failure` is set: its process then exits
    non-zero and Slurm knows too. Hydra alone would report such a job as completed.
    """

    hydra_context: HydraContext
    task_function: TaskFunction
    config: DictConfig
    singletons: dict[Any, Any]
    raise_failure: bool

    def __call__(self) -> JobReturn:
        Singleton.set_state(self.singletons)
        setup_globals()
        result = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=self.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if self.raise_failure and result.status == JobStatus.FAILED:
            _ = result.return_value  # raises the application's own exception
        return result
