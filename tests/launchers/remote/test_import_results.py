"""Results that are brought into a sweep reach what is theirs, whole, once; what does not fit is left out by name."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import time

import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import PointState
from launchers.remote import bundle, digests
from launchers.remote.bundle import BundleError, CutError, measure
from launchers.remote.import_results import Arrivals
from launchers.status.survey import poll_sweep
from launchers.sweep.ledger import Ledger
from tests.run.small_disk import small_disk_on

from .bundles import ATTEMPT, RUN, bring, everything, results


def brought(ledger: Ledger) -> dict[str, bytes]:
    return {path: content for path, content in everything(ledger).items() if path != "sweep.json"}


@pytest.fixture
def sweep(tmp_path) -> Ledger:
    """A sweep that sent point 0 to grace and let point 6 be carried to delta."""
    ledger = Ledger(tmp_path / "sweep")
    ledger.folder.mkdir()
    asked = [
        {"point": n, "overrides": ["batch=2"], "gpu": None, "batch": None, "site": s}
        for n, s in ((0, "grace"), (6, "delta"))
    ]
    ledger.create(sweep_id="s1", overrides=[])
    ledger.know(asked, {"grace": {"connect": {"method": "slurm"}}, "delta": {"connect": {"method": "bundle"}}})
    ledger.append("elsewhere", points=[6], plan="plan.delta.yaml")
    ledger.append("planned", group="00-grace", job_name="j", site="grace", points=[[0, 1, "r-0"]], asked=[asked[0]])
    return ledger


def test_results_that_are_brought_twice_are_there_once(sweep):
    assert bring(results(), sweep).new == 3
    before, records = everything(sweep), sweep.points()
    assert bring(results(), sweep).new == 0
    assert (everything(sweep), sweep.points()) == (before, records)
    (attempt,) = records[6].attempts
    assert (attempt.run_id, attempt.job_id, attempt.carried) == ("r-6", "77_0", True)


def test_results_do_not_change_what_a_point_asks_for(sweep):
    bring(results(attempts=[ATTEMPT | {"overrides": ["workload.module=evil"]}]), sweep)
    assert sweep.points()[6].overrides == ["batch=2"]


def test_results_that_are_cut_off_at_their_very_end_do_not_either(sweep):
    """A run directory of which the ledger does not tell is asked for its overrides, which `rerun` composes."""
    manifest = json.dumps({"status": "failed", "run_id": "r-6", "overrides": ["workload.module=evil"]}).encode()
    with pytest.raises(CutError):
        bring(results({"6/attempt-1/manifest.json": manifest})[:-1024], sweep)
    assert brought(sweep) == {"6/attempt-1/manifest.json": manifest}
    assert sweep.points()[6].overrides == ["batch=2"]


@pytest.mark.parametrize(
    "path",
    [
        *("0/attempt-1/manifest.json", "6/attempt-2/manifest.json", "sweep.json", "ledger.jsonl"),
        *("jobs/00-delta/77_0_submitted.pkl", "jobs/00-delta/77_0_0_log.out", "6/attempt-1/evil.pkl"),
        *("6/attempt-1/checkpoints/step-1/state.json", "code/abc/inpaint_bench/worker.py", "logs/other/x.out"),
        *("6/attempt-1/.hidden/x.json", "6/attempt-1/weights/model.json"),
        *("06/attempt-1/manifest.json", "6/attempt-01/manifest.json", "sub/6/attempt-1/manifest.json"),
    ],
)
def test_results_cannot_touch_what_is_not_a_file_of_their_own_runs(path, sweep):
    before = everything(sweep)
    with pytest.raises(BundleError, match="not a file of the runs that it brings"):
        bring(results(RUN | {path: b"evil"}), sweep)
    assert everything(sweep) == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sweep_id": "s2"}, "is sweep s1, and these are results of s2"),
        ({"kind": "plan"}, "holds no results"),
        ({"made_unix": "now"}, "lacks the time"),
        ({"made_unix": 1e300}, "lacks the time"),
        ({"made_unix": time.time() + 7 * 86_400}, "yet to come: look at the clocks"),
        ({"journals": [7]}, "lacks the journals"),
        ({"attempts": None}, "lacks the attempts"),
        ({"attempts": [ATTEMPT, ATTEMPT]}, "describes an attempt twice"),
        ({"attempts": [ATTEMPT | {"run_id": "../../x"}]}, "in a way that cannot be"),
        ({"attempts": [ATTEMPT | {"group": ".."}]}, "in a way that cannot be"),
        ({"attempts": [ATTEMPT | {"job_id": "pid:x@here"}]}, "in a way that cannot be"),
        ({"attempts": [ATTEMPT | {"refused": "red\x1b[31m"}]}, "in a way that cannot be"),
        ({"attempts": [ATTEMPT | {"job_id": 7}]}, "in a way that cannot be"),
        ({"attempts": [{}]}, "in a way that cannot be"),
        ({"attempts": [None]}, "in a way that cannot be"),
    ],
)
def test_results_of_something_else_are_refused(changes, says, sweep):
    with pytest.raises(bundle.UserError, match=says):
        bring(results(**changes), sweep)
    assert not (sweep.folder / "6").exists()


def test_a_log_of_no_job_that_is_known_comes_with_its_array_unless_all_of_that_is_left_out(sweep):
    log = {"logs/00-delta/99_0_0_log.out": b"said\n"}
    assert bring(results(log, attempts=[ATTEMPT | {"point": 3}]), sweep).new == 0
    assert bring(results(log, attempts=[ATTEMPT | {"point": 3}, ATTEMPT]), sweep).new == 1
    assert brought(sweep) == log


def test_a_folder_here_that_is_a_link_is_not_followed_out(sweep, tmp_path):
    (tmp_path / "outside").mkdir()
    (sweep.folder / "6").symlink_to(tmp_path / "outside")
    with pytest.raises(bundle.UserError, match="leads elsewhere by a link"):
        bring(results(), sweep)
    assert not list((tmp_path / "outside").iterdir())


def test_a_file_here_that_is_a_link_is_replaced_and_what_it_names_is_not(sweep, tmp_path):
    (tmp_path / "precious").write_text("mine")
    bring(results({}), sweep)
    (sweep.folder / "6" / "attempt-1").mkdir(parents=True)
    (sweep.folder / "6" / "attempt-1" / "manifest.json").symlink_to(tmp_path / "precious")
    bring(results(), sweep)
    assert (tmp_path / "precious").read_text() == "mine"
    assert everything(sweep)["6/attempt-1/manifest.json"] == RUN["6/attempt-1/manifest.json"]


def test_a_closed_part_is_never_replaced_by_another(sweep):
    bring(results(), sweep)
    lies = {"6/attempt-1/steps/part-000000.parquet": b"lies", "6/attempt-1/manifest.json": b"later"}
    received = bring(results(RUN | lies, made_unix=200), sweep)
    assert "a closed part differs" in received.left_out[6, 1]
    assert {path: everything(sweep)[path] for path in RUN} == RUN


def test_of_what_grows_the_newer_wins_whichever_comes_last(sweep):
    manifest = "6/attempt-1/manifest.json"
    assert bring(results({manifest: b"1"}, made_unix=100), sweep).new == 1
    assert bring(results({manifest: b"2"}, made_unix=200), sweep).new == 1
    late = bring(results({manifest: b"1"}, made_unix=100), sweep)
    assert (late.new, late.older) == (0, 1)
    assert everything(sweep)[manifest] == b"2"


def test_a_journal_that_became_a_part_goes_and_one_that_is_still_there_stays(sweep):
    journals = {f"6/attempt-1/{table}/.journal.arrows": b"open rows" for table in ("steps", "events")}
    bring(results(RUN | journals, made_unix=100), sweep)
    later = {"6/attempt-1/events/.journal.arrows": b"open rows", "6/attempt-1/steps/part-000001.parquet": b"open rows"}
    bring(results(later, made_unix=200), sweep)
    bring(results(RUN | journals, made_unix=100), sweep)
    assert {path for path in everything(sweep) if "journal" in path} == {"6/attempt-1/events/.journal.arrows"}


def test_results_that_were_cut_leave_whole_files_and_no_manifest(sweep):
    content = results({"6/attempt-1/steps/part-000000.parquet": b"r" * 5000, "6/attempt-1/manifest.json": b"{}"})
    with pytest.raises(CutError):
        bring(content[:-1600], sweep)
    assert list(everything(sweep)) == ["sweep.json", "6/attempt-1/steps/part-000000.parquet"]
    with pytest.raises(CutError):
        bring(content[:-4000], sweep)
    assert not list(sweep.folder.rglob("*.tmp"))
    assert bring(content, sweep).kept == 1


AGAIN = ATTEMPT | {"attempt": 2, "run_id": "r-6-2", "job_id": "78_0"}
SECOND = {
    "6/attempt-2/steps/part-000000.parquet": b"more rows",
    "logs/00-delta/78_0_0_log.out": b"said more\n",
    "6/attempt-2/manifest.json": b"{}",
}


class TestAnAttemptThatContradictsWhatIsKnownHere:
    """Its files stay out, all else comes, and nothing of it is in the ledger."""

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"run_id": "r-other"}, "it is another run here (r-6)"),
            ({"site": "grace"}, "it was sent to delta, and these results are of grace"),
            ({"point": 3}, "this sweep has no such point"),
            ({"point": 0, "site": "grace", "run_id": "r-0"}, "it was sent from here; there is nothing to bring"),
        ],
    )
    def test_is_left_out_with_the_reason(self, sweep, changes, why):
        bring(results(), sweep)
        odd = ATTEMPT | changes
        its = f"{odd['point']}/attempt-1"
        files = {
            f"{its}/steps/part-000000.parquet": b"lies",
            f"{its}/steps/part-000001.parquet": b"lies",
            "logs/00-delta/77_0_0_log.out": b"lies\n",
            f"{its}/manifest.json": b"lies",
        }
        content = results(files | SECOND, made_unix=200, attempts=[odd, AGAIN])
        received = bring(content, sweep)
        assert received.left_out == {(odd["point"], 1): why}
        assert brought(sweep) == RUN | SECOND
        told = sweep.points()
        assert [(a.run_id, a.job_id) for a in told[6].attempts] == [("r-6", "77_0"), ("r-6-2", "78_0")]
        assert [a.run_id for a in told[0].attempts] == ["r-0"]
        again = bring(content, sweep)
        assert (again.left_out, again.new) == (received.left_out, 0)
        assert (brought(sweep), sweep.points()) == (RUN | SECOND, told)

    def test_is_brought_once_it_fits(self, sweep):
        added = {"point": 3, "overrides": [], "gpu": None, "batch": None, "site": "delta"}
        new = results({"3/attempt-1/manifest.json": b"{}"}, attempts=[ATTEMPT | {"point": 3, "run_id": "r-3"}])
        assert bring(new, sweep).left_out == {(3, 1): "this sweep has no such point"}
        assert sweep.notes("collected") == []
        sweep.know([added], {})
        assert bring(new, sweep).new == 1
        assert [a.run_id for a in sweep.points()[3].attempts] == ["r-3"]

    def test_is_told_with_a_line_each_and_exit_code_1(self, sweep, tmp_path, capsys):
        bring(results(), sweep)
        (tmp_path / "b.tar").write_bytes(results(RUN | SECOND, attempts=[ATTEMPT | {"run_id": "r-other"}, AGAIN]))
        for said in ("3 new files of 1 run", "nothing new; 3 were here"):
            assert app.main(["collect", str(tmp_path / "b.tar"), "--into", str(sweep.folder)]) == 1
            out, err = capsys.readouterr()
            assert said in out
            assert "left out: point 6, attempt 1: it is another run here (r-6)" in out
            assert "not everything was brought" in err


class TestASiteThatIsAskedOverSsh:
    def test_does_not_speak_for_another(self, sweep):
        with pytest.raises(BundleError, match="grace was asked, and these results are of delta"):
            bring(results(), sweep, site="grace")

    def test_does_not_name_a_process_of_this_machine(self, sweep):
        with pytest.raises(BundleError, match="in a way that cannot be"):
            bring(results(attempts=[ATTEMPT | {"job_id": f"pid:{os.getpid()}@{socket.gethostname()}"}]), sweep, "delta")

    def test_is_believed_whatever_its_clock_says(self, sweep):
        """Regression: a site whose clock was set back brought nothing until it had caught up."""
        sweep.know([], {"delta": {"connect": {"method": "ssh"}}})
        manifest = "6/attempt-1/manifest.json"
        bring(results({manifest: b"1"}, made_unix=200), sweep, "delta")
        assert bring(results({manifest: b"2"}, made_unix=100), sweep, "delta").new == 1
        assert everything(sweep)[manifest] == b"2"


def test_a_bundle_that_is_replaced_after_it_was_checked_is_not_read(sweep, tmp_path, monkeypatch):
    """Regression: the second reading's list was not checked, and could name any file of the sweep."""
    path, verify = tmp_path / "b.tar", bundle.verify
    path.write_bytes(results())

    def swapped(file):
        index = verify(file)
        path.write_bytes(results({"jobs/00-delta/77_0_submitted.pkl": b"evil"}))
        return index

    monkeypatch.setattr(bundle, "verify", swapped)
    assert app.main(["collect", str(path), "--into", str(sweep.folder)]) == 2
    assert list(everything(sweep)) == ["sweep.json"]


def test_a_run_directory_here_that_is_a_link_to_another_part_of_the_sweep_is_not_followed(sweep):
    bring(results({}), sweep)
    (sweep.folder / "code").mkdir()
    (sweep.folder / "6").mkdir()
    (sweep.folder / "6" / "attempt-1").symlink_to(sweep.folder / "code")
    with pytest.raises(UserError, match="leads elsewhere by a link"):
        bring(results(), sweep)
    assert not list((sweep.folder / "code").iterdir())


def test_two_collects_at_once_do_not_mix(sweep):
    waits = pytest.raises(UserError, match="another `collect` is bringing results into it; wait for it")
    with Arrivals(sweep), waits:
        bring(results(), sweep)
    assert bring(results(), sweep).new == 3


def test_what_a_killed_collect_left_goes_away_and_what_is_being_written_stays(sweep):
    bring(results(), sweep)
    steps = sweep.folder / "6" / "attempt-1" / "steps"
    old, fresh = steps / ".part-000001.parquet.4711.tmp", steps / ".part-000002.parquet.4712.tmp"
    for file in (old, fresh):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    with Arrivals(sweep, site="delta") as arrivals:
        arrivals.have()
    assert (old.exists(), fresh.exists()) == (False, True)


def test_parts_that_were_read_once_are_not_read_again_and_what_else_changed_is_seen(sweep, monkeypatch):
    bring(results(), sweep)
    read = []
    monkeypatch.setattr(digests, "measure", lambda source, beat: read.append(source.path) or measure(source))

    def have() -> dict[str, str]:
        with Arrivals(sweep, site="delta") as arrivals:
            return {path: sha256 for path, (_, sha256) in arrivals.have().items()}

    assert have() == {path: hashlib.sha256(content).hexdigest() for path, content in RUN.items()}
    assert sorted(read) == ["6/attempt-1/manifest.json", "logs/00-delta/77_0_0_log.out"]
    part = "6/attempt-1/steps/part-000000.parquet"
    times = (sweep.folder / part).stat()
    (sweep.folder / part).write_bytes(b"RoWS")  # of the same size, with the same time
    os.utime(sweep.folder / part, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert have()[part] == hashlib.sha256(b"RoWS").hexdigest()
    (sweep.folder / digests.FILE).write_text("[")
    assert have().keys() == RUN.keys()


class TestADiskThatFillsUp:
    @pytest.fixture
    def small(self, sweep, tmp_path):
        with small_disk_on(tmp_path / "small"):
            folder = tmp_path / "small" / "sweep"
            folder.mkdir()
            for name in ("sweep.json", "ledger.jsonl"):
                shutil.copy(sweep.folder / name, folder)
            yield Ledger(folder)

    def test_before_anything_comes_says_so_and_nothing_is_written(self, small):
        with pytest.raises(UserError, match=r"1,000,000 bytes are to come and [\d,]+ are free; what arrived is kept"):
            bring(results({"6/attempt-1/steps/part-000000.parquet": bytes(1_000_000)}), small)
        assert list(everything(small)) == ["sweep.json"]

    def test_half_way_says_so_keeps_what_is_whole_and_goes_on_when_there_is_room(self, small):
        parts = {f"6/attempt-1/steps/part-{n:06d}.parquet": b"%d" % n for n in range(100)}  # a page each
        content = results(parts | {"6/attempt-1/manifest.json": b"{}"})
        with pytest.raises(UserError, match="No space left on device; what arrived is kept, `collect` goes on"):
            bring(content, small)
        there = everything(small)
        assert 0 < len(there) - 1 < 100
        assert there.items() <= (parts | {"sweep.json": there["sweep.json"]}).items()
        (standing,) = (one for one in poll_sweep(small).points if one.record.num == 6)
        assert standing.state is PointState.UNKNOWN  # and so nothing that `rerun` sends again
        subprocess.run(["mount", "-o", "remount,size=2m", str(small.folder.parent)], check=True)
        assert bring(content, small).kept == len(there) - 1
        assert everything(small).keys() == {*parts, "6/attempt-1/manifest.json", "sweep.json"}

    def test_what_is_here_already_needs_no_room(self, small):
        content = results({"6/attempt-1/steps/part-000000.parquet": bytes(150_000)})
        assert bring(content, small).new == 1
        assert bring(content, small).kept == 1
