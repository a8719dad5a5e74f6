"""Results are copied into a sweep whole and once; what contradicts the sweep is left out with the reason."""

import os

import msgspec
import pytest

from inpaint_bench.core.errors import UserError
from launchers.remote.client import SweepReply
from launchers.remote.sync import CollectReport, ResultFile, copy_results
from launchers.sweep.attempt import Attempt
from launchers.sweep.ledger import Ledger
from tests.launchers.sweeps import a_point, a_sweep, plan

ATTEMPT = {
    "point": 6,
    "attempt": 1,
    "run_id": "r-6",
    "site": "delta",
    "group": "00-delta",
    "job_name": "inpaint-s1-00-delta",
    "job_id": "77_0",
    "refused": None,
    "cancelled": False,
}
MANIFEST = "6/attempt-1/manifest.json"
PART = "6/attempt-1/steps/part-000000.parquet"
RUN = {PART: b"rows", "logs/00-delta/77_0_0_log.out": b"said\n", MANIFEST: b'{"status": "completed"}'}


class Connection:
    """Copies files of another machine, and loses the connection after `limit` of them."""

    def __init__(self, sweep: Ledger, files: dict[str, bytes], mtime_s: int = 100, limit: int = 1000) -> None:
        self.sweep, self.files, self.mtime_s, self.limit = sweep, files, mtime_s, limit

    def __call__(self, files):
        for file in files[: self.limit]:
            target = self.sweep.folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.files[file.path])
            os.utime(target, (self.mtime_s, self.mtime_s))
        if len(files) > self.limit:
            raise ConnectionError


def reply(**changes: object) -> SweepReply:
    attempts = [msgspec.convert(attempt, Attempt) for attempt in changes.pop("attempts", [ATTEMPT])]
    return SweepReply(**{"sweep_id": "s1", "submitting": False, "records": attempts, **changes})


def copy(
    sweep: Ledger, files: dict[str, bytes] = RUN, *, site: str = "delta", limit: int = 1000, mtime_s: int = 100, **more
) -> CollectReport:
    listed = [ResultFile(path, len(content), mtime_s) for path, content in files.items()]
    return copy_results(sweep, reply(**more), listed, Connection(sweep, files, mtime_s, limit), site=site)


def results(sweep: Ledger) -> dict[str, bytes]:
    records = ("sweep.json", "ledger.jsonl", ".lock")
    files = [file for file in sweep.folder.rglob("*") if file.is_file() and file.name not in records]
    return {file.relative_to(sweep.folder).as_posix(): file.read_bytes() for file in files}


@pytest.fixture
def sweep(tmp_path) -> Ledger:
    """Return a sweep that submitted point 0 at grace and point 6 at delta."""
    submitted, remote = a_point(0, overrides=["batch=2"], site="grace"), a_point(6, overrides=["batch=2"])
    sites = {"grace": {"connect": {"method": "slurm"}}, "delta": {"connect": {"method": "ssh"}}}
    ledger = a_sweep(tmp_path / "sweep", [submitted, remote], sites)
    plan(ledger, [submitted], group="00-grace")
    plan(ledger, [remote], group="01-delta")
    return ledger


def test_the_second_copy_finds_nothing_new(sweep):
    assert len(copy(sweep).new) == 3
    records = sweep.points()
    repeated = copy(sweep)
    assert (repeated.new, repeated.num_unchanged) == ([], 3)
    assert results(sweep) == RUN
    assert sweep.points() == records


def test_the_manifest_comes_last_and_an_interrupted_copy_is_continued(sweep):
    for limit in (1, 2):
        with pytest.raises(ConnectionError):
            copy(sweep, dict(reversed(RUN.items())), limit=1)
        assert len(results(sweep)) == limit
        assert MANIFEST not in results(sweep)
    assert copy(sweep).num_unchanged == 2
    assert results(sweep) == RUN


def test_files_that_are_not_results_are_not_copied(sweep):
    others = {"6/attempt-1/evil.pkl": b"x", "6/attempt-1/.hidden/x.json": b"x", "6/attempt-2/x.json": b"x"}
    logs = {"logs/00-delta/77_1_0_log.out": b"x", "logs/other/77_0_0_log.out": b"x"}
    odd = "6/attempt-1/my \x1b[31m picture.png"
    report = copy(sweep, RUN | others | logs | {odd: b"x"})
    assert results(sweep) == RUN
    assert report.left_out == ["'6/attempt-1/my \\x1b[31m picture.png': a file with such a name is not copied"]


def test_results_of_another_sweep_are_refused(sweep):
    with pytest.raises(UserError, match="this is sweep s1, and these are results of s2"):
        copy(sweep, sweep_id="s2")
    assert results(sweep) == {}


def test_a_folder_here_that_is_a_link_is_not_followed(sweep, tmp_path):
    (tmp_path / "outside").mkdir()
    (sweep.folder / "code").mkdir()
    for link, target in (("6", tmp_path / "outside"), ("6/attempt-1", sweep.folder / "code")):
        (sweep.folder / link).parent.mkdir(exist_ok=True)
        (sweep.folder / link).symlink_to(target)
        with pytest.raises(UserError, match="leads elsewhere by a link"):
            copy(sweep)
        assert not list(target.iterdir())
        (sweep.folder / link).unlink()


def test_a_closed_part_is_never_replaced_by_another(sweep):
    copy(sweep)
    changed = RUN | {PART: b"other rows", MANIFEST: b"later"}
    report = copy(sweep, changed, mtime_s=200)
    assert "this closed part differs" in report.left_out[0]
    assert results(sweep) == RUN


def test_a_run_that_has_not_ended_is_reported(sweep):
    report = copy(sweep, attempts=[ATTEMPT | {"is_open": True}])
    assert results(sweep) == {path: RUN[path] for path in RUN if path != MANIFEST}
    assert "1 run not ended, so without manifest" in str(report)


AGAIN = ATTEMPT | {"attempt": 2, "run_id": "r-6-2", "job_id": "78_0"}
SECOND = {
    "6/attempt-2/steps/part-000000.parquet": b"more rows",
    "logs/00-delta/78_0_0_log.out": b"said more\n",
    "6/attempt-2/manifest.json": b"{}",
}


class TestAttemptThatContradictsTheSweep:
    """Its files stay out, all other attempts are copied, and nothing of it is in the ledger."""

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"run_id": "r-other"}, "it has another run id here (r-6)"),
            ({"site": "grace"}, "it was sent to delta, and these results are from grace"),
            ({"point": 3}, "this sweep has no such point"),
            ({"attempt": 3}, "it was not submitted from here; rsync its run directory and merge both"),
            ({"point": 0, "site": "grace", "run_id": "r-0"}, "it was sent to grace, and these results are from delta"),
        ],
    )
    def test_it_is_left_out_with_the_reason(self, sweep, changes, reason):
        plan(sweep, [a_point(6)], attempt=2, run_id="r-6-2", group="02-delta")
        records = sweep.points()
        copy(sweep)
        odd = ATTEMPT | changes
        run_dir = f"{odd['point']}/attempt-{odd['attempt']}"
        files = {f"{run_dir}/steps/part-000001.parquet": b"lies", f"{run_dir}/manifest.json": b"lies"}
        report = copy(sweep, files | SECOND, mtime_s=200, attempts=[odd, AGAIN])
        assert report.left_out == [f"point {odd['point']}, attempt {odd['attempt']}: {reason}"]
        assert results(sweep) == RUN | SECOND
        repeated = copy(sweep, files | SECOND, mtime_s=200, attempts=[odd, AGAIN])
        assert (repeated.left_out, repeated.new) == (report.left_out, [])
        assert results(sweep) == RUN | SECOND
        assert sweep.points() == records


class TestSiteOverSsh:
    def test_an_attempt_that_is_a_local_process_is_left_out(self, sweep):
        """`cancel` would look for the process on this machine."""
        process = ATTEMPT | {"job_id": f"pid:{os.getpid()}@here"}
        assert copy(sweep, {MANIFEST: b"{}"}, site="delta", attempts=[process]).left_out == [
            "point 6, attempt 1: it did not run in Slurm"
        ]

    def test_a_changed_file_is_copied_whatever_the_clock_of_the_site_says(self, sweep):
        """Regression: a site whose clock was set back brought nothing until it had caught up."""
        copy(sweep, {MANIFEST: b"1"}, mtime_s=200, site="delta")
        assert len(copy(sweep, {MANIFEST: b"2"}, mtime_s=100, site="delta").new) == 1
        assert results(sweep)[MANIFEST] == b"2"
