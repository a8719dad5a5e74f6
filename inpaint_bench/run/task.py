"""The function that Hydra runs for one point: in a job of a sweep, or here for a single run."""

import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.console import echo, pluralize, shell_command
from inpaint_bench.core.records import Manifest
from inpaint_bench.core.schema import CHECKPOINTS
from inpaint_bench.core.signals import Terminated
from inpaint_bench.core.workloads import WorkloadConfig


def task(config: DictConfig) -> Manifest:
    """Execute one point and return its manifest."""
    hydra_config = HydraConfig.get()
    # as typed: the environment of the launch is not that of a job
    overrides: Any = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    run_dir = Path(hydra_config.runtime.output_dir)
    # A job of a sweep: its configuration was checked before it was submitted.
    if hydra_config.mode is not RunMode.RUN:
        return _run(config, run_dir, overrides, is_job=True)
    echo(f"run directory: {run_dir}")
    try:
        manifest = _run(config, run_dir, overrides)
    except Terminated as error:
        echo(f"Stopped: {error}. {_how_to_go_on(config, run_dir)}", error=True)
        raise
    _print_summary(manifest, run_dir)
    return manifest


def _run(config: DictConfig, run_dir: Path, overrides: list[str], *, is_job: bool = False) -> Manifest:
    from inpaint_bench.run.worker import run  # torch only where a job runs, not where it is submitted

    return run(config, run_dir, overrides, is_job=is_job)


def _how_to_go_on(config: DictConfig, run_dir: Path) -> str:
    workload = OmegaConf.to_object(config.workload)
    if not (isinstance(workload, WorkloadConfig) and workload.resumes):
        return "A benchmark does not resume; the same command starts it again."
    fixed = {"hydra.run.dir": run_dir, "workload.resume": "true"}
    typed = [argument for argument in sys.argv[1:] if argument.partition("=")[0].lstrip("+") not in fixed]
    command = shell_command("launch", *typed, *(f"{key}={value}" for key, value in fixed.items()))
    saved = any((run_dir / CHECKPOINTS).glob("step-*"))
    return f"To go on: {command}" if saved else f"There is no checkpoint yet. To start over: {command}"


def _print_summary(manifest: Manifest, run_dir: Path) -> None:
    progress, quality = manifest.progress, manifest.quality
    for entry in quality.validation if quality else []:
        loss = "not finite" if entry["loss"] is None else f"{entry['loss']:.4g}"
        print(f"validation loss at step {entry['step']}: {loss}")
    print(f"{manifest.status}: {pluralize(progress.step if progress else 0, 'step')}{manifest.pace}")
    if quality and quality.weights:
        echo(f"weights: {run_dir / quality.weights}")
