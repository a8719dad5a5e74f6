"""`levers`: every recipe file with what it does, and where measurements of this checkout show that it helps or not."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from textwrap import fill
from typing import Any

from inpaint_bench.core.config import recipe
from inpaint_bench.core.console import console, echo
from inpaint_bench.core.paths import ROOT

RESULTS = "benchmarks/results"


def run_levers(datasets: list[Path], *, as_json: bool) -> None:
    """Print the levers. `datasets` are merged datasets to derive their effects from; none: those of the checkout."""
    chosen = datasets or committed()
    levers = list_levers(chosen)
    if as_json:
        echo(json.dumps(levers, indent=1))
        return
    width = min(console().width, 120)
    for lever in levers:
        lines = [f"{lever['name']}: {lever['description']}", *(f"  {text}" for text in lever["seen"])]
        for text in lines:
            echo(fill(text, width, subsequent_indent="    "))
    echo(f"Measured in: {', '.join(str(path) for path in chosen) or 'no dataset'}")


def committed() -> list[Path]:
    """Return the datasets of the checkout."""
    return sorted(path.parent for path in (ROOT / RESULTS).glob("*/runs.parquet"))


def list_levers(datasets: list[Path]) -> list[dict[str, Any]]:
    """Return name and description of every lever, and what the datasets show about it."""
    seen = _effects(datasets)
    return [
        {"name": name, "description": _description(path), "seen": seen.get(name, [])}
        for name, path in recipe.files().items()
    ]


def _description(path: Path) -> str:
    """Return the comment at the head of a recipe file."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.lstrip("# "))
    return " ".join(lines)


def _effects(datasets: list[Path]) -> dict[str, list[str]]:
    """Return by lever what each study shows about it; a step of several levers is told with each of them."""
    from analysis.dataset import open_dataset
    from analysis.stats.study import LADDER, LEAVE_ONE_OUT, comparisons, step_gain

    effects: dict[str, list[str]] = defaultdict(list)
    for folder in datasets:
        for study in comparisons(open_dataset(folder).runs):
            if study.kind == LEAVE_ONE_OUT:
                continue
            for index, step in enumerate(study.steps[1:], start=1):
                reference = study.previous(index) if study.kind == LADDER else 0
                if reference is None:
                    continue
                before = study.steps[reference]
                gain = step_gain(step, before)
                if gain is None:
                    continue
                interval, verdict = "no interval", "provisional"
                if gain.low is not None and gain.high is not None:
                    interval = f"95 %: {100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
                    verdict = "no difference" if gain.tie else "helps" if gain.value > 0 else "slower"
                figures = f"{100 * gain.value:+.1f} % images/s ({interval}, n = {gain.n})"
                text = f"{verdict}: {study.setting}: {figures} over {before.recipe}"
                for lever in step.added:
                    others = "+".join(name for name in step.added if name != lever)
                    effects[lever].append(text + (f", together with {others}" if others else ""))
    return effects
