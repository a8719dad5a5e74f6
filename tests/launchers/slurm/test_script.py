"""The sbatch scripts, compared with reviewed ones. `UPDATE_GOLDEN=1 pytest` rewrites those after an intended change."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from inpaint_bench.core.errors import UserError
from launchers.points.point import group_points
from launchers.slurm.script import render
from launchers.submit import checks
from tests.launchers.conftest import ACCOUNT

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = """a b'c"d$(id)`id`;&|<>*?~#!{e}"""


def script(points, *lines: str) -> str:
    (group,) = group_points(points(*lines))
    text = render(replace(group, name="00"), Path("/sweep"), Path("/sweep/code/0123456789ab"), "s1")
    return text.replace(sys.executable, "python")


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
        ("delta-h200-of-8", f"gpu=h200 gpus=8 {ACCOUNT}"),
        ("delta-a100-2x4", f"gpu=a100 site=delta gpus=4 nodes=2 telemetry=none {ACCOUNT}"),
        ("grace-a100-of-2", "gpu=a100 site=grace gpus=2"),
        (
            "grace-a100-container",
            "gpu=a100 sites.grace.environment.container.image=/scratch/user/me/inpaint-bench.sif",
        ),
        (
            "delta-a100-2x4-container",
            f"gpu=a100 site=delta gpus=4 nodes=2 telemetry=none {ACCOUNT} "
            "sites.delta.environment.container.image=/projects/abcd/inpaint-bench.sif "
            "sites.delta.environment.container.binds=[/projects/abcd/data:/data:ro]",
        ),
        ("grace-a40-mail", "gpu=a40 notify.mail=me@example.org"),
        ("delta-h200-counters", f"gpu=h200 profile=ncu {ACCOUNT}"),
        (
            "delta-h200-changed",
            f"gpu=h200 {ACCOUNT} sites.delta.qos=low sites.delta.use_srun=false "
            "sites.delta.constraint=[work,projects] sites.delta.environment.modules=[nccl] "
            "sites.delta.environment.setup=[hostname]",
        ),
    ],
)
def test_script_of_each_site_is_as_reviewed(points, name, line):
    text = script(points, line, line)
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
    subprocess.run(["bash", "-n", file], check=True)


def test_exported_variables_are_quoted(points):
    (point,) = points("gpu=a40")
    point.site.environment.variables["HERE"] = "a b$(id)"
    (group,) = group_points([point])
    text = render(group, Path("/f"), Path("/c"), "s")
    assert "export HERE='a b$(id)'" in text


def test_only_trainings_request_a_warning_signal(points):
    options = "#SBATCH --time=60\n#SBATCH --signal=USR2@120\n"
    assert options in script(points, f"gpu=h200 {ACCOUNT} workload.train_steps=9")
    assert "--signal" not in script(points, f"gpu=h200 {ACCOUNT}")


def test_control_character_never_reaches_a_directive(points):
    (point,) = points("gpu=a40")
    point.site.qos = "x\n#SBATCH --uid=0"
    (group,) = group_points([point])
    with pytest.raises(UserError, match="control character"):
        render(group, Path("/f"), Path("/c"), "s")


def test_invalid_variable_name_is_refused(points):
    (point,) = points("gpu=a40")
    point.site.environment.variables["A;B"] = "x"
    (group,) = group_points([point])
    with pytest.raises(UserError, match="not a variable name"):
        render(group, Path("/f"), Path("/c"), "s")


def script_of(point, sweep=Path("/sweep")):
    (group,) = group_points([point])
    return render(replace(group, name="00"), sweep, Path("/code"), "s")


def directives(text):
    """Options and values as sbatch reads them: quoted as for a shell."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    arguments = [shlex.split(line) for line in lines]
    assert all(len(argument) == 1 for argument in arguments), arguments
    return dict(argument[0].partition("=")[::2] for argument in arguments)


class TestQuoting:
    def test_directives_keep_values_with_special_characters(self, points):
        (point,) = points("gpu=a40")
        point.site.qos = point.site.account.value = HOSTILE
        point.site.constraint, point.site.exclude_nodes = [HOSTILE], ["gr01", HOSTILE]
        options = directives(script_of(point))
        assert (options["qos"], options["account"], options["constraint"]) == (HOSTILE,) * 3
        assert options["exclude"] == f"gr01,{HOSTILE}"

    def test_folder_reaches_the_job_as_one_argument(self, points):
        (point,) = points("gpu=a40")
        sweep = Path("/tmp", HOSTILE.replace("/", ""))
        text, folder = script_of(point, sweep), sweep / "jobs/00"
        assert directives(text)["output"] == str(folder / "%A_%a_0_log.out")
        (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
        printed = subprocess.run(
            ["bash", "-c", f"srun() {{ printf '%s\\n' \"${{@: -1}}\"; }}; {line}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert printed.stdout == f"{folder}\n"

    def test_module_is_one_argument(self, points):
        (point,) = points("gpu=a40")
        point.site.environment.modules = ["cuda; id"]
        assert "module load 'cuda; id'\n" in script_of(point)

    @pytest.mark.parametrize("char", ["\n", "\r", "\0", "\x1b", "\x7f"])
    def test_control_characters_are_refused(self, points, char):
        (point,) = points("gpu=a40")
        with pytest.raises(UserError, match="control character"):
            script_of(point, Path("/sweep", f"a{char}#SBATCH --uid=0"))
        (point,) = points("gpu=a40")
        point.site.python = f"/bin/py{char}x"
        (group,) = group_points([point])
        with pytest.raises(UserError, match="control character"):
            checks.script_of(group, Path("/sweep"), Path("/code"), "s1")
        for environment in ({"modules": [f"x{char}"]}, {"variables": {"A": f"x{char}"}}):
            (point,) = points("gpu=a40")
            for name, value in environment.items():
                setattr(point.site.environment, name, value)
            with pytest.raises(UserError, match="control character"):
                script_of(point)
