"""Test benchmarks/gpu_sweep.sh without a GPU: a tiny model on simulated ones, through real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from .testbed.plan import free_port

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_sweep.sh"
TINY = ("data.num_images=16", "data.resolution_px=32", "model=tiny_inpaint", "recipe=cpu")
QUICK = (
    *("data.num_images=null", "data.resolution_px=32"),
    *("workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=0"),
)


def gpu_sweep(folder: Path, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [SCRIPT, *arguments],
        cwd=folder,
        env=os.environ | {"PATH": path, "GPUS": "0", **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_too_few_arguments_show_the_usage(tmp_path: Path) -> None:
    done = gpu_sweep(tmp_path, "debs", "out")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: benchmarks/gpu_sweep.sh DEBS OUT SWEEP")


def test_a_second_call_goes_on_where_the_first_ran_out_of_time(testbed_light: object, tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare = [sys.executable, "-m", "inpaint_bench", "prepare", "data=synthetic", f"prepare.out={data}", *TINY]
    subprocess.run(prepare, cwd=ROOT, check=True, capture_output=True, timeout=120)
    Path(f"{data}.complete").touch()
    # Sockets need a short path.
    state = Path(f"/tmp/gpu-sweep-{os.getpid()}")
    env = {"INPAINT_BENCH_TESTBED": str(state), "PREPARED": str(data), "PORT": str(free_port())}
    arguments = ("debs", tmp_path, "sweep", "batch=2", *QUICK)
    try:
        first = gpu_sweep(tmp_path, *arguments, **env, LIMIT_S="0")
        assert first.returncode == 3, first.stdout + first.stderr
        assert (tmp_path / "sweep.tgz").exists()
        second = gpu_sweep(tmp_path, *arguments, **env, LIMIT_S="200")
        assert second.returncode == 0, second.stdout + second.stderr
        assert "launched" not in second.stdout
        assert not state.exists(), "the bed is down"
    finally:
        down = [sys.executable, "-m", "tests.testbed", "down"]
        subprocess.run(down, cwd=ROOT, env=os.environ | env, check=True, capture_output=True, timeout=60)
    with tarfile.open(tmp_path / "sweep.tgz") as archive:
        manifest = archive.extractfile("sweep/0/attempt-1/manifest.json")
        assert manifest is not None
        assert json.load(manifest)["status"] == "completed"
        assert not any(name.startswith("sweep/code") for name in archive.getnames())
