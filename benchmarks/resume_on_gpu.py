"""How close a training that was cut and resumed stays to one left alone, on a GPU, beside how close two unbroken
ones are to each other.

usage: python benchmarks/resume_on_gpu.py DATA OUT RECIPE... [KEY=VALUE...]    (OUT: 35 GB per recipe for SD 1.5)
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq


def start(run_dir: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "run.log").open("ab") as log:
        words = [sys.executable, "-m", "inpaint_bench.launch", *overrides, f"hydra.run.dir={run_dir}"]
        return subprocess.Popen(words, stdout=log, stderr=log)


def step(run_dir: Path) -> int:
    try:
        return int((json.loads((run_dir / "manifest.json").read_text())["progress"] or {"step": 0})["step"])
    except FileNotFoundError:
        return 0


def losses(run_dir: Path) -> dict[int, float]:
    tables = [pq.read_table(part, columns=["step", "loss"]) for part in sorted((run_dir / "steps").glob("*.parquet"))]
    return {row["step"]: row["loss"] for table in tables for row in table.to_pylist()}


def compare(name: str, one: dict[int, float], other: dict[int, float]) -> str:
    assert one.keys() == other.keys(), (sorted(one), sorted(other))
    errors = [abs(one[k] - other[k]) / abs(one[k]) for k in sorted(one)]
    equal = sum(e == 0 for e in errors)
    return f"{name}: {equal} of {len(errors)} losses equal to the bit, largest relative difference {max(errors):.3g}"


def main() -> None:
    data, out, *words = sys.argv[1:]
    recipes, more = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    common = ["site=local", "data=prepared", f"data.root={data}", "workload.train_steps=60", *more]
    for number, recipe in enumerate(recipes):
        root = Path(out) / str(number)
        overrides = [*common, f"recipe=[{recipe}]"]
        children = {name: start(root / name, overrides) for name in ("unbroken", "again", "cut")}
        while children["cut"].poll() is None and not 5 < step(root / "cut") < 60:
            time.sleep(0.05)
        children["cut"].send_signal(signal.SIGUSR2)
        print(f"{recipe}: cut ended with {children['cut'].wait()}, after step {step(root / 'cut')}", flush=True)
        start(root / "cut", overrides).wait()
        for name in ("unbroken", "again"):
            children[name].wait()
        first = losses(root / "unbroken")
        for name in ("again", "cut"):
            print(compare(f"{recipe}: unbroken against {name}", first, losses(root / name)), flush=True)


if __name__ == "__main__":
    main()
