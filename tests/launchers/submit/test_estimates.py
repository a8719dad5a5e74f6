"""A dry run says what is likely needed; points that do not fit their cards are left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.console import output
from launchers.sweep.sweep_record import SweepRecord
from tests.launchers.sweeps import a_point, a_sweep, plan, submit, write_manifest
from tests.run.support import compose


def dry_run(folder: Path, *overrides: str) -> int:
    return launch.main(["-m", *overrides, "dry_run=true", f"hydra.sweep.dir={folder}"])


def test_dry_run_shows_likely_memory_minutes_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(tmp_path, "gpu=a40,a100,h200", "batch=8,16,32") == 0
    text = capsys.readouterr().out
    assert "likely memory" in text
    assert "of 44.5 GiB" in text
    assert "delta: 3 points, at most 9.0 SU" in text
    assert "delta: likely" in text
    assert ": measured (n = " in text
    assert "ratio of the poster, 0.227 (0.227 to 0.274), times H200 (n = " in text
    for batch_that_fits in ("gpu=a40 batch=32: needs 52.2 GiB", "the largest batch that fits is 25"):
        assert batch_that_fits in text
    assert "2 of 9 points left out" in text


def test_json_has_what_is_likely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["gpu=a40", "batch=16,64", "dry_run=true", "--json", f"hydra.sweep.dir={tmp_path}"]
    try:
        assert launch.main(["-m", *overrides]) == 0
    finally:
        output.as_json = False
    content = json.loads(capsys.readouterr().out)
    (array,), (left_out,) = content["arrays"], content["left_out"]
    assert left_out.startswith("gpu=a40 batch=64: needs")
    likely = array["points"][0]["likely"]
    assert 0.7 < likely["share"] < 0.8
    assert likely["service_units"][0] < array["points"][0]["service_units"]
    assert likely["rate"]["source"].startswith("ratio of the poster, ")
    assert (likely["rate"]["joules_per_image"], likely["joules"]) == (None, None)  # it was 0.0


def test_points_that_do_not_fit_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, sweep = tmp_path / "sweep", ["-m", "gpu=a100", "batch=64,16", "seed=0,1"]
    assert launch.main([*sweep, f"hydra.sweep.dir={folder}"]) == 0
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "left out: gpu=a100 batch=64: needs 91.5 GiB of the card's 39.6" in text
    assert "the largest batch that fits is 21 (2 points)" in text
    assert "2 of 4 points left out; memory_check=false submits them all the same" in text
    assert [(point.point, point.batch) for point in SweepRecord.read(folder).points] == [(2, 16), (3, 16)]
    folder = tmp_path / "all"
    assert launch.main([*sweep, "memory_check=false", f"hydra.sweep.dir={folder}"]) == 0
    assert len(SweepRecord.read(folder).points) == 4


def test_a_point_that_may_fit_within_the_error_is_kept_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(tmp_path, "gpu=h200", "batch=104,112") == 0  # 104 ran on an H200; it is predicted 3.5 % too high
    text = capsys.readouterr().out
    assert "gpu=h200 batch=104: needs 140.5 GiB of the card's 139.6 (traced, error up to 6 %)" in text
    assert "left out: gpu=h200 batch=112" in text
    assert "1 of 2 points left out" in text


@pytest.mark.parametrize("dry", ["true", "false"])
def test_sweep_of_which_nothing_fits_is_refused(dry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    assert launch.main(["-m", "gpu=a40,a100", "batch=64", f"dry_run={dry}", f"hydra.sweep.dir={folder}"]) == 2
    error = capsys.readouterr().err
    assert "no point fits its card: gpu=a40 batch=64: needs 91.5 GiB" in error
    assert "memory_check=false submits them all the same" in error
    assert not (folder / "ledger.jsonl").exists()


def test_what_is_not_predicted_is_said_once_and_refuses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(tmp_path, "gpu=a40", "batch=1000", "data.resolution_px=384", "seed=0,1") == 0
    text = capsys.readouterr().out
    assert "memory: not predicted for 2 of 2 points" in text
    assert "likely" not in text
    assert dry_run(tmp_path, "gpu=a40", "batch=auto") == 0
    assert "memory" not in capsys.readouterr().out


@pytest.mark.parametrize("other", ["model.unet.block_out_channels=[32,64,64,64]", "workload.optimizer=adafactor"])
def test_nothing_is_predicted_of_another_network_or_optimizer(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the figures of the model's own network left a point out that fits."""
    assert dry_run(tmp_path, "gpu=a40", "batch=32", other) == 0
    text = capsys.readouterr().out
    assert "memory: not predicted for 1 of 1 point" in text
    assert "likely" not in text


def test_a_training_cut_at_its_time_limit_takes_the_energy_until_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: 1.4 kWh in an hour of one card of 700 W."""
    cut = ["gpu=h200", "batch=16", "workload.train_steps=20000", "sites.delta.requeue.request=false", "time_min=60"]
    assert dry_run(tmp_path, *cut) == 0
    (kwh,) = re.findall(r"likely 1 \(1 to 1\) h of jobs, .*?([\d.]+) kWh", capsys.readouterr().out)
    assert 0.5 < float(kwh) < 0.7


def test_grid_intensity_gives_the_co2_of_the_energy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(tmp_path, "gpu=h200", "batch=16") == 0
    plain = capsys.readouterr().out
    assert dry_run(tmp_path, "gpu=h200", "batch=16", "sites.delta.grid_gco2_per_kwh=400") == 0
    text = capsys.readouterr().out
    found = re.search(r"([\d.]+) kWh of the GPUs, ([\d.]+) kg of CO2", text)
    assert found
    assert float(found[2]) == pytest.approx(0.4 * float(found[1]), rel=0.01)
    assert "CO2" not in plain


def test_energy_of_some_points_is_not_shown_as_that_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody published the energy of an A40 at batch 16."""
    assert dry_run(tmp_path, "gpu=a40,h200", "batch=16", "site=delta") == 0
    assert re.search(r"kWh of the GPUs in 1 of them\n", capsys.readouterr().out)


def test_nearly_full_card_gets_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(tmp_path, "gpu=a100", "batch=20") == 0
    assert "it may run out of memory" in capsys.readouterr().out


def test_estimates_are_no_part_of_a_configuration() -> None:
    assert config_hash(compose("memory_check=false", "datasets=[mine]")) == config_hash(compose())


def test_status_compares_with_what_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [a_point(num, likely_min=3.5) for num in range(2)]
    ledger = a_sweep(tmp_path, points, {"delta": {"connect": {"method": "bundle"}}})
    plan(ledger, points)
    submit(ledger, [0, 1])
    write_manifest(tmp_path, 0, started_unix_ns=10**18, ended_unix_ns=10**18 + 240 * 10**9)
    app.main(["status", str(tmp_path)])
    assert "1 completed run took 4 min, 4 min were likely." in " ".join(capsys.readouterr().out.split())
