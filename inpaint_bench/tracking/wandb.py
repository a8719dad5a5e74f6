"""Weights & Biases: offline a folder that `wandb sync` sends later, else its server."""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import wandb

from inpaint_bench.core.schema import Status

from .api import TrackedRun, Value

# W&B would watch the GPU itself, beside the sidecar, and send facts about machine, code and packages.
_OFF = ("x_save_requirements", "save_code")
_ON = (
    *("x_disable_stats", "x_disable_meta", "x_disable_machine_info"),
    *("disable_git", "disable_job_creation", "silent"),
)


class WandB:
    """A run, whose id is the run id."""

    def __init__(self, run: TrackedRun) -> None:
        if run.settings.online:
            os.environ["WANDB_MODE"] = "online"
        mode = os.environ.setdefault("WANDB_MODE", "offline")
        folder = Path(os.environ.setdefault("WANDB_DIR", str(run.files)))
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.project("WANDB_PROJECT"),
            id=run.run_id,
            resume=None if mode == "offline" else "allow",
            name=run.name,
            # Tags have at most 64 characters, and a recipe of many levers has more: the whole is in the configuration.
            tags=[f"{key}={value}"[:64] for key, value in run.tags.items() if key != "run"],
            config=run.tags,
            group=run.tags.get("sweep"),
            settings={"console": "off", **dict.fromkeys(_ON, True), **dict.fromkeys(_OFF, False)},
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


start = WandB  # raises wandb.Error, online also if no key is given
