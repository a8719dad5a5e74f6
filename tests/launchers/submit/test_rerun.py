"""Overrides of `rerun`, and sweeps that it refuses."""

from pathlib import Path

import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from launchers.submit.submit import Submission
from launchers.sweep import snapshot
from launchers.sweep.ledger import Ledger
from launchers.sweep.sweep_record import SweepRecord
from tests.launchers.conftest import ACCOUNT

from .test_submit import sweep

UNREACHABLE = ["gpu=h200", "profile=demo", "sites.delta.connect.method=slurm"]  # waits in a plan file: nothing runs


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned") / "sweep"
    assert sweep(folder, *UNREACHABLE, "batch=8") == 0
    return folder


@pytest.fixture
def planned_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a sweep whose launcher was interrupted before it submitted anything."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "take", interrupt)
        assert sweep(tmp_path / "s", "gpu=a40", "batch=8,16,32", "profile=demo") == 130
    return tmp_path / "s"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("dry_run=true", "use --dry-run"),
        ("dry_run=1", "use --dry-run"),
        ("++dry_run=yes", "use --dry-run"),
        ("wait=true", "use --wait"),
        ("out=/elsewhere", "launch another one"),
        ("hydra.sweep.dir=/elsewhere", "launch another one"),
        ("hydra/launcher=basic", "launch another one"),
        ("identity.attempt=7", "every attempt gets its own"),
        ("study=ladder", "launch another one"),
        ("repeats=3", "use --repeats N"),
        ("repeats_max=3", "only --repeats auto"),
        ("batch=4,8", "several values need -m"),
        ("~recipe", "needs the name of a lever"),
        ("prepare.out=x", "no run reads it"),
    ],
)
def test_keys_that_a_rerun_must_not_change_are_refused(planned, change, reason, capsys):
    """Regression: `rerun SWEEP dry_run=true` submitted."""
    before = Ledger(planned).folder.joinpath("ledger.jsonl").read_text()
    assert app.main(["rerun", str(planned), change]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {change}: ")
    assert reason in error
    assert Ledger(planned).folder.joinpath("ledger.jsonl").read_text() == before


def test_misspelt_override_is_reported_even_if_nothing_is_submitted(planned, capsys):
    assert app.main(["rerun", str(planned), "btach=8"]) == 2
    assert "Did you mean batch?" in capsys.readouterr().err
    assert app.main(["rerun", str(planned), "batch=16"]) == 0
    assert "Nothing to submit" in capsys.readouterr().out


def test_recipe_of_a_rerun_is_spelt_as_in_a_launch(planned_batches, capsys):
    assert app.main(["rerun", str(planned_batches), "--dry-run", "recipe=tf32+num_workers=2"]) == 0
    assert "recipe.num_workers=2" in capsys.readouterr().out
    assert app.main(["rerun", str(planned_batches), "recipe=tf32+num_workers=2", "recipe.num_workers=4"]) == 2
    assert "recipe.num_workers is given twice" in capsys.readouterr().err


def test_points_that_a_change_makes_equal_are_refused(planned_batches, capsys):
    """Regression: `rerun SWEEP batch=4` measured the same point three times."""
    folder = str(planned_batches)
    assert app.main(["rerun", folder, "--dry-run", "batch=4"]) == 2
    assert "batch=4: would make points 0, 1 and 2 the same measurement" in capsys.readouterr().err
    assert app.main(["rerun", folder, "--dry-run", "--repeats", "2", "batch=8"]) == 2
    assert "the same measurement" in capsys.readouterr().err
    for change in ("time_min=30", "data.seed=3"):
        assert app.main(["rerun", folder, "--dry-run", change]) == 0


@pytest.mark.parametrize("spelled", ["dry_run=1", "++dry_run=yes"])
def test_dry_run_leaves_no_sweep_to_rerun(spelled, tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert sweep(folder, "gpu=a40", "batch=2", "profile=demo", spelled) == 0
    assert "nothing was submitted" in capsys.readouterr().out
    assert app.main(["rerun", str(folder)]) == 2
    assert "A dry run, and a launch that ended before it submitted anything, make none" in capsys.readouterr().err
    assert app.main(["status", str(folder)]) == 2
    assert "A dry run, and a launch that ended before it submitted anything, make none" in capsys.readouterr().err
    assert not (folder / "sweep.json").exists()


def test_point_composed_as_a_dry_run_is_never_submitted(points, tmp_path):
    submission = Submission(folder=tmp_path, new_sweep=SweepRecord(sweep_id="s1"))
    with pytest.raises(UserError, match="points of a dry run are not submitted"):
        submission.run(lambda _: points(f"gpu=h200 dry_run=on {ACCOUNT}"))
    assert not (tmp_path / "sweep.json").exists()
