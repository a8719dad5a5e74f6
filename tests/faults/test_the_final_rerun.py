"""One `rerun` per sweep of the matrix completes it. Runs after the modules that check the first attempts."""

from __future__ import annotations

from typing import Any

import pytest

from inpaint_bench.cli import app

from .matrix import CAUSES, STEPS, Matrix
from .support import SHORT, losses, manifest, nothing_to_submit, status_points, step

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rerun_matrix(matrix: Matrix) -> Matrix:
    every = "app_error,oom,lost,telemetry_incomplete"
    assert app.main(["rerun", str(matrix["causes"]), "--only", every, SHORT]) == 0
    assert app.main(["rerun", str(matrix["stopped"]), SHORT]) == 0
    assert app.main(["rerun", str(matrix["node"]), SHORT]) == 0
    assert app.main(["rerun", str(matrix["module"]), SHORT, "sites.grace.environment.modules=[]"]) == 0
    assert app.main(["rerun", str(matrix["late"]), SHORT]) == 0
    assert app.main(["rerun", str(matrix["twice_late"]), f"workload.train_steps={step(matrix['twice_late']) + 4}"]) == 0
    assert app.main(["rerun", str(matrix["taken"])]) == 0
    disk = matrix["disk"].resolve()
    for ballast in (disk / "marks").glob("ballast.*"):
        ballast.unlink()
    assert app.main(["rerun", str(disk), "--only", "app_error", SHORT]) == 0
    matrix.wait_until_ended()
    return matrix


@pytest.mark.parametrize("name", ["causes", "stopped", "node", "module", "late", "twice_late", "taken", "disk"])
def test_every_point_completes_as_a_second_attempt(rerun_matrix: Matrix, name: str, capsys: Any) -> None:
    folder = rerun_matrix[name].resolve()
    assert {(point["state"], point["attempt"]) for point in status_points(folder, capsys)} == {("completed", 2)}
    assert nothing_to_submit(folder, capsys)


def test_failed_node_is_not_used(rerun_matrix: Matrix) -> None:
    assert manifest(rerun_matrix["node"], attempt=2)["slurm"]["node"] != rerun_matrix.observed["node"]


def test_gpu_oom_is_rerun_under_another_label(rerun_matrix: Matrix) -> None:
    point = CAUSES.index("oom_gpu")
    labels = [manifest(rerun_matrix["causes"], point, attempt)["recipe"] for attempt in (1, 2)]
    assert labels == ["cpu", "cpu+grad_checkpoint"]


def test_preempted_training_continues_with_the_same_losses(rerun_matrix: Matrix) -> None:
    both = sorted(losses(rerun_matrix["taken"]) + losses(rerun_matrix["taken"], attempt=2))
    assert both == losses(rerun_matrix["undisturbed"])[:STEPS]
