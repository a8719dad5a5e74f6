"""After all that, one `rerun` per sweep, and everything is done. Runs last: the other modules look at what was left."""

from __future__ import annotations

from typing import Any

import pytest

from inpaint_bench.cli import app

from .matrix import CAUSES, STEPS, Matrix
from .support import SHORT, losses, manifest, nothing_to_send, step, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def healed(matrix: Matrix) -> Matrix:
    every = "app_error,oom,lost,telemetry_incomplete"
    assert app.main(["rerun", str(matrix["causes"]), "--only", every, SHORT]) == 0
    assert app.main(["rerun", str(matrix["stopped"]), SHORT]) == 0
    assert app.main(["rerun", str(matrix["node"]), SHORT]) == 0
    assert app.main(["rerun", str(matrix["module"]), SHORT, "sites.grace.environment.modules=[]"]) == 0
    assert app.main(["rerun", str(matrix["late"]), SHORT]) == 0
    assert app.main(["rerun", str(matrix["twice_late"]), f"workload.train_steps={step(matrix['twice_late']) + 4}"]) == 0
    assert app.main(["rerun", str(matrix["taken"])]) == 0
    disk = matrix["disk"].resolve()
    for ballast in (disk / "jobs").glob("*/ballast.*"):
        ballast.unlink()
    assert app.main(["rerun", str(disk), "--only", "app_error", SHORT]) == 0
    matrix.ended()
    return matrix


@pytest.mark.parametrize("name", ["causes", "stopped", "node", "module", "late", "twice_late", "taken", "disk"])
def test_completes_every_point_as_a_second_attempt(healed: Matrix, name: str, capsys: Any) -> None:
    folder = healed[name].resolve()
    assert {(point["state"], point["attempt"]) for point in told(folder, capsys)} == {("completed", 2)}
    assert nothing_to_send(folder, capsys)


def test_does_not_use_the_node_that_died(healed: Matrix) -> None:
    assert manifest(healed["node"], attempt=2)["slurm"]["node"] != healed.seen["node"]


def test_labels_anew_what_ran_out_of_gpu_memory(healed: Matrix) -> None:
    point = CAUSES.index("oom_gpu")
    labels = [manifest(healed["causes"], point, attempt)["recipe"] for attempt in (1, 2)]
    assert labels == ["cpu", "cpu+grad_checkpoint"]


def test_goes_on_with_the_same_losses_where_a_preemption_ended_the_first_attempt(healed: Matrix) -> None:
    both = sorted(losses(healed["taken"]) + losses(healed["taken"], attempt=2))
    assert both == losses(healed["alone"])[:STEPS]
