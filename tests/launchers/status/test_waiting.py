"""wait and `status --watch` poll a site no more often than its limits.poll_s."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app, status
from inpaint_bench.core.attempt_state import SchedulerState
from inpaint_bench.core.config.site import ConnectConfig, Limits, SiteConfig
from inpaint_bench.core.errors import PointsFailedError
from launchers.points.site_catalog import Reachability
from launchers.slurm.query import SlurmReply
from launchers.status import survey, waiting
from launchers.sweep.ledger import Ledger
from tests.launchers.sweeps import a_point, a_sweep, plan, submit


def swept(folder: Path, **sites: SiteConfig) -> Path:
    """Write a sweep of one point per site, as array 7 of each."""
    points = [a_point(num, overrides=[f"site={name}"], site=name) for num, name in enumerate(sites)]
    ledger = a_sweep(folder, points, {name: asdict(site) for name, site in sites.items()})
    for point, site in zip(points, sites.values(), strict=True):
        plan(ledger, [point], group=point.site)
        if site.connect.method == "slurm":
            submit(ledger, [point.point], group=point.site)
    return folder


REACHED = Reachability(ok=True, on_site=True, reason="this is a test")
GRACE = SiteConfig(name="grace")
DELTA = SiteConfig(name="delta", limits=Limits(poll_s=90))
HERE = SiteConfig(name="local", connect=ConnectConfig(method="local"))


class TestWaiting:
    def pauses(self, folder, monkeypatch, *states) -> list[float]:
        """Return the pauses between polls in which all jobs have these states one after another."""
        slept, reported = [], {name: iter(states) for name in Ledger(folder).sweep.sites}

        def query_jobs(site, *_, **__):
            return SlurmReply(states={"7_0": SchedulerState(state=next(reported[site.name]))}, squeue="ok", sacct="ok")

        def sleep(pause_s):
            slept.append(pause_s)
            assert len(slept) < len(states), "all points have ended, but it still waits"

        monkeypatch.setattr(survey, "query_jobs", query_jobs)
        monkeypatch.setattr(survey, "reachability", lambda site: REACHED)
        monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=sleep))
        with pytest.raises(PointsFailedError):
            waiting.wait(Ledger.open(folder), {0})
        return slept

    def test_says_how_many_points_run(self, tmp_path, monkeypatch, caplog):
        caplog.set_level("INFO")
        self.pauses(swept(tmp_path / "sweep", grace=GRACE), monkeypatch, "RUNNING", "FAILED")
        assert "1 running; 0 waiting" in caplog.text

    def test_polls_once_a_minute(self, tmp_path, monkeypatch):
        folder = swept(tmp_path / "sweep", grace=GRACE)
        assert self.pauses(folder, monkeypatch, "PENDING", "RUNNING", "PENDING", "RUNNING", "FAILED") == [60] * 4

    def test_polls_several_sites_as_often_as_the_slowest_allows(self, tmp_path, monkeypatch):
        folder = swept(tmp_path / "sweep", grace=GRACE, delta=DELTA, local=HERE)
        assert self.pauses(folder, monkeypatch, "PENDING", "FAILED") == [90]

    def test_polls_often_if_there_is_no_slurm(self, tmp_path, monkeypatch):
        folder, slept = swept(tmp_path / "sweep", local=HERE), []
        monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=interrupted(slept)))
        with Ledger(folder).lock(), pytest.raises(KeyboardInterrupt):
            waiting.wait(Ledger.open(folder), {0})
        assert slept[0] < 5


def interrupted(slept: list[float]) -> Callable[[float], None]:
    """Return a sleep that is interrupted by Ctrl-C and appends its duration to the list."""

    def sleep(pause_s: float) -> None:
        slept.append(pause_s)
        raise KeyboardInterrupt

    return sleep


class TestWatching:
    @pytest.mark.parametrize(
        ("sites", "options", "message"),
        [
            (
                {"grace": GRACE},
                ["--watch", "--every", "59"],
                "--every 59: must be between 60 and 86400 s (limits.poll_s of grace)",
            ),
            (
                {"grace": GRACE, "delta": DELTA},
                ["--watch", "--every", "60"],
                "between 90 and 86400 s (limits.poll_s of delta)",
            ),
            ({"local": HERE}, ["--watch", "--every", "-1"], "--every -1: must be between 0.1 and 86400 s\n"),
            ({"local": HERE}, ["--watch", "--every", "nan"], "--every nan: must be between"),
            ({"local": HERE}, ["--watch", "--every", "1e300"], "--every 1e+300: must be between"),
            ({"grace": GRACE}, ["--every", "60"], "--every 60: only together with --watch"),
        ],
    )
    def test_shorter_interval_than_a_site_allows_is_refused_before_polling(
        self, sites, options, message, tmp_path, monkeypatch, capsys
    ):
        folder = swept(tmp_path / "sweep", **sites)
        monkeypatch.setattr(survey, "query_jobs", lambda *_, **__: pytest.fail("it was polled"))
        assert app.main(["status", str(folder), *options]) == 2
        assert message in capsys.readouterr().err

    def test_shorter_interval_is_refused_even_if_nothing_was_submitted(self, tmp_path, capsys):
        folder = swept(tmp_path / "sweep", grace=GRACE)
        ledger = folder / "ledger.jsonl"
        ledger.write_text("")
        assert app.main(["status", str(folder), "--watch", "--every", "1"]) == 2
        assert "(limits.poll_s of grace)" in capsys.readouterr().err

    @pytest.mark.parametrize(("site", "every_s"), [(GRACE, 60), (DELTA, 90), (HERE, 60)])
    def test_default_interval_is_a_minute_or_that_of_the_site(self, site, every_s, tmp_path, monkeypatch):
        folder = swept(tmp_path / "sweep", **{site.name: site})
        slept = []
        monkeypatch.setattr(
            survey, "query_jobs", lambda *_, **__: SlurmReply(states={"7_0": SchedulerState(state="PENDING")})
        )
        monkeypatch.setattr(status, "time", SimpleNamespace(time=time.time, sleep=interrupted(slept)))
        with Ledger(folder).lock():  # so that a point of this machine is queued
            assert app.main(["status", str(folder), "--watch"]) == 130
        assert slept == [every_s]


def test_sites_set_the_interval_and_that_of_the_test_bed_is_shorter(points, capsys, tmp_path):
    plain, bed = points("gpu=h200", "gpu=h200 profile=testbed")
    assert (plain.site.limits.poll_s, bed.site.limits.poll_s) == (60, 2)
    wrong = ["-m", "gpu=h200", "sites.delta.limits.poll_s=0", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
    assert launch.main(wrong) == 2
    assert "limits.poll_s=0: must lie between 1 and 86,400" in capsys.readouterr().err
