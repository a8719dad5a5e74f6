"""A site that is reached over ssh: a real sshd in front of the second cluster, and what can go wrong between."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from inpaint_bench import cancel, collect, launch, merge, rerun, status
from inpaint_bench.config import Reach, SiteConfig, check_reach
from inpaint_bench.errors import UserError
from launchers import remote, ssh
from launchers.ledger import Ledger
from launchers.watch import sites_of
from tests.testbed import Bed
from tests.testbed.errors import PackagesError
from tests.testbed.fixtures import REQUIRE
from tests.testbed.ssh import LoginNodes, install

QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]
PARTITION = ("scontrol", "update", "partitionname=gpuH200x8")


@pytest.fixture(scope="module")
def nodes(testbed: Bed) -> Iterator[LoginNodes]:
    """A login node of delta that greets everyone. Needs Debian's openssh-server and rsync."""
    try:
        install()
    except PackagesError as error:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    nodes = LoginNodes(testbed)
    nodes.up("delta")
    yield nodes
    nodes.down()


@pytest.fixture(autouse=True)
def _bed(request, monkeypatch):
    if "nodes" in request.fixturenames:
        monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(request.getfixturevalue("testbed").state))


def sweep(nodes: LoginNodes, folder: Path, *overrides: str, timeout_s: float = 30) -> int:
    """Delta over ssh, all else as in the profile."""
    reach = {
        "method": "ssh",
        "host": "delta-login",
        "ssh_config": nodes.config,
        "folder": nodes.bed.state / "scratch",
        "timeout_s": int(timeout_s),
    }
    over = [f"sites.delta.reach.{key}={value}" for key, value in reach.items()]
    over += [f"sites.delta.python={sys.executable}", "profile=testbed", *QUICK]
    return launch.main(["-m", *over, *overrides, f"hydra.sweep.dir={folder}"])


def told(folder: Path, capsys) -> list[dict]:
    capsys.readouterr()
    assert status.main([str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    return said["points"] if isinstance(said, dict) else said


def jobs(nodes: LoginNodes, folder: Path) -> list[str]:
    """What delta's Slurm holds of a sweep."""
    name = Ledger.open(folder).sweep["sweep_id"]
    listed = nodes.bed.run("delta", "squeue", "-h", "-r", "-o", "%i %j").stdout.splitlines()
    return [line.split()[0] for line in listed if name in line]


@pytest.mark.testbed
def test_one_command_sends_nine_points_by_slurm_and_by_ssh_and_all_come_back(nodes, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "sweep"
    assert sweep(nodes, folder, "gpu=a40,a100,h200", "batch=2,3,4", "wait=true") == 0
    assert not list(folder.glob("plan.*"))
    assert {point["state"] for point in told(folder, capsys)} == {"completed"}
    ids = [a.job_id for p in Ledger.open(folder).points().values() for a in p.attempts if a.site == "delta"]
    states = {row["JobID"]: row["State"] for row in nodes.bed.sacct("delta")}
    assert [states[job] for job in ids] == ["COMPLETED"] * 3
    assert not (folder / "6").exists()

    assert collect.main([str(folder)]) == 0
    assert re.search(r"delta: \d+ new files of 3 runs", capsys.readouterr().out)
    assert collect.main([str(folder)]) == 0
    assert "delta: nothing new" in capsys.readouterr().out
    assert merge.main([str(folder), "-o", str(tmp_path / "dataset")]) == 0
    runs = pl.read_parquet(tmp_path / "dataset" / "runs.parquet")
    assert runs.group_by("site").len().sort("site").rows() == [("delta", 3), ("grace", 6)]
    assert runs["valid"].all()
    (code,) = {path.name for path in (folder / "code").iterdir()}
    manifest = json.loads((folder / "6" / "attempt-1" / "manifest.json").read_text())
    assert manifest["environment"]["git"]["content_sha256"].startswith(code)
    assert not list(folder.rglob("6/**/*.pkl"))

    monkeypatch.setattr(remote.Place, "ask", lambda *_, **__: pytest.fail("what lies here needs no asking"))
    assert {point["state"] for point in told(folder, capsys)} == {"completed"}
    assert rerun.main([str(folder)]) == 0
    assert "Nothing to send again" in capsys.readouterr().out


@pytest.fixture
def waiting(nodes) -> Iterator[None]:
    """Delta's jobs wait, so that nothing moves by itself."""
    nodes.bed.run("delta", *PARTITION, "state=down")
    yield
    nodes.bed.run("delta", "scancel", "--user", "root")
    nodes.bed.run("delta", *PARTITION, "state=up")


@pytest.fixture
def queued(nodes, waiting, tmp_path) -> Path:
    """A sweep of one point that waits at delta."""
    folder = tmp_path / "queued"
    assert sweep(nodes, folder, "gpu=h200", "batch=2", timeout_s=4) == 0
    return folder


@pytest.mark.testbed
class TestBetween:
    def test_a_site_that_is_gone_is_a_missing_witness_and_its_points_are_not_lost(self, nodes, queued, capsys):
        assert [point["state"] for point in told(queued, capsys)] == ["queued"]
        nodes.stop("delta")
        try:
            (point,) = told(queued, capsys)
            assert point["state"] == "unknown"
            assert re.search(r"ssh delta-login: .*Connection refused", point["message"])
            assert rerun.main([str(queued)]) == 0
            assert "Nothing to send again" in capsys.readouterr().out
            for command in (cancel, collect):
                assert command.main([str(queued)]) == 2
                assert "delta-login" in capsys.readouterr().err
            assert [point["state"] for point in told(queued, capsys)] == ["unknown"]
        finally:
            nodes.start("delta")
        assert cancel.main([str(queued)]) == 0
        nodes.bed.wait(lambda: [point["reason"] for point in told(queued, capsys)] == ["cancelled"])
        assert jobs(nodes, queued) == []

    def test_points_for_a_site_that_does_not_answer_wait_in_a_plan_until_it_does(
        self, nodes, waiting, tmp_path, capsys
    ):
        folder = tmp_path / "sweep"
        with nodes.another_host_key("delta"):
            assert sweep(nodes, folder, "gpu=h200", "batch=2,3") == 0
            out = capsys.readouterr().out
            assert "Host key verification failed" in out
            assert "They wait in" in out
            assert [point["state"] for point in told(folder, capsys)] == ["planned", "planned"]
        assert (folder / "plan.delta.yaml").exists()
        assert rerun.main([str(folder)]) == 0
        assert not (folder / "plan.delta.yaml").exists()
        assert [point["state"] for point in told(folder, capsys)] == ["queued", "queued"]
        assert len(jobs(nodes, folder)) == 2

    def test_a_peer_that_falls_silent_ends_a_command_in_bounded_time(self, nodes, queued, capsys):
        nodes.freeze("delta")
        try:
            start = time.monotonic()
            (point,) = told(queued, capsys)
            assert time.monotonic() - start < 30
            assert point["state"] == "unknown"
            assert "delta-login" in point["message"]
        finally:
            nodes.thaw("delta")
        assert [point["state"] for point in told(queued, capsys)] == ["queued"]

    def test_an_answer_that_got_lost_doubles_nothing(self, nodes, waiting, tmp_path, capsys, monkeypatch):
        folder, ask, asked = tmp_path / "sweep", remote.Place.ask, []

        def unheard(at, verb, request, **more):
            asked.append((at, verb, request))
            ask(at, verb, request, **more)
            raise ssh.UnreachableError("ssh delta-login: the connection broke")

        with monkeypatch.context() as patch:
            patch.setattr(remote.Place, "ask", unheard)
            assert sweep(nodes, folder, "gpu=h200", "batch=2") == 1
            assert "is not known" in capsys.readouterr().out
            assert [point["state"] for point in told(folder, capsys)] == ["unknown"]
        (point,) = told(folder, capsys)
        (job,) = jobs(nodes, folder)
        assert (point["state"], point["job_id"]) == ("queued", job)
        assert rerun.main([str(folder)]) == 0
        assert "Nothing to send again" in capsys.readouterr().out
        at, verb, request = asked[0]
        assert [line["job_id"] for line in at.ask(verb, request)] == [job]
        later = request | {"points": [request["points"][0] | {"attempt": 2, "run_id": "r-2"}]}
        assert [line["refused"] for line in at.ask(verb, later)] == ["attempt 1 is queued there"]
        assert jobs(nodes, folder) == [job]

    def test_a_question_that_got_lost_is_asked_again_by_rerun(self, nodes, waiting, tmp_path, capsys, monkeypatch):
        folder, ask = tmp_path / "sweep", remote.Place.ask

        def unasked(at, verb, request, **more):
            if verb == remote.SUBMIT:
                raise ssh.UnreachableError("ssh delta-login: the connection broke")
            return ask(at, verb, request, **more)

        monkeypatch.setattr(remote.shutil, "which", lambda _: None)  # no rsync here: the code goes by tar
        with monkeypatch.context() as patch:
            patch.setattr(remote.Place, "ask", unasked)
            assert sweep(nodes, folder, "gpu=h200", "batch=2") == 1
            assert [point["state"] for point in told(folder, capsys)] == ["planned"]
        assert rerun.main([str(folder)]) == 0
        assert [(point["state"], point["attempt"]) for point in told(folder, capsys)] == [("queued", 2)]
        assert len(jobs(nodes, folder)) == 1

    def test_code_that_was_cut_off_on_its_way_never_runs(self, nodes, waiting, tmp_path, capsys, monkeypatch):
        folder, slow = tmp_path / "sweep", tmp_path / "bin"
        slow.mkdir()
        (slow / "rsync").write_text('#!/bin/sh\nexec /usr/bin/rsync --bwlimit=60 "$@"\n')
        (slow / "rsync").chmod(0o755)
        scratch = nodes.bed.state / "scratch"
        known = set(scratch.glob("*")) if scratch.exists() else set()

        def cut() -> None:
            end = time.monotonic() + 60
            while time.monotonic() < end and not any(
                (sent / "code").glob(".*.partial/*") for sent in set(scratch.glob("*")) - known
            ):
                time.sleep(0.02)
            nodes.stop("delta")

        cutter = threading.Thread(target=cut)
        cutter.start()
        with monkeypatch.context() as patch:
            patch.setenv("PATH", str(slow), prepend=os.pathsep)
            assert sweep(nodes, folder, "gpu=h200", "batch=2") == 1
        cutter.join()
        nodes.start("delta")
        (sent,) = set(scratch.glob("*")) - known
        assert [path.name[0] for path in (sent / "code").iterdir()] == ["."]
        assert [point["state"] for point in told(folder, capsys)] == ["planned"]
        assert rerun.main([str(folder)]) == 0
        assert [point["state"] for point in told(folder, capsys)] == ["queued"]
        assert len(jobs(nodes, folder)) == 1

    def test_results_that_were_cut_off_look_unfinished_and_the_rest_comes_next_time(
        self, nodes, queued, capsys, monkeypatch
    ):
        at = remote.place(sites_of(Ledger.open(queued))["delta"], Ledger.open(queued))
        run_dir = Path(at.root, "0", "attempt-1")
        (run_dir / "steps").mkdir(parents=True)
        parts = {f"steps/part-{n:06d}.parquet": os.urandom(4 << 20) for n in range(4)}
        for name, content in parts.items():
            (run_dir / name).write_bytes(content)
        (run_dir / "manifest.json").write_text('{"status": "completed"}')
        read, seen = ssh.Stream.read, [0]

        def cut(stream, size):
            part = read(stream, size)
            seen[0] += len(part)
            if seen[0] > 6 << 20 and nodes_up[0]:
                nodes_up[0] = False
                nodes.stop("delta")
            return part

        nodes_up = [True]
        with monkeypatch.context() as patch:
            patch.setattr(ssh.Stream, "read", cut)
            assert collect.main([str(queued)]) == 2
        assert "goes on from there" in capsys.readouterr().err
        nodes.start("delta")
        here = queued / "0" / "attempt-1"
        assert not (here / "manifest.json").exists()
        arrived = {f"steps/{file.name}": file.read_bytes() for file in (here / "steps").iterdir()}
        assert arrived
        assert arrived.items() < parts.items()
        assert collect.main([str(queued)]) == 0
        assert f"{len(arrived)} were here" not in capsys.readouterr().out  # they are not even sent again
        assert {f"steps/{file.name}": file.read_bytes() for file in (here / "steps").iterdir()} == parts
        assert (here / "manifest.json").exists()

    def test_what_a_site_cannot_do_is_told_in_its_words(self, nodes, waiting, tmp_path, capsys):
        cases = [
            ("sites.delta.gpus.h200.partition=nowhere", "nvalid partition"),
            ("sites.delta.reach.folder=/proc/nothing", "/proc/nothing/.* cannot be made there"),
            ("sites.delta.python=/no/python", "/no/python is no program there"),
        ]
        for number, (override, says) in enumerate(cases):
            assert sweep(nodes, tmp_path / str(number), "gpu=h200", "batch=2", override) == 1
            assert re.search(says, capsys.readouterr().out)

    def test_a_connection_that_is_not_to_stay_ends_with_its_command(self, nodes, queued):
        reach = Reach(method="ssh", host="delta-login", ssh_config=str(nodes.config), persist_min=0)
        code = (
            "import sys; from inpaint_bench.config import Reach; from launchers.ssh import Connection;"
            f"c = Connection({reach!r}); print(c.run('echo hello').out); print(c._control('check'))"
        )
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["b'hello\\n'", "0"]
        assert ssh.Connection(reach)._control("check") != 0


@pytest.mark.parametrize(
    ("reach", "python", "says"),
    [
        ({}, "/p", r"reach\.host is empty: reach\.method=ssh needs it, a name in your ssh configuration"),
        ({"host": "delta"}, "/p", r"reach\.folder is empty"),
        ({"host": "delta", "folder": "/scratch/me"}, None, r"delta\.python is empty"),
        ({"host": "-oProxyCommand=sh", "folder": "/s"}, "/p", r"reach\.host='-oProxyCommand=sh': must be"),
        ({"host": "delta;reboot", "folder": "/s"}, "/p", r"must be .* without signs that a shell reads"),
        ({"host": "delta", "folder": "scratch"}, "/p", r"reach\.folder='scratch': must be an absolute path there"),
        ({"host": "delta", "folder": "/s/$(reboot)"}, "/p", r"without signs that a shell reads"),
        ({"host": "delta", "folder": "/s\n"}, "/p", r"without signs that a shell reads"),
        (
            {"host": "delta", "method": "slurm"},
            None,
            r"reach\.host=delta: is read by reach\.method=ssh, and it is slurm",
        ),
    ],
)
def test_a_way_that_lacks_something_or_could_do_harm_is_refused_in_a_sentence(reach, python, says):
    with pytest.raises(UserError, match=says):
        check_reach(SiteConfig(name="delta", python=python, reach=Reach(**{"method": "ssh"} | reach)))


def test_a_control_character_never_reaches_another_shell():
    with pytest.raises(UserError, match="control character"):
        ssh.shell(["/bin/python", "-m", "x\nreboot"])


def test_what_a_shell_there_reads_is_what_was_meant():
    words = ["printf", "%s|", "a b", "$HOME", "it's", '"', "*", "`id`"]
    done = subprocess.run(["sh", "-c", ssh.shell(words, V="x y")], capture_output=True, text=True, check=True)
    assert done.stdout == "a b|$HOME|it's|\"|*|`id`|"


def test_a_folder_for_sockets_that_others_could_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path) if len(str(tmp_path)) < 30 else "/tmp/ib-test")
    base = Path(os.environ["XDG_RUNTIME_DIR"])
    base.mkdir(exist_ok=True)
    folder = base / "inpaint-bench"
    try:
        assert ssh.socket_folder() == folder
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)
        with pytest.raises(UserError, match="yours alone"):
            ssh.socket_folder()
        folder.rmdir()
        folder.symlink_to(tmp_path)
        with pytest.raises(UserError, match="yours alone"):
            ssh.socket_folder()
    finally:
        folder.unlink() if folder.is_symlink() else folder.rmdir()


def test_what_ssh_says_cannot_drive_a_terminal():
    assert ssh.printable("red \x1b[31malarm\x07\r\nnext") == "red ?[31malarm? next"
