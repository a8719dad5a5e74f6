"""What befalls a site that is reached over ssh: silence, words that get lost, transfers that are cut."""

import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from inpaint_bench.cli import app
from launchers.remote import client, ssh
from launchers.status.survey import sites_of
from launchers.sweep.ledger import Ledger
from tests.launchers.over_ssh import jobs, sweep, told

pytestmark = [pytest.mark.testbed, pytest.mark.faults, pytest.mark.usefixtures("delta_waits")]


@pytest.fixture(scope="module")
def queued(delta_waits, login_nodes, tmp_path_factory) -> Path:
    """A sweep of one point that waits at delta, where a command waits 15 s at most."""
    folder = tmp_path_factory.mktemp("ssh") / "queued"
    assert sweep(login_nodes, folder, "gpu=h200", "batch=2", timeout_s=5) == 0
    return folder


def test_a_peer_that_falls_silent_ends_a_command_in_bounded_time(login_nodes, queued, capsys):
    login_nodes.freeze("delta")
    try:
        start = time.monotonic()
        (point,) = told(queued, capsys)
        assert time.monotonic() - start < 30
        assert point["state"] == "unknown"
        assert "delta-login" in point["message"]
    finally:
        login_nodes.thaw("delta")
    assert [point["state"] for point in told(queued, capsys)] == ["queued"]


def test_an_answer_that_got_lost_doubles_nothing(login_nodes, tmp_path, capsys, monkeypatch):
    folder, ask, asked = tmp_path / "sweep", client.Place.ask, []

    def unheard(at, verb, request, **more):
        asked.append((at, verb, request))
        ask(at, verb, request, **more)
        raise ssh.UnreachableError("ssh delta-login: the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(client.Place, "ask", unheard)
        assert sweep(login_nodes, folder, "gpu=h200", "batch=2") == 1
        assert "is not known" in capsys.readouterr().out
        assert [point["state"] for point in told(folder, capsys)] == ["unknown"]
    (point,) = told(folder, capsys)
    (job,) = jobs(login_nodes, folder)
    assert (point["state"], point["job_id"]) == ("queued", job)
    assert app.main(["rerun", str(folder)]) == 0
    assert "Nothing to send again" in capsys.readouterr().out
    at, verb, request = asked[0]
    assert [line["job_id"] for line in at.ask(verb, request)] == [job]
    later = request | {"points": [request["points"][0] | {"attempt": 2, "run_id": "r-2"}]}
    assert [line["refused"] for line in at.ask(verb, later)] == ["attempt 1 is queued there"]
    assert jobs(login_nodes, folder) == [job]


def test_a_question_that_got_lost_is_asked_again_by_rerun(login_nodes, tmp_path, capsys, monkeypatch):
    folder, ask = tmp_path / "sweep", client.Place.ask

    def unasked(at, verb, request, **more):
        if verb == client.SUBMIT:
            raise ssh.UnreachableError("ssh delta-login: the connection broke")
        return ask(at, verb, request, **more)

    which = shutil.which  # no rsync here: the code goes by tar
    monkeypatch.setattr(client.shutil, "which", lambda name: None if name == "rsync" else which(name))
    with monkeypatch.context() as patch:
        patch.setattr(client.Place, "ask", unasked)
        assert sweep(login_nodes, folder, "gpu=h200", "batch=2") == 1
        assert [point["state"] for point in told(folder, capsys)] == ["planned"]
    assert app.main(["rerun", str(folder)]) == 0
    assert [(point["state"], point["attempt"]) for point in told(folder, capsys)] == [("queued", 2)]
    assert len(jobs(login_nodes, folder)) == 1


def test_code_that_was_cut_off_on_its_way_never_runs(login_nodes, tmp_path, capsys, monkeypatch):
    folder, slow = tmp_path / "sweep", tmp_path / "bin"
    slow.mkdir()
    (slow / "rsync").write_text('#!/bin/sh\nexec /usr/bin/rsync --bwlimit=60 "$@"\n')
    (slow / "rsync").chmod(0o755)
    scratch = login_nodes.bed.state / "scratch"
    known = set(scratch.glob("*")) if scratch.exists() else set()

    def cut() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not set(scratch.glob("*/code/.*.partial/*")):
            time.sleep(0.02)
        login_nodes.stop("delta")

    cutter = threading.Thread(target=cut)
    cutter.start()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(slow), prepend=os.pathsep)
        assert sweep(login_nodes, folder, "gpu=h200", "batch=2") == 1
    cutter.join()
    login_nodes.start("delta")
    (sent,) = set(scratch.glob("*")) - known
    assert [path.name[0] for path in (sent / "code").iterdir()] == ["."]
    assert [point["state"] for point in told(folder, capsys)] == ["planned"]
    assert app.main(["rerun", str(folder)]) == 0
    assert [point["state"] for point in told(folder, capsys)] == ["queued"]
    assert len(jobs(login_nodes, folder)) == 1


def test_results_that_were_cut_off_look_unfinished_and_the_rest_comes_next_time(
    login_nodes, queued, capsys, monkeypatch
):
    at = client.place(sites_of(Ledger.open(queued))["delta"], Ledger.open(queued))
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
        if seen[0] > 6 << 20 and is_up[0]:
            is_up[0] = False
            login_nodes.stop("delta")
        return part

    is_up = [True]
    with monkeypatch.context() as patch:
        patch.setattr(ssh.Stream, "read", cut)
        assert app.main(["collect", str(queued)]) == 2
    assert "goes on from there" in capsys.readouterr().err
    login_nodes.start("delta")
    here = queued / "0" / "attempt-1"
    assert not (here / "manifest.json").exists()
    arrived = {f"steps/{file.name}": file.read_bytes() for file in (here / "steps").iterdir()}
    assert arrived
    assert arrived.items() < parts.items()
    assert app.main(["collect", str(queued)]) == 0
    assert f"{len(arrived)} were here" not in capsys.readouterr().out  # they are not even sent again
    assert {f"steps/{file.name}": file.read_bytes() for file in (here / "steps").iterdir()} == parts
    assert (here / "manifest.json").exists()


def test_what_a_site_cannot_do_is_told_in_its_words(login_nodes, tmp_path, capsys):
    cases = [
        ("sites.delta.gpus.h200.partition=nowhere", "nvalid partition"),
        ("sites.delta.connect.folder=/proc/nothing", "/proc/nothing/.* cannot be made there"),
        ("sites.delta.python=/no/python", "/no/python is no program there"),
    ]
    for number, (override, says) in enumerate(cases):
        assert sweep(login_nodes, tmp_path / str(number), "gpu=h200", "batch=2", override) == 1
        assert re.search(says, capsys.readouterr().out)
