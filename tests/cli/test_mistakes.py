"""Mistakes that people make on the command line: each is answered by a sentence that says what would be right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.commands import exit_codes
from inpaint_bench.core.hydra_support import refuse_wrong_overrides
from inpaint_bench.core.paths import conf_dir
from launchers.points.compose import composer

pytestmark = pytest.mark.slow
NOT_UTF8 = "is not UTF-8, as every path and argument has to be"

LOCAL = "gpu=cpu site=local model=tiny_inpaint recipe=cpu telemetry=none"

# Overrides that do not fit, and what the answer has to say: its parts in order, `...` between them.
OVERRIDES = [
    ("gpu=A100 batch=8", "Did you mean a100?"),
    ("gpu=a10 batch=8", "have: a100, a100_80gb, a40, cpu, h100, h200, l40s. Did you mean a100?"),
    ("recipe=tuend", "Did you mean tuned?"),
    ("recipe=[baseline,tf23]", "recipe=tf23: no such choice. Did you mean tf32?"),
    ("site=delt", "Did you mean delta?"),
    ("site=Delta gpu=a40", "Did you mean delta?"),
    ("workload=inference gpu=h200", "Did you mean sd_inference?"),
    (
        "model=pixart",
        "model=pixart: no such choice; have: flux, flux_fill, sd15, sd15_inpaint, sd2, sd2_inpaint, sd35_medium, ",
    ),
    ("data=photos", "data=photos: no such choice; have: folder, nifti, prepared, synthetic"),
    ("telemetry=dcgm", "have: none, nvml, replay"),
    ("profile=demos", "Did you mean demo?"),
    ("gpu=h200 site=grace", "gpu=h200: not on site grace; it has: a100, a40"),
    ("bacth=16", "Did you mean batch?"),
    ("gpu=a40 recipe.num_worker=8", "Did you mean num_workers?"),
    ("gpu=a40 num_workers=8", "Did you mean recipe.num_workers?"),
    ("gpu=a40 compile=true", "Did you mean recipe.compile?"),
    ("gpu=a40 account=bbxx", "Did you mean sites.<name>.account?"),
    ("gpu=a40 wait=true dry-run=true", "Did you mean dry_run?"),
    ("gpu=a40 sites.delta.acount.value=x", "Did you mean account?"),
    ("gpu=a40 sites.dleta.account.value=bbxx-delta-gpu", "sites.dleta: no such site; have: delta, grace, local"),
    ("gpu=a40 +batch=8", "leave out the +"),
    ("gpu=a40 batch=0", "batch=0: must lie between 1 and 1,000,000"),
    ("gpu=a40 batch=16.5", "must be an integer between 1 and 1,000,000, or auto"),
    ("gpu=a40 batch=big", "must be an integer between 1 and 1,000,000, or auto"),
    ("gpu=a40 batch=[8,16]", "several are swept with -m batch=8,16"),
    ("gpu=a40 batch=8,8", "8 is given twice"),
    ("gpu=a40 recipe.num_workers=many", "must be an integer between 0 and 256"),
    ("gpu=a40 recipe.optimizer=adam", "Did you mean adamw?"),
    ("gpu=a40 time_min=1h", "must be a time limit in minutes or as MIN"),
    ("gpu=a40 mem_gb=4TB", "must be an integer between 1 and 65,536, or null"),
    ("gpu=a40 repeats=three", "must be an integer between 1 and 1,000, or auto"),
    ("gpu=a40 dry_run=maybe", "dry_run=maybe: must be true or false"),
    ("gpu=a40 data=folder", "data.root is empty"),
    ("gpu=a40 data.root=empty", "data.root=empty: data=synthetic makes its data and reads no folder; add data=f"),
    ("gpu=a40 workload=denoise_shape data.root=empty", "reads no folder; leave data.root out"),
    ("gpu=a40 data.resolution_px=512px", "must be an integer between 32 and 4,096"),
    ("gpu=a40 name=a/b", "must be a name without /"),
    ("gpu=a40 'out=${nowhere}'", "${nowhere}: no such key"),
    ("gpus=a40,a100 batch=8", "gpus is a number; cards are chosen with gpu=a40,a100"),
    ("gpus=a40,a100", "cards are chosen with gpu=a40,a100"),
    ("gpu=cpu recipe=cpu telemetry=none data=folder data.root=nowhere", "data.root=nowhere: no such folder"),
    (
        "gpu=cpu recipe=cpu telemetry=none sites.local.gpus.cpu.charge_factor=2",
        "sites.local.gpus.cpu.charge_factor: multiplies a rate, and the site has none; set",
    ),
    ("gpu=a40 recipe=[baseline,tf32", "recipe=[baseline,tf32: a bracket is missing; write recipe=baseline+tf32"),
    ("gpu=a40 sites.grace.exclude_nodes=[a,b", "a bracket is missing; write sites.grace.exclude_nodes=[a,b]"),
    ("gpu=a40 batch=8, 16", "ends with a comma; write several values without spaces"),
    ("gpu=a40 'batch=8;16'", "several values are written as batch=a,b"),
    ("gpu:a40", "gpu=a40"),
    ("gpu=a40 gpu=a100", "gpu is given twice, gpu=a40 and gpu=a100; keep one of them"),
    ("data.kinds=x", "data.kinds: no such key in data ... kind"),
    ("gpu=h100", "gpu=h100: no site has it (delta: a100, a40, h200; grace"),
    ("gpu=h200 gpu.memory_gb=0", "gpu.memory_gb=0.0: must lie between 1 and 1,024"),
    ("gpu=a40 gpu.memory_gb=-0.0", "gpu.memory_gb=-0.0: must lie between 1 and 1,024"),
    ("gpu=a40 gpu.memory_gb=nan", "gpu.memory_gb=nan: must"),
    ("gpu=a40 gpu.bf16_dense_tflops=0", "gpu.bf16_dense_tflops=0.0: must lie between 1 and 20,000"),
    ("gpu=a40 gpu.bandwidth_gb_s=0", "gpu.bandwidth_gb_s=0.0: must lie between 1 and 20,000"),
    ("gpu=a40 gpu.power_limit_w=0", "gpu.power_limit_w=0.0: must lie between 1 and 5,000"),
    ("gpu=a40 workload.learning_rate=0", "workload.learning_rate=0.0: must lie between 1e-12 and 10"),
    ("gpu=a40 workload.learning_rate=-1e-5", "workload.learning_rate=-1e-05: must lie between 1e-12 and 10"),
    ("recipe.precision=int8", "recipe.precision=int8: not one of bf16, fp16, fp32"),
    ("time_min=9999 gpu=h200", "time_min=9999: partition gpuH200x8 of delta allows 2880"),
    (
        "gpu=h200 site=delta sites.delta.gpus.h200.partition=null",
        "sites.delta.gpus.h200.partition is not set: name the Slurm partition with this GPU",
    ),
    ("data.resolution_px=100", "data.resolution_px=100: must be a multiple of 8"),
    ("workload.validate_every=5", "workload.validate_every=5: only training ... Set workload.train_steps to train"),
    ("workload.checkpoint_every_s=60", "workload.checkpoint_every_s=60.0: only training"),
    ("workload.save_weights=true", "workload.save_weights=true: only training"),
    ("workload.sample_images=4", "workload.sample_images=4: only training"),
    ("workload.resume=false", "workload.resume=false: only training"),
    ("telemetry.dcgm_url=http://node:9400", "telemetry.dcgm_url: was removed; profile=ncu counts the kernels"),
    ("+telemetry.dcgm_every_s=5", "telemetry.dcgm_every_s: was removed; profile=ncu"),
    ("site=delta +site.qoss=x", "site.qoss: no such key in site. Did you mean qos?"),
    ("gpu=null", "gpu=null: needs the name of a file in conf/gpu"),
    ("gpu=h200,5", "gpu=h200,5: needs the name of a file in conf/gpu"),
    ("gpu=[a40,h200]", "gpu=[a40,h200]: needs the name of a file in conf/gpu; several are swept with -m gpu=a,b"),
    ("recipe=true", "recipe=true: needs the name of a lever or bundle, or a list of them"),
    ("model.weights= gpu=h200", "model.weights='': must be a path, or null"),
    ("quality.lpips_weights= gpu=h200", "quality.lpips_weights='': must be a path, or null"),
    ("gpu=h200 time_min=1:90:00", "time_min=1:90:00: must be a time limit in minutes"),
    ("gpu=h200 time_min=1-24", "time_min=1-24: must be a time limit in minutes"),
    ("gpu=h200 site.account.value=x", "site.account.value: is not read with site=auto ... sites.<name>.account"),
    ("gpu=h200 site.requeue.request=false", "site.requeue.request: is not read with site=auto"),
    ("gpu=h200 sites.delta.qos=true", "sites.delta.qos=true: a text is needed ... 'sites.delta.qos=\"true\"'"),
    ("gpu=h200 site=delta +site.environment.variables.X=1.5", "variables.X=1.5: a text is needed"),
    ("gpu=h200 sites.delta.account.value=1_200_34", "value=1_200_34: a text is needed, and this is read as 120034"),
    ("gpu=h200 sites.delta.account.value=x,1_2", "value=x,1_2: a text is needed, and this is read as 12 unless quo"),
    ("gpu=h200 sites.delta.exclude_nodes=[x,1_2]", "exclude_nodes=[x,1_2]: a text is needed ... '\"...\"'"),
    ("gpu=h200 sites.delta.qos=+5", "sites.delta.qos=+5: a text is needed ... as 5 unless quoted: ' ... qos=\"+5\"'"),
    ("gpu=h200 sites.delta.qos=1e5", "sites.delta.qos=1e5: a text is needed ... as 100000.0 unless quoted"),
    ("gpu=h200 hydra.sweep.dir=2024_05", "hydra.sweep.dir=2024_05: a text is needed, and this is read as 202405"),
    ("gpu=h200 hydra.sweep.dir=2024.10", "hydra.sweep.dir=2024.10: a text is needed, and this is read as 2024.1"),
    ("gpu=h200 site=delta site.environment.variables.X=a", "no such key ... ; +site.environment ... =... adds"),
    ("sites.delta=5 gpu=h200", "sites.delta=5: needs keys and values"),
    ("sites.delta.preempt.signal=SIGTREM gpu=h200", "preempt.signal=SIGTREM: not one of ... Did you mean SIGTERM?"),
    ("sites.delta.preempt.signal=null gpu=h200", "preempt.grace_s=300: needs signal too"),
    ("sites.delta.gpus.h20.partition=x gpu=h200", "gpus.h20: no such key ... h200 ... needs a file in conf/gpu"),
    ("sites.delta.charging.mem_gb_per_unit={h20:9} gpu=h200", "mem_gb_per_unit.h20: no such key ... mean h200?"),
    ("sites.delta.gpus.h200.max_minutes=null gpu=h200", "max_minutes=null: must be a time limit ... or UNLIMITED"),
    ("site=delta site.gpus.h200.max_minutes=1:00:00 gpu=h200 time_min=1-1", "time_min=1500:  ... allows 60"),
    ("gpu=a100 site=delta gpus=8", "gpus=8: a node of delta has 4 a100"),
    ("gpu=a100 site=grace nodes=64 sites.grace.gpus.a100.max_nodes=32", "nodes=64: a job  ...  grace may have 32"),
    ("time_min=UNLIMITED", "time_min=UNLIMITED: must be a time limit in minutes or as  ... , or auto"),
    ("sites.nowhere.qos=x", "sites.nowhere: no such site; have: delta, grace, local"),
    ("sites.grace.gpus.a100.partitio=x", "gpus.a100.partitio: no such key ... Did you mean partition?"),
    (
        "sites.delta.account.value=me gpu=h200",
        "account.value=me: not an account of delta ... `accounts` at delta lists yours",
    ),
    ("batch=[", "batch="),
    ("gpu=a40 repeats=0", "repeats=0: must lie between 1 and 1,000"),
    ("gpu=a40 repeats=auto repeats_target=0", "repeats_target=0.0: must lie between"),
    ("gpu=a40 'notify.mail=a b'", "must be one address of mail"),
    ("notify.webhook_file=hook", "notify.webhook_file: was removed; notify.mail has Slurm write at the end"),
    ("sites.local.cpu_jobs.account=a", "sites.local.cpu_jobs: was removed; nothing needs jobs without a GPU"),
    (f"{LOCAL} sites.local.environment.container.image=/i.sif", "jobs on this machine run without a container"),
    (f"{LOCAL} sites.local.environment.container.image=docker://python", "must be an absolute path at the site"),
    (
        f"{LOCAL} sites.local.environment.container.binds=[relative]",
        "must be an absolute path, or source:target",
    ),
    (f"{LOCAL} sites.local.environment.container.command=docker", "not one of apptainer, singularity"),
]

# Other command lines, and what the answer has to say.
COMMANDS = [
    # a launch answers wrong overrides as above
    ("launch -m gpu=A100 batch=8", "gpu=A100: no such choice; have: a100,"),
    ("launch -m gpu=a40 batch=0", "batch=0: must lie between 1 and 1,000,000"),
    ("launch bacth=16", "bacth: no such key at the top. Did you mean batch? `inpaint-bench launch --help` lists all"),
    ("launch recipe=tuend", "Did you mean tuned?"),
    ("launch recipe=[tuned,tf32]+ema", "recipe=[tuned,tf32]+ema: put all parts into the brackets, or leave"),
    ("prepare data=[photos]", "data=photos: no such choice; have: folder, nifti, prepared, synthetic"),
    ("launch -m study=ladder gpu=h200", "study.levers=[]: name at least one lever"),
    ("launch gpu=cpu recipe=cpu telemetry=nvml", "telemetry=nvml samples a GPU, and this run uses none: set"),
    ("launch -m gpu=cpu recipe=cpu telemetry=nvml", "telemetry=nvml samples a GPU, and this run uses none: set"),
    (
        "launch gpu=cpu recipe=cpu telemetry=none out=/proc/x",
        "cannot be made in /proc (No such file or directory); name another folder",
    ),
    ("launch -m gpu=a40 out=/proc/x", "cannot be made in /proc (No such file or directory); name another folder"),
    ("launch gpu=cpu recipe=cpu telemetry=none out=", "out: is empty; name a folder"),
    ("launch -m gpu=a40 batch=1,2 budget=1", "A shorter time limit, time_min=..., lowers what it may cost"),
    (
        "launch -m gpu=h200 sites.delta.charging.gpus_per_unit=null sites.delta.charging.cores_per_unit=null "
        "sites.delta.gpus={a40:{charge_factor:null},a100:{charge_factor:null},h200:{charge_factor:null}} budget=1",
        "to cap GPU hours, set sites.delta.charging.unit=GPU-h sites.delta.charging.units_per_gpu.h200=1",
    ),
    ("launch -m gpu=cpu site=local", "recipe baseline needs a GPU, but gpu=cpu is none: put cpu first: recipe=cpu"),
    ("launch -m gpu=h200 recipe=cpu", "recipe cpu runs on the CPU, which would be recorded as gpu=h200"),
    ("launch -m +batchs=8,16", "batchs: no such key at the top. Did you mean batch?"),
    ("launch -m hydra.sweep.dir=", "hydra.sweep.dir: is empty; name a folder"),
    ("launch -m gpu=h200 hydra.sweep.subdir=x", "hydra.sweep.subdir: run directories are named by point and attempt"),
    (
        "launch -m gpu=h200 recipe=attn_flash4",
        "diffusers' UNet of sd15_inpaint cannot call it: set recipe.unet=nhwc too",
    ),
    (
        "launch -m gpu=h200 recipe=tuned",
        "tuned reads prepared data (cache_image,  ... ), and this is data=synthetic:  ... prepare.caches=true`",
    ),
    ("launch -m repeats=2000", "2,000 points are more than max_points=1000"),
    ("launch -m gpu=h200 nodes=1,2", "nodes=2: a job in partition gpuH200x8 of delta may have 1"),
    ("launch -m sites.grace.template=nope.sh.j2 dry_run=true", "template nope.sh.j2:  ... have: base.sh.j2"),
    ("launch -m sites.grace.connect.slurm_conf=a,b dry_run=true", "sites.grace.connect differs between points"),
    ("launch -m wait=true,false dry_run=true", "wait differs between points"),
    ("launch -m notify.mail=a@x.org,b@x.org", "notify differs between points, and a sweep has one"),
    (f"launch {LOCAL} notify.mail=me", "notify needs -m"),
    ("launch -m gpu=a40 repeats=2,3", "repeats differs between points"),
    ("launch -m gpu=a40 repeats=2 seed=0,1", "repeats=2: the seed is swept too"),
    ("launch -m gpu=a40 repeats=2 hydra.sweeper.max_batch_size=1", "max_batch_size"),
    ("launch gpu=cpu repeats=3", "repeats=3 needs -m"),
    ("launch -m budget=1 gpu=h200", "budget=1: this sweep may cost 3.0 SU; nothing was submitted"),
    ("launch -m budget=87 gpu=a100 site=grace", "budget=87: this sweep may cost 88.0 SU; nothing was submitted"),
    (
        "launch -m budget=87 gpu=a40",
        "may cost 88.0 SU (an upper bound: the rate of a40 at grace is not known); nothing",
    ),
    ("launch -m budget=178 gpu=a40,a100,h200", "may cost 179.0 SU, 3.0 at delta and 176.0 at grace (an upper bound"),
    ("launch -m budget=1 gpu=h200 sites.delta.gpus.h200.charge_factor=null", "charging rule of delta is not known"),
    ("launch -m study=ladder study.levers=[adamw_fusd]", "study: adamw_fusd:  ... Did you mean adamw_fused"),
    (
        "launch -m study=ladder study.levers=[ema] recipe=cpu",
        "recipe=cpu: study=ladder makes the recipes itself; study.base",
    ),
    ("launch gpu=a40 batch=8,16", "several values need -m"),
    ("launch -m gpu a40", "write gpu=a40"),
    ("launch -m gpu = a40", "write gpu=VALUE without spaces"),
    ("launch -m gpu=a40 --batch 16", "keys are set without dashes, such as batch=16"),
    ("launch -m --gpu=a40", "keys are set without dashes, such as gpu=a40"),
    ("launch --mutlirun gpu=a40", "Did you mean --multirun?"),
    ("launch -m gpu=a40 --dry-rum", "Did you mean --dry-run?"),
    ("launch gpu=a40 --dry-run", "dry_run=true needs -m"),
    ("launch --config-dir /nowhere gpu=a40", "--config-dir /nowhere: no such folder"),
    ("launch --plan plan.nowhere.yaml", "plan.nowhere.yaml: No such file"),
    (
        "launch --plan plan.delta.yaml sites.delta.account.value=bbxx-delta-gpu",
        "--plan takes no such argument; a plan has",
    ),
    ("launch help", "`inpaint-bench launch --help`"),
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
    ("doctor site delt", "delt: no such site; have: delta, grace, local, all. Did you mean delta?"),
]


def problem(code: int, out: str, error: str, message: str) -> str | None:
    """Return an answer that is not one sentence with this message, None for one that is."""
    expected = ".*".join(map(re.escape, message.split(" ... ")))
    wrong = r"Traceback|Error executing job|Config search path|mismatched input|LexerNo|hydra\.cc"
    right = code == 2 and re.fullmatch(f"error: .*{expected}.*\n", error) and not re.search(wrong, out + error)
    return None if right and len(re.findall(r"[.?!] [A-Z`]", error)) <= 2 else f"{code}: {out}{error}"


def test_an_override_that_does_not_fit_is_answered_by_what_would_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One composition for all; a launch does the same to its overrides, as the command lines below show."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    problems = {}
    with composer() as compose:

        def refused(overrides: list[str]) -> None:
            refuse_wrong_overrides(overrides, [conf_dir()], multirun=True)
            compose(0, overrides)

        for line, message in OVERRIDES:
            code = exit_codes.guarded(partial(refused, shlex.split(line)))
            if wrong := problem(code, *capfd.readouterr(), message):
                problems[line] = wrong
    assert problems == {}


@pytest.mark.parametrize(("line", "message"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_mistake_is_answered_by_what_would_be_right(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    code = app.main(shlex.split(line))
    assert problem(code, *capfd.readouterr(), message) is None
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


def test_a_reader_that_closes_the_pipe_sees_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m inpaint_bench launch -m gpu=a40,a100 dry_run=true | head -1"
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
