"""MLflow: a tracking server, or a folder that needs none."""

import os
from collections.abc import Sequence
from pathlib import Path

import mlflow
from mlflow.entities import Metric

from inpaint_bench.core.environment import without_credentials
from inpaint_bench.core.files import expand_path
from inpaint_bench.core.schema import Status

from .api import TrackedRun, Value

BATCH = 1000  # values that a server takes at once
_STATUS = {Status.COMPLETED: "FINISHED", Status.FAILED: "FAILED"}


class MLflow:
    """A run in the experiment `track.project`."""

    def __init__(self, run: TrackedRun) -> None:
        uri = run.settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or str(run.sweep_dir / "mlruns")
        if "://" not in uri:
            uri = str(expand_path(uri.removeprefix("file:")).absolute())
            # MLflow 3 refuses folders, in favour of databases, unless this is set. Jobs on several nodes of a cluster
            # cannot share a file of SQLite.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(uri)
        experiment = mlflow.set_experiment(run.project("MLFLOW_EXPERIMENT_NAME")).experiment_id
        # Its `start_run` would send facts about program and code.
        self._client = mlflow.MlflowClient()
        if run.tracked_run is None:
            tags = {**run.tags, "mlflow.user": os.environ.get("USER", "unknown")}
            self.tracked_run = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        else:
            self.tracked_run = run.tracked_run
            self._client.update_run(self.tracked_run, status="RUNNING")
        shown = without_credentials(uri) if "://" in uri else uri  # links are published
        place = f"{experiment}/{self.tracked_run}"
        if uri.startswith(("http://", "https://")):
            place = f"#/experiments/{experiment}/runs/{self.tracked_run}"
        self.link = f"{shown.rstrip('/')}/{place}"

    def log(self, values: Sequence[Value]) -> None:
        metrics = [Metric(value.name, value.value, round(1000 * value.unix_s), value.step) for value in values]
        for start_at in range(0, len(metrics), BATCH):
            self._client.log_batch(self.tracked_run, metrics[start_at : start_at + BATCH])

    def picture(self, name: str, path: Path, step: int) -> None:
        """Write a PNG file; the last one of a name stays."""
        self._client.log_artifact(self.tracked_run, str(path), artifact_path=name)

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self.tracked_run, _STATUS.get(status, "KILLED"))


start = MLflow
