"""The user's own file at a launch, a rerun, a plan file and `doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from launchers.sweep.sweep_record import SweepRecord

pytestmark = pytest.mark.slow
SWEEP = ["-m", "gpu=h200", "batch=8"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("sites.delta.account.value: abcd-delta-gpu\nnotify.mail: me@example.org\n")
    monkeypatch.setenv("INPAINT_BENCH_CONFIG", str(path))
    return path


def _script(folder: Path) -> str:
    (script,) = (folder / "sbatch").glob("*.sh")
    return script.read_text()


def test_it_wins_over_the_site_file_and_the_command_line_over_it(file: Path, tmp_path: Path) -> None:
    assert launch.main([*SWEEP, "dry_run=true", f"hydra.sweep.dir={tmp_path}/a"]) == 0
    assert "#SBATCH --account=abcd-delta-gpu\n" in _script(tmp_path / "a")
    assert "--mail-user=me@example.org\n" in _script(tmp_path / "a")
    typed = ["sites.delta.account.value=efgh-delta-gpu", "notify.mail=null", "dry_run=true"]
    assert launch.main([*SWEEP, *typed, f"hydra.sweep.dir={tmp_path}/b"]) == 0
    assert "#SBATCH --account=efgh-delta-gpu\n" in _script(tmp_path / "b")
    assert "mail" not in _script(tmp_path / "b")


def test_its_values_are_recorded_so_that_a_rerun_without_the_file_keeps_them(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    assert launch.main([*SWEEP, f"hydra.sweep.dir={folder}"]) == 0  # Delta is out of reach: a plan file
    (point,) = SweepRecord.read(folder).points
    assert "sites.delta.account.value='abcd-delta-gpu'" in (point.overrides or [])
    monkeypatch.setenv("INPAINT_BENCH_CONFIG", "")
    assert launch.main(["--plan", f"{folder}/plan.delta.yaml", "--dry-run"]) == 0
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("scripts: "))
    assert "#SBATCH --account=abcd-delta-gpu\n" in _script(Path(shown.removeprefix("scripts: ")).parent)


def test_a_plan_without_an_account_takes_it_from_the_file_at_the_site(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = file.read_text()
    file.write_text("")
    assert launch.main([*SWEEP, f"hydra.sweep.dir={tmp_path}/sweep"]) == 0
    file.write_text(content)
    assert launch.main(["--plan", f"{tmp_path}/sweep/plan.delta.yaml", "--dry-run"]) == 0
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("scripts: "))
    assert "#SBATCH --account=abcd-delta-gpu\n" in _script(Path(shown.removeprefix("scripts: ")).parent)


def test_a_sweep_without_slurm_says_that_nobody_is_told(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["-m", "gpu=cpu", "site=local", "model=tiny_inpaint", "recipe=cpu", "telemetry=none", "dry_run=true"]
    assert launch.main([*line, f"hydra.sweep.dir={tmp_path}/sweep"]) == 0
    said = "notify.mail=me@example.org: no mail about the points at site=local, since Slurm sends it"
    assert said in capsys.readouterr().out


def test_doctor_shows_it(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert app.main(["doctor"]) == 0
    out, error = capsys.readouterr()
    assert f"your own file: {file}\n" in out
    assert f"{file} sets sites.delta.account.value='abcd-delta-gpu' notify.mail='me@example.org'\n" in error
    file.write_text("batch: 8")
    assert app.main(["doctor"]) == 2
    assert f"error: {file}: batch: cannot stand here" in capsys.readouterr().err


def test_a_demo_runs_on_this_machine_whatever_sites_and_settings_the_user_has(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a site file that matches this machine took the points of its GPUs, and submitted them to Slurm."""
    file.write_text("sites.delta.environment.container.image: /projects/x.sif\nbudget: 1\n")
    (tmp_path / "mine/site").mkdir(parents=True)
    gpus = "gpus: {a100: {partition: gpu, max_per_node: 4, max_minutes: 60}}"
    (tmp_path / "mine/site/mine.yaml").write_text(f"name: mine\nconnect: {{hostnames: ['.*']}}\n{gpus}\n")
    options = ["-m", "--config-dir", f"{tmp_path}/mine", "dry_run=true", f"hydra.sweep.dir={tmp_path}/s"]
    for overrides in (["gpu=a40,a100,h200"], ["gpu=a100", "site=mine"]):
        assert launch.main([*options, *overrides, "profile=demo"]) == 0
        assert "partition" not in capsys.readouterr().out
        assert not (tmp_path / "s/sbatch").exists()
    file.write_text("")
    assert launch.main([*options, "gpu=a100"]) == 0
    assert "#SBATCH --partition=gpu" in _script(tmp_path / "s")
