"""A site that is reached over ssh: a real sshd in front of the second cluster."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config import config_hash
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_json
from inpaint_bench.core.site import ConnectConfig, SiteConfig, check_connect
from launchers.points import site_catalog
from launchers.points.compose import composer
from launchers.remote import client, ssh
from launchers.status.survey import sites_of
from launchers.sweep.ledger import Ledger
from tests.launchers.over_ssh import jobs, shown, sweep, told, words


@contextmanager
def another_run_there(folder: Path, site: str, point: int) -> Iterator[None]:
    """The site's ledger tells of an attempt that is not the one that is known here."""
    ledger = Ledger.open(folder)
    at = client.place(sites_of(ledger)[site], ledger)
    theirs = Path(at.root, "ledger.jsonl")
    kept = theirs.read_text()
    theirs.write_text(kept.replace(ledger.points()[point].last.run_id, "r-other"))
    yield
    theirs.write_text(kept)


@pytest.mark.testbed
def test_one_command_sends_nine_points_by_slurm_and_by_ssh_and_all_return(login_nodes, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "sweep"
    assert sweep(login_nodes, folder, "gpu=a40,a100,h200", "batch=2,3,4", "wait=true") == 0
    assert not list(folder.glob("plan.*"))
    assert {point["state"] for point in told(folder, capsys)} == {"completed"}
    ids = [a.job_id for p in Ledger.open(folder).points().values() for a in p.attempts if a.site == "delta"]
    assert login_nodes.bed.ended("delta", ids) == ["COMPLETED"] * 3
    assert not (folder / "6").exists()
    assert "`inpaint-bench collect" in shown(folder, capsys)
    assert app.main(["rerun", str(folder), "--repeats", "auto", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("`collect` has to bring 1 run first") == 3

    assert app.main(["collect", str(folder)]) == 0
    assert re.search(r"delta: \d+ new files of 3 runs", capsys.readouterr().out)
    assert app.main(["collect", str(folder)]) == 0
    assert "delta: nothing new" in capsys.readouterr().out
    with another_run_there(folder, "delta", 7):
        for _ in range(2):
            assert app.main(["collect", str(folder)]) == 1
            out = capsys.readouterr().out
            assert "delta: nothing new" in out
            assert re.search(r"left out: point 7, attempt 1: it is another run here \(\S+\)\n", out)
    assert "`inpaint-bench merge" in shown(folder, capsys)
    assert app.main(["merge", str(folder), "-o", str(tmp_path / "dataset")]) == 0
    runs = pl.read_parquet(tmp_path / "dataset" / "runs.parquet")
    assert runs.group_by("site").len().sort("site").rows() == [("delta", 3), ("grace", 6)]
    assert runs["valid"].all()
    (code,) = {path.name for path in (folder / "code").iterdir()}
    manifest = json.loads((folder / "6" / "attempt-1" / "manifest.json").read_text())
    assert manifest["environment"]["git"]["content_sha256"].startswith(code)
    assert not list(folder.rglob("6/**/*.pkl"))

    monkeypatch.setattr(client.Place, "ask", lambda *_, **__: pytest.fail("what lies here needs no asking"))
    assert {point["state"] for point in told(folder, capsys)} == {"completed"}
    assert app.main(["rerun", str(folder)]) == 0
    assert "Nothing to send again" in capsys.readouterr().out


@pytest.fixture(scope="module")
def queued(delta_waits, login_nodes, tmp_path_factory) -> Path:
    """A sweep of one point that waits at delta."""
    folder = tmp_path_factory.mktemp("ssh") / "queued"
    assert sweep(login_nodes, folder, "gpu=h200", "batch=2") == 0
    return folder


@pytest.mark.testbed
class TestBetween:
    def test_a_site_that_is_gone_is_a_missing_witness_and_its_points_are_not_lost(self, login_nodes, queued, capsys):
        assert [point["state"] for point in told(queued, capsys)] == ["queued"]
        login_nodes.stop("delta")
        try:
            (point,) = told(queued, capsys)
            assert point["state"] == "unknown"
            assert re.search(r"ssh delta-login: .*Connection refused", point["message"])
            assert app.main(["rerun", str(queued)]) == 1
            assert "nothing was sent again: 1 point is unknown (ssh delta-login" in capsys.readouterr().err
            for verb in ("cancel", "collect"):
                assert app.main([verb, str(queued)]) == 2
                assert "delta-login" in capsys.readouterr().err
            assert [point["state"] for point in told(queued, capsys)] == ["unknown"]
        finally:
            login_nodes.start("delta")
        assert [point["state"] for point in told(queued, capsys)] == ["queued"]

    def test_points_for_a_site_that_does_not_answer_wait_in_a_plan_until_it_does(
        self, login_nodes, delta_waits, tmp_path, capsys
    ):
        folder = tmp_path / "sweep"
        with login_nodes.another_host_key("delta"):
            assert sweep(login_nodes, folder, "gpu=h200", "batch=2,3") == 0
            out = capsys.readouterr().out
            assert "Host key verification failed" in out
            assert "They wait in" in out
            assert [point["state"] for point in told(folder, capsys)] == ["planned", "planned"]
        assert (folder / "plan.delta.yaml").exists()
        assert app.main(["rerun", str(folder)]) == 0
        assert not (folder / "plan.delta.yaml").exists()
        assert [point["state"] for point in told(folder, capsys)] == ["queued", "queued"]
        assert len(jobs(login_nodes, folder)) == 2

    def test_cancel_goes_over_the_same_connection(self, login_nodes, queued, capsys):
        assert app.main(["cancel", str(queued)]) == 0
        login_nodes.bed.wait(lambda: [point["reason"] for point in told(queued, capsys)] == ["cancelled"])
        assert jobs(login_nodes, queued) == []

    @pytest.mark.parametrize("to", ["1", "2"])
    def test_an_answer_without_end_does_not_fill_the_disk_here(self, login_nodes, monkeypatch, to):
        monkeypatch.setattr(ssh, "MAX_ANSWER_BYTES", 1 << 20)
        connect = ConnectConfig(method="ssh", host="delta-login", ssh_config=str(login_nodes.config))
        begin = time.monotonic()
        with pytest.raises(UserError, match="delta-login answered with more than 1,048,576 bytes"):
            ssh.Connection(connect).run(f"yes >&{to}")
        assert time.monotonic() - begin < connect.timeout_s

    def test_a_connection_that_is_not_to_stay_ends_with_its_command(self, login_nodes):
        connect = ConnectConfig(method="ssh", host="delta-login", ssh_config=str(login_nodes.config), persist_min=0)
        ssh.Connection(connect)._control("exit")
        code = (
            "import sys; from inpaint_bench.core.site import ConnectConfig;"
            "from launchers.remote.ssh import Connection;"
            f"c = Connection({connect!r}); print(c.run('echo hello').out); print(c._control('check'))"
        )
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["b'hello\\n'", "0"]
        assert ssh.Connection(connect)._control("check") != 0


@pytest.mark.parametrize(
    ("connect", "python", "says"),
    [
        ({}, "/p", r"connect\.host is empty: connect\.method=ssh needs a name in your ssh configuration"),
        ({"host": "delta"}, "/p", r"connect\.folder is empty"),
        ({"host": "delta", "folder": "/scratch/me"}, None, r"delta\.python is empty"),
        ({"host": "-oProxyCommand=sh", "folder": "/s"}, "/p", r"connect\.host='-oProxyCommand=sh': must be"),
        ({"host": "delta;reboot", "folder": "/s"}, "/p", r"must be .* without shell metacharacters"),
        ({"host": "delta", "folder": "scratch"}, "/p", r"connect\.folder='scratch': must be an absolute path there"),
        ({"host": "delta", "folder": "/s/$(reboot)"}, "/p", r"without shell metacharacters"),
        ({"host": "delta", "folder": "/s\n"}, "/p", r"without shell metacharacters"),
        (
            {"host": "delta", "method": "slurm"},
            None,
            r"connect\.host=delta: is used only with connect\.method=ssh, and the method is slurm",
        ),
    ],
)
def test_a_way_that_lacks_something_or_could_do_harm_is_refused_in_a_sentence(connect, python, says):
    with pytest.raises(UserError, match=says):
        check_connect(SiteConfig(name="delta", python=python, connect=ConnectConfig(**{"method": "ssh"} | connect)))


def test_over_ssh_a_dry_run_writes_what_will_be_rendered_there_and_asks_nobody(tmp_path, capsys):
    over = ["method=ssh", "host=nowhere.invalid", "folder=/scratch/me", "slurm_conf=null"]
    words = [f"sites.delta.connect.{one}" for one in over]
    words += ["sites.delta.python=/opt/python", "gpu=h200", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
    assert launch.main(["-m", *words]) == 0
    (script,) = (tmp_path / "sbatch").glob("*.sh")
    text = script.read_text()
    assert re.search(r"#SBATCH --output=/scratch/me/s\w+/jobs/", text)
    assert re.search(r"PYTHONPATH=/scratch/me/s\w+/code/\w{12}\b", text)
    assert "/opt/python" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("way", ["ssh", "bundle"])
def test_on_a_machine_of_the_site_itself_its_own_slurm_is_used(way, points, monkeypatch, tmp_path):
    line = f"gpu=h200 sites.delta.connect.method={way} sites.delta.python=/p"
    line += " sites.delta.connect.host=h sites.delta.connect.folder=/f"
    assert points(line)[0].site.connect.method == way
    monkeypatch.setattr(site_catalog, "_host_names", lambda: ("dt-login03.delta.ncsa.illinois.edu",))
    (tmp_path / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (there,) = points(line)
    assert (there.site.connect.method, there.reachable) == ("slurm", True)


def test_a_control_character_never_reaches_another_shell():
    with pytest.raises(UserError, match="control character"):
        ssh.shell(["/bin/python", "-m", "x\nreboot"])


def test_what_a_shell_there_reads_is_what_was_meant(tmp_path):
    words = ["printf", "%s|", "a b", "$HOME", "it's", '"', "*", "`id`"]
    command = ["sh", "-c", ssh.shell(words, V="x y")]
    env = {**os.environ, "HOME": str(tmp_path)}  # with no profile that prints or waits
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "a b|$HOME|it's|\"|*|`id`|"


def test_a_folder_for_sockets_that_others_could_use_is_refused(tmp_path, monkeypatch):
    with TemporaryDirectory() as short:  # a socket's path is
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        folder = ssh.socket_folder()
        assert folder.parent == Path(short)
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)
        with pytest.raises(UserError, match="yours alone"):
            ssh.socket_folder()
        folder.rmdir()
        folder.symlink_to(tmp_path)
        with pytest.raises(UserError, match="yours alone"):
            ssh.socket_folder()


def test_what_ssh_says_cannot_drive_a_terminal():
    assert ssh.printable("red \x1b[31malarm\x07\r\nnext") == "red ?[31malarm? next"


@pytest.mark.testbed
def test_a_time_limit_that_was_worked_out_here_holds_there(login_nodes, delta_waits, tmp_path, monkeypatch, capsys):
    """Regression: it was worked out again there, without the runs that lie here, and the budget held against that."""
    monkeypatch.chdir(tmp_path)
    asked = [*words(login_nodes), "gpu=h200", "batch=2", "time_min=auto", "out=mine", "budget=1"]
    with composer() as compose:
        earlier = {"site": "delta", "gpu": "h200", "config_hash": config_hash(compose(0, asked).config)}
    took = {"status": "completed", "reason": None, "resumed": None, "started_unix_ns": 1, "ended_unix_ns": 300 * 10**9}
    replace_json(tmp_path / "mine" / "old" / "sweep.json", {})
    replace_json(tmp_path / "mine" / "old" / "0" / "attempt-1" / "manifest.json", earlier | took)
    assert launch.main(["-m", *asked, f"hydra.sweep.dir={tmp_path}/sweep"]) == 0
    assert re.search(r"20 min +1 run, 5 min at most .* 1 ", capsys.readouterr().out)
    (job,) = jobs(login_nodes, tmp_path / "sweep")
    assert login_nodes.bed.run("delta", "squeue", "-h", "-j", job, "-o", "%l").stdout.strip() == "20:00"


@pytest.mark.testbed
def test_what_the_site_refuses_before_it_submits_is_told_in_its_words(login_nodes, tmp_path, monkeypatch, capsys):
    """Regression: what became of the points was said not to be known."""
    monkeypatch.setenv("ONLY_HERE", "1")
    folder = tmp_path / "sweep"
    assert sweep(login_nodes, folder, "gpu=h200", "batch=2", "workload.measure_steps=${oc.env:ONLY_HERE}") == 1
    said = capsys.readouterr()
    assert re.search(r"delta: .*ONLY_HERE.*sends its 1 point\.", said.out)
    assert said.err == "error: 1 of 1 point was refused\n"
    assert jobs(login_nodes, folder) == []
    (point,) = told(folder, capsys)
    assert (point["state"], point["reason"]) == ("failed", "never_started")
    assert "ONLY_HERE" in point["message"]
