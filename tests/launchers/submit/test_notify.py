"""The end of a sweep: a mail of Slurm's for each array, and one message to a webhook from each site."""

import json
import shlex
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.schema import SWEEP
from launchers.submit import webhook
from tests.faults.support import ROOT, SHORT, WORKLOAD, reasons, status_points
from tests.launchers.over_ssh import launch_sweep
from tests.launchers.sweeps import exited_process, sweep_of_jobs, write_manifest

SECRET = "T0SECRET0B0"


class Receiver(ThreadingHTTPServer):
    """A server that keeps the messages which it gets, and answers with `code`."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.messages, self.code, self.pause_s = [], 200, 0.0


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.messages.append((self.path, self.headers["Content-Type"], json.loads(body)))
        time.sleep(self.server.pause_s)
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with Receiver() as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        yield receiver
        receiver.shutdown()


@pytest.fixture
def webhook_file(server, tmp_path):
    file = tmp_path / "webhook"
    file.touch(mode=0o600)
    file.write_text(f"http://127.0.0.1:{server.server_port}/services/{SECRET}\n")
    return file


@pytest.fixture
def ended_sweep(tmp_path):
    folder = sweep_of_jobs(tmp_path / "sweep", [exited_process(), exited_process()])
    write_manifest(folder, 0, run_id="r-0", ended_unix_ns=10**18)
    return folder


class TestMessage:
    def test_message_has_states_reasons_commands_and_a_text(self, server, webhook_file, ended_sweep):
        assert webhook.report(ended_sweep, "local", str(webhook_file))
        ((path, kind, content),) = server.messages
        assert (path, kind) == (f"/services/{SECRET}", "application/json")
        assert (content["sweep_id"], content["site"], content["folder"]) == ("s1", "local", str(ended_sweep))
        assert sum(content["states"].values()) == 2
        assert content["states"]["failed"] >= 1
        assert content["commands"]["status"] == f"inpaint-bench status {shlex.quote(str(ended_sweep))}"
        assert content["text"].startswith("Sweep s1 has ended at local: ")
        assert all(reason in content["text"] for reason in content["reasons"])
        assert all(command in content["text"] for command in content["commands"].values())

    @pytest.mark.subprocess
    def test_sweep_on_this_machine_sends_it_at_its_end(self, server, webhook_file, tmp_path):
        line = ["gpu=cpu", "site=local", "model=tiny_inpaint", "recipe=cpu", "telemetry=none"]
        line += [*WORKLOAD[1:], SHORT, "workload.name=fine", f"notify.webhook_file={webhook_file}"]
        assert launch.main(["-m", *line, f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
        ((_, _, sent),) = server.messages
        assert sent["states"] == {"completed": 1}
        assert "rerun" not in sent["commands"]

    def test_second_start_of_the_job_sends_nothing(self, server, webhook_file, ended_sweep):
        (ended_sweep / webhook.FOLDER).mkdir()
        arguments = [str(ended_sweep), "local", "1", str(webhook_file)]
        assert [webhook.main(arguments), webhook.main(arguments)] == [0, 0]
        assert len(server.messages) == 1

    @pytest.mark.parametrize(("code", "tries"), [(404, 1), (503, webhook.TRIES)])
    def test_refusal_is_logged_without_the_url(
        self, server, webhook_file, ended_sweep, monkeypatch, caplog, code, tries
    ):
        monkeypatch.setattr(webhook, "PAUSE_S", 0.0)
        server.code = code
        assert not webhook.report(ended_sweep, "local", str(webhook_file))
        assert len(server.messages) == tries
        assert f"the webhook was not sent: the server answered with code {code}" in caplog.text
        assert SECRET not in caplog.text

    def test_server_that_does_not_answer_is_given_up_and_not_asked_again(
        self, server, webhook_file, ended_sweep, monkeypatch, caplog
    ):
        monkeypatch.setattr(webhook, "TIMEOUT_S", 0.5)
        server.pause_s = 2.0
        assert not webhook.report(ended_sweep, "local", str(webhook_file))
        assert len(server.messages) == 1
        assert "no answer within" in caplog.text

    def test_server_that_is_not_there_is_logged(self, tmp_path, ended_sweep, monkeypatch, caplog):
        monkeypatch.setattr(webhook, "PAUSE_S", 0.0)
        file = tmp_path / "closed"
        file.touch(mode=0o600)
        file.write_text(f"http://127.0.0.1:1/{SECRET}")
        assert not webhook.report(ended_sweep, "local", str(file))
        assert "no connection" in caplog.text
        assert SECRET not in caplog.text


class TestBadInput:
    @pytest.mark.parametrize(
        ("override", "sentence"),
        [
            (f"notify.webhook_file=https://hooks.example.org/{SECRET}", "write it into a file that only you can read"),
            ("notify.webhook_file=absent", "notify.webhook_file=absent: No such file or directory"),
            ("notify.webhook_file=open", "chmod 600"),
            ("notify.webhook_file=wrong", "a URL that begins with https://"),
            ("notify.mail=me@example.org", "Slurm sends the mail, and site=local has none"),
            ("'notify.mail=a b'", "must be one address of mail"),
            ("notify.mail=a@x.org,b@x.org", "notify differs between points, and a sweep has one"),
        ],
    )
    def test_mistake_is_refused_before_anything_is_submitted(self, tmp_path, monkeypatch, capsys, override, sentence):
        monkeypatch.chdir(tmp_path)
        for name, mode in (("open", 0o644), ("wrong", 0o600)):
            (tmp_path / name).write_text("ftp://example.org")
            (tmp_path / name).chmod(mode)
        (override,) = shlex.split(override)
        line = ["-m", "gpu=cpu", "site=local", "model=tiny_inpaint", "recipe=cpu", override, "hydra.sweep.dir=sweep"]
        assert launch.main(line) == 2
        printed = capsys.readouterr()
        assert sentence in printed.err
        assert SECRET not in printed.out + printed.err
        assert not (tmp_path / "sweep" / SWEEP).exists()

    def test_url_is_refused_for_a_site_that_cannot_be_seen_from_here(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        line = ["-m", "gpu=h200", "sites.delta.account.value=bbxx-delta-gpu", "hydra.sweep.dir=sweep"]
        line += [f"notify.webhook_file=https://hooks.example.org/{SECRET}", "dry_run=true"]
        assert launch.main(line) == 2
        assert "write it into a file" in capsys.readouterr().err
        assert not (tmp_path / "sweep" / SWEEP).exists()

    def test_job_for_cpus_needs_an_account_of_its_own_at_delta(self, tmp_path, webhook_file, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "slurm.conf").touch()
        line = ["-m", "gpu=h200", "sites.delta.account.value=bbxx-delta-gpu", f"notify.webhook_file={webhook_file}"]
        line += [f"sites.delta.connect.slurm_conf={tmp_path / 'slurm.conf'}", "dry_run=true"]
        monkeypatch.setattr("launchers.submit.notify.is_visible", lambda site, reachability: True)
        assert launch.main([*line, "hydra.sweep.dir=sweep"]) == 2
        assert "sites.delta.cpu_jobs.account is empty" in capsys.readouterr().err

    def test_single_run_tells_nobody(self, capsys):
        line = ["gpu=cpu", "site=local", "model=tiny_inpaint", "recipe=cpu", "notify.mail=me"]
        assert launch.main(line) == 2
        assert "notify needs -m" in capsys.readouterr().err


def content(folder) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


@pytest.mark.slurm
class TestOnSlurm:
    @pytest.fixture(autouse=True)
    def _bed(self, testbed, monkeypatch):
        monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))

    @pytest.fixture
    def partition_down(self, testbed):
        """For one test: `delta_waits` is for all tests of a module."""
        partition = ("scontrol", "update", "partitionname=gpuH200x8")
        testbed.run("delta", *partition, "state=down")
        yield
        testbed.run("delta", *partition, "state=up")

    def test_each_site_sends_one_message_when_its_arrays_have_ended(self, testbed, tmp_path, server, webhook_file):
        folder, mail = tmp_path / "sweep", f"me-{tmp_path.name}@example.org"
        line = ["gpu=a40,h200", "workload.name=fine,app_error", "sites.grace.limits.max_array_size=1"]
        line += ["workload.min_measure_s=12"]
        line += [f"notify.webhook_file={webhook_file}", f"notify.mail={mail}", f"hydra.sweep.dir={folder}"]
        assert launch.main(["-m", *WORKLOAD, *line]) == 0
        testbed.wait(lambda: len(server.messages) == 2, timeout_s=200, what="a message of each site")
        for path, _, sent in server.messages:
            assert path == f"/services/{SECRET}"
            assert sent["states"] == {"completed": 1, "failed": 1}
            assert sent["reasons"] == {"app_error": 1}
            assert "1 completed, 1 failed (1 app_error)" in sent["text"]
        assert sorted(sent["site"] for _, _, sent in server.messages) == ["delta", "grace"]
        assert SECRET.encode() not in content(folder)
        manifests = [file.read_text() for file in folder.glob("*/attempt-*/manifest.json")]
        assert len(manifests) == 4
        assert not any(mail in text or "webhook" in text for text in manifests)
        # Grace has two arrays of one task each, and delta one of two: Slurm writes once about each of them.
        lines = {}
        for site, arrays in (("grace", 2), ("delta", 1)):
            file = testbed.plan.home(site) / "log" / "mail"
            lines[site] = [text for text in file.read_text().splitlines() if text.startswith(mail)]
            assert len(lines[site]) == arrays, lines
        assert len(server.messages) == 2

    @pytest.mark.usefixtures("partition_down")
    def test_rerun_takes_over_and_only_the_newest_job_sends(self, testbed, tmp_path, server, webhook_file, capsys):
        folder = tmp_path / "sweep"
        line = ["gpu=h200", "seed=0,1", "sites.delta.limits.max_array_size=1", f"notify.webhook_file={webhook_file}"]
        assert launch.main(["-m", *WORKLOAD, *line, f"hydra.sweep.dir={folder}"]) == 0
        testbed.run("delta", "scancel", status_points(folder, capsys)[0]["job_id"].split("_")[0])
        ended = ("failed", "cancelled")
        testbed.wait(lambda: reasons(folder, capsys)[0] == ended, timeout_s=60, what="the end of the first array")
        assert app.main(["rerun", str(folder), "--only", "cancelled"]) == 0
        record = json.loads((folder / webhook.FOLDER / "delta.json").read_text())
        assert record["number"] == 2
        assert server.messages == []
        testbed.run("delta", "scancel", "--partition", "gpuH200x8", "--me")
        logs = [folder / webhook.FOLDER / f"delta-{number}.log" for number in (1, 2)]
        testbed.wait(lambda: server.messages and all(log.exists() and log.read_text() for log in logs))
        assert f"nothing was sent: more was submitted since, and job {record['job_id']} waits" in logs[0].read_text()
        ((_, _, sent),) = server.messages
        # Slurm may not list a job yet that was cancelled before it started: its state is unknown for some minutes.
        assert sum(sent["states"].values()) == 2
        assert set(sent["states"]) <= {"failed", "unknown"}

    def test_site_over_ssh_sends_its_own(self, login_nodes, tmp_path, server, webhook_file):
        line = ["gpu=h200", "batch=1", f"notify.webhook_file={webhook_file}"]
        assert launch_sweep(login_nodes, tmp_path / "sweep", *line) == 0
        login_nodes.bed.wait(lambda: server.messages, what="the message of delta")
        ((_, _, sent),) = server.messages
        assert (sent["site"], sent["states"]) == ("delta", {"completed": 1})
        assert sent["folder"].startswith(str(login_nodes.bed.state))
        missing = "notify.webhook_file=/absent"
        assert launch_sweep(login_nodes, tmp_path / "other", "gpu=h200", "batch=1", missing) == 1
        assert len(server.messages) == 1
