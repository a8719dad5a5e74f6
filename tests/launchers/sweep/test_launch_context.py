"""A sweep is sent again from anywhere as it was launched: its working directory, its files, Hydra's own overrides."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json, replace_json
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.schema import PLAN_PATTERN, SWEEP
from launchers.points.compose import composer
from launchers.submit import dry_run
from launchers.sweep.launch_context import Surroundings
from launchers.sweep.ledger import Ledger
from tests.launchers.submit.test_submit import QUICK, manifests

MINE = ["gpu=cpu", "site=mine", "profile=demo", "telemetry=none", "data=folder", "data.root=photos", "batch=2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of a user's own, with a site file of his own and some images; we are in it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "mine" / "site").mkdir(parents=True)
    text = (conf_dir() / "site" / "local.yaml").read_text().replace("name: local", "name: mine")
    (folder / "mine" / "site" / "mine.yaml").write_text(text)
    (folder / "photos").mkdir()
    places = ["file_name,latitude,longitude"]
    for number in range(4):
        Image.new("RGB", (64, 64), (40 * number, 90, 120)).save(folder / "photos" / f"{number}.png")
        places.append(f"{number}.png,{30 + number},-90")
    (folder / "photos" / "metadata.csv").write_text("\n".join(places))
    return folder


@pytest.fixture(scope="module")
def launched(project: Path) -> Path:
    """A sweep whose launcher was interrupted before it sent anything."""
    folder = project / "sweep"
    words = [*MINE, *QUICK[1:], "hydra.job.name=theirs", f"hydra.sweep.dir={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.setattr(Ledger, "know", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert launch.main(["-m", "--config-dir", "mine", *words]) == 130
    return folder


@pytest.fixture
def sweep(launched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; we are elsewhere."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(launched, tmp_path / "sweep"))


def test_what_a_launch_hangs_on_is_kept(project, sweep):
    kept = Ledger(sweep).surroundings
    assert (kept.working_dir, kept.config_dirs) == (str(project), (str(project / "mine"),))
    assert (kept.config_path, kept.config_name) == (None, "config")
    assert "hydra.job.name=theirs" in kept.hydra_overrides
    assert Surroundings.read(sweep / "multirun.yaml") == kept, "Hydra's own record tells the same"
    with composer(kept) as compose:
        assert Path.cwd() == project
        assert compose(0, MINE).config.hydra.job.name == "theirs"
    assert Path.cwd() != project


def test_rerun_runs_from_the_folder_and_with_the_files_of_the_launch(sweep, capsys):
    """Regression: `rerun` said site=mine: no such choice, and relative paths led from wherever it was called."""
    assert app.main(["rerun", str(sweep)]) == 0
    (manifest,) = manifests(sweep)
    assert (manifest["site"], manifest["status"]) == ("mine", "completed")
    capsys.readouterr()
    assert app.main(["rerun", str(sweep), "--repeats", "2", "--dry-run"]) == 0
    assert "01-mine-cpu" in capsys.readouterr().out


def test_where_the_launch_died_before_its_record_hydras_tells_it(sweep, capsys):
    (sweep / SWEEP).unlink()
    assert app.main(["rerun", str(sweep), "--dry-run"]) == 0
    assert " mine " in capsys.readouterr().out


def test_a_sweep_from_before_all_this_was_kept_is_composed_from_here(sweep, project, monkeypatch, capsys):
    content = read_json(sweep / SWEEP)
    del content["surroundings"]
    replace_json(sweep / SWEEP, content)
    assert app.main(["rerun", str(sweep), "--dry-run"]) == 2
    assert "site=mine: no such choice" in capsys.readouterr().err


def test_folders_that_are_gone_are_named(sweep, capsys):
    content = read_json(sweep / SWEEP)
    for key, value in (("config_dirs", ["/no/mine"]), ("working_dir", "/no/project")):
        replace_json(sweep / SWEEP, content | {"surroundings": content["surroundings"] | {key: value}})
        assert app.main(["rerun", str(sweep)]) == 2
        assert "is gone, and the sweep was launched" in capsys.readouterr().err


def test_a_plan_is_sent_with_the_files_of_the_launch_or_their_copy(project, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "sweep"
    shutil.copytree(project / "mine", tmp_path / "mine")
    away = [*MINE, "sites.mine.connect.method=slurm", f"hydra.sweep.dir={folder}"]
    monkeypatch.chdir(tmp_path)
    assert launch.main(["-m", "--config-dir", "mine", *away]) == 0
    plan = folder / PLAN_PATTERN.format(site="mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert launch.main(["--plan", str(plan), "--dry-run"]) == 0
    shutil.move(tmp_path / "mine", tmp_path / "copy")
    assert launch.main(["--plan", str(plan), "--dry-run"]) == 2
    assert f"{tmp_path / 'mine'}: is gone" in capsys.readouterr().err
    assert launch.main(["--plan", str(plan), "--dry-run", "--config-dir", str(tmp_path / "copy")]) == 0


def test_files_that_do_not_travel_are_refused_for_a_site_over_ssh(points, tmp_path):
    (point,) = points("gpu=cpu site=local")
    point.site.connect.method = "ssh"
    with pytest.raises(UserError, match=r"/mine: the points for local are composed there.*put them into conf/"):
        dry_run.check([point], tmp_path, Surroundings(config_dirs=("/mine",)))
