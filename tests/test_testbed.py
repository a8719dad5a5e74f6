"""Test the test bed: two real Slurm clusters that behave like the sites and are removed completely."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testbed.plan import STATE_PATH_LIMIT, free_port, machine_gpus, port_is_taken

from .testbed import SITES, Bed, BedError, Plan, fixtures, packages, processes, unpack

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


def cancel(bed: Bed, site: str, job: str) -> None:
    assert bed.run(site, "scancel", job).returncode == 0


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
        job = submit(bed, "grace", "--partition=short", "--export=NONE", wrap="echo $PATH", cwd=tmp_path)
        wait_for(bed, "grace", job, "COMPLETED")
        assert (tmp_path / f"{job}.out").read_text().strip() == processes.login_env()["PATH"]

    def test_job_ids_of_the_sites_are_disjoint(self, testbed_light: Bed) -> None:
        ids = [int(submit(testbed_light, site, "--hold")) for site in SITES]
        for site, job in zip(SITES, ids, strict=True):
            cancel(testbed_light, site, str(job))
        assert ids[1] - ids[0] > 10_000_000


class TestStandIn:
    def test_sacct_standin_lists_pending_tasks_like_sacct(self, bed: Bed) -> None:
        job = submit(bed, "grace", "--array=1-9:4%2", "--hold")
        bed.wait(lambda: states(bed, "grace", job) == ["PENDING"])
        row = bed.sacct("grace", [job])[0]
        cancel(bed, "grace", job)
        assert row["JobID"] == f"{job}_[1,5,9%2]"
        assert row["NodeList"] == "None assigned"

    def test_sacct_standin_finds_a_single_task_and_refuses_unknown_options(self, testbed_light: Bed) -> None:
        job = submit(testbed_light, "grace", "--array=0-1")
        wait_for(testbed_light, "grace", job, "COMPLETED", "COMPLETED")
        assert [row["JobID"] for row in testbed_light.sacct("grace", [f"{job}_1"])] == [f"{job}_1"]
        assert testbed_light.run("grace", "sacct", "-o", "MaxRSS").returncode == 1
        assert testbed_light.run("grace", "sacct", "--user=nobody").returncode == 2


class TestUpAndDown:
    def test_two_test_beds_run_at_the_same_time(self, testbed: Bed, testbed_light: Bed) -> None:
        assert testbed.is_up()
        assert testbed_light.is_up()
        assert not set(testbed.plan.ports()) & set(testbed_light.plan.ports())
        job = submit(testbed, "grace", "--hold", "--job-name=mine")
        names = [bed.run("grace", "squeue", "-h", "-o", "%j").stdout for bed in (testbed, testbed_light)]
        cancel(testbed, "grace", job)
        assert "mine" in names[0]
        assert "mine" not in names[1]

    def test_down_removes_processes_ports_and_folder(self, testbed_light: Bed, tmp_path: Path) -> None:
        """Also slurmstepd, which overwrites its environment with its title."""
        others = set(traces(testbed_light.state))
        with fixtures.temporary_bed(light=True, sites=("grace",)) as bed:
            wrap = "setsid -f sleep 500; echo ok; srun sleep 500"
            job = submit(bed, "grace", "--partition=gpu", "--gres=gpu:a100:1", wrap=wrap, cwd=tmp_path)
            bed.wait(lambda: "sleep" in "".join(comms(traces(bed.state))), what=f"{job} to start its step")
            bed.wait(lambda: comms(traces(bed.state)).count("slurmstepd") == 2, what="both steps")
            ports = [port for port in bed.plan.ports() if port_is_taken(port)]
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
        monkeypatch.setattr(Plan, "render", lambda self, site: render(self, site) | broken)
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


class TestPlan:
    def test_ports_of_daemons_are_distinct(self) -> None:
        plan = Plan(state=Path("/x/bed"))
        used = [port for site in SITES for port in re.findall(r"Port=(\d+)", plan.render(site)["slurm.conf"])]
        used = [port for port in used if int(port) != plan.slurmdbd_port]
        assert len(used) == len(set(used)) == sum(len(plan.nodes(site)) + 1 for site in SITES)
        assert {int(port) for port in used} | {plan.slurmdbd_port, plan.mariadb_port} <= set(plan.ports())

    def test_bed_with_real_gpus_is_one_node_that_numbers_them_from_zero(self, real_gpus: list[Path]) -> None:
        plan = Plan(state=Path("/x/bed"), sites=("delta",), light=True, gpus=2)
        texts = plan.render("delta")
        assert plan.nodes("delta") == ["gpuh001"]
        assert "NodeName=gpuh001 Name=gpu File=/x/bed/delta/dev/nvidia[0-1]\n" in texts["gres.conf"]
        assert " Gres=gpu:2 " in texts["slurm.conf"]
        assert re.search(r"^PartitionName=gpuH200x8 .*Default=YES", texts["slurm.conf"], re.MULTILINE)
        assert machine_gpus() == real_gpus

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


class TestProcesses:
    def test_pid_file_of_another_process_is_ignored(self, tmp_path: Path) -> None:
        file = tmp_path / "pid"
        file.write_text(f"{os.getpid()} {processes.start_tick(os.getpid())}\n")
        assert processes.ours(file, tmp_path) is None, "no mark"
        log, env = tmp_path / "log", processes.daemon_env(tmp_path, {})
        pid = processes.spawn(["sleep", "100"], pid_file=file, log=log, env=env)
        try:
            # Until the child has called exec, its environment is this process's.
            deadline = time.monotonic() + 30
            while processes.ours(file, tmp_path) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert processes.ours(file, tmp_path) == pid
            assert processes.ours(file, tmp_path / "other") is None
            file.write_text(f"{pid} 1\n")
            assert processes.ours(file, tmp_path) is None, "same number, other process"
        finally:
            processes.stop([pid], patience_s=5)
        assert processes.start_tick(pid) is None


class TestPackages:
    @pytest.fixture
    def bare(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
        """Simulate a machine without Slurm, as root or not."""

        def set_up(root: bool) -> None:
            monkeypatch.setattr("shutil.which", lambda *_, **__: None)
            monkeypatch.setattr("os.geteuid", lambda: 0 if root else 1000)

        return set_up

    def test_fixtures_skip_with_a_summary_or_fail_if_a_bed_is_required(
        self, bare: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bare(False)
        refusals: list[str] = []
        monkeypatch.setattr(fixtures, "_refusals", refusals)
        monkeypatch.delenv(fixtures.REQUIRE, raising=False)
        with pytest.raises(pytest.skip.Exception, match="NO SLURM TEST BED"):
            next(fixtures._bed_or_skip(light=True))
        assert len(refusals) == 1
        monkeypatch.setenv(fixtures.REQUIRE, "1")
        with pytest.raises(pytest.fail.Exception, match="NO SLURM TEST BED"):
            next(fixtures._bed_or_skip(light=True))


class TestUnpack:
    def test_package_is_unpacked_without_replacing_existing_files(self, tmp_path: Path) -> None:
        package, root = tmp_path / "package", tmp_path / "root"
        for name, text in {
            "DEBIAN/control": "Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n",
            "usr/sbin/slurmd-wlm": "new",
            "lib/systemd/slurmd.service": "new",
            "etc/there": "new",
            "usr/lib/x86_64-linux-gnu/libz.so.1.2.13": "new",
            "usr/lib/x86_64-linux-gnu/libnuma.so.1.0.0": "new",
            "usr/lib/x86_64-linux-gnu/slurm-wlm/libz.so.1": "new",
        }.items():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(text)
        (package / "usr/lib/x86_64-linux-gnu/libnuma.so.1").symlink_to("libnuma.so.1.0.0")
        subprocess.run(["dpkg-deb", "-b", package, tmp_path / "x.deb"], check=True, capture_output=True)
        for folder in ("etc", "usr/lib", "usr/sbin"):
            (root / folder).mkdir(parents=True)
        (root / "lib").symlink_to("usr/lib")
        (root / "etc/there").write_text("old")
        (root / "usr/sbin/slurmd").symlink_to("/etc/alternatives/nowhere")

        assert unpack.unpack([tmp_path / "x.deb"], root, {"libz.so.1"}) == 5
        assert (root / "etc/there").read_text() == "old"
        assert (root / "usr/lib/systemd/slurmd.service").read_text() == "new"
        assert not (root / "usr/lib/x86_64-linux-gnu/libz.so.1.2.13").exists()
        assert (root / "usr/lib/x86_64-linux-gnu/slurm-wlm/libz.so.1").exists()
        assert (root / "usr/lib/x86_64-linux-gnu/libnuma.so.1").read_text() == "new"
        assert (root / "usr/sbin/slurmd").read_text() == "new"
        assert unpack.unpack([tmp_path / "x.deb"], root, {"libz.so.1"}) == 0
