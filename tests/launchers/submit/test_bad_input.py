"""Wrong input is refused in one sentence with exit code 2, before anything is written."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inpaint_bench.cli import app
from inpaint_bench.cli.doctor import site_files
from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.console import shell_command
from inpaint_bench.core.files import replace_json
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.records import Manifest, Quality
from inpaint_bench.core.schema import Status
from inpaint_bench.launch import main
from launchers.points import site_catalog

PLAN = "sweep_id: s1\nsite: delta\npoints:\n- {num: 0, overrides: [gpu=h200]}\n"


def test_budget_that_both_sites_keep_is_accepted(capsys, tmp_path):
    assert main(["-m", "gpu=a40,a100,h200", "budget=179", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]) == 0
    assert "Dry run: nothing was submitted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"points: [1", "not a plan file"),
        (b"points: \xff\xfe", "not a plan file ("),
        (f"{PLAN}wait: true\n".encode(), "unknown field `wait`"),
        (f"{PLAN}- {{num: 0, overrides: [gpu=h200]}}\n".encode(), "duplicate point 0"),
        (b"points: " + b"[" * 100, "nested too deeply"),
        (b"points: &a [1]\norder: *a", "with an alias"),
    ],
    ids=["unclosed", "binary", "unknown field", "duplicate point", "nested", "alias"],
)
def test_plan_file_that_cannot_be_one_is_refused(content, message, capsys, tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_bytes(content)
    assert main(["--plan", str(file), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert f"{file}: " in error
    assert message in error
    assert len(error.splitlines()) == 1


def test_plan_file_that_is_a_folder_is_refused(capsys, tmp_path):
    assert main(["--plan", str(tmp_path)]) == 2
    assert f"{tmp_path}: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a plain file"),
        ("points: " + "[" * 60_000, "not a plan file"),  # newer versions of libyaml refuse it themselves
    ],
    ids=["pipe", "nested very deeply"],
)
def test_plan_file_on_which_a_process_could_hang_or_crash_is_refused(text, message, tmp_path):
    file = tmp_path / "plan.yaml"
    if text is None:
        os.mkfifo(file)
    else:
        file.write_text(text)
    # In a process of its own, which a segmentation fault or a pipe without a writer ends.
    command = [sys.executable, "-m", "inpaint_bench", "launch", "--plan", str(file), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    assert f"{file}: " in done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_sweep_directory_that_is_a_file_is_refused(capsys, tmp_path):
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        assert main(["-m", "gpu=a40", "dry_run=true", f"hydra.sweep.dir={tmp_path / folder}"]) == 2
        assert re.search(r"hydra\.sweep\.dir=.*/file is a file; a sweep needs a folder", capsys.readouterr().err)
    assert app.main(["status", str(tmp_path / "file")]) == 2
    assert "it is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "dry_run"),
    [("a:b", "false"), *((name, "true") for name in ("100%A", "a\\b", "a\nb", "a\x1b[2Jb", "a\u2028b", "-a", "a "))],
)
def test_sweep_directory_that_a_job_would_read_as_another_is_refused(name, dry_run, capsys, tmp_path):
    """Regression: with a colon in it, jobs imported the checkout instead of the code snapshot."""
    quoted = name.replace("\\", "\\\\")
    overrides = ["gpu=a40", "profile=demo", f"dry_run={dry_run}", f"hydra.sweep.dir='{tmp_path}/{quoted}/s'"]
    assert main(["-m", *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: hydra.sweep.dir=")
    assert "a job would read it as another path" in error
    assert error.strip().isprintable()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"name: mine\n  gpus: [", "mapping values"), (b"- mine", "keys and values"), (b"name: \xff", "UTF-8")],
)
def test_unreadable_site_file_is_named(text, message, capsys, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine.yaml").write_bytes(text)
    command = ["-m", "--config-dir", str(tmp_path), "gpu=a40", "dry_run=true", f"hydra.sweep.dir={tmp_path}/s"]
    assert main([*command, "site=mine"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/site/mine.yaml:")
    assert message in error
    assert len(error.splitlines()) == 1
    # Nobody else's command is stopped.
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(f"site mine is left out: {tmp_path}/site/mine.yaml:")


def _site(folder: Path, name: str, *changes: tuple[str, str]) -> Path:
    """Write a copy of delta's site file under another name into a folder for --config-dir."""
    text = (conf_dir() / "site" / "delta.yaml").read_text()
    for old, new in (("name: delta\n", f"name: {name}\n"), *changes):
        assert old in text
        text = text.replace(old, new)
    file = folder / "site" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def _dry_run(folder: Path, *arguments: str) -> int:
    return main(["-m", "--config-dir", str(folder), "dry_run=true", f"hydra.sweep.dir={folder}/s", *arguments])


def test_file_with_another_suffix_is_refused(capsys, tmp_path):
    file = _site(tmp_path, "mine")
    file.rename(file.with_suffix(".yml"))
    assert _dry_run(tmp_path, "gpu=h200") == 2
    assert capsys.readouterr().err == f"error: {file.with_suffix('.yml')}: is not read; name it mine.yaml\n"


def test_times_and_accounts_reach_the_script_as_they_were_written(capsys, tmp_path):
    account = ("value: null # <code>-delta-gpu", "value: 000123456789")
    _site(tmp_path, "mine", account, ("'[a-z0-9]{4}-delta-gpu'", "'\\d{12}'"), ("2880", "2-00:00:00"))
    assert _dry_run(tmp_path, "site=mine", "gpu=h200", "time_min=1:30:00,2-0") == 0
    scripts = [file.read_text() for file in sorted((tmp_path / "s" / "sbatch").iterdir())]
    assert [re.findall("--(account|time)=(.*)", script) for script in scripts] == [
        [("account", "000123456789"), ("time", "90")],
        [("account", "000123456789"), ("time", "2880")],
    ]
    assert _dry_run(tmp_path, "site=mine", "gpu=h200", "time_min=2-0:01") == 2
    assert "time_min=2881: partition gpuH200x8 of mine allows 2880" in capsys.readouterr().err


def test_home_site_with_a_broken_file_is_not_replaced_by_another(capsys, tmp_path):
    _site(tmp_path, "mine", ("  method", "\tmethod"))
    (tmp_path / "gpu").mkdir()
    h201 = (conf_dir() / "gpu" / "h200.yaml").read_text().replace("name: h200", "name: h201")
    (tmp_path / "gpu" / "h201.yaml").write_text(h201.replace("home_site: delta", "home_site: mine"))
    _site(tmp_path, "other", ("  h200:", "  h201:"))
    assert _dry_run(tmp_path, "gpu=h201") == 2
    assert re.match(rf"error: {tmp_path}/site/mine\.yaml:\d+: not YAML", capsys.readouterr().err)


def test_two_sites_that_claim_this_machine_are_to_be_chosen_between(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(site_catalog, "_host_names", lambda: ("dt-login01",))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    _site(tmp_path, "mine")
    # Neither is the home site of the A100.
    assert _dry_run(tmp_path, "gpu=a100") == 2
    error = capsys.readouterr().err
    assert "gpu=a100: this machine belongs to delta and mine by their connect.hostnames; choose with site=" in error
    assert _dry_run(tmp_path, "gpu=a100", "site=mine") == 0


def test_file_that_hydra_would_pass_by_is_refused(capsys, tmp_path):
    file = _site(tmp_path, "delta")
    assert _dry_run(tmp_path, "gpu=h200") == 0  # an equal copy
    file.write_text(file.read_text().replace("max_minutes: 2880", "max_minutes: 60"))
    assert _dry_run(tmp_path, "gpu=h200") == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: is not read, since {conf_dir()}/site/delta.yaml comes")


def test_doctor_reads_a_folder_of_site_files(capsys, tmp_path):
    file = _site(tmp_path, "mine")
    assert {row[0]: row[1] for row in site_files([], tmp_path)}["mine"] == str(file)
    command = ["doctor", "site", "mine", "--config-dir", str(tmp_path)]
    assert app.main(command) == 2
    assert "mine cannot be reached from here" in capsys.readouterr().err
    (file := _site(tmp_path, "delta")).write_text("name: delta\n")
    assert app.main(command) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: is not read, since {conf_dir()}/site/delta.yaml comes")


def test_broken_site_is_listed_by_doctor_and_stops_no_other_site(capsys, tmp_path, monkeypatch):
    conf = tmp_path / "conf"
    shutil.copytree(conf_dir(), conf)
    (conf / "site" / "grace.yaml").write_text("name: grace\nqos: a\nqos: b\n")
    monkeypatch.setattr("launchers.points.compose.conf_dir", lambda: conf)
    rows = {row[0]: row for row in site_files([])}
    assert rows["grace"][2:4] == (
        "no",
        f"{conf}/site/grace.yaml:3: qos: is given twice, first in line 2; keep one of them",
    )
    assert rows["local"][2] == "yes"
    assert app.main(["doctor", "site", "grace"]) == 2
    assert f"error: {conf}/site/grace.yaml:3: qos" in capsys.readouterr().err
    assert app.main(["doctor", "site", "delta"]) == 2
    assert "delta cannot be reached from here" in capsys.readouterr().err


SWEEP = {
    "sweep_id": "s1",
    "format_version": 3,
    "sites": {"delta": {"connect": {"method": "slurm"}}},
    "points": [{"point": 0, "overrides": ["gpu=h200"], "gpu": "h200", "batch": 8, "site": "delta"}],
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"points": [1]}, "damaged (Expected `object`, got `int` - at `$.points[0]`)"),
        ({"points": [{"point": "0"}]}, "damaged (Expected `int`, got `str` - at `$.points[0].point`)"),
        ({"points": [SWEEP["points"][0] | {"site": "grace"}]}, "damaged (point 0: no site named grace)"),
        ({"overrides": None}, "damaged (Expected `array`, got `null` - at `$.overrides`)"),
        ({"sweep_id": ...}, "damaged (Object missing required field `sweep_id`)"),
        ({"sites": []}, "damaged (Expected `object`, got `array` - at `$.sites`)"),
        ({"order": {"cells": 0, "repeats": 1, "seed": 0, "order_seed": None}}, "damaged (Expected `int` >= 1"),
        ({"launch_context": {"working_dir": 5}}, "damaged (Expected `str | null`, got `int`"),
        ({"format_version": ...}, "has format 1, and this version of inpaint_bench reads 3"),
        ({"format_version": 4}, "has format 4, and this version of inpaint_bench reads 3"),
    ],
)
def test_damaged_sweep_record_is_refused_by_every_command(wrong, message, capsys, tmp_path):
    content = {key: value for key, value in (SWEEP | wrong).items() if value is not ...}
    replace_json(tmp_path / "sweep.json", content)
    for verb in ("status", "rerun", "cancel", "collect"):
        assert app.main([verb, str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert f"{tmp_path}/sweep.json: {message}" in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize("inside", ["", "0/attempt-1"])
def test_single_run_into_a_sweep_is_refused(inside, capsys, tmp_path):
    """Regression: its manifest took the place of that of a point."""
    replace_json(tmp_path / "sweep.json", SWEEP)
    overrides = ["gpu=cpu", "recipe=cpu", "telemetry=none", "model=tiny_inpaint", "data.resolution_px=64"]
    assert main([*overrides, f"hydra.run.dir={tmp_path / inside}"]) == 2
    assert f"belongs to the sweep {tmp_path}, whose runs it would mix" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


def test_single_run_into_a_completed_one_is_refused(capsys, tmp_path):
    """Regression: its rows stood beside those of the other, so that neither could be merged."""
    replace_json(tmp_path / "manifest.json", {"run_id": "r-1", "status": "completed"})
    overrides = ["gpu=cpu", "recipe=cpu", "telemetry=none", "model=tiny_inpaint", "data.resolution_px=64"]
    assert main([*overrides, f"hydra.run.dir={tmp_path}"]) == 2
    assert "holds a completed run, whose files a new one would replace" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("used", "folder", "message"),
    [
        ("run/manifest.json", "run", "/run holds a run without a sweep: choose another hydra.sweep.dir"),
        ("runs/day/sweep.json", "runs", "/runs holds other sweeps: choose another hydra.sweep.dir; with out="),
        ("sweep/sweep.json", "sweep/0", "/sweep, whose runs it would mix; name another"),
    ],
)
def test_sweep_into_a_directory_in_use_is_refused(used, folder, message, capsys, tmp_path):
    """Regression: it was written beside the files of a run, and among those of another sweep."""
    (tmp_path / used).parent.mkdir(parents=True)
    (tmp_path / used).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    for more in ([], ["dry_run=true"]):
        assert main(["-m", "gpu=h200", f"hydra.sweep.dir={tmp_path / folder}", *more]) == 2
        assert message in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
@pytest.mark.parametrize(
    ("used", "folder", "message"),
    [
        ("run/manifest.json", "run/a/b", "/run, whose files it would mix; name another"),
        ("runs/day/sweep.json", "runs", "/runs holds other sweeps: choose another {key}; with out="),
    ],
)
def test_directory_inside_a_run_or_above_sweeps_is_refused(key, used, folder, message, capsys, tmp_path):
    """Regression: a single run was made inside another one."""
    replace_json(tmp_path / used, {"run_id": "r-1", "status": "completed"})
    before = sorted(tmp_path.rglob("*"))
    overrides = ["gpu=cpu", "recipe=cpu", "telemetry=none", "model=tiny_inpaint", "data.resolution_px=64"]
    flag = ["-m"] if key == "hydra.sweep.dir" else []
    assert main([*flag, *overrides, f"{key}={tmp_path / folder}"]) == 2
    assert message.format(key=key) in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_manifest_of_another_program_is_no_run(capsys, tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    overrides = ["gpu=cpu", "recipe=cpu", "telemetry=none", "dry_run=true"]
    assert main(["-m", *overrides, f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
    assert "nothing was submitted" in capsys.readouterr().out


def test_a_variable_that_the_shell_left_in_the_sweep_directory_is_refused(capsys, tmp_path):
    """Regression: a folder of the name $SCRATCH was made."""
    overrides = ["gpu=cpu", "recipe=cpu", "telemetry=none", "dry_run=true"]
    assert main(["-m", *overrides, f"hydra.sweep.dir='{tmp_path}/$SCRATCH/sweep'"]) == 2
    assert "the shell left $SCRATCH as it is" in capsys.readouterr().err


def test_sweep_that_was_moved_to_such_a_directory_is_not_rerun(capsys, tmp_path):
    replace_json(tmp_path / "a:b" / "sweep.json", SWEEP)
    for options in ([], ["--dry-run"]):
        assert app.main(["rerun", str(tmp_path / "a:b"), *options]) == 2
        assert "a job would read it as another path" in capsys.readouterr().err


def test_ledger_that_is_a_folder_is_reported(capsys, tmp_path):
    replace_json(tmp_path / "sweep.json", SWEEP)
    (tmp_path / "ledger.jsonl").mkdir()
    for verb in ("status", "rerun", "cancel", "collect"):
        assert app.main([verb, str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"error: {tmp_path}/ledger.jsonl: Is a directory\n"


def test_folder_name_is_quoted_in_printed_commands(capsys, tmp_path):
    folder = tmp_path / "$(id)"
    unreachable = ["gpu=h200", "repeats=auto", "profile=demo", "sites.delta.connect.method=slurm"]
    assert main(["-m", *unreachable, f"hydra.sweep.dir='{folder}'"]) == 0
    printed = capsys.readouterr().out.partition("When the jobs have ended: ")[2].splitlines()[0]
    assert printed == shell_command("rerun", folder, "--repeats", "auto")
    pasted = subprocess.run(["bash", "-c", f"printf '%s\\n' {printed}"], capture_output=True, text=True, check=True)
    assert pasted.stdout.splitlines() == ["inpaint-bench", "rerun", str(folder), "--repeats", "auto"]
    # Regression: a dry run, which makes no sweep directory, named the command too.
    assert main(["-m", *unreachable, f"hydra.sweep.dir='{tmp_path / 'dry'}'", "dry_run=true"]) == 0
    assert "When the jobs have ended" not in capsys.readouterr().out


def test_dry_run_continues_where_scripts_cannot_be_written(capsys, tmp_path):
    """For example in another user's sweep, which can only be read."""
    (tmp_path / "sbatch").touch()
    assert main(["-m", "gpu=a40", "batch=2,3", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/sbatch: File exists, so the scripts were not written" in out
    assert re.search(r"00 +grace +gpu-a40 +2 +gres=gpu:a40:1", out)
    assert "nothing was submitted" in out


def test_loss_that_is_not_finite_is_printed_in_words(capsys, tmp_path):
    from inpaint_bench.run.task import _print_summary

    quality = Quality(validation=[{"step": 5, "loss": None}])
    _print_summary(Manifest(schema_version=1, run_id="r", status=Status.COMPLETED, quality=quality), tmp_path)
    assert "validation loss at step 5: not finite" in capsys.readouterr().out


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_errors_of_disk_and_permissions_are_one_sentence(number, capsys):
    def refused():
        raise OSError(number, os.strerror(number), "/sweep/ledger.jsonl")

    assert guarded(refused) == 2
    assert capsys.readouterr().err == f"error: /sweep/ledger.jsonl: {os.strerror(number)}\n"


def test_other_system_errors_keep_their_traceback():
    def bug():
        raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(OSError, match="Bad file"):
        guarded(bug)


@pytest.mark.parametrize("prints", ["print('x')", "print('x' * 100_000)", "console().print(table(['x'], [['y']]))"])
def test_closed_pipe_ends_with_its_exit_code(prints):
    code = "import sys; from inpaint_bench.commands.exit_codes import guarded; "
    code += "from inpaint_bench.core.console import console, table;"
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", f"{code} sys.exit(guarded(lambda: {prints}))"]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with os.fdopen(written, "wb") as closed:
        done = subprocess.run(command, env=buffered, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("path", ["x" * 300, "\u00e9" * 130, "/".join(["y" * 100] * 12), "/".join(["y" * 250] * 20)])
def test_names_that_are_too_long_are_refused_before_anything_is_made(path, capsys, tmp_path):
    assert main(["-m", "gpu=a40", "batch=2,3", f"hydra.sweep.dir='{tmp_path / path}'"]) == 2
    error = capsys.readouterr().err
    assert "it is too long: a name may have 255 bytes, and the path 800" in error
    assert len(error) < 1000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["status", "rerun", "cancel", "collect"])
def test_a_sweep_path_that_is_too_long_is_one_sentence(verb, capsys, tmp_path):
    assert app.main([verb, str(tmp_path / ("x" * 300))]) == 2
    assert capsys.readouterr().err.count("\n") == 1
