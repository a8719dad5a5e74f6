"""A job runs the code that was submitted with it, or says why not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inpaint_bench.core.environment import check_running
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import ROOT
from launchers.sweep import snapshot

CHECK = "import sys, launchers; from inpaint_bench.core.environment import check_running; from pathlib import Path\n"
CHECK += "check_running(Path({code!r}))"


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return snapshot.take(tmp_path_factory.mktemp("sweep") / "code")


def checked(code: Path, *python_path: Path) -> str:
    """Check in a process with this PYTHONPATH, and return what it prints to standard error."""
    environment = {"PYTHONPATH": ":".join(map(str, python_path)), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", CHECK.format(code=str(code))]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stderr


def test_snapshot_first_in_the_path_is_accepted(code: Path) -> None:
    assert checked(code, code, ROOT) == ""


def test_snapshot_below_a_link_is_accepted(code: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").symlink_to(code.parent)
    assert checked(tmp_path / "scratch" / code.name, tmp_path / "scratch" / code.name) == ""


def test_packages_from_another_folder_are_named(code: Path) -> None:
    assert f"inpaint_bench was imported from {ROOT}/inpaint_bench and not from {code}" in checked(code, ROOT, code)


@pytest.mark.parametrize("change", ["edited", "added", "removed"])
def test_changed_snapshot_is_refused(change: str, tmp_path: Path) -> None:
    code = snapshot.take(tmp_path / "code")
    match change:
        case "edited":
            with (code / "launchers" / "entry.py").open("a") as file:
                file.write("# edited")
        case "added":
            (code / "torch.py").touch()
        case "removed":
            (code / "conf" / "config.yaml").unlink()
    # also where its record is changed to match
    record = json.loads((code / "snapshot.json").read_text())
    (code / "snapshot.json").write_text(json.dumps(record | {"content_sha256": "0" * 64}))
    assert "the code was changed after it was submitted" in checked(code, code)


def test_compiled_files_do_not_count_as_a_change(code: Path) -> None:
    (code / "launchers" / "__pycache__").mkdir(exist_ok=True)
    (code / "launchers" / "__pycache__" / "entry.cpython-311.pyc").touch()
    assert checked(code, code) == ""


def test_checkout_is_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was imported from"):
        check_running(tmp_path)


def test_only_the_user_can_enter_the_code_of_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir(mode=0o775)
    snapshot.take(tmp_path / "code")
    assert (tmp_path / "code").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["launchers/entry.py", "torch.py"])
def test_stored_code_that_was_changed_is_not_used_again(name: str, tmp_path: Path) -> None:
    code = snapshot.take(tmp_path / "code")
    assert snapshot.take(tmp_path / "code") == code
    with (code / name).open("a") as file:
        file.write("# evil")
    with pytest.raises(UserError, match="its content does not match its name"):
        snapshot.take(tmp_path / "code")
