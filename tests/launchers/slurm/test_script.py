"""The sbatch scripts, compared with reviewed ones. `UPDATE_GOLDEN=1 pytest` rewrites those after an intended change."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import templates_dir
from launchers.points.point import group_points
from launchers.slurm import sbatch as scripts
from launchers.slurm.sbatch import render
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
        text = script_of(point, sweep)
        assert directives(text)["output"] == str(sweep / "jobs/00" / "%A_%a_0_log.out")
        (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
        printed = subprocess.run(
            ["bash", "-c", f"srun() {{ printf '%s\\n' \"${{@: -2:1}}\"; }}; {line}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert printed.stdout == f"{sweep / 'points'}\n"

    def test_module_is_one_argument(self, points):
        (point,) = points("gpu=a40")
        point.site.environment.modules = ["cuda; id"]
        assert "module load 'cuda; id'\n" in script_of(point)

    @pytest.mark.parametrize("char", ["\n", "\x1b"])
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


def test_a_job_knows_its_end_from_the_first_line_on(points):
    (point,) = points("gpu=a40")
    point.site.environment.setup = ["sleep 99"]
    lines = [line for line in script_of(point).splitlines() if line and not line.startswith("#")]
    assert lines[0] == "export INPAINT_BENCH_END_UNIX=$(($(date +%s) + 3600))"


NAMES = (
    "nodes",
    "ntasks-per-node",
    "cpus-per-task",
    "mem",
    "gres",
    "time",
    "requeue",
    "open-mode",
    "output",
    "error",
)


class TestDirectives:
    @pytest.mark.parametrize("name", [*NAMES, "account", "partition", "export", "get-user-env"])
    def test_every_directive_can_be_left_out_and_replaced(self, points, name):
        (point,) = points("gpu=a40 sites.grace.account.value=123456789012")
        before = directives(script_of(point))
        assert name in before
        point.site.directives = {name: None}
        assert directives(script_of(point)) == {key: value for key, value in before.items() if key != name}
        point.site.directives = {name: "7"}
        assert directives(script_of(point)) == before | {name: "7"}

    def test_cores_that_are_not_requested_are_not_passed_to_srun(self, points):
        for line in ("sites.grace.directives.cpus-per-task=null", "sites.grace.gpus.a40.cpus_per_gpu=null"):
            text = script(points, f"gpu=a40 {line}")
            assert "cpus-per-task" not in text
            assert "\nsrun --unbuffered --export=ALL " in text
        assert "INPAINT_BENCH_END" not in script(points, "gpu=a40 sites.grace.directives.time=null")

    def test_values_are_quoted_and_may_be_missing(self, points):
        (point,) = points("gpu=a40")
        point.site.directives = {"exclusive": "", "comment": HOSTILE}
        options = directives(script_of(point))
        assert (options["exclusive"], options["comment"]) == ("", HOSTILE)
        assert "#SBATCH --exclusive\n" in script_of(point)

    def test_site_without_cores_and_memory_leaves_both_to_slurm(self, points):
        keys = "cpus_per_gpu=null sites.grace.gpus.a40.mem_gb_per_gpu=null"
        (point,) = points(f"gpu=a40 sites.grace.gpus.a40.{keys}")
        assert {"mem", "cpus-per-task"}.isdisjoint(directives(script_of(point)))
        assert str(point.request) == "gres=gpu:a40:1"
        (point,) = points(f"gpu=a40 mem_gb=9 sites.grace.gpus.a40.{keys}")
        assert directives(script_of(point))["mem"] == "9G"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("sites.grace.directives.array=null", r"directives='array': must be an option of sbatch in full"),
            ("sites.grace.directives.job-name=x", r"directives='job-name': must be"),
            ("sites.grace.directives.Mem=4G", r"directives='Mem': must be"),
            (
                "sites.grace.directives.mem=null mem_gb=5",
                r"mem_gb=5: sites\.grace\.directives\.mem stands in its place",
            ),
            (
                "gpus=2 sites.grace.directives.ntasks-per-node=null",
                r"ntasks-per-node: is left out, and a job of 2 needs",
            ),
            (
                "nodes=2 telemetry=none sites.grace.directives.nodes=null",
                r"directives\.nodes: is left out, and a job of 2",
            ),
        ],
    )
    def test_what_would_break_a_job_is_refused(self, points, line, message):
        with pytest.raises(UserError, match=message):
            script(points, f"gpu=a100 site=grace {line}")

    def test_ranks_may_be_requested_in_another_way(self, points):
        line = "gpu=a100 site=grace gpus=2 sites.grace.directives={ntasks-per-node:null,ntasks:2}"
        assert "#SBATCH --ntasks=2\n" in script(points, line)

    @pytest.mark.parametrize("wanted", ["memory per CPU", "no `--mem`", "a QOS"])
    def test_examples_of_the_documentation(self, points, wanted):
        text = (Path(__file__).parents[3] / "docs" / "sites.md").read_text()
        (line,) = re.findall(rf"^\| {wanted} \| .*`([\w-]+: [^`]+)` \|$", text, re.MULTILINE)
        key, _, value = line.partition(": ")
        before = directives(script_of(*points("gpu=a40")))
        (point,) = points(f"gpu=a40 sites.grace.{key}={value.replace(': ', ':').replace(', ', ',')}")
        added = {"memory per CPU": {"mem-per-cpu": "4G"}, "no `--mem`": {}, "a QOS": {"qos": "debug"}}[wanted]
        gone = {"mem"} if "mem" in wanted else set()
        assert directives(script_of(point)) == {k: v for k, v in before.items() if k not in gone} | added

    @pytest.mark.parametrize(
        ("line", "asked"),
        [
            ("-J mine", "job-name=mine"),
            ("--job-n mine", "job-name=mine"),
            ("-a 0-99", "array=0-99"),
            ("--mem=1G --arr=0-99", "array=0-99"),
            ("--array=0-0%4", ""),
            ("--comment='-a b'", ""),
        ],
    )
    def test_template_keeps_what_jobs_are_found_by(self, line, asked, points, tmp_path, monkeypatch):
        """Regression: such jobs were not found, and `rerun` submitted them again."""
        shutil.copytree(templates_dir(), tmp_path / "templates")
        block = f"{{% block directives %}}\n#SBATCH {line}\n{{% endblock %}}\n"
        (tmp_path / "templates" / "mine.sh.j2").write_text(f'{{% extends "base.sh.j2" %}}\n{block}')
        monkeypatch.setattr(scripts, "templates_dir", lambda: tmp_path / "templates")
        scripts._environment.cache_clear()
        (point,) = points("gpu=a40")
        point.site.template = "mine.sh.j2"
        try:
            if asked:
                with pytest.raises(UserError, match=rf"mine.sh.j2\) has --{asked}, and .* must stay"):
                    script_of(point)
            else:
                script_of(point)
        finally:
            scripts._environment.cache_clear()

    def test_directive_shortened_to_one_that_stays_is_refused(self, points):
        (point,) = points("gpu=a40 +sites.grace.directives.arr=0-9")
        with pytest.raises(UserError, match="--array=0-0, by which its jobs are found, must stay"):
            script_of(point)

    def test_template_of_the_documentation_replaces_directives(self, points, tmp_path, monkeypatch):
        text = (Path(__file__).parents[3] / "docs" / "sites.md").read_text()
        (template,) = re.findall(r"```jinja\n(.*?)```", text, re.DOTALL)
        shutil.copytree(templates_dir(), tmp_path / "templates")
        (tmp_path / "templates" / "mine.sh.j2").write_text(template)
        monkeypatch.setattr(scripts, "templates_dir", lambda: tmp_path / "templates")
        scripts._environment.cache_clear()
        (point,) = points("gpu=a40 sites.grace.qos=low")
        before = directives(script_of(point))
        point.site.template = "mine.sh.j2"
        added = {"mem-per-cpu": "4G", "clusters": "delta", "reservation": "training", "qos": "debug"}
        try:
            text = script_of(point)
        finally:
            scripts._environment.cache_clear()
        assert directives(text) == {key: value for key, value in before.items() if key not in ("mem", "qos")} | added
        assert text.index("#SBATCH --qos") < text.index("export INPAINT_BENCH_END_UNIX")
