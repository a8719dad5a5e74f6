"""A wrong sweep costs a sentence and nothing else."""

import errno
import io
import os
import re
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from inpaint_bench.guard import guarded
from inpaint_bench.launch import main
from inpaint_bench.terminal import table


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("batchs=8", r"batchs: no such key.*Did you mean batch\?.*Valid: batch"),
        ("data.kinds=x", r"data\.kinds: no such key in data.*kind"),
        ("gpu=b200", r"gpu=b200: no such choice; have: a100, a40"),
        ("gpu=h100", r"gpu=h100: no site serves it \(delta: a100, a40, h200; grace"),
        ("gpu=h200 site=grace", r"gpu=h200: not on site grace; it has: a100, a40"),
        ("batch=abc", r"batch=abc: must be an integer between 1 and 1,000,000, or auto"),
        ("batch=2.5", r"batch: .*'2\.5'.*; allowed: an integer between 1 and 1,000,000, or auto"),
        ("batch=0", r"batch=0: must lie between 1 and"),
        ("recipe.precision=int8", r"recipe\.precision=int8: not one of bf16, fp16, fp32"),
        ("time_min=9999 gpu=h200", r"time_min=9999: partition gpuH200x8 of delta allows 2880"),
        ("data=folder", r"data\.root is empty"),
        ("data.resolution_px=100", r"data\.resolution_px=100: must be a multiple of 8"),
        ("workload.validate_every=5", r"workload\.validate_every=5: only training.*Set workload\.train_steps to train"),
        ("workload.checkpoint_every_s=60", r"workload\.checkpoint_every_s=60\.0: only training"),
        ("workload.save_weights=true", r"workload\.save_weights=true: only training"),
        ("workload.sample_images=4", r"workload\.sample_images=4: only training"),
        ("workload.resume=false", r"workload\.resume=false: only training"),
        ("sites.nowhere.qos=x", r"sites\.nowhere: no such site; have: delta, grace, local"),
        ("sites.grace.gpus.a100.partitio=x", r"gpus\.a100\.partitio: no such key.*Did you mean partition\?"),
        ("sites.grace.template=nope.sh.j2 dry_run=true", r"template nope\.sh\.j2: .*have: base\.sh\.j2"),
        ("sites.grace.reach.slurm_conf=a,b dry_run=true", r"sites\.grace\.reach differs between points"),
        ("wait=true,false dry_run=true", r"wait differs between points"),
        ("sites.delta.account.value=me gpu=h200", r"account\.value=me: not an account of delta.*`accounts` there"),
        ("budget=1 gpu=h200", r"budget=1: this sweep may cost 3\.0 SU"),
        ("budget=1 gpu=a100", r"charging rule of grace is not known"),
        ("batch=[", r"batch="),
        ("study=ladder study.levers=[adamw_fusd]", r"^error: study: adamw_fusd: .*Did you mean adamw_fused"),
        (
            "study=ladder study.levers=[ema] recipe=cpu",
            r"recipe=cpu: study=ladder makes the recipes itself; study.base",
        ),
    ],
)
def test_a_wrong_sweep_is_refused_in_a_sentence_with_exit_code_2(arguments, says, capsys, tmp_path):
    code = main(["-m", *arguments.split(), f"out={tmp_path}"])
    error = capsys.readouterr().err
    assert code == 2
    assert re.search(says, error)
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("sweep.json"))


def test_a_single_run_on_another_site_is_refused(capsys, tmp_path):
    assert main(["site=delta", "gpu=h200", f"out={tmp_path}"]) == 2
    assert "site=delta needs -m" in capsys.readouterr().err


def test_a_plan_file_that_is_none_is_refused(capsys, tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("points: [1")
    assert main(["--plan", str(file)]) == 2
    assert "not a plan file" in capsys.readouterr().err


def test_a_folder_that_is_no_sweep_is_refused_by_every_command(capsys, tmp_path):
    from inpaint_bench import cancel, rerun, status

    for command in (status, rerun, cancel):
        assert command.main([str(tmp_path)]) == 2
        assert "not a sweep directory" in capsys.readouterr().err


def test_an_unknown_reason_lists_the_known_ones(capsys, tmp_path):
    from inpaint_bench import rerun

    assert rerun.main([str(tmp_path), "--only", "bad_luck"]) == 2
    assert "oom_gpu" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_told_in_words(capsys, tmp_path):
    from inpaint_bench.launch import _tell

    _tell({"status": "completed", "progress": None, "quality": {"validation": [{"step": 5, "loss": None}]}}, tmp_path)
    assert "validation loss at step 5: not finite" in capsys.readouterr().out


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_what_a_disk_or_its_owner_refuses_is_a_sentence(number, capsys):
    def refused():
        raise OSError(number, os.strerror(number), "/sweep/ledger.jsonl")

    assert guarded(refused) == 2
    assert capsys.readouterr().err == f"error: /sweep/ledger.jsonl: {os.strerror(number)}\n"


def test_another_error_of_the_system_keeps_its_traceback():
    def bug():
        raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(OSError, match="Bad file"):
        guarded(bug)


def test_a_message_from_another_machine_does_not_steer_the_terminal():
    out = io.StringIO()
    Console(file=out, width=80).print(table(["message"], [["before\x1b[2Jafter"]]))
    assert "\x1b" not in out.getvalue()
    assert "before" in out.getvalue()


def test_a_reader_that_leaves_is_no_bug():
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "inpaint_bench.doctor"]
    with os.fdopen(written, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode in (1, 128 + signal.SIGPIPE)  # 1 where a table was first to find out
