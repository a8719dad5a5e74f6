"""Planned and actual cost of a sweep."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.files import replace_json
from launchers.status.cost import cost_table, spent
from launchers.sweep.ledger import Ledger
from tests.launchers.sweeps import a_point, a_sweep, plan, submit


def test_a_dry_run_adds_up_per_site_by_its_own_rule(tmp_path, capsys):
    words = ["gpu=a40,h200", "batch=1,2", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
    assert launch.main(["-m", *words]) == 0
    out = capsys.readouterr().out
    assert "delta: 2 points, at most 6.0 SU" in out
    assert "grace: 2 points, cost unknown" in out
    added = [f"sites.delta.charging.{one}" for one in ("combine=sum", "mem_gb_per_unit.h200=1e6", "cores_per_unit=12")]
    assert launch.main(["-m", *words, *added]) == 0
    assert "delta: 2 points, at most 12.0 SU" in capsys.readouterr().out  # a GPU and its 12 cores, 3 times each


def test_where_no_accounting_answers_the_manifest_says_how_long(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no sacct
    points = [a_point(num, time_min=60, service_units=3.0) for num in range(3)]
    ledger = a_sweep(tmp_path, points, {"delta": {"connect": {"method": "slurm"}}})
    plan(ledger, points)
    submit(ledger, range(2))
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
    capsys.readouterr()
    assert app.main(["status", str(tmp_path / "sweep"), "--cost"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if " h200 " in f"{line} "]
    assert (row[2], float(row[6])) == ("2", 1.0)
    assert float(row[7]) == pytest.approx((first.actual or 0) + (second.actual or 0), rel=0.01)

    assert launch.main(dry) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "gpus-per-node=1" in line]
    assert all(re.search(r"15 min +1 earlier run, ", row) for row in rows)
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"][0]["service_units"] == 0.5
