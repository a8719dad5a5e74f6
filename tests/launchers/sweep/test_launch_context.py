"""A rerun composes as the launch did, wherever it is called from."""

import json
import re
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
from launchers.submit import checks
from launchers.sweep import snapshot
from launchers.sweep.ledger import Ledger
from launchers.sweep.sweep_record import LaunchContext
from tests.launchers.submit.test_submit import QUICK, manifests

pytestmark = pytest.mark.subprocess

MINE = ["gpu=cpu", "site=mine", "profile=demo", "telemetry=none", "data=folder", "data.root=photos", "batch=2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a folder with a user's own site file and some images."""
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
    """Make a sweep whose launcher was interrupted before it submitted anything."""
    folder = project / "sweep"
    overrides = [*MINE, *QUICK[1:], "hydra.job.name=theirs", f"hydra.sweep.dir={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.setattr(snapshot, "take", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert launch.main(["-m", "--config-dir", "mine", *overrides]) == 130
    return folder


@pytest.fixture
def sweep(launched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the sweep, and change to another working directory."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(launched, tmp_path / "sweep"))


def test_context_of_a_launch_is_recorded(project, sweep):
    context = Ledger(sweep).sweep.launch_context
    assert (context.working_dir, context.config_dirs) == (str(project), (str(project / "mine"),))
    assert (context.config_path, context.config_name) == (None, "config")
    assert "hydra.job.name=theirs" in context.hydra_overrides
    assert not any("sweep.dir" in line for line in context.hydra_overrides)
    with composer(context) as compose:
        assert Path.cwd() == project
        assert compose(0, MINE).composed.build().hydra.job.name == "theirs"
    assert Path.cwd() != project


def test_rerun_uses_the_working_directory_and_files_of_the_launch(sweep, capsys):
    """Regression: `rerun` refused site=mine, and relative paths started from where it was called."""
    assert app.main(["rerun", str(sweep)]) == 0
    (manifest,) = manifests(sweep)
    assert (manifest["site"], manifest["status"]) == ("mine", "completed")
    capsys.readouterr()
    assert app.main(["rerun", str(sweep), "--repeats", "2", "--dry-run"]) == 0
    assert re.search(r"01 +mine +1 ", capsys.readouterr().out)


def test_missing_folders_of_the_launch_are_named(sweep, capsys):
    content = read_json(sweep / SWEEP)
    for key, value in (("config_dirs", ["/no/mine"]), ("working_dir", "/no/project")):
        replace_json(sweep / SWEEP, content | {"launch_context": content["launch_context"] | {key: value}})
        assert app.main(["rerun", str(sweep)]) == 2
        assert "does not exist any more, and the launch used it" in capsys.readouterr().err


def test_plan_is_submitted_with_the_files_of_the_launch_or_their_copy(project, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "sweep"
    shutil.copytree(project / "mine", tmp_path / "mine")
    unreachable = [*MINE, "sites.mine.connect.method=slurm", f"hydra.sweep.dir={folder}"]
    monkeypatch.chdir(tmp_path)
    assert launch.main(["-m", "--config-dir", "mine", *unreachable]) == 0
    plan = folder / PLAN_PATTERN.format(site="mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert launch.main(["--plan", str(plan), "--dry-run"]) == 0
    shutil.move(tmp_path / "mine", tmp_path / "copy")
    assert launch.main(["--plan", str(plan), "--dry-run"]) == 2
    assert f"{tmp_path / 'mine'} does not exist any more" in capsys.readouterr().err
    assert launch.main(["--plan", str(plan), "--dry-run", "--config-dir", str(tmp_path / "copy")]) == 0


def test_an_experiment_of_hydra_sets_keys_of_a_workload(tmp_path, capsys):
    """https://hydra.cc/docs/patterns/configuring_experiments/"""
    folder = tmp_path / "mine"
    (folder / "experiment").mkdir(parents=True)
    head = "# @package _global_\ndefaults: [override /workload: finetune_text2image, override /model: sd2]\n"
    command = [
        "-m",
        "--config-dir",
        str(folder),
        "+experiment=short",
        "gpu=h200",
        "site=local",
        "dry_run=true",
        "--json",
    ]
    for key, code in (("train_steps", 0), ("trian_steps", 2)):
        (folder / "experiment" / "short.yaml").write_text(f"{head}workload: {{{key}: 7}}\nbatch: 4\n")
        assert launch.main([*command, f"hydra.sweep.dir={tmp_path / key}"]) == code
        printed = capsys.readouterr()
        assert code or json.loads(printed.out)["arrays"][0]["points"][0]["batch"] == 4
    assert "workload.trian_steps: In 'experiment/short'" in printed.err
    (folder / "config.yaml").write_text("batch: 3\n")
    (folder / "experiment" / "short.yaml").write_text(head)
    assert launch.main([*command, f"hydra.sweep.dir={tmp_path / 'root'}"]) == 0
    assert f"{folder}/config.yaml: is not read, since conf/config.yaml is the root" in capsys.readouterr().err


def test_config_dirs_are_refused_for_a_site_over_ssh(points, tmp_path):
    (point,) = points("gpu=cpu site=local recipe=cpu telemetry=none")
    point.site.connect.method = "ssh"
    with pytest.raises(UserError, match=r"/mine: the points for local are composed there.*move them into conf/"):
        checks.check_points([point], tmp_path, LaunchContext(config_dirs=("/mine",)))


def test_a_lever_that_an_earlier_version_did_not_refuse_is_no_obstacle_to_the_rest_of_its_sweep(
    points, tmp_path, caplog
):
    (point,) = points("gpu=cpu site=local recipe=[cpu,pin_memory] telemetry=none")
    with pytest.raises(UserError, match="lever pin_memory: needs a GPU"):
        checks.check_points([point], tmp_path, LaunchContext())
    checks.check_points([point], tmp_path, LaunchContext(), is_new=False)
    assert "point 0 will be unavailable: lever pin_memory: needs a GPU" in caplog.text
