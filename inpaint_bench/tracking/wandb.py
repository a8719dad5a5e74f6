"""Weights & Biases: offline a folder that `wandb sync` sends later, else its server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import wandb

from inpaint_bench.core.schema import Status

from .api import TrackedRun, Value

# W&B would watch the GPU itself, beside the sidecar, and send facts about machine, code and packages.
_SETTINGS = {
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "console": "off",
    "silent": True,
}


class WandB:
    """A run, whose id is the run id."""

    def __init__(self, run: TrackedRun) -> None:
        run.files.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.settings.project,
            id=run.run_id,
            resume="allow" if run.settings.online else None,
            mode="online" if run.settings.online else "offline",
            name=run.name,
            # Tags have at most 64 characters, and a recipe of many levers has more: the whole is in the configuration.
            tags=[f"{key}={value}"[:64] for key, value in run.tags.items() if key != "run"],
            config=run.tags,
            group=run.tags.get("sweep"),
            dir=str(run.files),
            settings=_SETTINGS,
        )
        self.tracked_run: str | None = self._run.id
        self.link = str(self._run.url or self._run.settings.sync_dir)
        # Steps of the losses come after those of the power: W&B's own step cannot go back.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Sequence[Value]) -> None:
        steps: dict[int, dict[str, float]] = defaultdict(dict)
        for value in values:
            steps[value.step][value.name] = value.value
        for step, named in steps.items():
            self._run.log({"step": step, **named})

    def picture(self, name: str, path: Path, step: int) -> None:
        self._run.log({"step": step, name: wandb.Image(str(path))})

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status is Status.COMPLETED else 1)


start = WandB  # raises wandb.Error, online also where no key is given
