"""`budget` caps a sweep with all that was sent of it before, and only by numbers that are ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_json
from inpaint_bench.core.validation import check
from launchers.points.compose import composer
from launchers.points.point import Point
from launchers.status import budget, tables
from launchers.sweep.events import Refused
from launchers.sweep.ledger import Ledger
from tests.launchers.conftest import ACCOUNT
from tests.launchers.sweeps import a_point, a_sweep, defer, plan, submit

Points = Callable[..., list[Point]]
ASKED = ["gpu=h200", "batch=8", ACCOUNT]
ENTRY = {"overrides": ASKED, "batch": 8, "time_min": 60, "service_units": 3.0}
TOOK_20_MIN = {"started_unix_ns": 10**18, "ended_unix_ns": 10**18 + 20 * 60 * 10**9}


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Two points at Delta that were submitted once, for 3 SU at most each; there is no accounting."""
    monkeypatch.setenv("PATH", str(tmp_path))
    sites = {"delta": {"name": "delta", "connect": {"method": "slurm"}}}
    made = a_sweep(tmp_path / "sweep", [a_point(num, **ENTRY) for num in range(2)], sites)
    send(made, 1)
    return made


def send(ledger: Ledger, attempt: int) -> None:
    plan(ledger, [a_point(num, **ENTRY) for num in range(2)], attempt=attempt)
    submit(ledger, range(2), job_id=f"7{attempt}_%a", attempt=attempt)


def ended(ledger: Ledger, num: int, attempt: int, status: str = "failed") -> None:
    run = ledger.folder / str(num) / f"attempt-{attempt}"
    run.mkdir(parents=True)
    replace_json(run / "manifest.json", {"status": status, "reason": "app_error", **TOOK_20_MIN})


def most(points: list[Point], ledger: Ledger) -> float:
    """What the sweep may cost with these points beside it, by the refusal's own words."""
    with pytest.raises(UserError, match=r"nothing was submitted") as refusal:
        budget.check(points, 0.0, ledger)
    return float(str(refusal.value).split("may cost ")[1].split(" SU")[0])


def test_what_ended_counts_by_the_time_it_took_and_what_goes_on_by_its_limit(ledger, points: Points):
    first, second = points(*[" ".join(ASKED)] * 2)
    assert most([first], ledger) == 3 + 3 + 3, "nobody knows how long they took"
    ended(ledger, 0, 1)
    assert most([first], ledger) == 1 + 3 + 3
    ended(ledger, 1, 1, status="running")
    assert most([first], ledger) == 1 + 3 + 3, "one that runs may take all of its time yet"
    second.num = 1
    assert most([first, second], ledger) == 1 + 1 + 3 + 3, "what is sent again has ended"


def test_every_attempt_counts_but_those_that_slurm_refused(ledger, points: Points):
    (first,) = points(" ".join(ASKED))
    ended(ledger, 0, 1)
    send(ledger, 2)
    assert most([first], ledger) == 1 + 3 + (3 + 3) + 3, "of point 1 nothing is known"
    plan(ledger, [a_point(num, **ENTRY) for num in range(2)], attempt=3, group="01", job_name="k")
    ledger.append(Refused(group="01", attempts=[(num, 3) for num in range(2)], message="no"))
    assert most([first], ledger) == 1 + 3 + (3 + 3) + 3


def test_what_waits_in_a_plan_counts_for_somebody_sends_it(ledger, points: Points):
    ledger.add_points([a_point(2, **ENTRY)], {})
    defer(ledger, [2])
    (first,) = points(" ".join(ASKED))
    assert most([first], ledger) == 3 + 3 + 3 + 3


def test_rerun_keeps_to_the_budget_of_the_whole_sweep(ledger, capsys):
    """Regression: each command had the budget for itself."""
    for num in range(2):
        ended(ledger, num, 1)
    words = [str(ledger.folder), "--only", "app_error", "--dry-run"]
    assert app.main(["rerun", *words, "budget=7.5"]) == 2
    assert "may cost 8.0 SU, 2.0 SU of it by what was sent before; nothing was" in capsys.readouterr().err
    assert app.main(["rerun", *words, "budget=8"]) == 0


def test_units_that_differ_are_not_added_up(points: Points):
    two = points(f"gpu=h200 {ACCOUNT}", f"gpu=a100 site=delta sites.delta.charging.unit=coins {ACCOUNT}")
    with pytest.raises(UserError, match="its sites charge in SU and in coins"):
        budget.check(two, 100.0)
    columns = [column.header for column in tables.plan_table(two).columns]
    assert "at most" in columns
    assert "coins at most" in [column.header for column in tables.plan_table(two[1:]).columns]
    with pytest.raises(UserError, match=r"may cost \d+\.\d coins; nothing"):
        budget.check(two[1:], 0.1)


def test_a_rule_that_would_make_a_sweep_cost_nothing_is_refused():
    """Regression: `charge_factor=-1` passed any budget."""
    with composer() as compose:
        for rule in (
            "gpus.h200.charge_factor=-1",
            "gpus.h200.charge_factor=nan",
            "gpus.h200.charge_factor=inf",
            "charging.gpus_per_unit=-1",
            "charging.mem_gb_per_unit.h200=nan",
            "charging.mem_gb_per_unit.h200=0",
        ):
            with pytest.raises(UserError, match=f"delta.{rule.partition('=')[0]}=.*: must "):
                compose(0, ["gpu=h200", f"sites.delta.{rule}"])


def test_a_number_without_bounds_must_still_be_one():
    @dataclass
    class Free:
        value: float = 0.0
        several: list[float] = field(default_factory=list)

    check(Free(value=1e300))
    for free in (Free(value=float("nan")), Free(value=float("-inf")), Free(several=[1.0, float("inf")])):
        with pytest.raises(UserError, match="must be a finite number"):
            check(free)
