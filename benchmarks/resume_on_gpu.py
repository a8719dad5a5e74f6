"""How close a training that was cut and resumed stays to one left alone, on a GPU, beside how close two unbroken
ones are to each other.

usage: python benchmarks/resume_on_gpu.py DATA OUT RECIPE... [KEY=VALUE...]

RECIPE is a list of bundles and levers: `tuned`, `tuned,attn_flash4`. Its three trainings run at once on the GPU, and
their checkpoints (about 3 x 10 GB for SD 1.5 with fp32 weights, 3 x 7 GB with bf16_split) are removed when they were
compared. Exit code 1 if a resumed training differs from an unbroken one by more than the tolerance: 0.002 of a
loss, or twice what parts two unbroken ones, if that is more. (Kernels that add in no fixed order part those, and what
one step rounds differently the next ones carry on.)
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

STEPS = 60
FIRST_CUT = 6  # steps before the cut, at least: a CUDA graph is captured in the fourth
TOLERANCE = 0.002  # relative, of a loss


class Difference(NamedTuple):
    """Between the losses of equal steps of two trainings."""

    equal: int  # to the bit
    steps: int
    largest: float  # relative


def start(run_dir: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    """Start a training in `run_dir`, or go on with one; its output is appended to run.log."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "run.log").open("ab") as log:
        command = [sys.executable, "-m", "inpaint_bench.launch", *overrides, f"hydra.run.dir={run_dir}"]
        return subprocess.Popen(command, stdout=log, stderr=log)


def step(run_dir: Path) -> int:
    """Return the last step that a training reported, 0 before the first."""
    try:
        return int((json.loads((run_dir / "manifest.json").read_text())["progress"] or {"step": 0})["step"])
    except FileNotFoundError:
        return 0


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of every step."""
    tables = [pq.read_table(part, columns=["step", "loss"]) for part in sorted((run_dir / "steps").glob("*.parquet"))]
    return {row["step"]: row["loss"] for table in tables for row in table.to_pylist()}


def compare(expected: dict[int, float], actual: dict[int, float]) -> Difference:
    """Return how far the losses of two trainings are apart. Both must have the same steps."""
    assert expected.keys() == actual.keys(), (sorted(expected), sorted(actual))
    errors = [abs(expected[k] - actual[k]) / abs(expected[k]) for k in sorted(expected)]
    return Difference(sum(e == 0 for e in errors), len(errors), max(errors))


def tolerance(unbroken: Difference) -> float:
    """Return what a resumed training may differ by, given how far two unbroken ones are from each other."""
    return max(TOLERANCE, 2 * unbroken.largest)


def measure(root: Path, recipe: str, overrides: list[str]) -> bool:
    """Train three times, cut one and resume it; print the differences. Return whether it is within the tolerance."""
    children = {name: start(root / name, overrides) for name in ("unbroken", "again", "cut")}
    while children["cut"].poll() is None and not FIRST_CUT <= step(root / "cut") < STEPS:
        time.sleep(0.05)
    children["cut"].send_signal(signal.SIGUSR2)
    code, cut_at = children["cut"].wait(), step(root / "cut")
    print(f"{recipe}: cut ended with {code}, after step {cut_at}", flush=True)
    codes = {"cut": start(root / "cut", overrides).wait()} | {
        name: children[name].wait() for name in ("unbroken", "again")
    }
    if failed := [name for name, code in codes.items() if code]:
        print(f"{recipe}: {', '.join(failed)} failed; see run.log in {root}", flush=True)
        return False
    resumed = json.loads((root / "cut" / "manifest.json").read_text())["resumed"]
    if not 0 < cut_at < STEPS or not resumed:
        print(f"{recipe}: the training was not cut in its midst, so nothing is shown", flush=True)
        return False
    first = losses(root / "unbroken")
    differences = {name: compare(first, losses(root / name)) for name in ("again", "cut")}
    for name, (equal, steps, largest) in differences.items():
        text = f"{equal} of {steps} losses equal to the bit, largest relative difference {largest:.3g}"
        print(f"{recipe}: unbroken against {name}: {text}", flush=True)
    limit = tolerance(differences["again"])
    within = differences["cut"].largest <= limit
    print(f"{recipe}: {'within' if within else 'OUTSIDE'} the tolerance of {limit:.3g}", flush=True)
    return within


def main() -> int:
    data, out, *arguments = sys.argv[1:]
    recipes, more = [text for text in arguments if "=" not in text], [text for text in arguments if "=" in text]
    common = ["site=local", "data=prepared", f"data.root={data}", f"workload.train_steps={STEPS}", *more]
    within = []
    for number, recipe in enumerate(recipes):
        root = Path(out) / str(number)
        within.append(measure(root, recipe, [*common, f"recipe=[{recipe}]"]))
        for folder in root.glob("*/checkpoints"):
            shutil.rmtree(folder)
    return int(not all(within))


if __name__ == "__main__":
    sys.exit(main())
