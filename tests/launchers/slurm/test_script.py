"""The sbatch scripts, letter by letter. `UPDATE_GOLDEN=1 pytest` writes them anew after a change that is meant."""

import os
import subprocess
from pathlib import Path

import pytest

from inpaint_bench.core.errors import UserError
from launchers.points.group import group_points
from launchers.slurm.script import render
from tests.launchers.conftest import ACCOUNT

GOLDEN = Path(__file__).parent / "golden"


def script(points, *lines: str) -> str:
    (group,) = group_points(points(*lines))
    return render(
        group,
        command="python -u -m launchers.entry /sweep/jobs/00",
        folder=Path("/sweep/jobs/00"),
        code=Path("/sweep/code/0123456789ab"),
        job_name="inpaint-s1-00",
    )


@pytest.fixture(autouse=True)
def _bare_shell(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("grace-a40", "gpu=a40"),
        ("grace-a100", "gpu=a100 sites.grace.account.value=123456789012 time_min=240"),
        ("delta-a100", f"gpu=a100 site=delta {ACCOUNT}"),
        ("delta-h200", f"gpu=h200 {ACCOUNT}"),
        (
            "delta-h200-changed",
            f"gpu=h200 {ACCOUNT} sites.delta.qos=low sites.delta.use_srun=false sites.delta.wckey=w "
            "sites.delta.constraint=[scratch,projects] sites.delta.environment.modules=[nccl] "
            "sites.delta.environment.setup=[hostname]",
        ),
    ],
)
def test_the_script_of_each_site_is_as_reviewed(points, name, line):
    text = script(points, line, line)
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
    subprocess.run(["bash", "-n", file], check=True)


def test_what_a_site_exports_is_quoted_for_the_shell(points):
    (point,) = points("gpu=a40")
    point.site.environment.variables["HERE"] = "a b$(id)"
    (group,) = group_points([point])
    text = render(group, command="true", folder=Path("/f"), code=Path("/c"), job_name="n")
    assert "export HERE='a b$(id)'" in text


def test_only_a_training_asks_for_a_warning(points):
    asked = "#SBATCH --time=60\n#SBATCH --signal=USR2@120\n"
    assert asked in script(points, f"gpu=h200 {ACCOUNT} workload.train_steps=9")
    assert "--signal" not in script(points, f"gpu=h200 {ACCOUNT}")


@pytest.mark.parametrize("field", ["qos", "wckey"])
def test_a_control_character_never_reaches_a_directive(points, field):
    (point,) = points("gpu=a40")
    setattr(point.site, field, "x\n#SBATCH --uid=0")
    (group,) = group_points([point])
    with pytest.raises(UserError, match="control character"):
        render(group, command="true", folder=Path("/f"), code=Path("/c"), job_name="n")


def test_a_variable_that_is_no_name_is_refused(points):
    (point,) = points("gpu=a40")
    point.site.environment.variables["A;B"] = "x"
    (group,) = group_points([point])
    with pytest.raises(UserError, match="not a name of a variable"):
        render(group, command="true", folder=Path("/f"), code=Path("/c"), job_name="n")
