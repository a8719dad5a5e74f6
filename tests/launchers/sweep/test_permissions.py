"""Who can read what a launch and its jobs create, and what is kept out of it."""

import os
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.core.composed_file import find_secret

QUICK = ["profile=demo", "gpu=a40", "data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2"]
QUICK += ["workload.min_measure_s=1"]
SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.slow
def test_a_sweep_is_closed_to_others_and_the_file_of_a_point_holds_no_secret(tmp_path, capsys):
    folder = tmp_path / "day" / "sweep"
    secret = f"+sites.local.environment.variables={{WANDB_API_KEY: {SECRET}}}"
    assert launch.main(["-m", *QUICK, "batch=2", secret, f"hydra.sweep.dir={folder}"]) == 0
    assert list(folder.glob("0/attempt-1/manifest.json"))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "WANDB_API_KEY looks like a secret: only you can read" in capsys.readouterr().out
    for run_record in [folder / "points" / "0.yaml", *folder.glob("0/attempt-1/.hydra/*.yaml")]:
        assert SECRET not in run_record.read_text(), run_record
    assert len(list(folder.glob("0/attempt-1/.hydra/*.yaml"))) == 3


@pytest.mark.parametrize("line", ["name=ghp_abcdefghijklmnopqrst", "name=hf_abcdefghijklmnopqrst"])
def test_a_secret_that_a_job_would_have_to_read_is_refused(line, tmp_path, capsys):
    assert launch.main(["-m", *QUICK, line, f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 2
    assert "looks like a secret: name a variable that the job has, such as" in capsys.readouterr().err
    assert not (tmp_path / "sweep" / "points").exists()


@pytest.mark.parametrize(("mode", "lines"), [(0o777, []), (0o755, ["+sites.local.environment.variables={A_KEY: x}"])])
def test_a_sweep_directory_that_is_open_to_others_is_refused(mode, lines, tmp_path: Path, capsys):
    (folder := tmp_path / "sweep").mkdir()
    folder.chmod(mode)
    assert launch.main(["-m", *QUICK, *lines, f"hydra.sweep.dir={folder}"]) == 2
    assert f"mode {mode:04o} lets others in" in capsys.readouterr().err
    assert not (folder / "sweep.json").exists()


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("sites.delta.environment.variables.WANDB_API_KEY=abc", "sites.delta.environment.variables.WANDB_API_KEY"),
        ("+x={HF_TOKEN: 'hf_x', B: 2}", "HF_TOKEN"),
        ("export DB_PASSWORD=x", "DB_PASSWORD"),
        ("export AWS_SECRET_ACCESS_KEY=x", "AWS_SECRET_ACCESS_KEY"),
        ("+a.secret=x", "a.secret"),
        ("+a.credentials=/x", "a.credentials"),
        ("data.root=https://me:pass@host/x", "https://me..."),
        ("+note=hf_abcdefghijklmnopqrst", "hf_..."),
    ],
)
def test_secrets_are_recognized(line, key):
    assert find_secret(["batch=8", line]) == key


def test_ordinary_overrides_are_no_secrets():
    lines = ["batch=8,16", "model.location_tokens=4", "data.root=/scratch/keys", "+note=monkey", "budget=100"]
    lines += ["track.uri=http://node:9400/metrics", "model.unet.num_key_value_heads=3", "x.token=null"]
    lines += ["workload.keep_checkpoints=2", "name=token", "study=levers"]
    assert find_secret(lines) is None
