"""What others could put in our way: folders that they can write to, and values that a shell would read."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from inpaint_bench.core.errors import UserError
from launchers import entry
from launchers.points.group import group_points
from launchers.slurm.script import render
from launchers.submit import dry_run
from launchers.sweep import private_dirs, snapshot

HOSTILE = """a b'c"d$(id)`id`;&|<>*?~#!{e}"""


def script_of(point, folder=Path("/sweep/jobs/00")):
    (group,) = group_points([point])
    return render(
        group, command=entry.command(sys.executable, folder), folder=folder, code=Path("/code"), job_name="inpaint-s-0"
    )


def directives(text):
    """Option and value as sbatch reads them: words as a shell quotes them."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    words = [shlex.split(line) for line in lines]
    assert all(len(one) == 1 for one in words), words
    return dict(one[0].partition("=")[::2] for one in words)


class TestFoldersWithPickles:
    def test_are_made_for_us_alone_whatever_the_umask(self, tmp_path):
        before = os.umask(0)
        try:
            folder = private_dirs.make(tmp_path / "jobs" / "00")
        finally:
            os.umask(before)
        assert [oct(one.stat().st_mode & 0o777) for one in (folder, folder.parent)] == ["0o700", "0o700"]
        private_dirs.check(folder)

    @pytest.mark.parametrize("which", ["jobs", "jobs/00"])
    def test_are_refused_where_others_may_enter(self, tmp_path, which):
        folder = private_dirs.make(tmp_path / "jobs" / "00")
        (tmp_path / which).chmod(0o770)
        with pytest.raises(UserError, match=r"mode 0770 lets others in.*chmod 700"):
            private_dirs.check(folder)
        with pytest.raises(UserError, match="mode 0770"):
            private_dirs.make(folder)

    def test_are_refused_where_they_are_links(self, tmp_path):
        theirs = private_dirs.make(tmp_path / "theirs" / "00")
        (tmp_path / "jobs").symlink_to(theirs.parent)
        with pytest.raises(UserError, match="no link"):
            private_dirs.make(tmp_path / "jobs" / "00")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
    def test_are_refused_where_they_are_somebody_elses(self, tmp_path):
        folder = private_dirs.make(tmp_path / "jobs" / "00")
        os.chown(folder, 65534, 65534)
        with pytest.raises(UserError, match="belongs to user 65534"):
            private_dirs.check(folder)

    def test_a_job_loads_nothing_from_one_that_others_may_enter(self, tmp_path):
        """A pickle that would leave a trace when it is loaded lies ready, and is not loaded."""
        folder = private_dirs.make(tmp_path / "jobs" / "00")
        (folder / "7_submitted.pkl").write_bytes(b"cposix\nsystem\n(S'touch " + bytes(tmp_path / "loaded") + b"'\ntR.")
        job = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
        environment = {**os.environ, **job, "PYTHONPATH": str(Path(entry.__file__).parents[1])}
        command = ["bash", "-c", entry.command(sys.executable, folder)]
        folder.chmod(0o777)
        refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        assert "mode 0777 lets others in" in refused.stderr
        assert not (tmp_path / "loaded").exists()
        folder.chmod(0o700)
        subprocess.run(command, env=environment, capture_output=True, check=False)
        assert (tmp_path / "loaded").exists(), "the same pickle is loaded from a folder of ours"


class TestValuesForSlurmAndTheShell:
    def test_come_out_of_the_script_as_they_went_in(self, points):
        (point,) = points("gpu=a40")
        point.site.qos = point.site.wckey = point.site.account.value = HOSTILE
        point.site.constraint, point.site.exclude_nodes = [HOSTILE], ["gr01", HOSTILE]
        found = directives(script_of(point))
        assert (found["qos"], found["wckey"], found["account"], found["constraint"]) == (HOSTILE,) * 4
        assert found["exclude"] == f"gr01,{HOSTILE}"

    def test_of_a_folder_reach_the_job_as_one_argument(self, points):
        (point,) = points("gpu=a40")
        folder = Path("/tmp", HOSTILE.replace("/", ""), "jobs")
        text = script_of(point, folder)
        assert directives(text)["output"] == str(folder / "%A_%a_0_log.out")
        (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
        printed = subprocess.run(
            ["bash", "-c", f"srun() {{ printf '%s\\n' \"${{@: -1}}\"; }}; {line}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert printed.stdout == f"{folder}\n"

    def test_a_module_is_one_word(self, points):
        (point,) = points("gpu=a40")
        point.site.environment.modules = ["cuda; id"]
        assert "module load 'cuda; id'\n" in script_of(point)

    @pytest.mark.parametrize("sign", ["\n", "\r", "\0", "\x1b", "\x7f"])
    def test_with_a_control_character_are_refused(self, points, sign):
        (point,) = points("gpu=a40")
        with pytest.raises(UserError, match="control character"):
            script_of(point, Path("/sweep", f"a{sign}#SBATCH --uid=0", "jobs"))
        (point,) = points("gpu=a40")
        point.site.python = f"/bin/py{sign}x"
        (group,) = group_points([point])
        with pytest.raises(UserError, match="control character"):
            dry_run.script(group, Path("/sweep"), Path("/code"), "s1")
        for environment in ({"modules": [f"x{sign}"]}, {"variables": {"A": f"x{sign}"}}):
            (point,) = points("gpu=a40")
            for name, value in environment.items():
                setattr(point.site.environment, name, value)
            with pytest.raises(UserError, match="control character"):
                script_of(point)

    @pytest.mark.parametrize("sign", ["%", "\\"])
    def test_a_folder_that_slurm_would_read_as_a_pattern_is_refused(self, points, sign):
        with pytest.raises(UserError, match="as a pattern"):
            dry_run.check(points("gpu=a40"), Path("/sweep", f"a{sign}j"), None)


class TestCode:
    """What a job imports is as good as a pickle."""

    def test_nobody_else_can_enter_the_code_of_a_sweep(self, tmp_path):
        (tmp_path / "code").mkdir(mode=0o775)
        snapshot.take(tmp_path / "code")
        assert (tmp_path / "code").stat().st_mode & 0o077 == 0

    @pytest.mark.parametrize("name", ["launchers/entry.py", "torch.py"])
    def test_stored_code_that_was_changed_is_not_run(self, name, tmp_path):
        code = snapshot.take(tmp_path / "code")
        assert snapshot.take(tmp_path / "code") == code
        with (code / name).open("a") as file:
            file.write("# evil")
        with pytest.raises(UserError, match="is not the code that it was named after"):
            snapshot.take(tmp_path / "code")
