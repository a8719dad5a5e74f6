"""Which files of a sweep are copied, listed by the agent as in a process at the site."""

import os
from pathlib import Path

import pytest

from launchers.remote.client import SweepReply
from launchers.remote.sync import is_result, list_results
from launchers.sweep.attempt import Attempt
from launchers.sweep.events import Refused
from launchers.sweep.ledger import Ledger
from tests.launchers.sweeps import a_point, a_sweep, plan, submit

PART = "steps/part-000000.parquet"


def make_sweep(folder: Path, runs: int, *, job: str | None = None) -> Ledger:
    """Return a sweep whose points were all submitted at delta in one array; without a job it was refused."""
    points = [a_point(num) for num in range(runs)]
    ledger = a_sweep(folder, points, {"delta": {"name": "delta", "connect": {"method": "slurm"}}})
    plan(ledger, points, group="00-delta")
    if job:
        submit(ledger, range(runs), job_id=job, group="00-delta")
    else:
        ledger.append(Refused(group="00-delta", attempts=[(num, 1) for num in range(runs)], message="not now"))
    return ledger


@pytest.fixture
def site(tmp_path) -> Ledger:
    """Three runs with a part and a manifest each."""
    ledger = make_sweep(tmp_path / "site", 3)
    for n in range(3):
        run_dir = ledger.folder / str(n) / "attempt-1"
        (run_dir / PART).parent.mkdir(parents=True)
        (run_dir / PART).write_bytes(b"rows %d" % n * 1000)
        (run_dir / "manifest.json").write_text('{"status": "completed"}')
    return ledger


def listed(ledger: Ledger, open_points: tuple[int, ...] = ()) -> SweepReply:
    reply = SweepReply(sweep_id="s1")
    list_results(ledger.folder, ledger.points().values(), open_points, reply)
    return reply


def paths(reply: SweepReply, point: int) -> list[str]:
    return sorted(file.path for attempt in reply.attempts if attempt.point == point for file in attempt.files)


def test_every_run_is_listed_with_its_parts_and_its_manifest(site):
    reply = listed(site)
    assert [attempt.key for attempt in reply.attempts] == [(n, 1) for n in range(3)]
    assert paths(reply, 1) == ["1/attempt-1/manifest.json", f"1/attempt-1/{PART}"]
    (part,) = [file for file in reply.attempts[1].files if file.path.endswith("parquet")]
    assert (part.size, part.mtime_s) == (6000, int((site.folder / part.path).stat().st_mtime))


def test_a_run_that_has_not_ended_is_listed_without_what_still_changes(site):
    run_dir = site.folder / "1" / "attempt-1"
    for name in ("telemetry.json", "steps/.journal.arrows"):
        (run_dir / name).write_bytes(b"x")
    reply = listed(site, open_points=(1,))
    assert [attempt.is_open for attempt in reply.attempts] == [False, True, False]
    assert paths(reply, 1) == [f"1/attempt-1/{PART}"]
    assert len(paths(listed(site), 1)) == 4


def test_a_file_with_an_unusual_name_is_skipped_with_a_message(site):
    (site.folder / "1" / "attempt-1" / "my \x1b[31m picture.png").write_bytes(b"x")
    reply = listed(site)
    assert [len(attempt.files) for attempt in reply.attempts] == [2, 2, 2]
    assert reply.skipped == ["'1/attempt-1/my \\x1b[31m picture.png': a file with such a name is not copied"]


def test_links_and_pipes_are_not_listed_and_not_opened(site, tmp_path):
    (tmp_path / "precious.json").write_text("{}")
    run_dir = site.folder / "1" / "attempt-1"
    (run_dir / "manifest.json").unlink()
    for name in ("manifest.json", "other.json"):
        (run_dir / name).symlink_to(tmp_path / "precious.json")
    os.mkfifo(run_dir / "worker.log")
    (run_dir / "events").symlink_to(tmp_path)
    assert paths(listed(site), 1) == [f"1/attempt-1/{PART}"]


def test_a_log_is_listed_with_the_run_of_its_job(tmp_path):
    site = make_sweep(tmp_path / "site", 3, job="77_%a")
    logs = site.folder / "jobs" / "00-delta"
    logs.mkdir(parents=True)
    for name in ("77_1_0_log.out", "77_1_0_log.err", "77_2_0_log.out", "99_1_0_log.out", "77_1_submitted.pkl"):
        (logs / name).write_text(name)
    os.mkfifo(logs / "77_0_0_log.out")
    reply = listed(site)
    assert [paths(reply, n) for n in range(3)] == [
        [],
        ["logs/00-delta/77_1_0_log.err", "logs/00-delta/77_1_0_log.out"],
        ["logs/00-delta/77_2_0_log.out"],
    ]


@pytest.mark.parametrize(
    ("path", "copied"),
    [
        ("6/attempt-1/manifest.json", True),
        ("6/attempt-1/events/.journal.arrows", True),
        ("6/attempt-1/events/.journal.worker.arrows", True),
        ("6/attempt-1/.hydra/config.yaml", True),
        ("logs/00-delta/77_0_0_log.out", True),
        ("6/attempt-1/events/.journal.worker.arrows.tmp", False),
        ("6/attempt-1/events/.part-000001.parquet.tmp", False),
        ("6/attempt-1/.hidden/x.json", False),
        ("6/attempt-1/evil.pkl", False),
        ("6/attempt-1/checkpoints/step-1/state.json", False),
        ("6/attempt-1/weights/model.json", False),
        ("6/attempt-2/manifest.json", False),
        ("06/attempt-1/manifest.json", False),
        ("0/6/attempt-1/manifest.json", False),
        ("jobs/00-delta/77_0_0_log.out", False),
        ("logs/00-delta/77_1_0_log.out", False),
        ("logs/other/77_0_0_log.out", False),
        ("logs/00-delta/77_0_submitted.pkl", False),
        ("sweep.json", False),
        ("code/abc/inpaint_bench/worker.json", False),
    ],
)
def test_only_results_of_the_attempt_itself_are_copied(path, copied):
    attempt = Attempt(point=6, attempt=1, run_id="r", site="delta", group="00-delta", planned_unix=0.0, job_id="77_0")
    assert is_result(path, attempt) is copied
