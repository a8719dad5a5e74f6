"""The sweeper expands as Hydra's does, and leaves composing to the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from launchers.submit.plugin import SweepLauncher
from launchers.sweep import snapshot
from tests.launchers.sweeps import planned_rows

pytestmark = pytest.mark.slow


def sweep(folder: Path, *words: str) -> int:
    return launch.main(["-m", *words, f"hydra.sweep.dir={folder}"])


def test_hydra_composes_once_per_choice_of_groups(tmp_path, monkeypatch, capsys):
    composed = []
    real = ConfigLoaderImpl.load_sweep_config
    monkeypatch.setattr(
        ConfigLoaderImpl,
        "load_sweep_config",
        lambda self, master, overrides: composed.append(overrides) or real(self, master, overrides),
    )
    assert sweep(tmp_path, "gpu=a40,a100", "batch=1,2,3", "seed=range(0,5)", "dry_run=true") == 0
    assert sorted(composed) == [["gpu=a100"], ["gpu=a40"]]
    rows = planned_rows(capsys.readouterr().out)
    assert [(int(row[0]), row[1], row[2]) for row in rows] == [
        (num, ("a40", "a100")[num // 15], str(num // 5 % 3 + 1)) for num in range(30)
    ]


@pytest.mark.parametrize("words", [["hydra/sweeper=basic"], []], ids=["Hydra's sweeper", "ours"])
def test_point_that_does_not_compose_stops_the_sweep_and_leaves_nothing(tmp_path, capsys, words):
    assert sweep(tmp_path, "gpu=a40", "data.seed=1,abc", *words) == 2
    assert "data.seed" in capsys.readouterr().err
    assert not list(tmp_path.rglob("sweep.json"))
    if not words:
        assert not list(tmp_path.iterdir())


def test_points_for_another_launcher_are_checked_before_the_first_runs(tmp_path, capsys):
    assert sweep(tmp_path, "hydra/launcher=basic", "gpu=a40", "profile=demo", "data.seed=1,abc") == 2
    assert "data.seed" in capsys.readouterr().err
    assert not (tmp_path / "0").exists()


def test_what_only_our_launcher_obeys_is_refused_with_another_one(tmp_path, capsys):
    """Regression: `dry_run=true` ran the points."""
    for key in ("dry_run=true", "repeats=3", "budget=0", "notify={mail:a@b.c}"):
        assert sweep(tmp_path, "hydra/launcher=basic", "gpu=a40", "profile=demo", key) == 2
        assert f"{key}: only our launcher obeys it" in capsys.readouterr().err
    assert not (tmp_path / "0").exists()


def test_study_adds_its_own_sweep(tmp_path, capsys):
    study = ["study=ladder", "study.levers=[tf32,channels_last]", "gpu=a40"]
    assert sweep(tmp_path, *study, "dry_run=true") == 0
    assert [row[0] for row in planned_rows(capsys.readouterr().out)] == ["0", "1", "2"]


def test_grid_of_a_study_goes_to_both_sites_and_is_rerun(tmp_path, capsys, monkeypatch):
    assert sweep(tmp_path / "dry", "study=poster", "dry_run=true") == 0
    out = capsys.readouterr().out
    cells = [(row[1], row[2], row[3]) for row in planned_rows(out)]
    assert cells[-2:] == [("h200", "32", "recipe=poster_baseline"), ("h200", "16", "recipe=poster_optimized")]
    assert len(cells) == 11
    assert "grace: 6 points" in out
    assert "delta: 5 points" in out
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert sweep(tmp_path / "died", "study=poster", "gpu=h200", "site=local", "profile=demo") == 130
    capsys.readouterr()
    assert app.main(["rerun", str(tmp_path / "died"), "--dry-run"]) == 0
    rows = [row[:3] for row in planned_rows(capsys.readouterr().out)]
    assert rows == [[str(num), "h200", batch] for num, batch in enumerate(["4", "8", "16", "32", "16"])]


def test_launcher_refuses_another_application():
    config = OmegaConf.create({"hydra": {}})
    with pytest.raises(UserError, match="hydra/launcher=inpaint_bench: submits inpaint_bench's own points"):
        SweepLauncher().setup(hydra_context=None, task_function=None, config=config)
