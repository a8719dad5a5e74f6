"""Test the test bed: two real Slurm clusters that behave like the sites and are removed completely."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.testbed.plan import STATE_PATH_LIMIT, free_port, port_is_taken

from .testbed import Bed, BedError, Plan, fixtures, packages, processes

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.faults  # all other tests on Slurm show that the test bed works


@pytest.fixture(params=["testbed", "testbed_light"])
def bed(request: pytest.FixtureRequest) -> Bed:
    """Run a test with and without a database."""
    found: Bed = request.getfixturevalue(request.param)
    return found


def submit(bed: Bed, site: str, *options: str, wrap: str = "true", cwd: Path | None = None) -> str:
    output = "--output=%j.out" if cwd else "--output=/dev/null"
    done = bed.run(site, "sbatch", "--parsable", output, *options, f"--wrap={wrap}", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().partition(";")[0]


def states(bed: Bed, site: str, job: str) -> list[str]:
    return [row["State"] for row in bed.sacct(site, [job])]


def wait_for(bed: Bed, site: str, job: str, *expected: str) -> None:
    bed.wait(
        lambda: sorted(states(bed, site, job)) == sorted(expected),
        what=f"job {job} to be {' '.join(expected)}",
    )


def reason(bed: Bed, site: str, job: str) -> str:
    return bed.run(site, "squeue", "-h", "-j", job, "-o", "%r").stdout.strip()


def traces(state: Path) -> list[str]:
    """Return the processes whose command or environment names the folder, independent of the bed's records."""
    found = []
    for entry in Path("/proc").iterdir():
        pid = int(entry.name) if entry.name.isdigit() else os.getpid()
        if pid == os.getpid() or processes.start_tick(pid) is None:
            continue
        try:
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            opened = [str(link.readlink()) for link in (entry / "fd").iterdir()]
        except OSError:
            continue
        if str(state).encode() in text or any(name.startswith(str(state)) for name in opened):
            found.append(entry.name)
    return found


@pytest.fixture
def real_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Let this machine have two GPUs, whose numbers do not begin at 0."""
    monkeypatch.setattr("tests.testbed.plan.DEVICES", tmp_path)
    for name in ("nvidia10", "nvidia3", "nvidiactl", "nvidia-caps"):
        (tmp_path / name).symlink_to("/dev/null")
    return [tmp_path / "nvidia3", tmp_path / "nvidia10"]


def command_line(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.testbed", *map(str, words)],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class TestJobs:
    def test_job_with_a_fresh_environment_does_not_run_the_users_profile(self, bed: Bed, tmp_path: Path) -> None:
        if packages.slurm_version() >= "26":
            pytest.skip("this Slurm keeps no login environments: it asks `su` for each job")
        job = submit(bed, "grace", "--partition=short", "--export=NONE", wrap="echo $PATH", cwd=tmp_path)
        wait_for(bed, "grace", job, "COMPLETED")
        assert (tmp_path / f"{job}.out").read_text().strip() == processes.login_env()["PATH"]


class TestUpAndDown:
    def test_a_killed_node_and_down_leave_no_process_and_no_file(self, testbed_light: Bed, tmp_path: Path) -> None:
        """Also slurmstepd, which overwrites its environment with its title or with blanks."""
        others = set(traces(testbed_light.state))
        with fixtures.temporary_bed(light=True, sites=("grace",)) as bed:
            wrap = "setsid -f sleep 500; echo ok; srun sleep 500"
            for node in ("gr01", "gr02"):
                submit(bed, "grace", "-pgpu", "--gres=gpu:a100:1", f"--nodelist={node}", wrap=wrap, cwd=tmp_path)
            bed.wait(lambda: comms(traces(bed.state)).count("slurmstepd") == 4, what="both steps of each job")
            bed.wait(lambda: comms(traces(bed.state)).count("sleep") == 4, what="their programs")
            ports = [port for port in bed.plan.ports() if port_is_taken(port)]
            bed.kill_node("grace", "gr01")
            assert comms(traces(bed.state)).count("slurmstepd") == 2
            assert comms(traces(bed.state)).count("sleep") == 2
            assert len(ports) == 6, "slurmctld and five nodes"
            bed.down()
            assert traces(bed.state) == []
            assert not any(port_is_taken(port) for port in ports)
            assert not bed.state.exists()
            bed.down()
        assert others <= set(traces(testbed_light.state)), "the other bed lives on"

    def test_jobs_at_once_get_a_gpu_each_of_those_that_the_machine_has(
        self, real_gpus: list[Path], tmp_path: Path
    ) -> None:
        with fixtures.temporary_bed(light=True, sites=("delta",), gpus=2) as bed:
            links = [link.readlink() for link in sorted((bed.plan.home("delta") / "dev").iterdir())]
            assert links == real_gpus
            # H100s have a partition of their own, on the same node; a third job waits for the first two.
            wrap = 'srun sh -c "echo $CUDA_VISIBLE_DEVICES"; until test -e go; do sleep 0.1; done'
            request = ("--gpus-per-node=1", "--cpus-per-task=12", "--mem=232G")
            partitions = ("gpuH200x8", "gpuH100", "gpuH100")
            jobs = [submit(bed, "delta", f"-p{name}", *request, wrap=wrap, cwd=tmp_path) for name in partitions]
            bed.wait(lambda: [states(bed, "delta", job) for job in jobs[:2]] == [["RUNNING"]] * 2)
            bed.wait(lambda: reason(bed, "delta", jobs[2]) == "Resources")
            outputs = [tmp_path / f"{job}.out" for job in jobs]
            bed.wait(lambda: sorted(file.read_text() for file in outputs[:2]) == ["0\n", "1\n"])
            (tmp_path / "go").touch()
            assert bed.ended("delta", jobs) == ["COMPLETED"] * 3

    def test_up_refuses_a_port_in_use_and_starts_nothing(self, testbed_light: Bed, tmp_path: Path) -> None:
        state = tmp_path.parent / "b"
        taken = testbed_light.plan.port
        done = command_line("up", "--light", "--state", state, "--port", str(taken))
        assert done.returncode == 1
        assert f"port {taken}, " in done.stderr
        assert "--port" in done.stderr
        assert not state.exists()

    def test_command_line_up_status_down(self, tmp_path: Path) -> None:
        state = Path(tempfile.mkdtemp(prefix="testbed-")) / "bed"
        here = {"INPAINT_BENCH_TESTBED": str(state)}
        up = ("up", "--light", "--sites", "delta", "--port", str(free_port()))
        try:
            assert command_line("install", "--light", **here).returncode == 0
            assert "delta (5 nodes)" in command_line(*up, **here).stdout
            assert "already up" in command_line(*up, **here).stdout
            assert "a bed is up" in command_line("up", **here).stderr
            shell = command_line("env", "delta", **here).stdout + "sbatch --wait --wrap=true; sacct -nPo State"
            done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert "COMPLETED" in done.stdout, done.stderr
            assert command_line("kill-node", "delta", "nosuch", **here).returncode == 1
            assert command_line("kill-node", "delta", "gpua001", **here).returncode == 0
            assert command_line("nudge", "delta", **here).stdout == ""
            assert command_line("start-node", "delta", "gpua001", **here).returncode == 0
            assert "gpuh001" in command_line("status", **here).stdout
        finally:
            assert command_line("down", **here).returncode == 0
        assert command_line("down", **here).returncode == 0
        assert not state.exists()
        state.parent.rmdir()

    def test_failed_up_stops_its_daemons_and_shows_the_log(self, monkeypatch: pytest.MonkeyPatch) -> None:
        packages.install(light=True)
        folder = Path(tempfile.mkdtemp(prefix="testbed-"))
        plan = Plan(state=folder / "bed", sites=("delta",), light=True, port=free_port())
        render = Plan.render
        broken = {"slurm.conf": "NoSuchOption=1\n"}
        monkeypatch.setattr(Plan, "render", lambda self, site, version: render(self, site, version) | broken)
        monkeypatch.setattr("tests.testbed.bed.NODES_READY_S", 1)
        with pytest.raises(BedError, match=r"idle[\s\S]*slurmctld\.out[\s\S]*NoSuchOption"):
            Bed(plan).up()
        assert traces(plan.state) == []
        Bed(plan).down()
        folder.rmdir()


def comms(pids: list[str]) -> list[str]:
    return [processes_name(pid) for pid in pids]


def processes_name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_a_version_of_slurm_that_no_suite_has_is_refused() -> None:
    done = command_line("make", "23.11", "faults")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "SLURM=23.11: no Debian suite here has it; must be one of 22.05 (bookworm), 24.11 (trixie), 26.05 (forky)\n"
    )


class TestPlan:
    def test_more_gpus_than_the_machine_has_are_refused(self, real_gpus: list[Path]) -> None:
        with pytest.raises(BedError, match="gpus=3: this machine has 2"):
            Plan(state=Path("/x/bed"), sites=("delta",), light=True, gpus=3)

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ({"sites": ("grace", "nowhere")}, "of: grace, delta"),
            ({"sites": ("grace", "grace")}, "once"),
            ({"gpus": 1}, "--sites delta"),
            ({"port": 65530}, "ports"),
            ({"state": Path("/x y")}, "blanks"),
            ({"state": Path("/" + "x" * STATE_PATH_LIMIT)}, "shorter folder"),
        ],
    )
    def test_wrong_plan_is_refused_with_the_valid_values(self, wrong: dict[str, object], words: str) -> None:
        with pytest.raises(BedError, match=words):
            Plan(**{"state": Path("/x/bed")} | wrong)  # type: ignore[arg-type]

    def test_folder_with_other_files_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packages, "require", lambda light: None)
        monkeypatch.setattr("tests.testbed.plan.STATE_PATH_LIMIT", 1000)
        (tmp_path / "thesis.tex").touch()
        bed = Bed(Plan(state=tmp_path))
        with pytest.raises(BedError, match="no test bed's"):
            bed.up()
        bed.down()
        assert (tmp_path / "thesis.tex").exists()
