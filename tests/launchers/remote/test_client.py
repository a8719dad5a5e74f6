"""Replies of our commands at a site over ssh: those that are wrong are an error in a sentence and change nothing."""

import json
import os
from types import SimpleNamespace

import msgspec
import pytest
from omegaconf import OmegaConf

from inpaint_bench.cli import app
from inpaint_bench.core.config.site import ConnectConfig, SiteConfig
from inpaint_bench.core.errors import UserError
from launchers.remote import client, plan_file, ssh
from launchers.sweep.events import Staged
from launchers.sweep.ledger import Ledger
from tests.launchers.sweeps import a_point, a_sweep, add_point, plan

ATTEMPT = {
    "point": 0,
    "attempt": 1,
    "run_id": "r-0",
    "site": "delta",
    "group": "00-delta",
    "job_name": "j",
    "job_id": "77_0",
    "refused": None,
    "cancelled": False,
    "scheduler": {"state": "PENDING", "detail": "Priority", "raw": "squeue: PENDING Priority"},
    "artifacts": {"manifest": None},
}
SWEEP = {"sweep_id": "s1", "submitting": False, "sources": {"delta": {"squeue": "ok", "sacct": "ok"}}}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a function that sets the site's reply to every command and returns a sweep with a point at delta."""
    connect = ConnectConfig(method="ssh", host="delta", folder="/scratch/me")
    site = SiteConfig(name="delta", python="/usr/bin/python3", connect=connect)
    ledger = a_sweep(tmp_path / "sweep", [a_point(0)], {"delta": OmegaConf.to_container(OmegaConf.structured(site))})
    plan(ledger, [a_point(0)], group="00-delta")
    ledger.append(Staged(site="delta", root="/scratch/me/s1", code="abc"))

    def reply(result: object = None, error: str | None = None) -> Ledger:
        out = b"" if result is None else json.dumps(result).encode()
        err = f"a warning\nerror: {error}\n".encode() if error else b""

        def run(*_: object, **__: object) -> SimpleNamespace:
            startup = b"Welcome." + ssh.MARK_LINE
            return SimpleNamespace(returncode=2 if error else 0, stdout=startup + out, stderr=startup + err)

        monkeypatch.setattr(ssh.SshConnection, "run", run)
        return ledger

    return reply


def status_of_point(ledger, capsys) -> dict:
    capsys.readouterr()
    assert app.main(["status", str(ledger.folder), "--json"]) != 2
    (point,) = json.loads(capsys.readouterr().out)["points"]
    return point


def test_the_state_of_a_job_comes_from_the_reply(site, capsys):
    point = status_of_point(site(SWEEP | {"records": [ATTEMPT]}), capsys)
    assert (point["state"], point["job_id"]) == ("queued", "77_0")


@pytest.mark.parametrize(("submitting", "state"), [(True, "unknown"), (False, "planned")])
def test_an_attempt_without_a_job_is_unknown_while_the_site_is_submitting(submitting, state, site, capsys):
    attempt = ATTEMPT | {"job_id": None, "scheduler": None}
    point = status_of_point(site(SWEEP | {"submitting": submitting, "records": [attempt]}), capsys)
    assert point["state"] == state
    assert ("delta is still submitting" in point["message"]) is submitting


@pytest.mark.parametrize(
    "change",
    [
        *({"point": "0"}, {"point": True}, {"attempt": -1}, {"attempt": 10**9}, {"run_id": "r\x1b[2J"}, {"run_id": 7}),
        *({"group": "../../etc"}, {"group": ".."}, {"group": ""}, {"group": None}, {"job_id": "1;reboot_0"}),
        *(
            {"job_id": "77_0\n"},
            {"job_id": 77},
            {"cluster": "--all"},
            {"refused": ["no"]},
            {"scheduler": "PENDING"},
            {"scheduler": {}},
        ),
        *({"scheduler": {"state": 7}}, {"scheduler": {"state": "PENDING", "detail": 3}}, {"artifacts": []}),
        *({"artifacts": {"manifest": []}}, {"artifacts": {"manifest": None, "manifest_age_s": "long"}}),
    ],
)
def test_a_wrong_reply_is_an_error_and_changes_nothing(change, site, capsys):
    ledger = site(SWEEP | {"records": [ATTEMPT | change]})
    before = (ledger.folder / "ledger.jsonl").read_bytes()
    point = status_of_point(ledger, capsys)
    assert point["state"] == "unknown"
    assert "delta: the reply of `status` there cannot be read" in point["message"]
    assert (ledger.folder / "ledger.jsonl").read_bytes() == before


def test_an_attempt_that_is_a_process_or_ran_elsewhere_is_ignored(site, capsys):
    for change in ({"job_id": "pid:1@here"}, {"site": "grace", "attempt": 2}):
        point = status_of_point(site(SWEEP | {"records": [ATTEMPT | change]}), capsys)
        assert (point["state"], point["job_id"], point["attempt"]) == ("planned", None, 1)


def test_cluster_that_the_site_reports_is_known_here(site, capsys):
    ledger = site(SWEEP | {"records": [ATTEMPT | {"cluster": "far"}]})
    point = status_of_point(ledger, capsys)
    assert (point["state"], point["job_id"], point["cluster"]) == ("queued", "77_0", "far")
    assert app.main(["status", str(ledger.folder)]) != 2
    assert "delta (cluster far) squeue ok, sacct ok" in " ".join(capsys.readouterr().out.split())


def test_equal_job_ids_of_two_clusters_at_a_site_are_two_jobs(site, capsys):
    ledger = site()
    add_point(ledger, a_point(1))
    plan(ledger, [a_point(1)], group="01-delta")
    other = {"point": 1, "run_id": "r-1", "group": "01-delta", "scheduler": {"state": "RUNNING"}}
    site(SWEEP | {"records": [ATTEMPT | {"cluster": "far"}, ATTEMPT | other]})
    capsys.readouterr()
    assert app.main(["status", str(ledger.folder), "--json"]) != 2
    points = json.loads(capsys.readouterr().out)["points"]
    assert [(point["job_id"], point["state"]) for point in points] == [("77_0", "queued"), ("77_0", "running")]


def test_control_characters_do_not_reach_the_terminal(site, capsys):
    scheduler = {"state": "PENDING", "detail": "red \x1b[31m", "raw": "squeue: \x1b[2JPENDING"}
    attempt = ATTEMPT | {"scheduler": scheduler, "refused": "no \x1b[31m"}
    ledger = site(SWEEP | {"sources": {"delta": {"squeue": "\x1b[2Jok", "sacct": "ok"}}, "records": [attempt]})
    capsys.readouterr()
    for options in ([], ["--point", "0"]):
        assert app.main(["status", str(ledger.folder), *options]) != 2
        out = capsys.readouterr().out
        assert "PENDING" in out or "queued" in out
        assert "\x1b" not in out
    for problems, error in ((None, "red \x1b[31m"), ({"problems": ["red \x1b[31m"]}, None)):
        site(problems, error=error)
        assert app.main(["cancel", str(ledger.folder)]) == 2
        out, err = capsys.readouterr()
        assert "red ?[31m" in err
        assert "\x1b" not in out + err


def test_the_sweep_of_another_user_is_not_queried_over_ssh(site, monkeypatch, capsys):
    """Check it because the record names the ssh configuration, which could run any command here."""
    ledger = site(SWEEP | {"records": [ATTEMPT]})
    monkeypatch.setattr(os, "geteuid", lambda: (ledger.folder / "sweep.json").stat().st_uid + 1)
    monkeypatch.setattr(ssh.SshConnection, "run", lambda *_, **__: pytest.fail("ssh was called"))
    assert app.main(["status", str(ledger.folder)]) != 2
    assert app.main(["collect", str(ledger.folder)]) == 2
    assert "only that user can collect its results" in capsys.readouterr().err


def test_a_refusal_of_the_site_is_the_error_of_cancel_and_nothing_is_cancelled(site, capsys):
    ledger = site(SWEEP | {"records": [ATTEMPT]})
    remote = client.RemoteSweep.of(SiteConfig(name="delta", connect=ConnectConfig(method="ssh", host="h")), ledger)
    assert remote is not None
    site(error="sbatch: error: no such folder")
    assert app.main(["cancel", str(ledger.folder)]) == 2
    assert "delta: sbatch: error: no such folder" in capsys.readouterr().err
    assert not ledger.points()[0].last.cancelled


def test_a_plan_that_arrives_cut_off_is_never_read(tmp_path):
    points = [plan_file.PlannedPoint(num=num, overrides=["batch=16"], run_id=f"r-{num}") for num in range(2)]
    plan = plan_file.Plan(sweep_id="s1", site="delta", points=points)
    content, path = msgspec.json.encode(plan), tmp_path / "plan"
    path.write_bytes(content)
    assert plan_file.read(path) == plan
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match="not a plan file"):
            plan_file.read(path)
