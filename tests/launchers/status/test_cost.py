"""Planned and actual cost of a sweep, and its budget."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config.validation import check
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_json
from launchers.points.compose import composer
from launchers.points.point import Point
from launchers.status.cost import attempt_costs, check_budget, point_cost
from launchers.status.survey import poll_sweep
from launchers.status.tables import plan_tables, points_table
from launchers.sweep.events import Refused
from launchers.sweep.ledger import Ledger, job_name
from tests.launchers.conftest import ACCOUNT
from tests.launchers.sweeps import a_point, a_sweep, add_point, defer, plan, submit

pytestmark = pytest.mark.slow


def test_dry_run_sums_cost_per_site_by_its_own_rule(tmp_path, capsys):
    overrides = ["gpu=a40,h200", "batch=1,2", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
    assert launch.main(["-m", *overrides]) == 0
    out = capsys.readouterr().out
    assert "delta: 2 points, at most 6.0 SU" in out
    # 16 cores and a GPU that counts 72, added
    assert "grace: 2 points, at most 176.0 SU (an upper bound: the rate of a40 at grace is not known)" in out
    assert len(re.findall(r" <= 88 ", out)) == 2
    added = [
        f"sites.delta.charging.{rule}" for rule in ("combine=sum", "mem_gb_per_unit.h200=1e6", "cores_per_unit=12")
    ]
    assert launch.main(["-m", *overrides, *added]) == 0
    assert "delta: 2 points, at most 12.0 SU" in capsys.readouterr().out  # a GPU and its 12 cores, 3 times each


def test_elapsed_time_comes_from_the_manifest_without_accounting(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no sacct
    points = [a_point(num, total_time_min=60, service_units=3.0) for num in range(3)]
    ledger = a_sweep(tmp_path, points, {"delta": {"connect": {"method": "slurm"}}})
    plan(ledger, points)
    submit(ledger, range(2))
    took = {"status": "completed", "started_unix_ns": 10**18, "ended_unix_ns": 10**18 + 20 * 60 * 10**9}
    (tmp_path / "0" / "attempt-1").mkdir(parents=True)
    replace_json(tmp_path / "0" / "attempt-1" / "manifest.json", took)

    sweep = poll_sweep(ledger)
    ran, pending = attempt_costs(sweep).values()  # the third was never submitted
    assert (ran.actual, ran.at_most) == (1.0, 1.0)
    assert (pending.actual, pending.at_most) == (None, 3.0)
    costs = [point_cost(point, sweep.sites) for point in sweep.points]
    assert [(cost.actual, cost.at_most) for cost in costs] == [(1.0, 1.0), (None, 3.0), (None, None)]
    sweep.sites["delta"].charging.upper_bounds = ["h200"]
    out = io.StringIO()
    Console(file=out, width=200).print(points_table(sweep.points, sweep.sites))
    rows = [line for line in out.getvalue().splitlines() if "delta" in line]
    assert "<= 1 " in rows[0]
    assert "<= 3 " in rows[1]
    assert "<=" not in rows[2]


@pytest.mark.subprocess
def test_time_that_sacct_does_not_give_counts_as_the_limit(tmp_path, fake_command, caplog):
    """Regression: a manifest's 20 minutes of a job of 60 passed the budget, whenever sacct did not answer."""
    points = [a_point(num, total_time_min=60, service_units=3.0) for num in range(2)]
    ledger = a_sweep(tmp_path, points, {"delta": {"connect": {"method": "slurm", "hostnames": [".*"]}}})
    plan(ledger, points)
    submit(ledger, range(2))
    for name in ("sbatch", "squeue"):
        fake_command(name, "exit 0")
    wide = "echo 'sacct: error: slurmdbd: Too wide of a date range in query' >&2; exit 1"
    sacct = fake_command(
        "sacct", f"""case "$*" in *Elapsed*-S*|*-S*Elapsed*) echo '7_0|00:30:00|j';; *) {wide};; esac"""
    )
    took = {"status": "completed", "started_unix_ns": 10**18, "ended_unix_ns": 10**18 + 20 * 60 * 10**9}
    for num in range(2):
        (tmp_path / str(num) / "attempt-1").mkdir(parents=True)
        replace_json(tmp_path / str(num) / "attempt-1" / "manifest.json", took)
    costs = attempt_costs(poll_sweep(ledger)).values()
    assert [(cost.actual, cost.at_most) for cost in costs] == [(1.5, 1.5), (None, 3.0)]
    assert "delta: sacct gives no elapsed time of 1 attempt: time limits count against the budget" in caplog.text
    assert " -S " in sacct.read_text()


def test_planned_and_actual_cost_on_slurm(testbed, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    quick = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]
    overrides = ["-m", "gpu=h200", "batch=2,3", "profile=testbed", *quick, f"out={tmp_path}"]
    dry = [*overrides, "time_min=auto", "dry_run=true", f"hydra.sweep.dir={tmp_path / 'dry'}"]

    assert launch.main([*dry, "sites.delta.gpus.h200.partition=nowhere"]) == 0
    assert "refused: " in capsys.readouterr().out
    assert launch.main(dry) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "gpus-per-node=1" in line]
    assert all(re.search(r"60 min +default, .* \d\d:\d\d ", row) for row in rows)

    assert launch.main([*overrides, "wait=true", f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
    ledger = Ledger.open(tmp_path / "sweep")
    array = str(ledger.points()[0].attempts[0].job_id).partition("_")[0]
    states = ("sacct", "-X", "-n", "-P", "-o", "State", "-j", array)
    testbed.wait(
        lambda: testbed.run("delta", *states).stdout.split() == ["COMPLETED"] * 2, what="sacct to know the ends"
    )
    capsys.readouterr()
    assert app.main(["status", str(tmp_path / "sweep"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["points"]
    for cost, point in zip(attempt_costs(poll_sweep(ledger)).values(), shown, strict=True):
        assert cost.actual == cost.at_most
        second = 3 / 3600  # SU; Slurm counts whole ones, and a run of this test may take little more than two
        assert 0 < point["cost"] <= (cost.actual or 0.0) + second < 0.5, "Slurm also charges the start of the job"
        assert point["cost_unit"] == "SU"

    assert launch.main(dry) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "gpus-per-node=1" in line]
    assert all(re.search(r"15 min +1 earlier run, ", row) for row in rows)
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"][0]["service_units"] == 0.5


# --- budget --------------------------------------------------------------------------------------

Points = Callable[..., list[Point]]
OVERRIDES = ["gpu=h200", "batch=8", ACCOUNT]
ENTRY = {"overrides": OVERRIDES, "batch": 8, "total_time_min": 60, "service_units": 3.0}
TOOK_20_MIN = {"started_unix_ns": 10**18, "ended_unix_ns": 10**18 + 20 * 60 * 10**9}


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Two points at Delta, submitted once for at most 3 SU each; there is no accounting."""
    monkeypatch.setenv("PATH", str(tmp_path))
    sites = {"delta": {"name": "delta", "connect": {"method": "slurm"}}}
    ledger = a_sweep(tmp_path / "sweep", [a_point(num, **ENTRY) for num in range(2)], sites)
    submit_all(ledger, 1)
    return ledger


def submit_all(ledger: Ledger, attempt: int) -> None:
    group = f"{attempt:02d}"
    name = job_name(group, ledger.sweep.sweep_id)
    plan(ledger, [a_point(num, **ENTRY) for num in range(2)], attempt=attempt, group=group, job_name=name)
    submit(ledger, range(2), job_id=f"7{attempt}_%a", attempt=attempt, group=group)


def end(ledger: Ledger, num: int, attempt: int, status: str = "failed") -> None:
    run = ledger.folder / str(num) / f"attempt-{attempt}"
    run.mkdir(parents=True)
    replace_json(run / "manifest.json", {"status": status, "reason": "app_error", **TOOK_20_MIN})


def max_cost(points: list[Point], ledger: Ledger) -> float:
    """Return what the sweep may cost with these points, from the message of the refusal."""
    with pytest.raises(UserError, match=r"nothing was submitted") as refusal:
        check_budget(points, 0.0, ledger)
    return float(str(refusal.value).split("may cost ")[1].split(" SU")[0])


def test_ended_attempts_count_their_elapsed_time_and_others_their_limit(ledger, points: Points):
    first, second = points(*[" ".join(OVERRIDES)] * 2)
    assert max_cost([first], ledger) == 3 + 3 + 3, "their elapsed time is unknown"
    end(ledger, 0, 1)
    assert max_cost([first], ledger) == 1 + 3 + 3
    end(ledger, 1, 1, status="running")
    assert max_cost([first], ledger) == 1 + 3 + 3, "a running attempt may use all of its time"
    second.num = 1
    assert max_cost([first, second], ledger) == 1 + 1 + 3 + 3, "a resubmitted point has ended"


def test_every_attempt_counts_unless_slurm_refused_it(ledger, points: Points):
    (first,) = points(" ".join(OVERRIDES))
    end(ledger, 0, 1)
    submit_all(ledger, 2)
    assert max_cost([first], ledger) == 1 + 3 + (3 + 3) + 3, "of point 1 nothing is known"
    plan(ledger, [a_point(num, **ENTRY) for num in range(2)], attempt=3, group="03", job_name="k")
    ledger.append(Refused(group="03", attempts=[(num, 3) for num in range(2)], message="no"))
    assert max_cost([first], ledger) == 1 + 3 + (3 + 3) + 3


def test_points_in_a_plan_file_count(ledger, points: Points):
    add_point(ledger, a_point(2, **ENTRY))
    defer(ledger, [2])
    (first,) = points(" ".join(OVERRIDES))
    assert max_cost([first], ledger) == 3 + 3 + 3 + 3


def test_budget_of_a_rerun_is_that_of_the_whole_sweep(ledger, capsys):
    """Regression: each command had the whole budget."""
    for num in range(2):
        end(ledger, num, 1)
    arguments = [str(ledger.folder), "--only", "app_error", "--dry-run"]
    assert app.main(["rerun", *arguments, "budget=7.5"]) == 2
    assert "may cost 8.0 SU, 2.0 SU of it for earlier attempts; nothing was" in capsys.readouterr().err
    assert app.main(["rerun", *arguments, "budget=8"]) == 0


def test_different_units_are_not_added(points: Points):
    two = points(f"gpu=h200 {ACCOUNT}", f"gpu=a100 site=delta sites.delta.charging.unit=coins {ACCOUNT}")
    with pytest.raises(UserError, match="the sites charge in SU and coins"):
        check_budget(two, 100.0)
    columns = [column.header for column in plan_tables(two)[1].columns]
    assert "max cost" in columns
    assert "max coins" in [column.header for column in plan_tables(two[1:])[1].columns]
    with pytest.raises(UserError, match=r"may cost \d+\.\d coins; nothing"):
        check_budget(two[1:], 0.1)


@pytest.mark.parametrize(
    ("directive", "instead"),
    [("time=2-00:00:00", "set time_min"), ("cpus-per-task=64", "set cpus_per_gpu"), ("gpus-per-node=4", "set gpus")],
)
def test_directive_that_the_charging_rule_does_not_see_makes_the_cost_unknown(
    directive: str, instead: str, points: Points
):
    """Regression: 0.5 SU passed budget=1, and the script asked for two days."""
    name = directive.partition("=")[0]
    changed = points(f"gpu=a100 site=delta sites.delta.directives.{directive} {ACCOUNT}")
    assert changed[0].service_units is None
    check_budget(changed, None)
    with pytest.raises(UserError, match=rf"directives\.{name} changes what a job costs.*leave it out, and {instead}"):
        check_budget(changed, 1000.0)
    # Delta's rule counts memory, and one node is the default.
    (point,) = points(f"gpu=a100 site=delta sites.delta.directives={{mem:null,mem-per-cpu:4G}} {ACCOUNT}")
    assert point.service_units is None
    (point,) = points(f"gpu=a100 site=delta sites.delta.directives={{nodes:null}} {ACCOUNT}")
    assert point.service_units is not None


def test_charging_rule_that_makes_a_sweep_free_is_refused():
    """Regression: `charge_factor=-1` passed any budget."""
    with composer() as compose:
        for rule in (
            "gpus.h200.charge_factor=-1",
            "gpus.h200.charge_factor=nan",
            "gpus.h200.charge_factor=inf",
            "charging.gpus_per_unit=-1",
            "charging.units_per_gpu.h200=-1",
            "charging.mem_gb_per_unit.h200=nan",
            "charging.mem_gb_per_unit.h200=0",
        ):
            with pytest.raises(UserError, match=f"delta.{rule.partition('=')[0]}=.*: must "):
                compose(0, ["gpu=h200", f"sites.delta.{rule}"])


def test_number_without_bounds_must_be_finite():
    @dataclass
    class Free:
        value: float = 0.0
        several: list[float] = field(default_factory=list)

    check(Free(value=1e300))
    for free in (Free(value=float("nan")), Free(value=float("-inf")), Free(several=[1.0, float("inf")])):
        with pytest.raises(UserError, match="must be a finite number"):
            check(free)
