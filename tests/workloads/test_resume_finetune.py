"""The real fine-tuning, interrupted ten times from outside, against an uninterrupted one."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.run.test_resume import losses, start, whole

STEPS = 120
FINETUNE = (
    f"workload.train_steps={STEPS}",
    "workload.checkpoint_every_s=0.05",
    "workload.validate_every=40",
    "data.num_images=64",
    "recipe=[cpu,ema]",
)


@pytest.mark.faults  # test_resume.py interrupts a smaller training as often
@pytest.mark.timeout(1800)
def test_losses_after_ten_kills_and_signals_are_bit_identical(tmp_path: Path) -> None:
    whole_run = start(tmp_path / "whole", *FINETUNE)
    chance = random.Random(3)
    run_dir, cuts = tmp_path / "cut", 0
    for by in [signal.SIGKILL, signal.SIGUSR2] * 5:
        child = start(run_dir, *FINETUNE)
        checkpoints = run_dir / "checkpoints"
        before = set(checkpoints.glob("step-*")) if checkpoints.is_dir() else set()
        while child.poll() is None and not set(checkpoints.glob("step-*")) - before:
            time.sleep(0.01)  # it trains
        time.sleep(chance.uniform(0, 0.3))
        child.send_signal(by)
        cuts += child.wait(600) in (-signal.SIGKILL, 128 + signal.SIGUSR2)
    assert whole(run_dir, *FINETUNE)["status"] == "completed"
    assert whole_run.wait(900) == 0
    assert cuts >= 8, "most signals arrived while it trained"
    assert losses(run_dir) == losses(tmp_path / "whole")
    assert sorted(losses(run_dir)) == list(range(STEPS))
