"""What a submitted job executes: one point, by Hydra's own `run_job`."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.run.manifest import check_owner
from launchers.points.composition import Composed
from launchers.points.point import Point


@dataclass(frozen=True, kw_only=True)
class HydraState:
    """What Hydra needs in another process: the same for all points of a command, so pickled once."""

    content: bytes

    @classmethod
    def now(cls, context: HydraContext, task: TaskFunction) -> HydraState:
        # cloudpickle: a task of somebody's script, and resolvers, may be functions without a module to import
        return cls(content=cloudpickle.dumps((context, task, Singleton.get_state()), pickle.HIGHEST_PROTOCOL))

    def restore(self) -> tuple[HydraContext, TaskFunction]:
        context, task, singletons = pickle.loads(self.content)  # part of a pickle that has been loaded already
        Singleton.set_state(singletons)
        return context, task


@dataclass(kw_only=True)
class PointJob:
    """Picklable; carries the configuration composed at submission, so later edits do not reach the job.

    A failing application raises out of the job where `raise_failure` is set: its process then exits
    non-zero and Slurm knows too. Hydra alone would report such a job as completed.
    """

    hydra: HydraState
    composed: Composed
    raise_failure: bool

    @classmethod
    def of(cls, point: Point, hydra: HydraState, job_id: str) -> PointJob:
        """`job_id`: what the job is to know itself as (`hydra.job.id`)."""
        return cls(hydra=hydra, composed=point.composed.edited({"hydra.job.id": job_id}), raise_failure=True)

    @property
    def config(self) -> DictConfig:
        return self.composed.config()

    def __call__(self) -> JobReturn:
        context, task = self.hydra.restore()
        setup_globals()
        config = self.config
        if run_id := OmegaConf.select(config, "identity.run_id"):  # before Hydra writes its record there
            check_owner(Path(config.hydra.sweep.dir, config.hydra.sweep.subdir), run_id)
        result = run_job(
            hydra_context=context,
            task_function=task,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if self.raise_failure and result.status == JobStatus.FAILED:
            _ = result.return_value  # raises the application's own exception
        return result
