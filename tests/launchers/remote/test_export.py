"""What a site sends of a sweep, by its own command in a process of its own: steadily, in little memory, run by run."""

import json
import os
import sys
from pathlib import Path

import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.site import SiteConfig
from launchers import remote_agent
from launchers.remote import bundle, client, export
from launchers.remote.digests import FILE, Digests
from launchers.remote.import_results import Arrivals
from launchers.remote.ssh import Stream, UnreachableError
from launchers.sweep.ledger import Ledger

PART = "steps/part-000000.parquet"


def a_sweep(folder: Path, runs: int, method: str, *, job: str | None = None) -> Ledger:
    """Of points that all went to delta, in one array; without a job none was taken, so no Slurm is asked."""
    ledger, points = Ledger(folder), range(runs)
    folder.mkdir()
    asked = [{"point": n, "overrides": [], "gpu": None, "batch": None, "site": "delta"} for n in points]
    ledger.create(sweep_id="s1", overrides=[])
    ledger.know(asked, {"delta": {"name": "delta", "connect": {"method": method}}})
    named = {"group": "00-delta", "job_name": "j", "site": "delta"}
    ledger.append("planned", **named, points=[[n, 1, f"r-{n}"] for n in points], asked=asked)
    outcome = {"kind": "submitted", "job_id": job} if job else {"kind": "refused", "message": "not now"}
    ledger.append(**outcome, group="00-delta", points=[[n, 1] for n in points])
    return ledger


@pytest.fixture
def site(tmp_path) -> Ledger:
    """Three runs with a part, a log and a manifest each, as they lie where they ran."""
    ledger = a_sweep(tmp_path / "site", 3, "slurm")
    for n in range(3):
        run_dir = ledger.folder / str(n) / "attempt-1"
        (run_dir / PART).parent.mkdir(parents=True)
        (run_dir / PART).write_bytes(b"rows %d" % n * 1000)
        (run_dir / "manifest.json").write_text('{"status": "completed"}')
    return ledger


@pytest.fixture
def here(tmp_path) -> Ledger:
    return a_sweep(tmp_path / "here", 3, "ssh")


def place() -> client.Place:
    return client.Place(site=SiteConfig(name="delta"), root="/there", code="c")


def sending(site: Ledger, have: dict) -> Stream:
    """The site's own command, as at the other end of a connection."""
    request = json.dumps({"root": str(site.folder), "site": "delta", "have": have}).encode()
    command = [sys.executable, "-m", "launchers.remote_agent", client.EXPORT]
    return Stream(["env", f"PYTHONPATH={ROOT}", *command], request, host="delta-login", silence_s=60)


def take_all(stream: Stream, arrivals: Arrivals) -> None:
    while client.another(stream, place(), []):
        arrivals.take(stream, bundle.read_index(stream))


def runs_of(site: Ledger, have: dict) -> tuple[list[dict[str, bytes]], list[str]]:
    """The files of each bundle, and what stays there."""
    bundles, stays = [], []
    with sending(site, have) as stream:
        while client.another(stream, place(), stays):
            files: dict[str, bytes] = {}
            index = bundle.read_index(stream)
            bundle.read_files(stream, index, lambda m, chunks, files=files: files.update({m.path: b"".join(chunks)}))
            bundles.append(files)
    return bundles, stays


def test_each_run_comes_in_a_bundle_of_its_own_its_manifest_last_and_the_second_time_empty(site, here):
    bundles, _ = runs_of(site, {})
    files = [PART, "manifest.json"]
    assert [list(found) for found in bundles] == [[f"{n}/attempt-1/{name}" for name in files] for n in range(3)]
    with Arrivals(here, site="delta") as arrivals, sending(site, {}) as stream:
        take_all(stream, arrivals)
    with Arrivals(here, site="delta") as arrivals:
        assert runs_of(site, arrivals.have())[0] == [{}, {}, {}]


def test_a_connection_that_ends_between_two_runs_leaves_the_first_complete(site, here):
    (site.folder / "1" / "attempt-1" / PART).write_bytes(bytes(4 << 20))  # more than lies in a pipe
    with Arrivals(here, site="delta") as arrivals, sending(site, {}) as stream:
        assert client.another(stream, place(), [])
        arrivals.take(stream, bundle.read_index(stream))
        stream._process.kill()
        with pytest.raises((UnreachableError, bundle.CutError)):
            take_all(stream, arrivals)
    arrived = sorted(str(path.relative_to(here.folder)) for path in here.folder.glob("0/**/*.*"))
    assert arrived == ["0/attempt-1/manifest.json", f"0/attempt-1/{PART}"]
    assert here.notes("collected")[0]["files"] >= 2


def test_while_a_large_file_is_read_a_line_says_that_the_site_lives(site, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_agent, "BEAT_S", 0.0)
    (site.folder / "0" / "attempt-1" / PART).write_bytes(bytes(20 * bundle.CHUNK))
    with (tmp_path / "out").open("wb") as out:
        remote_agent.export({"root": str(site.folder), "site": "delta", "have": {}}, out)
    before = (tmp_path / "out").read_bytes().partition(client.MARK + client.BUNDLE)[0]
    assert before.count(b'"alive"') > 20


def test_a_part_is_read_once_for_its_digest_and_a_hint_that_is_wrong_is_forgotten(site):
    part = f"0/attempt-1/{PART}"
    sent = runs_of(site, {})[0][0][part]
    known = json.loads((site.folder / FILE).read_text())
    assert set(known) == {f"{n}/attempt-1/{PART}" for n in range(3)}
    known[part][-1] = "0" * 64
    (site.folder / FILE).write_text(json.dumps(known))
    with pytest.raises(bundle.BundleError, match=f"{part}: its checksum does not fit"):
        runs_of(site, {})
    assert runs_of(site, {})[0][0][part] == sent


def test_what_has_a_name_that_no_bundle_holds_stays_there_and_is_said(site, capsys):
    (site.folder / "1" / "attempt-1" / "my \x1b[31m picture.png").write_bytes(b"x")
    bundles, stays = runs_of(site, {})
    assert [len(files) for files in bundles] == [2, 2, 2]
    assert stays == ["'1/attempt-1/my \\x1b[31m picture.png': not a path that a bundle may hold"]
    out = site.folder.parent / "out.tar"
    assert app.main(["collect", str(site.folder), "--export", str(out)]) == 1
    assert "left there: '1/attempt-1/my \\x1b[31m picture.png'" in capsys.readouterr().out
    assert len(bundle.verify(out).members) == 6


def test_what_somebody_ran_there_on_the_login_node_stays_there_and_is_said(site):
    asked = {"overrides": [], "gpu": None, "batch": None}
    site.know([], {"local": {"name": "local", "connect": {"method": "local"}}})
    site.append("planned", group="1", job_name=None, site="local", points=[[1, 2, "r-1-2"]], asked=[asked])
    bundles, stays = runs_of(site, {})
    assert len(bundles) == 3
    assert stays == ["point 1, attempt 2: was run at local, and delta was asked"]


def test_links_and_pipes_are_not_sent_and_not_waited_for(site, tmp_path):
    (tmp_path / "precious.json").write_text("{}")
    run_dir = site.folder / "1" / "attempt-1"
    (run_dir / "manifest.json").unlink()
    for name in ("manifest.json", "other.json"):
        (run_dir / name).symlink_to(tmp_path / "precious.json")
    os.mkfifo(run_dir / "worker.log")
    (site.folder / "jobs" / "00-delta").mkdir(parents=True)
    os.mkfifo(site.folder / "jobs" / "00-delta" / "77_1_0_log.out")
    assert list(runs_of(site, {})[0][1]) == [f"1/attempt-1/{PART}"]


def test_a_log_comes_with_the_run_of_its_job_and_one_of_no_job_with_the_first(tmp_path):
    site = a_sweep(tmp_path / "site", 3, "slurm", job="77_%a")
    logs = site.folder / "jobs" / "00-delta"
    logs.mkdir(parents=True)
    for name in ("77_1_0_log.out", "77_1_0_log.err", "77_2_0_log.out", "99_1_0_log.out", "77_1_submitted.pkl"):
        (logs / name).write_text(name)
    runs = export.outgoing(site.folder, site.points().values(), ())
    assert [[source.path.rpartition("/")[2] for source in run.sources] for run in runs] == [
        ["99_1_0_log.out"],
        ["77_1_0_log.err", "77_1_0_log.out"],
        ["77_2_0_log.out"],
    ]


def test_a_file_that_went_between_list_and_look_is_not_sent(site):
    (run, *_) = export.outgoing(site.folder, site.points().values(), ())
    (site.folder / "0" / "attempt-1" / PART).unlink()
    contents = export.contents(run.sources, Digests(site.folder))
    assert [member.path for _, member in contents] == ["0/attempt-1/manifest.json"]


def test_what_the_site_cannot_do_is_told_in_its_words(site):
    (site.folder / "sweep.json").unlink()
    with pytest.raises(client.RemoteError, match=r"delta: .*site: not a sweep directory"):
        runs_of(site, {})
