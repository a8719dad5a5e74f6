"""What a submitted job executes: one point, through Hydra's `run_job`."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import cloudpickle
from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.run.manifest import check_owner
from launchers.points.composition import ComposedConfig
from launchers.points.point import Point


def pickle_hydra(context: HydraContext, task: TaskFunction) -> bytes:
    """Pickle Hydra's state in this process for the jobs of a command: the same for all points, so pickled once."""
    # cloudpickle: resolvers may be functions of a script
    return cloudpickle.dumps((context, task, Singleton.get_state()), pickle.HIGHEST_PROTOCOL)


def _follow(config: DictConfig, run_dir: Path) -> None:
    """Run the ranks of a node other than the first, where no files of Hydra's are written."""
    from inpaint_bench.ranks.engine import run_ranks
    from inpaint_bench.run.worker import run_rank

    run_ranks(parse_config(config), run_dir, run_rank)


@dataclass(kw_only=True)
class PointJob:
    """A picklable job for one point, with the configuration composed at submission."""

    hydra: bytes
    composed: ComposedConfig

    @classmethod
    def of(cls, point: Point, hydra: bytes, job_id: str) -> Self:
        """Make the job of a point; `job_id` becomes `hydra.job.id`."""
        return cls(hydra=hydra, composed=point.composed.with_edits({"hydra.job.id": job_id}))

    def __call__(self) -> None:
        """Run the point. Raises what failed, and UserError where its run directory belongs to another run."""
        context, task, singletons = pickle.loads(self.hydra)  # part of a pickle that was loaded already
        Singleton.set_state(singletons)
        # Registers Hydra's resolvers, such as ${hydra:...}, in this process.
        setup_globals()
        config = self.composed.build()
        run_dir = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
        if int(os.environ.get("SLURM_PROCID", "0")):
            _follow(config, run_dir)
            return
        check_owner(run_dir, config.identity.run_id)  # before Hydra writes its own record there
        result = run_job(
            hydra_context=context,
            task_function=task,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        # Hydra only stores what failed. Raised, it makes the process exit non-zero, so that Slurm records a failure.
        _ = result.return_value
