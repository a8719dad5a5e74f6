"""`levers`: every lever and bundle with what it does, and where measurements of this checkout show that it helps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.levers import LEVERS, RecipeConfig
from inpaint_bench.core.config.validation import did_you_mean
from inpaint_bench.core.console import console, echo, echo_json
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.key_docs import as_written, comment
from inpaint_bench.core.paths import ROOT, conf_dir

if TYPE_CHECKING:
    import polars as pl

    from analysis.stats.intervals import Gain

RESULTS = "benchmarks/results"


def run_levers(words: Sequence[str] | None, *, as_json: bool) -> None:
    """Print the levers, or those that `words` name; `words` that are folders are datasets to derive the effects from.

    Without a dataset the effects are those of the checkout's.
    """
    words = words or []
    names = [word for word in words if word in LEVERS or word in recipe.bundles()]
    datasets = [Path(word) for word in words if word not in names]
    for path in datasets:
        if not path.is_dir():
            offered = recipe.choices()
            raise UserError(
                f"{path}: no such lever or folder.{did_you_mean(str(path), offered)} `inpaint-bench levers` lists all"
            )
    chosen = datasets or committed()
    levers = list_levers(chosen, names)
    if as_json:
        echo_json(levers)
        return
    width = min(console().width, 120)
    for lever in levers:
        about = _details(lever) if names else []
        for text in [f"{lever['name']}: {lever['description']}", *(f"  {line}" for line in [*about, *lever["seen"]])]:
            echo(*wrap(text, width, subsequent_indent="    "))
    measured_in = ", ".join(path.name for path in chosen) or "no dataset"
    echo(*wrap(f"Datasets that were read: {measured_in}", width, break_on_hyphens=False))


def committed() -> list[Path]:
    """Return the datasets of the checkout."""
    return sorted(path.parent for path in (ROOT / RESULTS).glob("*/runs.parquet"))


def list_levers(datasets: list[Path], names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return every lever and bundle, or those named: what it does, sets and needs, and what the datasets show."""
    seen = _effects(datasets)
    return [{"name": name, **_about(name), "seen": seen.get(name, [])} for name in names or recipe.choices()]


def _details(lever: dict[str, Any]) -> Iterator[str]:
    yield "sets " + " ".join(f"recipe.{key}={as_written(value)}" for key, value in lever["sets"].items())
    if lever["needs"]:
        yield f"needs {lever['needs']}"
    if lever["bundles"]:
        yield f"part of {', '.join(lever['bundles'])}"


def _about(name: str) -> dict[str, Any]:
    bundles = {bundle: recipe.read_bundle(bundle) for bundle in recipe.bundles()}
    if name in bundles:
        lines = (conf_dir() / "recipe" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        head_comment = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
        return {"description": head_comment, "sets": bundles[name], "needs": "", "bundles": []}
    lever = LEVERS[name]
    said = lever.description or comment(RecipeConfig, lever.field)
    is_default = not lever.description and lever.value is not True
    users = [bundle for bundle, sets in bundles.items() if "name" in sets and sets.get(lever.field) == lever.value]
    return {
        "description": f"{said}: {as_written(lever.value)}, the default" if is_default else said,
        "sets": {lever.field: lever.value},
        "needs": lever.needs,
        "bundles": users,
    }


def _effects(datasets: list[Path]) -> dict[str, list[str]]:
    """Return by lever what each study shows about it; a step of several levers is told with each of them.

    A lever that no study of a dataset has gets the cells that differ by it alone, a bundle those of `baseline`. Runs
    in which a lever was not active count for nothing: until 28 November 2026 channels_last was undone in the UNet.
    """
    import polars as pl

    from analysis.dataset import open_dataset
    from analysis.stats.study import LADDER, LEAVE_ONE_OUT, comparisons, gain_over

    effects: dict[str, list[str]] = defaultdict(list)
    for folder in datasets:
        runs = open_dataset(folder).runs.filter(pl.col("inactive_levers").is_null())
        studied = set()
        for study in comparisons(runs):
            if study.kind == LEAVE_ONE_OUT:
                continue
            for index, step in enumerate(study.steps[1:], start=1):
                reference = study.previous(index) if study.kind == LADDER else 0
                gain = gain_over(study, index, reference)
                if gain is None:
                    continue
                text = _text(gain, study.setting, study.steps[reference or 0].recipe)
                studied.update(step.added)
                for lever in step.added:
                    others = "+".join(name for name in step.added if name != lever)
                    effects[lever].append(text + (f", together with {others}" if others else ""))
        for lever, text in _pairs(runs):
            if lever not in studied:
                effects[lever].append(text)
    return effects


def _pairs(runs: pl.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield a lever or bundle, and what it gains, for each two cells that differ by it alone."""
    from analysis.stats.cells import RECIPE_COMPARISON_KEYS, build_cells, compare
    from analysis.units import gpu_label

    keys = [name if name != "requested_batch" else "batch" for name in RECIPE_COMPARISON_KEYS]
    for same in build_cells(runs).drop_nulls(["batch", "images_per_s"]).partition_by(keys):
        for new, old in permutations(same.to_dicts(), 2):
            # Adapters are other work than all weights.
            added = _added(new["recipe"], old["recipe"]) if new["adapters"] == old["adapters"] else None
            if added and (gain := compare(new, old, "images_per_s")):
                cards = f"{new['gpus']} {gpu_label(new['gpu'])}".removeprefix("1 ")
                px = f", {new['resolution_px']} px" if new["resolution_px"] else ""
                yield added, _text(gain, f"{new['model']}{px}, {cards}, batch {new['batch']}", old["recipe"])


def _added(new: str, old: str) -> str | None:
    """Return the bundle that a recipe is beside `baseline`, or the only lever that it has other than the other one."""
    if new in recipe.bundles() and old == recipe.BASELINE:
        return new
    more, less = (recipe.levers(RecipeConfig(**recipe.fields_of(name))) for name in (new, old))
    differing = [field for field in more | less if more.get(field) != less.get(field)]
    return more.get(differing[0]) if len(differing) == 1 else None


def _text(gain: Gain, setting: str, reference: str) -> str:
    interval, verdict = "no interval", "provisional"
    if gain.low is not None and gain.high is not None:
        interval = f"95 %: {100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
        verdict = "no difference" if gain.tie else "helps" if gain.value > 0 else "slower"
    return f"{verdict}: {setting}: {100 * gain.value:+.1f} % images/s ({interval}, n = {gain.n}) over {reference}"
