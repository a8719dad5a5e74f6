"""Mistakes that people make on the command line: each is answered by a sentence that says what would be right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.commands import exit_codes
from tests.conf_names import names

pytestmark = pytest.mark.slow
NOT_UTF8 = "is not UTF-8, as every path and argument has to be"

SITES = names("site", "auto")
CPU = "gpu=cpu recipe=cpu telemetry=none"

# What was typed, and what the answer has to say.
MISTAKES = [
    # names of choices
    ("launch -m gpu=A100 batch=8", "Did you mean a100?"),
    ("launch -m gpu=a10 batch=8", f"have: {names('gpu')}. Did you mean a100?"),
    ("launch recipe=tuend", "Did you mean tuned?"),
    ("launch -m recipe=[baseline,tf23]", "recipe=tf23: no such choice. Did you mean tf32?"),
    ("launch site=delt", "Did you mean delta?"),
    ("launch -m site=Delta gpu=a40", "Did you mean delta?"),
    ("launch workload=inference gpu=h200", "Did you mean sd_inference?"),
    ("launch model=pixart", f"model=pixart: no such choice; have: {names('model')}"),
    ("launch recipe=[tuned,tf32]+ema", "recipe=[tuned,tf32]+ema: put all parts into the brackets, or leave"),
    ("prepare data=[photos]", f"data=photos: no such choice; have: {names('data')}"),
    ("launch data=photos", f"data=photos: no such choice; have: {names('data')}"),
    ("launch telemetry=dcgm", "have: none, nvml, replay"),
    ("launch profile=demos", "Did you mean demo?"),
    ("launch -m study=ladder study.levers=[compiel] gpu=h200", "Did you mean compile?"),
    ("launch -m study=ladder gpu=h200", "study.levers=[]: name at least one lever"),
    ("launch -m gpu=h200 site=grace", "gpu=h200: not on site grace; it has: a100, a40"),
    # names of keys
    ("launch bacth=16", "Did you mean batch?"),
    ("launch -m gpu=a40 recipe.num_worker=8", "Did you mean num_workers?"),
    ("launch -m gpu=a40 num_workers=8", "Did you mean recipe.num_workers?"),
    ("launch -m gpu=a40 compile=true", "Did you mean recipe.compile?"),
    ("launch -m gpu=a40 account=bbxx", "Did you mean sites.<name>.account?"),
    ("launch -m gpu=a40 wait=true dry-run=true", "Did you mean dry_run?"),
    ("launch -m gpu=a40 sites.delta.acount.value=x", "Did you mean account?"),
    (
        "launch -m gpu=a40 sites.dleta.account.value=bbxx-delta-gpu",
        f"sites.dleta: no such site; have: {SITES}",
    ),
    ("launch -m gpu=a40 +batch=8", "leave out the +"),
    # values
    ("launch -m gpu=a40 batch=0", "batch=0: must lie between 1 and 1,000,000"),
    ("launch -m gpu=a40 batch=16.5", "must be an integer between 1 and 1,000,000, or auto"),
    ("launch -m gpu=a40 batch=big", "must be an integer between 1 and 1,000,000, or auto"),
    ("launch -m gpu=a40 batch=[8,16]", "several are swept with -m batch=8,16"),
    ("launch -m gpu=a40 batch=8,8", "8 is given twice"),
    ("launch -m gpu=a40 recipe.num_workers=many", "must be an integer between 0 and 256"),
    ("launch -m gpu=a40 recipe.optimizer=adam", "Did you mean adamw?"),
    ("launch -m gpu=a40 time_min=1h", "must be a time limit in minutes or as MIN"),
    ("launch -m gpu=a40 mem_gb=4TB", "must be an integer between 1 and 65,536, or null"),
    ("launch -m gpu=a40 repeats=three", "must be an integer between 1 and 1,000, or auto"),
    ("launch -m gpu=a40 dry_run=maybe", "dry_run=maybe: must be true or false"),
    ("launch -m gpu=a40 sites.delta.account.value=foo", "not an account of delta"),
    ("launch -m gpu=a40 data=folder", "data.root is empty"),
    (
        "launch gpu=a40 data.root=empty",
        "data.root=empty: data=synthetic makes its data and reads no folder; add data=f",
    ),
    ("launch -m gpu=a40 workload=denoise_shape data.root=empty", "reads no folder; leave data.root out"),
    ("launch -m gpu=a40 data.resolution_px=512px", "must be an integer between 32 and 4,096"),
    ("launch -m gpu=a40 name=a/b", "must be a name without /"),
    ("launch -m gpu=a40 'out=${nowhere}'", "${nowhere}: no such key"),
    # what the machine or the site cannot do, before a run directory is made
    ("launch -m gpus=a40,a100 batch=8", "gpus is a number; cards are chosen with gpu=a40,a100"),
    ("launch gpus=a40,a100", "cards are chosen with gpu=a40,a100"),
    ("launch gpu=cpu recipe=cpu telemetry=nvml", "telemetry=nvml samples a GPU, and this run uses none: set"),
    ("launch -m gpu=cpu recipe=cpu telemetry=nvml", "telemetry=nvml samples a GPU, and this run uses none: set"),
    (f"launch {CPU} data=folder data.root=nowhere", "data.root=nowhere: no such folder"),
    (f"launch {CPU} out=/proc/x", "cannot be made in /proc (No such file or directory); name another folder"),
    ("launch -m gpu=a40 out=/proc/x", "cannot be made in /proc (No such file or directory); name another folder"),
    (f"launch {CPU} out=", "out: is empty; name a folder"),
    (
        f"launch -m {CPU} sites.local.gpus.cpu.charge_factor=2",
        "sites.local.gpus.cpu.charge_factor: multiplies a rate, and the site has none; set",
    ),
    (
        "launch -m gpu=a40 budget=1",
        "this sweep may cost 88.0 SU (an upper bound: the rate of a40 at grace is not known)",
    ),
    ("launch -m gpu=a40 batch=1,2 budget=1", "A shorter time limit, time_min=..., lowers what it may cost"),
    (
        "launch -m gpu=h200 sites.delta.charging.gpus_per_unit=null sites.delta.charging.cores_per_unit=null "
        "sites.delta.gpus={a40:{charge_factor:null},a100:{charge_factor:null},h200:{charge_factor:null}} budget=1",
        "to cap GPU hours, set sites.delta.charging.unit=GPU-h sites.delta.charging.units_per_gpu.h200=1",
    ),
    # the form of the command line
    (
        "launch -m gpu=a40 recipe=[baseline,tf32",
        "recipe=[baseline,tf32: a bracket is missing; write recipe=baseline+tf32",
    ),
    ("launch -m gpu=a40 sites.grace.exclude_nodes=[a,b", "a bracket is missing; write sites.grace.exclude_nodes=[a,b]"),
    ("launch gpu=a40 batch=8,16", "several values need -m"),
    ("launch -m gpu=a40 batch=8, 16", "ends with a comma; write several values without spaces"),
    ("launch -m gpu=a40 'batch=8;16'", "several values are written as batch=a,b"),
    ("launch -m gpu a40", "write gpu=a40"),
    ("launch -m gpu = a40", "write gpu=VALUE without spaces"),
    ("launch -m gpu:a40", "gpu=a40"),
    ("launch -m gpu=a40 --batch 16", "keys are set without dashes, such as batch=16"),
    ("launch -m --gpu=a40", "keys are set without dashes, such as gpu=a40"),
    ("launch --mutlirun gpu=a40", "Did you mean --multirun?"),
    ("launch -m gpu=a40 --dry-rum", "Did you mean --dry-run?"),
    ("launch gpu=a40 --dry-run", "dry_run=true needs -m"),
    ("launch -m gpu=a40 gpu=a100", "gpu is given twice, gpu=a40 and gpu=a100; keep one of them"),
    ("launch --config-dir /nowhere gpu=a40", "--config-dir /nowhere: no such folder"),
    ("launch --plan plan.nowhere.yaml", "plan.nowhere.yaml: No such file"),
    (
        "launch --plan plan.delta.yaml sites.delta.account.value=bbxx-delta-gpu",
        "--plan takes no such argument; a plan has",
    ),
    ("launch help", "`inpaint-bench launch --help`"),
    # verbs and their arguments
    ("lauch -m gpu=a40", "Did you mean 'launch'"),
    ("submit gpu=a40", "Did you mean 'launch'?"),
    ("run gpu=a40", "Did you mean 'launch'?"),
    ("help", "Did you mean '--help'?"),
    ("--verison", "--version"),
    ("status", "runs: no sweep in this folder; give the sweep directory that `launch -m` printed"),
    ("status --json", "--json: needs a sweep directory; `inpaint-bench status` lists the latest"),
    ("rerun", "Missing argument 'SWEEP'. Sweep directory, as `launch -m` printed it."),
    ("status nowhere", "nowhere: not a sweep directory (no such folder)"),
    ("rerun empty --only timeouts", "--only timeouts: no such reason"),
    ("merge empty", "Missing option '-o' / '--output'."),
    ("merge nowhere -o dataset", "'nowhere' does not exist. Folders with run directories"),
    ("report nowhere -o page", "'nowhere' does not exist. Folder that `merge` wrote, or a folder of such folders."),
    ("compare empty empty --junit x.xml", "--junit x.xml: needs --fail-on, which says what a failure is"),
    ("compare empty empty --fail-on 3% --junit no/x.xml", "--junit no/x.xml: its folder does not exist"),
    ("restore nowhere empty -o out", "nowhere: no such folder; WEIGHTS is"),
    ("restore empty nowhere -o out", "nowhere: no such folder; IMAGES is"),
    ("prepare data=sythetic prepare.out=p", "Did you mean synthetic?"),
    ("prepare", "prepare.out is empty"),
    ("prepare empty", "empty: is not KEY=VALUE; a folder of images is data=folder data.root=empty"),
    ("prepare empty -o p", "No such option: -o. `inpaint-bench prepare --help` lists all."),
    (
        "prepare data.root=empty prepare.out=p",
        "data=synthetic makes its data and reads no folder; add data=folder or data",
    ),
    ("prepare prepare.out=p prepare.formats=webdataset", "prepare.formats: must be a list, such as [a, b]"),
    ("doctor grace", "No such command 'grace'. `inpaint-bench doctor --help` lists all."),
    ("doctor site delt", f"delt: no such site; have: {SITES}, all. Did you mean delta?"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_answered_by_what_would_be_right(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert app.main(shlex.split(line)) == 2
    out, error = capfd.readouterr()
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert len(re.findall(r"[.?!] [A-Z`]", error)) <= 2
    assert not re.search(r"Traceback|Error executing job|search path|mismatched input|LexerNo|hydra\.cc", out + error)
    assert [path.name for path in tmp_path.iterdir() if path.name != "runs"] == ["empty"]


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_here_is_missed_before_torch_is_loaded(tmp_path: Path) -> None:
    code = "import sys; from inpaint_bench.launch import main; sys.exit(main() + 4 * ('torch' in sys.modules))"
    arguments = ["gpu=h200", "site=local", f"out={tmp_path}/runs"]
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: gpu=h200: this machine has no NVIDIA GPU (")
    assert run.stderr.endswith("with -m the run is submitted to a site, and gpu=cpu recipe=cpu runs here\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["launch", "launch -m gpu=a40,a100 dry_run=true", "levers", "doctor"])
def test_a_reader_that_closes_the_pipe_sees_no_traceback(line: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m inpaint_bench {line} | head -1"
    run = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(run.stdout.splitlines()) == 1
    assert run.stderr == ""


def test_launch_without_arguments_prints_the_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["launch"]) == launch.main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: inpaint-bench launch [OPTIONS] KEY=VALUE ...")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "remark"),
    [
        ("notify.mail=me", "notify.mail=me: is no address; the site's mail system must have a user me"),
        ("track=wandb", "track=wandb: was not checked whether grace has the package wandb"),
        ("out=/proc/x", "/proc/x: No such file or directory, so the scripts were not written"),
    ],
)
def test_a_dry_run_says_what_it_cannot_know(
    override: str, remark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["launch", "-m", "gpu=a40", override, "--dry-run"]) == 0
    assert remark in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("main", [app.main, launch.main])
@pytest.mark.parametrize(
    "arguments", [["-m", "gpu=a40", "hydra.sweep.dir=/tmp/\udcff"], ["--plan", "/tmp/\udcff/plan.delta.yaml"]]
)
def test_a_path_that_is_not_utf_8_is_refused(main, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *arguments] if main is app.main else arguments) == 2
    assert capsys.readouterr().err == f"error: {arguments[-1].replace(chr(0xDCFF), '?')}: {NOT_UTF8}\n"


@pytest.mark.parametrize("name", ["gone", "\udcff"])
def test_a_working_directory_that_cannot_be_named_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    if name == "gone":
        (tmp_path / name).rmdir()
    assert app.main(["watch", "--telemetry", "none", "--", "true"]) == 2
    assert re.fullmatch(f"error: (.*/\\?: {NOT_UTF8}|the working directory does not .*)\n", capsys.readouterr().err)


def test_a_file_whose_name_is_not_utf_8_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_codes.guarded(lambda: len("a\udcff".encode())) == 2
    assert capsys.readouterr().err == f"error: a?: {NOT_UTF8}\n"
