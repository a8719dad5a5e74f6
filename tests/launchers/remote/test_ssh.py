"""A site that is reached over ssh: a real sshd in front of the second cluster."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.config.site import ConnectConfig, SiteConfig, check_connect
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_json
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.schema import SNAPSHOT
from launchers.points import site_catalog
from launchers.points.compose import composer
from launchers.remote import ssh
from launchers.remote.client import CancelReply, PlanReply, RemoteError, RemoteSweep, SweepReply, push_code
from launchers.status.survey import sites_of
from launchers.sweep.ledger import Ledger
from tests.launchers.over_ssh import launch_sweep, overrides, points_of, queued_jobs, replace_ssh, states_of


@contextmanager
def another_run_id_at_the_site(folder: Path, site: str, point: int) -> Iterator[None]:
    """Change the run id of an attempt in the ledger at the site."""
    ledger = Ledger.open(folder)
    remote = RemoteSweep.of(sites_of(ledger)[site], ledger)
    assert remote is not None
    file = Path(remote.root, "ledger.jsonl")
    content = file.read_text()
    file.write_text(content.replace(ledger.points()[point].last.run_id, "r-other"))
    yield
    file.write_text(content)


def test_one_command_submits_nine_points_locally_and_over_ssh_and_collects_them(
    login_nodes, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "sweep"
    assert launch_sweep(login_nodes, folder, "gpu=a40,a100,h200", "batch=2,3,4", "wait=true") == 0
    assert not list(folder.glob("plan.*"))
    assert set(states_of(folder, capsys)) == {"completed"}
    ids = [a.job_id for p in Ledger.open(folder).points().values() for a in p.attempts if a.site == "delta"]
    assert login_nodes.bed.ended("delta", ids) == ["COMPLETED"] * 3
    assert not (folder / "6").exists()
    assert app.main(["status", str(folder)]) != 2
    assert "`inpaint-bench collect" in capsys.readouterr().out
    assert app.main(["rerun", str(folder), "--repeats", "auto", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("`collect` has to bring 1 run first") == 3

    assert app.main(["collect", str(folder)]) == 0
    assert re.search(r"delta: \d+ new files of 3 runs", capsys.readouterr().out)
    assert app.main(["collect", str(folder)]) == 0
    assert "delta: nothing new" in capsys.readouterr().out
    with another_run_id_at_the_site(folder, "delta", 7):
        for _ in range(2):
            assert app.main(["collect", str(folder)]) == 1
            out = capsys.readouterr().out
            assert "delta: nothing new" in out
            assert re.search(r"left out: point 7, attempt 1: it has another run id here \(\S+\)\n", out)
    assert app.main(["status", str(folder)]) != 2
    assert "`inpaint-bench merge" in capsys.readouterr().out
    assert app.main(["merge", str(folder), "-o", str(tmp_path / "dataset")]) == 0
    runs = pl.read_parquet(tmp_path / "dataset" / "runs.parquet")
    assert runs.group_by("site").len().sort("site").rows() == [("delta", 3), ("grace", 6)]
    assert runs["valid"].all()
    (code,) = {path.name for path in (folder / "code").iterdir()}
    manifest = json.loads((folder / "6" / "attempt-1" / "manifest.json").read_text())
    assert manifest["environment"]["git"]["content_sha256"].startswith(code)
    assert not list(folder.rglob("6/**/*.pkl"))

    monkeypatch.setattr(RemoteSweep, "call", lambda *_, **__: pytest.fail("collected runs need no query"))
    assert set(states_of(folder, capsys)) == {"completed"}
    assert app.main(["rerun", str(folder)]) == 0
    assert "Nothing to submit." in capsys.readouterr().out


@pytest.fixture(scope="module")
def queued(delta_waits, login_nodes, tmp_path_factory) -> Path:
    """Return a sweep of one point that is queued at delta."""
    folder = tmp_path_factory.mktemp("ssh") / "queued"
    assert launch_sweep(login_nodes, folder, "gpu=h200", "batch=2") == 0
    return folder


class TestQueuedSweep:
    def test_points_of_an_unreachable_site_are_unknown_and_not_lost(self, login_nodes, queued, capsys):
        assert states_of(queued, capsys) == ["queued"]
        login_nodes.stop("delta")
        try:
            (point,) = points_of(queued, capsys)
            assert point["state"] == "unknown"
            assert re.search(r"ssh delta-login: .*Connection refused", point["message"])
            assert app.main(["rerun", str(queued)]) == 1
            assert "nothing was submitted: the state of 1 point is unknown (ssh delta-login" in capsys.readouterr().err
            for verb in ("cancel", "collect"):
                assert app.main([verb, str(queued)]) == 2
                assert "delta-login" in capsys.readouterr().err
            assert states_of(queued, capsys) == ["unknown"]
        finally:
            login_nodes.start("delta")
        assert states_of(queued, capsys) == ["queued"]

    def test_points_of_a_site_that_is_unreachable_at_launch_wait_in_a_plan(
        self, login_nodes, delta_waits, tmp_path, capsys
    ):
        folder = tmp_path / "sweep"
        with login_nodes.another_host_key("delta"):
            assert launch_sweep(login_nodes, folder, "gpu=h200", "batch=2,3") == 0
            out = capsys.readouterr().out
            assert "Host key verification failed" in out
            assert "They wait in" in out
            assert states_of(folder, capsys) == ["planned", "planned"]
        assert (folder / "plan.delta.yaml").exists()
        assert app.main(["rerun", str(folder)]) == 0
        assert not (folder / "plan.delta.yaml").exists()
        assert states_of(folder, capsys) == ["queued", "queued"]
        assert len(queued_jobs(login_nodes, folder)) == 2

    def test_cancel_goes_over_the_same_connection(self, login_nodes, queued, capsys):
        assert app.main(["cancel", str(queued)]) == 0
        login_nodes.bed.wait(lambda: [point["reason"] for point in points_of(queued, capsys)] == ["cancelled"])
        assert queued_jobs(login_nodes, queued) == []

    def test_a_connection_with_persist_min_0_ends_with_its_command(self, login_nodes):
        connect = ConnectConfig(method="ssh", host="delta-login", ssh_config=str(login_nodes.config), persist_min=0)
        check = ["ssh", "-F", str(login_nodes.config), "-o", f"ControlPath={ssh.SOCKETS}/%C", "-O"]
        subprocess.run([*check, "exit", "delta-login"], capture_output=True, check=False)
        code = (
            "import subprocess; from inpaint_bench.core.config.site import ConnectConfig;"
            "from launchers.remote.ssh import SshConnection;"
            f"print(SshConnection({connect!r}).run('echo hello').stdout);"
            f"print(subprocess.run({[*check, 'check', 'delta-login']!r}, stderr=subprocess.DEVNULL).returncode)"
        )
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["b'hello\\n'", "0"]
        assert subprocess.run([*check, "check", "delta-login"], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize(
    ("connect", "python", "message"),
    [
        ({}, "/p", r"connect\.host is empty: connect\.method=ssh needs a name in your ssh configuration"),
        ({"host": "delta"}, "/p", r"connect\.folder is empty"),
        ({"host": "delta", "folder": "/scratch/me"}, None, r"delta\.python is empty"),
        ({"host": "-oProxyCommand=sh", "folder": "/s"}, "/p", r"connect\.host='-oProxyCommand=sh': must be"),
        ({"host": "delta;reboot", "folder": "/s"}, "/p", r"must be .* without shell metacharacters"),
        (
            {"host": "delta", "folder": "scratch"},
            "/p",
            r"connect\.folder='scratch': must be an absolute path",
        ),
        ({"host": "delta", "folder": "/s/$(reboot)"}, "/p", r"without shell metacharacters"),
        ({"host": "delta", "folder": "/s\n"}, "/p", r"without shell metacharacters"),
        (
            {"host": "delta", "method": "slurm"},
            None,
            r"connect\.host=delta: is used only with connect\.method=ssh, and the method is slurm",
        ),
    ],
)
def test_an_incomplete_or_unsafe_connect_block_is_refused(connect, python, message):
    with pytest.raises(UserError, match=message):
        check_connect(SiteConfig(name="delta", python=python, connect=ConnectConfig(**{"method": "ssh"} | connect)))


def test_a_dry_run_over_ssh_writes_the_script_of_the_site_and_opens_no_connection(tmp_path, capsys):
    keys = ["method=ssh", "host=nowhere.invalid", "folder=/scratch/me", "slurm_conf=null"]
    arguments = [f"sites.delta.connect.{key}" for key in keys]
    arguments += ["sites.delta.python=/opt/python", "gpu=h200", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
    assert launch.main(["-m", *arguments]) == 0
    (script,) = (tmp_path / "sbatch").glob("*.sh")
    text = script.read_text()
    assert re.search(r"#SBATCH --output=/scratch/me/s\w+/jobs/", text)
    assert re.search(r"PYTHONPATH=/scratch/me/s\w+/code/\w{12}\b", text)
    assert "/opt/python" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("method", ["ssh", "bundle"])
def test_on_a_machine_of_the_site_itself_its_own_slurm_is_used(method, points, monkeypatch, tmp_path):
    line = f"gpu=h200 sites.delta.connect.method={method} sites.delta.python=/p"
    line += " sites.delta.connect.host=h sites.delta.connect.folder=/f"
    assert points(line)[0].site.connect.method == method
    monkeypatch.setattr(site_catalog, "_host_names", lambda: ("dt-login03.delta.ncsa.illinois.edu",))
    (tmp_path / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (point,) = points(line)
    assert (point.site.connect.method, point.reachable) == ("slurm", True)


def test_a_control_character_never_reaches_another_shell():
    with pytest.raises(UserError, match="control character"):
        ssh.login(ssh.shell(["/bin/python", "-m", "x\nreboot"]))


def test_a_command_reaches_the_shell_as_it_was_given(tmp_path):
    arguments = ["printf", "%s|", "a b", "$HOME", "it's", '"', "*", "`id`"]
    command = ["sh", "-c", ssh.login(ssh.shell(arguments, V="x y"))]
    env = {**os.environ, "HOME": str(tmp_path)}  # with no profile that prints or waits
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    assert ssh.strip_startup(done)
    assert done.stdout.decode() == "a b|$HOME|it's|\"|*|`id`|"


def test_a_socket_folder_that_others_could_use_is_refused(tmp_path):
    folder = tmp_path / "sockets"
    ssh.make_socket_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ssh.UnreachableError, match="yours alone"):
        ssh.make_socket_folder(folder)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ssh.UnreachableError, match="yours alone"):
        ssh.make_socket_folder(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_site_is_unreachable_where_another_user_has_the_socket_folder(tmp_path, monkeypatch):
    os.chown(tmp_path, 65534, -1)
    monkeypatch.setattr(ssh.make_socket_folder, "__defaults__", (tmp_path,))
    connection = ssh.SshConnection(ConnectConfig(method="ssh", host="nowhere"))
    with pytest.raises(ssh.UnreachableError, match=f"{tmp_path}: belongs to user 65534, and ssh needs it"):
        connection.run("true")


def test_error_output_is_shown_without_control_characters():
    output = b"@@@@@@@@\n first\nred \x1b[31malarm\x07\r\nnext\n"
    assert ssh.last_lines(output) == "red ?[31malarm?; next"


def test_a_time_limit_that_was_computed_from_earlier_runs_here_holds_at_the_site(
    login_nodes, delta_waits, tmp_path, monkeypatch, capsys
):
    """Regression: it was computed again at the site, without the runs of this machine, and so was the budget."""
    monkeypatch.chdir(tmp_path)
    requested = [*overrides(login_nodes), "gpu=h200", "batch=2", "time_min=auto", "out=earlier_runs", "budget=1"]
    with composer() as compose:
        earlier = {"site": "delta", "gpu": "h200", "config_hash": config_hash(compose(0, requested).composed.build())}
    took = {"status": "completed", "reason": None, "resumed": None, "started_unix_ns": 1, "ended_unix_ns": 300 * 10**9}
    replace_json(tmp_path / "earlier_runs" / "old" / "sweep.json", {})
    replace_json(tmp_path / "earlier_runs" / "old" / "0" / "attempt-1" / "manifest.json", earlier | took)
    assert launch.main(["-m", *requested, f"hydra.sweep.dir={tmp_path}/sweep"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"20 min +1 earlier run, 5 min at most ", out)
    assert re.search(r"h200 +2 +00 +1 ", out)  # of at most one service unit
    (job,) = queued_jobs(login_nodes, tmp_path / "sweep")
    assert login_nodes.bed.run("delta", "squeue", "-h", "-j", job, "-o", "%l").stdout.strip() == "20:00"


def test_an_error_at_the_site_before_it_submits_is_the_outcome_of_the_points(
    login_nodes, tmp_path, monkeypatch, capsys
):
    """Regression: the outcome of the points was reported as unknown."""
    monkeypatch.setenv("ONLY_HERE", "1")
    folder = tmp_path / "sweep"
    assert launch_sweep(login_nodes, folder, "gpu=h200", "batch=2", "workload.measure_steps=${oc.env:ONLY_HERE}") == 1
    out, err = capsys.readouterr()
    assert re.search(r"delta: .*ONLY_HERE.*1 point refused", out)
    assert "1 of 1 point not accepted" in err
    assert queued_jobs(login_nodes, folder) == []
    (point,) = points_of(folder, capsys)
    assert (point["state"], point["reason"]) == ("failed", "never_started")
    assert "ONLY_HERE" in point["message"]


READS = r"\(~/\.bash_profile, .*\) reads the standard input of commands; put those lines .* `if \[ -t 0 \]; then`"
PROFILE_ENDS = r"\(~/\.bash_profile, .*\) ends or replaces it before it runs a command; put those lines"
SHELL_ENDS = r"\(~/\.bashrc or .*\) ends or replaces it before it runs a command; put those lines"


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, None),
        ({"bash_profile": "echo Welcome; printf 'no newline \\033[31m'; echo warning >&2"}, None),
        ({"bash_profile": "read answer"}, READS),
        ({"profile": "cat > /dev/null"}, READS),
        ({"bash_profile": "read -n 1 answer"}, READS),
        ({"bashrc": "read answer"}, READS),
        ({"bash_profile": "tty -s || exit"}, PROFILE_ENDS),
        ({"bash_profile": "test -t 0 || { echo no terminal; exit 3; }"}, PROFILE_ENDS),
        ({"bash_profile": "exec sh"}, PROFILE_ENDS),
        ({"bashrc": "test -t 0 || exit 0"}, SHELL_ENDS),
        ({"bashrc": "exec sh"}, SHELL_ENDS),
        # as of an account that may run nothing
        (
            {"bashrc": "echo Your password has expired.; exit 1"},
            "login printed 'Your password has expired.' and ran no",
        ),
        ({"bashrc": "echo; echo Good morning"}, None),
    ],
)
def test_what_a_startup_file_does_to_commands_is_named_with_the_cure(files, problem, tmp_path, monkeypatch):
    replace_ssh(tmp_path, monkeypatch, **files)
    sentence = ssh.SshConnection(ConnectConfig(method="ssh", host="login")).startup_problem()
    assert re.search(problem, sentence) if problem else sentence is None


class TestCallsOfALoginShell:
    """Our real commands, below a login shell with startup files."""

    @pytest.fixture
    def remote(self, tmp_path, monkeypatch):
        def remote(**startup_files: str) -> RemoteSweep:
            replace_ssh(tmp_path, monkeypatch, **startup_files)
            root = tmp_path / "root"
            (root / "code").mkdir(parents=True)
            (root / "code" / "0123").symlink_to(ROOT)
            connect = ConnectConfig(method="ssh", host="login", folder=str(tmp_path))
            site = SiteConfig(name="delta", python=sys.executable, connect=connect)
            return RemoteSweep(site=site, root=str(root), code="0123")

        return remote

    def test_a_greeting_is_no_part_of_a_reply(self, remote):
        greeting = remote(bash_profile="printf 'inpaint-bench \\033[31m'; echo noise >&2; printf Welcome")
        reply = greeting.call("status", greeting.root, reply=SweepReply)
        assert (reply.sweep_id, reply.submitting) == (None, False)
        with Ledger(Path(greeting.root)).lock():
            assert greeting.call("status", greeting.root, reply=SweepReply).submitting
        with pytest.raises(RemoteError, match=r"^delta: \S+: not a sweep directory \(no sweep.json\)"):
            greeting.call("cancel", greeting.root, reply=CancelReply)
        with pytest.raises(RemoteError, match=r"^delta: -: not a plan file"):
            greeting.call("launch", "--plan", "-", "--folder", greeting.root, stdin=b"x", reply=PlanReply)

    @pytest.mark.parametrize(
        ("files", "problem"),
        [
            ({"bashrc": "cat; exit"}, SHELL_ENDS),
            ({"bash_profile": "tty -s || exit 1"}, PROFILE_ENDS),
            ({"bash_profile": "exec cat"}, PROFILE_ENDS),
            ({"bashrc": "tty -s || exit 0"}, SHELL_ENDS),
        ],
    )
    def test_no_reply_has_its_cause_and_the_cure(self, remote, files, problem, tmp_path):
        hindered = remote(**files)
        for call in (lambda: hindered.call("status", "x", reply=SweepReply), lambda: push_code(hindered, tmp_path)):
            with pytest.raises(ssh.UnreachableError, match=r"login: the command was not run: a startup.*" + problem):
                call()

    @pytest.mark.parametrize(
        ("line", "cause"), [("read answer", "a startup.*" + READS), ("exec < <(head -c 9000)", "tar: ")]
    )
    def test_code_of_which_only_a_part_arrived_is_not_there(self, remote, line, cause, tmp_path):
        hindered = remote(bash_profile=line)
        (tmp_path / "root" / "code" / "0123").unlink()
        with pytest.raises(RemoteError, match=r"delta: the code cannot be copied to \S+ \(" + cause):
            push_code(hindered, ROOT / "launchers")
        assert list((tmp_path / "root" / "code").glob(".0123.partial/*")) or "read" in line
        assert not (tmp_path / "root" / "code" / "0123").exists()

    def test_code_is_copied_once_below_a_greeting_without_a_line_end(self, remote, tmp_path):
        greeting = remote(bash_profile="printf 'Welcome'")
        code, target = tmp_path / "code", tmp_path / "root" / "code" / "0123"
        target.unlink()
        code.mkdir()
        (code / SNAPSHOT).touch()
        push_code(greeting, code)
        (target / "mark").touch()
        push_code(greeting, code)
        assert sorted(path.name for path in target.iterdir()) == sorted([SNAPSHOT, "mark"])
