"""What is known of a sweep before it is sent, and what it came to afterwards."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config import config_hash
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_json
from launchers.points import site_limits
from launchers.points.point import Point
from launchers.status.cost import cost_table, spent
from launchers.sweep.ledger import Ledger

Points = Callable[..., list[Point]]


class TestTimeLimitFromHistory:
    @pytest.fixture
    def ran(self, tmp_path: Path, points: Points) -> Callable[..., None]:
        """Runs of a point in an earlier sweep, by minutes."""
        (cell,) = points(f"gpu=h200 batch=8 out={tmp_path}")

        def leave(*minutes: float, sweep: str = "2026-11-20/08-00-00-x", **facts: object) -> None:
            folder = tmp_path / sweep
            replace_json(folder / "sweep.json", {})
            for number, taken in enumerate(minutes):
                manifest = {
                    "site": "delta",
                    "gpu": "h200",
                    "config_hash": config_hash(cell.config),
                    "status": "completed",
                    "reason": None,
                    "resumed": None,
                    "started_unix_ns": 10**18,
                    "ended_unix_ns": 10**18 + int(taken * 60e9),
                }
                (folder / str(number) / "attempt-1").mkdir(parents=True, exist_ok=True)
                replace_json(folder / str(number) / "attempt-1" / "manifest.json", manifest | facts)

        return leave

    @pytest.fixture
    def limit(self, tmp_path: Path, points: Points) -> Callable[..., tuple[int, str]]:
        def ask(more: str = "") -> tuple[int, str]:
            (point,) = points(f"gpu=h200 batch=8 time_min=auto out={tmp_path} {more}")
            assert point.config.time_min == point.bench.time_min == point.request.time_min
            return point.request.time_min, point.limit_basis

        return ask

    def test_without_a_run_it_is_the_default_and_says_so(self, limit, tmp_path):
        assert limit() == (60, f"default, no such run in {tmp_path}")

    def test_it_is_the_longest_run_with_a_margin(self, ran, limit):
        ran(10, 20, 15)
        assert limit() == (40, "3 runs, 20 min at most")

    def test_replicates_are_the_same_cell_and_another_batch_is_not(self, ran, limit):
        ran(20)
        assert limit("seed=7 name=other")[0] == 40
        assert limit("batch=16")[0] == 60

    def test_it_stays_within_the_partition(self, ran, limit):
        ran(3000)
        assert limit()[0] == 2880

    def test_what_failed_or_went_on_from_a_checkpoint_does_not_count(self, ran, limit):
        ran(1, sweep="a", status="failed", reason="app_error")
        ran(1, sweep="b", resumed=[{"step": 5, "checkpoint": "x"}])
        assert limit()[1].startswith("default")

    def test_a_run_that_its_time_limit_cut_off_took_at_least_so_long(self, ran, limit):
        ran(10, sweep="a")
        ran(60, sweep="b", status="interrupted", reason="timeout")
        assert limit() == (100, "2 runs, 60 min at most")

    def test_a_damaged_manifest_is_left_out(self, ran, limit, tmp_path):
        ran(20)
        broken = tmp_path / "2026-11-20/08-00-00-x/1/attempt-1/manifest.json"
        broken.parent.mkdir(parents=True)
        broken.write_text('{"site": "del')
        assert limit() == (40, "1 run, 20 min at most")

    def test_any_other_word_is_refused(self, points):
        with pytest.raises(UserError, match=r"time_min=soon: must be an integer between 1 and .*, or auto"):
            points("gpu=h200 time_min=soon")


class TestLimitsOfASite:
    def launch(self, folder: Path, *words: str) -> int:
        return launch.main(["-m", "gpu=h200", "batch=1,2,3,4,5", "dry_run=true", f"hydra.sweep.dir={folder}", *words])

    def test_more_jobs_than_a_user_may_have_are_refused(self, tmp_path, capsys):
        assert self.launch(tmp_path, "sites.delta.limits.max_submit_jobs=4") == 2
        assert "5 points for delta, which takes 4 jobs of one user at a time" in capsys.readouterr().err
        assert self.launch(tmp_path, "sites.delta.limits.max_submit_jobs=5") == 0

    def test_more_files_than_the_quota_takes_are_refused(self, tmp_path, capsys):
        quota = "sites.delta.storage.quotas=[{{folder:{},files:50}}]"
        assert self.launch(tmp_path, quota.format(tmp_path)) == 2
        said = rf"5 points for delta leave at least \d+ files, and {tmp_path} takes 50 "
        assert re.search(said, capsys.readouterr().err)
        assert self.launch(tmp_path, quota.format(tmp_path / "another")) == 0

    def test_files_that_may_become_too_many_are_told(self, points, tmp_path):
        asked = f"gpu=h200 time_min=600 sites.delta.storage.quotas=[{{folder:{tmp_path},files:2000}}]"
        (long,) = points(asked)
        (few,) = points(f"{asked} telemetry.part_s=600")
        assert "a higher telemetry.part_s makes fewer" in next(site_limits.notes([long], tmp_path))
        assert not list(site_limits.notes([few], tmp_path))


def test_a_dry_run_adds_up_per_site_by_its_own_rule(tmp_path, capsys):
    words = ["gpu=a40,h200", "batch=1,2", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
    assert launch.main(["-m", *words]) == 0
    out = capsys.readouterr().out
    assert "delta: 2 points, at most 6.0 SU" in out
    assert "grace: 2 points, cost not known" in out
    added = [f"sites.delta.charging.{one}" for one in ("combine=sum", "mem_gb_per_unit.h200=1e6", "cores_per_unit=12")]
    assert launch.main(["-m", *words, *added]) == 0
    assert "delta: 2 points, at most 12.0 SU" in capsys.readouterr().out  # a GPU and its 12 cores, 3 times each


def test_where_no_accounting_answers_the_manifest_says_how_long(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no sacct
    ledger = Ledger(tmp_path)
    ledger.create(sweep_id="s1")
    entry = {"overrides": [], "gpu": "h200", "batch": 8, "site": "delta", "time_min": 60, "service_units": 3.0}
    ledger.know([entry | {"point": num} for num in range(3)], {"delta": {"connect": {"method": "slurm"}}})
    points = [[num, 1, f"r{num}"] for num in range(3)]
    ledger.append("planned", group="00", job_name="j", site="delta", points=points, asked=[entry] * 3)
    ledger.append("submitted", group="00", job_id="77_%a", points=[[0, 1], [1, 1]])
    took = {"status": "completed", "started_unix_ns": 10**18, "ended_unix_ns": 10**18 + 20 * 60 * 10**9}
    (tmp_path / "0" / "attempt-1").mkdir(parents=True)
    replace_json(tmp_path / "0" / "attempt-1" / "manifest.json", took)

    ran, waits = spent(ledger, ledger.points().values())  # the third was never submitted
    assert (ran.elapsed_min, ran.planned, ran.actual, ran.witness) == (20, 3.0, 1.0, "manifest")
    assert (waits.elapsed_min, waits.planned, waits.actual, waits.witness) == (None, 3.0, None, "not known")
    out = io.StringIO()
    Console(file=out, width=200).print(cost_table([ran, waits], {"delta": "SU"}))
    assert "1 (1 of 2)" in out.getvalue()  # not the whole of what it cost


@pytest.mark.testbed
def test_what_slurm_expects_before_and_what_it_came_to_afterwards(testbed, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    quick = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]
    words = ["-m", "gpu=h200", "batch=2,3", "profile=testbed", *quick, f"out={tmp_path}"]
    dry = [*words, "time_min=auto", "dry_run=true", f"hydra.sweep.dir={tmp_path / 'dry'}"]

    assert launch.main([*dry, "sites.delta.gpus.h200.partition=nowhere"]) == 0
    assert "refused: " in capsys.readouterr().out
    assert launch.main(dry) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "gpus-per-node=1" in line]
    assert all(re.search(r"60 min +default, .* \d\d:\d\d ", row) for row in rows)

    assert launch.main([*words, "wait=true", f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
    ledger = Ledger.open(tmp_path / "sweep")
    first, second = spent(ledger, ledger.points().values())
    assert (first.witness, first.limit_min, first.planned) == ("sacct", 10, 0.5)
    assert first.elapsed_min is not None
    assert first.actual == pytest.approx(3.0 * first.elapsed_min / 60)
    assert 0 < first.elapsed_min < 10
    left = [f for part in ("0", "1", "jobs") for f in (tmp_path / "sweep" / part).rglob("*") if f.is_file()]
    assert len(left) >= 2 * (site_limits.RUN_FILES + site_limits.TELEMETRY_FILES)
    capsys.readouterr()
    assert app.main(["status", str(tmp_path / "sweep"), "--cost"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if " h200 " in f"{line} "]
    assert (row[2], float(row[6])) == ("2", 1.0)
    assert float(row[7]) == pytest.approx((first.actual or 0) + (second.actual or 0), rel=0.01)

    assert launch.main(dry) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "gpus-per-node=1" in line]
    assert all(re.search(r"15 min +1 run, ", row) for row in rows)
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"][0]["service_units"] == 0.5
