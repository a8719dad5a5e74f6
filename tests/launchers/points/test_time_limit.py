"""`time_min=auto`: a time limit from the durations of earlier runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inpaint_bench.core.config import config_hash
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_json
from launchers.points.point import Point

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
        assert limit() == (40, "3 earlier runs, 20 min at most")

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
        assert limit() == (100, "2 earlier runs, 60 min at most")

    def test_a_damaged_manifest_is_left_out(self, ran, limit, tmp_path):
        ran(20)
        broken = tmp_path / "2026-11-20/08-00-00-x/1/attempt-1/manifest.json"
        broken.parent.mkdir(parents=True)
        broken.write_text('{"site": "del')
        assert limit() == (40, "1 earlier run, 20 min at most")

    def test_any_other_word_is_refused(self, points):
        with pytest.raises(UserError, match=r"time_min=soon: must be an integer between 1 and .*, or auto"):
            points("gpu=h200 time_min=soon")
