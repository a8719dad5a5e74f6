"""What a submitted job executes: one point, through Hydra's `run_job`."""

from __future__ import annotations

import logging
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.config.bench import BenchConfig, parse_config
from inpaint_bench.core.errors import UserError
from inpaint_bench.run.manifest import check_owner
from launchers.points.composition import ComposedConfig
from launchers.points.point import Point


@dataclass(frozen=True, kw_only=True)
class HydraState:
    """Hydra's state for another process: the same for all points of a command, so pickled once."""

    content: bytes

    @classmethod
    def capture(cls, context: HydraContext, task: TaskFunction) -> HydraState:
        """Pickle the state of this process."""
        # cloudpickle: resolvers, and the task of another application, may be functions of a script
        return cls(content=cloudpickle.dumps((context, task, Singleton.get_state()), pickle.HIGHEST_PROTOCOL))

    def restore(self) -> tuple[HydraContext, TaskFunction]:
        """Set Hydra's singletons in this process, and return context and task."""
        context, task, singletons = pickle.loads(self.content)  # part of a pickle that was loaded already
        Singleton.set_state(singletons)
        return context, task


def _follow(config: DictConfig, run_dir: Path) -> JobReturn:
    """Run a rank other than 0, which writes neither files of Hydra's nor a result of its own."""
    from inpaint_bench.run import follower, ranks

    bench = parse_config(config)
    place = ranks.slurm_place(bench)
    if place is None:
        raise UserError("srun started several tasks for a job of one GPU")
    logging.basicConfig(level=logging.INFO, format=f"rank {place.rank}: %(message)s")
    follower.follow(bench, run_dir, place)
    return JobReturn()


@dataclass(kw_only=True)
class PointJob:
    """A picklable job for one point, with the configuration composed at submission.

    With `raise_failure`, the job raises the application's exception, so its process exits non-zero and Slurm records
    the failure. Hydra only stores the exception in the result, and Slurm would show the job as completed.
    """

    hydra: HydraState
    composed: ComposedConfig
    raise_failure: bool = True

    @classmethod
    def of(cls, point: Point, hydra: HydraState, job_id: str) -> PointJob:
        """Make the job of a point; `job_id` becomes `hydra.job.id`."""
        return cls(hydra=hydra, composed=point.composed.with_edits({"hydra.job.id": job_id}))

    def __call__(self) -> JobReturn:
        """Run the point. Raises UserError where its run directory belongs to another run."""
        context, task = self.hydra.restore()
        # Registers Hydra's resolvers, such as ${hydra:...}, in this process.
        setup_globals()
        config = self.composed.build()
        run_dir = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
        if int(os.environ.get("SLURM_PROCID", "0")) and OmegaConf.get_type(config) is BenchConfig:
            return _follow(config, run_dir)
        if run_id := OmegaConf.select(config, "identity.run_id"):  # before Hydra writes its own record there
            check_owner(run_dir, run_id)
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
