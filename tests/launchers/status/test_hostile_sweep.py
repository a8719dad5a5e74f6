"""A sweep directory that somebody else wrote: nothing in it is executed, followed, waited for, written or obeyed."""

import json
import os
import shutil
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config.site import ConnectConfig, SiteConfig, SiteEnvironment
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.schema import LEDGER, MANIFEST, SCHEDULER, SWEEP
from launchers.points import site_catalog
from launchers.slurm.local_executor import machine
from launchers.sweep.events import Staged
from launchers.sweep.ledger import Ledger
from launchers.sweep.sweep_record import LaunchContext
from tests.launchers.sweeps import a_point, a_sweep, plan, submit, write_manifest

pytestmark = pytest.mark.subprocess  # status calls squeue

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def give_away(*paths: Path) -> None:
    for path in paths:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        for below in path.rglob("*") if path.is_dir() and not path.is_symlink() else ():
            os.chown(below, NOBODY, NOBODY, follow_symlinks=False)


@pytest.fixture
def marker(tmp_path) -> Path:
    """A file that every planted program creates."""
    return tmp_path / "executed"


@pytest.fixture
def hostile(tmp_path, marker) -> Path:
    """A sweep whose record names programs in every place that names one: ssh, Slurm, Python, Hydra, the environment."""
    folder = tmp_path / "sweep"
    evil = folder / "evil"
    evil.mkdir(parents=True)
    program = evil / "program"
    program.write_text(f"#!/bin/sh\necho $0 $@ >> {marker}\n")
    program.chmod(0o755)
    (evil / "ssh_config").write_text(
        f"Host *\n  ProxyCommand {program}\n  PermitLocalCommand yes\n  LocalCommand {program}\n"
    )
    (evil / "slurm.conf").write_text(f"PluginDir={evil}\n")
    conf = evil / "conf"
    (conf / "hydra" / "job_logging").mkdir(parents=True)
    (conf / "hydra" / "hydra_logging").mkdir()
    logging = f"version: 1\nhandlers:\n  a: {{'()': os.system, command: {program}}}\nroot: {{handlers: [a]}}\n"
    for group in ("job_logging", "hydra_logging"):
        (conf / "hydra" / group / "evil.yaml").write_text(logging)
    over_ssh = ConnectConfig(method="ssh", host="h", folder="/tmp", ssh_config=str(evil / "ssh_config"), hostnames=[])
    by_slurm = ConnectConfig(slurm_conf=str(evil / "slurm.conf"), hostnames=[".*"])
    environment = SiteEnvironment(setup=[str(program)], variables={"BASH_ENV": str(program)})
    sites = [
        SiteConfig(name="delta", python=str(program), connect=by_slurm, environment=environment),
        SiteConfig(name="grace", python=str(program), connect=over_ssh),
        SiteConfig(name="elsewhere", python=str(program), connect=by_slurm),
        SiteConfig(name="local", python=str(program), connect=ConnectConfig(method="local")),
    ]
    context = LaunchContext(
        working_dir=str(evil), config_dirs=(str(conf),), hydra_overrides=("hydra/hydra_logging=evil",)
    )
    points = [a_point(num, site=site.name) for num, site in enumerate(sites)]
    ledger = a_sweep(folder, points, {site.name: asdict(site) for site in sites}, launch_context=context)
    for num, point in enumerate(points):
        plan(ledger, [point], group=f"0{num}", job_name=f"j{num}")
        submit(ledger, [num], job_id=f"{70 + num}_0", group=f"0{num}")
        write_manifest(folder, num, "running", run_id=f"r-{num}")
    ledger.append(Staged(site="grace", root="/tmp/x", code="abc"))
    return folder


COMMANDS = [
    ["status"],
    ["status", "--json"],
    ["status", "--point", "1"],
    ["rerun"],
    ["rerun", "--dry-run"],
    ["rerun", "--repeats", "3"],
    ["cancel"],
    ["collect"],
]


@needs_root
@pytest.mark.parametrize("part", [".", SWEEP, LEDGER])
def test_nothing_of_another_users_sweep_is_executed(part, hostile, marker, fake_command, capsys):
    calls = fake_command("squeue", f'[ -z "$SLURM_CONF" ] || echo conf=$SLURM_CONF >> {marker}')
    fake_command("sacct", f'[ -z "$SLURM_CONF" ] || echo conf=$SLURM_CONF >> {marker}')
    fake_command("ssh", f"echo ssh >> {marker}")
    fake_command("scancel", f"echo scancel >> {marker}")
    give_away(hostile / part)
    before = sorted(hostile.rglob("*"))
    for verb, *options in COMMANDS:
        code = app.main([verb, str(hostile), *options])
        _, err = capsys.readouterr()
        if verb == "status":
            assert "Traceback" not in err
        else:
            assert code == 2
            assert "belongs to user nobody; " in err
    assert not marker.exists(), marker.read_text()
    assert not calls.exists()  # this machine is at none of the reader's sites
    assert sorted(hostile.rglob("*")) == before


@needs_root
def test_status_of_another_users_sweep_says_that_remote_states_are_unknown(hostile, capsys):
    give_away(hostile)
    app.main(["status", str(hostile), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert "the sweep belongs to user nobody" in shown["notes"][0]
    by_site = {point["site"]: point for point in shown["points"]}
    for site in ("delta", "grace", "elsewhere"):
        assert by_site[site]["state"] in ("running", "unknown")
        assert "from the manifest only" in by_site[site]["message"] or by_site[site]["state"] == "unknown"
        assert f"is not a machine of {site}" in shown["sources"][site]["no_answer_reason"]


@needs_root
def test_another_users_jobs_are_queried_as_the_readers_own_site_file_says(
    hostile, tmp_path, fake_command, monkeypatch, capsys
):
    conf = tmp_path / "conf"
    shutil.copytree(conf_dir() / "site", conf / "site")
    delta = conf / "site" / "delta.yaml"
    delta.write_text(delta.read_text().replace("  hostnames: [", f"  hostnames: ['{socket.gethostname()}', "))
    monkeypatch.setattr(site_catalog, "conf_dir", lambda: conf)
    squeue = fake_command("squeue", "echo '70_0|PENDING|Priority||N/A|N/A|1:00:00|j0'")
    fake_command("sacct", "")
    fake_command("sbatch", "")
    give_away(hostile)
    app.main(["status", str(hostile), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert "-u nobody" in squeue.read_text()
    assert shown["points"][0]["state"] == "queued"


class TestLinks:
    """In one's own sweep directory too: a group, or files that were copied there, may have put them."""

    @pytest.fixture
    def sweep(self, tmp_path, fake_command) -> Path:
        """A point whose job has failed according to Slurm, so that `status` saves its state."""
        site = SiteConfig(name="delta", connect=ConnectConfig(hostnames=[".*"]))
        ledger = a_sweep(tmp_path / "sweep", [a_point(0)], {"delta": asdict(site)})
        plan(ledger, [a_point(0)], group="g")
        submit(ledger, [0], job_id="7_0", group="g")
        fake_command("sbatch", "")
        fake_command("squeue", "echo '7_0|FAILED|None|n1|N/A|N/A|1:00|j'")
        fake_command("sacct", "echo '7_0|FAILED|1:0|None|n1|j'")
        return ledger.folder

    @pytest.fixture
    def outside(self, tmp_path) -> Path:
        """A run directory with a log, outside of the sweep."""
        write_manifest(tmp_path / "outside", 0, "failed", run_id="r-0", message="a secret")
        (tmp_path / "outside" / "log").mkdir()
        (tmp_path / "outside" / "log" / "7_0_0_log.err").write_text("a secret\n")
        return tmp_path / "outside"

    def shown(self, sweep, capsys) -> str:
        for options in ([], ["--json"], ["--point", "0"]):
            app.main(["status", str(sweep), *options])
        return "".join(capsys.readouterr())

    @pytest.mark.parametrize("link", ["0", "0/attempt-1", f"0/attempt-1/{MANIFEST}"])
    def test_run_directory_behind_a_link_is_not_read_or_written(self, link, sweep, outside, capsys):
        (sweep / link).parent.mkdir(parents=True, exist_ok=True)
        (sweep / link).symlink_to(outside / link)
        shown = self.shown(sweep, capsys)
        assert "a secret" not in shown
        assert "link" in shown
        assert not list(outside.rglob(SCHEDULER))

    @pytest.mark.parametrize("link", ["jobs", "jobs/g", "jobs/g/7_0_0_log.err"])
    def test_log_behind_a_link_is_not_shown_or_exported(self, link, sweep, outside, capsys):
        write_manifest(sweep, 0, "failed", run_id="r-0")
        (outside / "log").rename(outside / "g")
        (sweep / link).parent.mkdir(parents=True, exist_ok=True)
        (sweep / link).symlink_to(outside / Path(link).relative_to("jobs"))
        assert "a secret" not in self.shown(sweep, capsys)

    @pytest.mark.parametrize("name", [SWEEP, LEDGER, ".lock", f"0/attempt-1/{MANIFEST}", "jobs/g/7_0_0_log.err"])
    def test_a_pipe_is_not_waited_for(self, name, sweep, capsys):
        write_manifest(sweep, 0, "failed", run_id="r-0")
        (sweep / name).parent.mkdir(parents=True, exist_ok=True)
        (sweep / name).unlink(missing_ok=True)
        os.mkfifo(sweep / name)
        for command in (["status"], ["status", "--point", "0"], ["cancel"], ["rerun", "--dry-run"], ["collect"]):
            app.main([command[0], str(sweep), *command[1:]])
            assert "Traceback" not in capsys.readouterr().err

    @pytest.mark.parametrize("name", [SWEEP, LEDGER, ".lock"])
    def test_records_and_lock_are_not_opened_through_a_link(self, name, sweep, tmp_path, capsys):
        target = tmp_path / "target"
        target.write_bytes((sweep / name).read_bytes() if (sweep / name).exists() else b"kept")
        content = target.read_bytes()
        (sweep / name).unlink(missing_ok=True)
        (sweep / name).symlink_to(target)
        assert app.main(["rerun", str(sweep)]) == 2
        assert "is a link" in capsys.readouterr().err
        assert target.read_bytes() == content


def test_control_characters_in_any_record_do_not_reach_the_terminal(tmp_path, capsys):
    nasty = "\x1b[2J\x9b31m\u202egnp\u2066\x07\r"
    site = SiteConfig(name="delta", connect=ConnectConfig(method="local"))
    point = a_point(0, overrides=[f"name={nasty}"], gpu=nasty)
    ledger = Ledger(a_sweep(tmp_path / "sweep", [point, a_point(1)], {"delta": asdict(site)}).folder)
    plan(ledger, [point])
    submit(ledger, [0], job_id=f"pid:1@{machine()}")
    write_manifest(ledger.folder, 0, "failed", run_id=f"r-{nasty}", message=nasty)
    (ledger.folder / nasty.replace("/", "")).mkdir()
    for verb, *options in (*COMMANDS, ["status", "--point", "7"], ["collect"]):
        app.main([verb, str(ledger.folder), *options])
        shown = "".join(capsys.readouterr())
        assert not set(nasty) & set(shown) - set("[2J31mgnp"), (verb, options)


@needs_root
def test_another_users_plan_is_not_run(tmp_path, capsys):
    plan = tmp_path / "plan.delta.yaml"
    plan.write_bytes(b"sweep_id: s1")
    give_away(plan)
    assert launch.main(["--plan", str(plan), "--dry-run"]) == 2
    assert "belongs to user 65534, and would run as you" in capsys.readouterr().err
