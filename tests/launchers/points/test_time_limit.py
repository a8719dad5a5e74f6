"""`time_min=auto`: a time limit from the durations of earlier runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.files import replace_json
from launchers.points.point import Point

pytestmark = pytest.mark.slow

Points = Callable[..., list[Point]]


class TestAutoTimeLimit:
    @pytest.fixture
    def ran(self, tmp_path: Path, points: Points) -> Callable[..., None]:
        """Write runs of a point, by minutes, into an earlier sweep."""
        (cell,) = points(f"gpu=h200 batch=8 out={tmp_path}")

        def write(*minutes: float, sweep: str = "2026-11-20/08-00-00-x", **facts: object) -> None:
            folder = tmp_path / sweep
            replace_json(folder / "sweep.json", {})
            for number, taken in enumerate(minutes):
                manifest = {
                    "site": "delta",
                    "gpu": "h200",
                    "config_hash": config_hash(cell.composed.build()),
                    "status": "completed",
                    "reason": None,
                    "resumed": None,
                    "started_unix_ns": 10**18,
                    "ended_unix_ns": 10**18 + int(taken * 60e9),
                }
                (folder / str(number) / "attempt-1").mkdir(parents=True, exist_ok=True)
                replace_json(folder / str(number) / "attempt-1" / "manifest.json", manifest | facts)

        return write

    @pytest.fixture
    def limit(self, tmp_path: Path, points: Points) -> Callable[..., tuple[int, str]]:
        def place(more: str = "") -> tuple[int, str]:
            (point,) = points(f"gpu=h200 batch=8 time_min=auto out={tmp_path} {more}")
            assert point.composed.build().time_min == point.bench.time_min == point.request.time_min
            return point.request.time_min, point.limit_basis

        return place

    def test_default_without_earlier_runs(self, limit, tmp_path):
        assert limit() == (60, f"default, no such run in {tmp_path}")

    def test_longest_run_with_a_margin(self, ran, limit):
        ran(10, 20, 15)
        assert limit() == (40, "3 earlier runs, 20 min at most")

    def test_replicates_are_the_same_cell_another_batch_is_not(self, ran, limit):
        ran(20)
        assert limit("seed=7 name=other")[0] == 40
        assert limit("batch=16")[0] == 60

    def test_jobs_of_several_points_count_on_it(self, ran, points, tmp_path):
        line = f"gpu=h200 out={tmp_path} site=delta points_per_job="
        ran(10, 20, 15)
        made = points(f"{line}auto batch=8", f"{line}auto batch=16", f"{line}3 batch=8")
        assert [point.likely_min for point in made] == [20, None, None]

    def test_limit_of_the_partition_is_kept(self, ran, limit):
        ran(3000)
        assert limit()[0] == 2880

    def test_failed_and_resumed_runs_do_not_count(self, ran, limit):
        ran(1, sweep="a", status="failed", reason="app_error")
        ran(1, sweep="b", resumed=[{"step": 5, "checkpoint": "x"}])
        assert limit()[1].startswith("default")

    def test_timed_out_run_is_a_lower_bound(self, ran, limit):
        ran(10, sweep="a")
        ran(60, sweep="b", status="interrupted", reason="timeout")
        assert limit() == (100, "2 earlier runs, 60 min at most")

    def test_damaged_manifest_is_skipped(self, ran, limit, tmp_path):
        ran(20)
        broken = tmp_path / "2026-11-20/08-00-00-x/1/attempt-1/manifest.json"
        broken.parent.mkdir(parents=True)
        broken.write_text('{"site": "del')
        assert limit() == (40, "1 earlier run, 20 min at most")
