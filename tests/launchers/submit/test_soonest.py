"""`site=soonest`: which site a card's points go to, by what sbatch answers at each."""

import json
import re
import shutil
import subprocess

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config.site import SiteConfig
from launchers.slurm.starts import ask, read_start
from launchers.status.survey import poll_sweep
from launchers.sweep.ledger import Ledger
from tests.launchers.conftest import ACCOUNT
from tests.launchers.over_ssh import launch_sweep, queued_jobs, replace_ssh

NOW = 1795883031


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"sbatch: Job 7 to start at {NOW + 90} using 1 processors on nodes gr03 in partition gpu-a40", 90),
        (f"sbatch: Job 7 to start at {NOW} on cluster delta a using 1 processors on nodes gpub001 in partition g", 0),
        (f"sbatch: your account ends soon\nsbatch: Job 7 to start at {NOW + 7} using 1 processors on nodes a in b", 7),
        (f"sbatch: Job 7 to start at {NOW - 4} using 1 processors on nodes gr03 in partition gpu-a40", 0),
        ("sbatch: Job 7 to start at Unknown using 1 processors on nodes gr03 in partition gpu-a40", None),
        ("sbatch: Job 7 to start at 2026-11-28T16:23:51 using 1 processors on nodes gr03 in partition gpu", None),
        (f"sbatch: Job 7 to start at {NOW - 90000} using 1 processors on nodes gr03 in partition gpu-a40", None),
        (f"sbatch: Job 7 to start at {NOW} using 1 \nsbatch: Job 8 to start at {NOW + 9} using 1 processors", None),
        (f"Jobs like Job 7 to start at {NOW} using 1 processors", None),
        ("", None),
    ],
)
def test_start_is_what_sbatch_says_and_nothing_that_looks_like_it(answer, expected):
    done = subprocess.CompletedProcess([], 0, b"", answer.encode())
    assert read_start(done, NOW).wait_s == expected
    assert not read_start(done, NOW).refused
    assert read_start(subprocess.CompletedProcess([], 1, b"", answer.encode()), NOW).wait_s is None


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name specified", True),
        ("allocation failure: Required partition not available (inactive or drain)", True),
        ("allocation failure: Invalid account or account/partition combination specified", True),
        ("allocation failure: Unable to contact slurm controller (connect failure)", False),
        ("allocation failure: Socket timed out on send/recv operation", False),
        ("allocation failure: Unspecified error", False),
        ("sbatch: fatal: Unable to process configuration file", False),
        ("Killed", False),
    ],
)
def test_refusal_is_told_from_no_answer(answer, refused):
    assert read_start(subprocess.CompletedProcess([], 1, b"", answer.encode()), NOW).refused is refused


def test_sbatch_that_cannot_be_run_or_does_not_answer_gives_no_time(fake_command, monkeypatch):
    fake_command("sbatch", "sleep 60")
    site = SiteConfig(name="grace")
    site.limits.command_timeout_s = 1
    assert str(ask(site, "")) == "sbatch: no answer within 1 s"
    monkeypatch.setenv("PATH", "/nonexistent")
    assert str(ask(site, "")) == "sbatch: No such file or directory"


STARTS = 'Job 7 to start at $(($(date +%s) + {})) using 1 processors on nodes a in partition b"'


@pytest.mark.parametrize(
    ("grace", "delta", "site", "said"),
    [
        (600, 100, "delta", "grace: in 10 min; delta: in 2 min"),
        (20, 5, "grace", "grace: now; delta: now"),  # equal, so the home of the card
        (None, 7260, "delta", "grace: not known; delta: in 2 h 1 min"),
        (None, None, "grace", "grace: not known; delta: not known"),
        ("Invalid account", None, "delta", "grace: refused: Invalid account; delta: not known"),
        ("Unable to contact slurm controller (connect failure)", "Invalid qos", "grace", "delta: refused: Invalid qos"),
        ("Invalid account", "Invalid qos", None, "grace: refused: Invalid account; delta: refused: Invalid qos"),
    ],
)
def test_first_to_start_then_those_that_do_not_say(grace, delta, site, said, fake_command, tmp_path, capsys):
    lines = []
    for name, answer in (("grace", grace), ("delta", delta)):
        (tmp_path / name).touch()
        text = f'echo "allocation failure: {answer}" >&2; exit 1' if isinstance(answer, str) else ":"
        text = f'echo "sbatch: {STARTS.format(answer)} >&2' if isinstance(answer, int) else text
        lines.append(f"*/{name}) {text};;")
    calls = fake_command("sbatch", f"case $SLURM_CONF in {' '.join(lines)} esac")
    confs = [f"sites.{name}.connect.slurm_conf={tmp_path / name}" for name in ("grace", "delta")]
    words = ["-m", "gpu=a40", "batch=8,16", "repeats=2", "site=soonest", ACCOUNT, *confs, "dry_run=true"]
    code = launch.main([*words, f"hydra.sweep.dir={tmp_path / 'sweep'}", "--json"])
    printed = capsys.readouterr()
    if site is None:
        assert code == 2
        assert f"no site takes gpu=a40 now ({said}); site=grace submits there all the same" in printed.err
    else:
        (array,) = json.loads(printed.out)["arrays"]
        assert (code, array["site"], len(array["points"])) == (0, site, 4)
        assert said in array["soonest"]
    assert len(calls.read_text().splitlines()) == 2 + (site is not None)  # the dry run asks about the array itself


@pytest.fixture
def full(testbed, monkeypatch):
    """Fill the A40s of grace for three hours."""
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    job = ["-p", "gpu-a40", "--gres=gpu:a40:2", "--time=180", "-o", "/dev/null", "--parsable", "--wrap=sleep 9999"]
    job_id = testbed.run("grace", "sbatch", *job).stdout.strip()
    testbed.wait(lambda: "R" in testbed.run("grace", "squeue", "-h", "-j", job_id, "-o", "%t").stdout)
    yield
    testbed.run("grace", "scancel", job_id)


class TestTwoSites:
    def test_points_go_where_they_start_first_and_stay_there(self, testbed, full, fake_command, tmp_path, capsys):
        calls, folder = fake_command("sbatch", f'exec {shutil.which("sbatch")} "$@"'), tmp_path / "sweep"
        words = ["-m", "gpu=a40,a100", "batch=2,3", "site=soonest", "profile=testbed", f"hydra.sweep.dir={folder}"]
        words += ["workload.min_measure_s=120"]  # none ends before it is cancelled
        assert launch.main(words) == 0
        out = capsys.readouterr().out
        assert re.search(r"delta +gpuA40x4 .*grace: in 3 h; delta: now", out)
        assert re.search(r"grace +gpu .*grace: now; delta: now", out)
        assert calls.read_text().count("--test-only\n") == 4  # once for each card and site
        assert app.main(["cancel", str(folder)]) == 0
        # Until sacct has each task's end, a point's state may be unknown, which a rerun refuses.
        testbed.wait(lambda: {status.reason for status in poll_sweep(Ledger.open(folder)).points} == {"cancelled"})
        sites = [point.record.site for point in poll_sweep(Ledger.open(folder)).points]
        assert sites == ["delta", "delta", "grace", "grace"]
        for words, site in (([], "delta"), (["site=grace"], "grace"), (["site=soonest"], "delta")):
            capsys.readouterr()
            assert app.main(["rerun", str(folder), *words, "--only", "cancelled", "--dry-run", "--json"]) == 0
            printed = capsys.readouterr().out
            assert {array["site"] for array in json.loads(printed)["arrays"] if "a40" in array["array"]} == {site}

    def test_site_over_ssh_is_asked_by_its_own_clock_and_without_its_shell(
        self, testbed, full, tmp_path, monkeypatch, capsys
    ):
        shell = f"export TZ=Asia/Tokyo SBATCH_PARTITION=nosuch SLURM_CONF={testbed.conf('delta')}; echo Welcome"
        replace_ssh(tmp_path, monkeypatch, bashrc=shell)
        connect = {"method": "ssh", "host": "login", "folder": "/f", "slurm_conf": "null"}
        words = [f"sites.delta.connect.{key}={value}" for key, value in connect.items()]
        words += ["-m", "gpu=a40", "batch=2", "site=soonest", "profile=testbed", "dry_run=true"]
        assert launch.main([*words, "sites.delta.python=/p", f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
        assert "grace: in 3 h; delta: now" in capsys.readouterr().out

    def test_points_are_submitted_over_ssh(self, login_nodes, full, tmp_path, capsys):
        folder = tmp_path / "sweep"
        assert launch_sweep(login_nodes, folder, "gpu=a40", "batch=2,3", "repeats=2", "site=soonest") == 0
        assert "grace: in 3 h; delta: now" in capsys.readouterr().out
        assert len(queued_jobs(login_nodes, folder)) == 4
        assert app.main(["cancel", str(folder)]) == 0
