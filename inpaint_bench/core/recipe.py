"""Names of recipes, and the three ways to compare levers.

A recipe is the baseline of its device and the levers that differ from it. A lever is one field of
`RecipeConfig`; its name is made from the field and its value, so two recipes with one name do the same. One
YAML in conf/recipe per lever carries that name; several make one recipe: `recipe=[tf32,channels_last]`. A
bundle is a YAML with a name of its own, and what was changed about it comes behind: `tuned+tf32`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

import yaml

from .config import RecipeConfig
from .errors import UserError
from .paths import conf_dir

# How a lever is called; a field that is not here: its own name where it is on or off, else name_value.
_NAMES: dict[str, str] = {
    "attention": "attn_{}",
    "num_workers": "workers_{}",
    "prefetch_factor": "prefetch_{}",
    "weights": "{}",
    "optimizer": "{}",
    "format": "{}",
    "stage_to": "stage_{}",
}
_VALUES: dict[tuple[str, Any], str] = {
    ("precision", "fp32"): "fp32",
    ("precision", "fp16"): "amp_fp16",
    ("precision", "bf16"): "amp_bf16",
    ("weights", "fp32"): "weights_fp32",
    ("compile", "default"): "compile",
    ("compile", "max-autotune-no-cudagraphs"): "compile_max-autotune_plain",
    ("decode", "dali"): "dali",
    ("cache_storage", "gpu"): "on_gpu",
}


def baseline(device: str) -> RecipeConfig:
    """What the levers of a device are counted from. On the processor: no autocast, no loader processes."""
    if device == "cpu":
        return RecipeConfig(device="cpu", precision="fp32", num_workers=0)
    return RecipeConfig()


def levers(recipe: RecipeConfig) -> dict[str, str]:
    """Name by field of every lever that is not as in the baseline, in the order of the fields."""
    return _differing(recipe, baseline(recipe.device))


def _differing(recipe: RecipeConfig, base: RecipeConfig) -> dict[str, str]:
    then, now = asdict(base), asdict(recipe)
    return {name: label(name, now[name]) for name in _switches() if now[name] != then[name]}


def label(field: str, value: Any) -> str:
    """`tf32`, `no_pin_memory`, `workers_8`, `attn_flash` ..."""
    if (field, value) in _VALUES:
        return _VALUES[field, value]
    if isinstance(value, bool):
        return field if value else f"no_{field}"
    return _NAMES.get(field, field + "_{}").format(value)


def name(recipe: RecipeConfig) -> str:
    """`baseline`, `cpu`, `tf32+channels_last`, `cpu+fused` ...; a bundle's own name comes before its changes."""
    parts = ["cpu"] if recipe.device == "cpu" else []
    parts += [recipe.name] if recipe.name else []
    base = replace(baseline(recipe.device), **_bundle(recipe.name))
    parts += _differing(recipe, base).values()
    return "+".join(parts) or "baseline"


@cache
def _bundle(name: str) -> dict[str, Any]:
    """The levers of the file of this name; none where there is no such file, so that all of them are named."""
    known = {path.stem: path for path in (conf_dir() / "recipe").glob("*.yaml")}
    content = yaml.safe_load(known[name].read_text(encoding="utf-8")) if name in known else {}
    return {field: value for field, value in content.items() if field in _switches()}


def _switches() -> list[str]:
    return [spec.name for spec in fields(RecipeConfig) if spec.name not in ("name", "device")]


# --- comparisons: from a list of levers to a list of recipes --------------------------------------


def one_at_a_time(base: str, steps: Sequence[str]) -> list[list[str]]:
    """The base, and the base with each step alone."""
    return [[base], *([base, *step.split("+")] for step in steps)]


def ladder(base: str, steps: Sequence[str]) -> list[list[str]]:
    """The base, and one step more each time."""
    return [[base, *_flat(steps[:count])] for count in range(len(steps) + 1)]


def leave_one_out(base: str, steps: Sequence[str]) -> list[list[str]]:
    """All steps, and all but each."""
    return [[base, *_flat(steps)], *([base, *_flat([s for s in steps if s != left])] for left in steps)]


STUDIES: dict[str, Callable[[str, Sequence[str]], list[list[str]]]] = {
    "one_at_a_time": one_at_a_time,
    "ladder": ladder,
    "leave_one_out": leave_one_out,
}


def _flat(steps: Sequence[str]) -> list[str]:
    return [part for step in steps for part in step.split("+")]


def sweep(study: str, base: str, steps: Sequence[str]) -> str:
    """The recipes of a study as the value of a sweep: `[baseline],[baseline,tf32]`. Raises UserError."""
    if study not in STUDIES:
        raise UserError(f"study.name={study}: not one of {', '.join(STUDIES)}")
    if not steps or len(set(steps)) < len(steps):
        raise UserError(f"study.levers={list(steps)}: name at least one lever, and none twice")
    have = sorted(path.stem for path in (conf_dir() / "recipe").glob("*.yaml"))
    for part in [base, *_flat(steps)]:
        if part not in have:
            close = get_close_matches(part, have, n=1)
            guess = f" Did you mean {close[0]}?" if close else ""
            raise UserError(f"study: {part}: no such recipe or lever.{guess} Have: {', '.join(have)}")
    return ",".join(f"[{','.join(one)}]" for one in STUDIES[study](base, list(steps)))
