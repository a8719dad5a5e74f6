"""Faults of a site that is reached over ssh: no answer, lost requests and replies, broken transfers."""

import json
import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from inpaint_bench.cli import app
from launchers.remote import client, ssh, sync
from launchers.status.survey import sites_of
from launchers.sweep.ledger import Ledger
from tests.launchers.over_ssh import launch_sweep, points_of, queued_jobs, states_of
from tests.run.small_disk import small_disk_on

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("delta_waits")]

TIMEOUT_S = 120.0  # for this machine to do something, however busy it is


@pytest.fixture(scope="module")
def queued(delta_waits, login_nodes, tmp_path_factory) -> Path:
    """Return a sweep of one point that is queued at delta; a command waits for the site for 15 s at most."""
    folder = tmp_path_factory.mktemp("ssh") / "queued"
    assert launch_sweep(login_nodes, folder, "gpu=h200", "batch=2", timeout_s=5) == 0
    return folder


def stop_when(login_nodes, condition) -> threading.Thread:
    """Stop delta's sshd as soon as a condition holds."""

    def run() -> None:
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end and not condition():
            time.sleep(0.02)
        login_nodes.stop("delta")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_site_that_stops_answering_ends_a_command_in_bounded_time(login_nodes, queued, capsys):
    login_nodes.freeze("delta")
    try:
        start = time.monotonic()
        (point,) = points_of(queued, capsys)
        assert time.monotonic() - start < 60
        assert point["state"] == "unknown"
        assert "delta-login" in point["message"]
    finally:
        login_nodes.thaw("delta")
    assert states_of(queued, capsys) == ["queued"]


def test_a_lost_reply_and_a_repeated_request_submit_nothing_twice(login_nodes, tmp_path, capsys, monkeypatch):
    folder, call, requests = tmp_path / "sweep", client.RemoteSweep.call, []

    def lose_reply(remote, *command, **options):
        requests.append((remote, command, options))
        call(remote, *command, **options)
        raise ssh.UnreachableError("ssh delta-login: the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(client.RemoteSweep, "call", lose_reply)
        assert launch_sweep(login_nodes, folder, "gpu=h200", "batch=2") == 1
        assert "is unknown" in capsys.readouterr().out
        assert states_of(folder, capsys) == ["unknown"]
    (point,) = points_of(folder, capsys)
    (job,) = queued_jobs(login_nodes, folder)
    assert (point["state"], point["job_id"]) == ("queued", job)
    assert app.main(["rerun", str(folder)]) == 0
    assert "Nothing to submit." in capsys.readouterr().out
    remote, command, options = requests[0]
    assert [attempt.job_id for attempt in remote.call(*command, **options).attempts] == [job]
    plan = json.loads(options["stdin"])
    plan["points"][0] |= {"attempt": 2, "run_id": "r-2"}
    (refused,) = remote.call(*command, **options | {"stdin": json.dumps(plan).encode()}).attempts
    assert (refused.run_id, refused.refused) == ("r-2", "attempt 1 is queued at the site")
    assert queued_jobs(login_nodes, folder) == [job]


def test_a_lost_request_is_repeated_by_rerun(login_nodes, tmp_path, capsys, monkeypatch):
    folder, call = tmp_path / "sweep", client.RemoteSweep.call

    def lose_request(remote, verb, *arguments, **options):
        if verb == "launch":
            raise ssh.UnreachableError("ssh delta-login: the connection broke")
        return call(remote, verb, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(client.RemoteSweep, "call", lose_request)
        assert launch_sweep(login_nodes, folder, "gpu=h200", "batch=2") == 1
        assert states_of(folder, capsys) == ["planned"]
    assert app.main(["rerun", str(folder)]) == 0
    assert [(point["state"], point["attempt"]) for point in points_of(folder, capsys)] == [("queued", 2)]
    assert len(queued_jobs(login_nodes, folder)) == 1


@pytest.fixture
def ended(login_nodes, tmp_path, capsys) -> tuple[Path, dict[str, bytes]]:
    """Return a sweep whose job was cancelled, and the files that its run left at delta."""
    folder = tmp_path / "sweep"
    assert launch_sweep(login_nodes, folder, "gpu=h200", "batch=2", "workload.min_measure_s=120") == 0
    assert app.main(["cancel", str(folder)]) == 0
    login_nodes.bed.wait(lambda: [point["reason"] for point in points_of(folder, capsys)] == ["cancelled"])
    ledger = Ledger.open(folder)
    remote = client.RemoteSweep.of(sites_of(ledger)["delta"], ledger)
    assert remote is not None
    files = {f"steps/part-{n:06d}.parquet": os.urandom(4 << 20) for n in range(4)}
    files |= {"manifest.json": b'{"status": "interrupted"}', ".hydra/config.yaml": b"a: 1\n"}
    for name, content in files.items():
        path = Path(remote.root, "0", "attempt-1", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (record,) = Ledger(Path(remote.root)).points().values()
    log = Path(remote.root, "jobs", record.last.group, f"{record.last.job_id}_0_log.out")
    log.write_bytes(b"a line\n")
    return folder, files


def results(folder: Path) -> dict[str, bytes]:
    """Return the collected files."""
    run_dir = folder / "0" / "attempt-1"
    paths = [path for path in run_dir.rglob("*") if path.is_file()]
    return {path.relative_to(run_dir).as_posix(): path.read_bytes() for path in paths if path.name != "scheduler.json"}


def check_resumed_collect(login_nodes, folder: Path, files: dict[str, bytes], capsys) -> None:
    """Check that an interrupted `collect` left complete parts but no manifest, and that the next copies the rest."""
    assert "`collect` continues from there" in capsys.readouterr().err
    login_nodes.start("delta")
    arrived = results(folder)
    assert arrived
    assert "manifest.json" not in arrived
    assert arrived.items() < files.items()
    assert app.main(["collect", str(folder)]) == 0
    unchanged = re.search(r"; (\d+) unchanged", capsys.readouterr().out)
    assert unchanged
    assert int(unchanged[1]) >= len(arrived)
    assert results(folder) == files
    (log,) = (folder / "logs").rglob("*.out")
    assert log.read_bytes() == b"a line\n"
    assert app.main(["collect", str(folder)]) == 0
    assert "delta: nothing new" in capsys.readouterr().out
    assert not list(folder.rglob(".*.tmp"))


def test_an_interrupted_transfer_leaves_no_manifest_and_is_resumed(login_nodes, ended, capsys, monkeypatch):
    folder, files = ended
    monkeypatch.setattr(sync, "BATCH_BYTES", 4 << 20)
    stopper = stop_when(login_nodes, lambda: list(folder.glob("0/attempt-1/steps/part-*")))
    assert app.main(["collect", str(folder)]) == 2
    stopper.join()
    check_resumed_collect(login_nodes, folder, files, capsys)


def test_on_a_full_disk_complete_files_stay_and_the_rest_follows_when_there_is_room(
    login_nodes, ended, tmp_path, capsys
):
    folder, files = ended
    with small_disk_on(tmp_path / "small", kib=10 * 1024):
        small = tmp_path / "small" / "sweep"
        small.mkdir()
        for name in ("sweep.json", "ledger.jsonl"):
            shutil.copy(folder / name, small)
        assert app.main(["collect", str(small)]) == 2
        assert "No space left on device" in capsys.readouterr().err
        arrived = results(small)
        assert "manifest.json" not in arrived
        assert arrived.items() < files.items()
        subprocess.run(["mount", "-o", "remount,size=40m", str(tmp_path / "small")], check=True)
        assert app.main(["collect", str(small)]) == 0
        assert results(small) == files


def test_an_error_at_the_site_is_reported_in_its_words(login_nodes, tmp_path, capsys):
    cases = [
        ("sites.delta.gpus.h200.partition=nowhere", "nvalid partition"),
        ("sites.delta.connect.folder=/proc/nothing", r"cannot be copied to /proc/nothing/.*cannot create directory"),
        ("sites.delta.python=/no/python", "/no/python is not a program there"),
    ]
    for number, (override, message) in enumerate(cases):
        assert launch_sweep(login_nodes, tmp_path / str(number), "gpu=h200", "batch=2", override) == 1
        assert re.search(message, capsys.readouterr().out)
