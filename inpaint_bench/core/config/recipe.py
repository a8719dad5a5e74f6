"""Names of recipes, and the studies that compare them.

A bundle is a YAML of conf/recipe with a name of its own; the levers that a recipe adds to it are appended:
`baseline+tf32`, `tuned+tf32`. So equal names mean equal execution. Several levers are chosen with
`recipe=[baseline,tf32,channels_last]` or, as reports spell it, `recipe=baseline+tf32+channels_last`; levers alone are
added to `baseline`, and numbers are keys (`recipe.num_workers=8`).

`baseline` is the plain loop of the workload. Where VAE and text encoders run in the training step it is a bundle; a
recipe without any lever is `earlier_baseline` there. Other workloads have no use for that bundle: theirs is the recipe
without a lever.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import conf_dir

from .bench import BenchConfig, StudyConfig, WorkloadConfig
from .levers import CAPABILITIES, FIELDS, LEVERS, RecipeConfig, capabilities, lever_name
from .validation import did_you_mean

BASELINE = "baseline"
EARLIER = "earlier_baseline"  # for workloads that train beside a VAE; for others a recipe without levers is BASELINE
PREPARED_ONLY = ("format", "stage_to", "cache_image", "cache_masked", "cache_text")  # with data=prepared


def bundles() -> list[str]:
    """Return the names of the YAMLs of conf/recipe: the baselines, and bundles of levers."""
    return sorted(path.stem for path in (conf_dir() / "recipe").glob("*.yaml"))


@cache
def read_bundle(bundle: str) -> dict[str, Any]:
    """Return the content of a YAML of conf/recipe. Raises ConfigFileError."""
    from .yaml_file import read_config_file  # slow to import, and every reader of the schema imports this module

    return read_config_file(conf_dir() / "recipe" / f"{bundle}.yaml", "recipe")


def choices() -> list[str]:
    """Return what `recipe=` offers: bundles, and levers that are no baseline's value."""
    return sorted([*bundles(), *(lever.name for lever in LEVERS.values() if lever.listed)])


def without_levers(device: str) -> RecipeConfig:
    """Return the recipe that levers are counted from. On a CPU: no autocast, no loader processes."""
    if device == "cpu":
        return RecipeConfig(device="cpu", precision="fp32", num_workers=0)
    return RecipeConfig()


def check_device(bench: BenchConfig) -> None:
    """Raise UserError if the recipe runs on a GPU and `gpu` is none, or the other way round."""
    gpu = bench.gpu
    if bench.recipe.device == "cpu" and gpu.nvml_name and not bench.demonstration:
        raise UserError(
            f"recipe {name(bench)} runs on the CPU, which would be recorded as gpu={gpu.name}: "
            "set gpu=cpu, or demonstration=true"
        )
    if bench.recipe.device != "cpu" and not gpu.nvml_name:
        raise UserError(
            f"recipe {name(bench)} needs a GPU, but gpu={gpu.name} is none: put cpu first: recipe=cpu, "
            "or 'recipe=[cpu,lora]'"
        )


def check_telemetry(bench: BenchConfig) -> None:
    """Raise UserError if the sidecar would have nothing to sample or to replay."""
    source, capture = bench.telemetry.source, bench.telemetry.capture
    if source != "replay" and capture:
        raise UserError(f"telemetry.capture={capture}: only telemetry=replay reads it, and this is telemetry={source}")
    if source != "nvml" and bench.telemetry.power_limit_w is not None:
        raise UserError(f"telemetry.power_limit_w: telemetry={source} has no GPU to limit: set telemetry=nvml")
    if source == "nvml" and bench.recipe.device == "cpu":
        raise UserError("telemetry=nvml samples a GPU, and this run uses none: set telemetry=none")
    if source == "replay" and not (capture or bench.gpu.capture):
        raise UserError("telemetry=replay needs telemetry.capture=<name or file of a capture>, or set telemetry=none")


def check_levers(bench: BenchConfig) -> None:
    """Raise UserError for a lever that needs what the workload does not have."""
    workload = bench.workload
    for field, lever in levers(bench.recipe).items():
        if missing := [CAPABILITIES[need] for need in capabilities(field) if need not in workload.capabilities]:
            raise UserError(
                f"{lever}: workload={workload.name} has no use for it, as it needs {' and '.join(missing)}; "
                f"levers: {', '.join(workload.levers())}"
            )


def check_data(bench: BenchConfig) -> None:
    """Raise UserError if the recipe reads prepared data and gets other data. In a study that is unavailable."""
    read = {field: lever for field, lever in levers(bench.recipe).items() if field in PREPARED_ONLY}
    if read and bench.data.kind != "prepared" and bench.study.name not in STUDIES:
        prepare = ["prepare.out=DIR"]
        prepare += [f"prepare.formats=[{bench.recipe.format}]"] if "format" in read else []
        prepare += ["prepare.caches=true"] if any(field.startswith("cache_") for field in read) else []
        raise UserError(
            f"recipe {name(bench)} reads prepared data ({', '.join(read.values())}), and this is "
            f"data={bench.data.kind}: `inpaint-bench prepare ... {' '.join(prepare)}`, then data=prepared data.root=DIR"
        )


def check_network(bench: BenchConfig) -> None:
    """Raise UserError for levers that a model's network has no use for, and for a task that it is not told to do."""
    model, recipe = bench.model, bench.recipe
    inpaints = model.transformer.get("inpaints")
    if inpaints is not None and model.input_channels(None) not in bench.workload.unet_channels:
        raise UserError(
            f"workload={bench.workload.name}: needs model.transformer.inpaints={str(not inpaints).lower()}, of "
            f"model={model.name} it is {str(inpaints).lower()}"
        )
    if not model.transformer:
        given = {"frozen_storage": recipe.frozen_storage, "checkpoint_keeps": recipe.checkpoint_keeps}
        given |= {"sharding": "pipeline"} if recipe.sharding == "pipeline" else {}
        for field, value in given.items():
            if value != getattr(RecipeConfig, field):
                raise UserError(
                    f"recipe.{field}={value}: is for the transformers of FLUX and SD 3.5, not for model={model.name}"
                )
        return
    unfit = {
        "unet": recipe.unet != "diffusers",
        "vae_encoder": recipe.vae_encoder != "diffusers",
        "lora_targets": recipe.lora_targets != "attention",
        "lora_text_encoder": recipe.lora_text_encoder,
    }
    for field in (field for field, is_unfit in unfit.items() if is_unfit):
        raise UserError(
            f"recipe.{field}={getattr(recipe, field)}: is for models with a UNet, not for model={model.name}"
        )
    if model.dtype == "bf16" and recipe.weights == "fp32":
        raise UserError(
            f"recipe.weights=fp32: the networks of model={model.name} are bf16. Set recipe.weights=half with "
            "recipe.lora_rank, or to make images; recipe.weights=bf16_stochastic trains all weights, and model.dtype="
            "fp32 makes fp32 ones, which recipe.sharding=fsdp2 and tensor divide"
        )


def levers(recipe: RecipeConfig) -> dict[str, str]:
    """Return the name of every lever of a recipe, by field and in the order of the fields."""
    return _differences(recipe, without_levers(recipe.device))


def _differences(recipe: RecipeConfig, base: RecipeConfig) -> dict[str, str]:
    before, after = vars(base), vars(recipe)
    return {field: lever_name(field, after[field]) for field in FIELDS if after[field] != before[field]}


def name(bench: BenchConfig) -> str:
    """Return `baseline`, `cpu`, `baseline+tf32`, `cpu+adamw_fused` ...: the bundle, and what is changed of it."""
    recipe = bench.recipe
    parts = ["cpu"] if recipe.device == "cpu" else []
    parts += [recipe.name] if recipe.name else []
    # If the recipe is not one of our bundles, all its levers are named.
    base = replace(without_levers(recipe.device), **(_bundle_fields(recipe.name) if recipe.name in bundles() else {}))
    parts += [EARLIER] if not parts and has_plain_bundle(bench.workload) else []
    parts += _differences(recipe, base).values()
    return "+".join(parts) or BASELINE


@cache
def bundles_by_levers() -> dict[frozenset[str], str]:
    """Return the bundles of several levers."""
    contents = {name: lever_names(name) for name in bundles()}
    return {content: name for name, content in contents.items() if len(content) > 1}


def _bundle_fields(bundle: str) -> dict[str, Any]:
    """Return the fields of levers that a bundle sets: all but its name and its device."""
    return {key: value for key, value in read_bundle(bundle).items() if key in FIELDS}


def has_plain_bundle(workload: WorkloadConfig | type[WorkloadConfig]) -> bool:
    """Return whether `baseline` is a bundle of levers for a workload: it trains beside a VAE."""
    return {*capabilities("encoders")} <= {*workload.capabilities}


def fields_of(name: str) -> dict[str, Any]:
    """Return the fields that a recipe of this name sets: bundles, levers and numbers, joined by `+`."""
    fields: dict[str, Any] = {}
    for part in name.split("+"):
        field, equals, value = part.partition("=")
        if part in bundles():
            fields |= _bundle_fields(part)
        elif lever := LEVERS.get(part):
            fields[lever.field] = lever.value
        elif value.isdecimal():
            fields[field] = int(value)
        elif equals:
            fields[field] = float(value) if value.replace(".", "").isdecimal() else value
    return fields


def lever_names(name: str) -> frozenset[str]:
    """Return the levers of a recipe of this name, with those of bundles. Raises UserError for a wrong part."""
    known = {*bundles(), *LEVERS, *(f"{field}=" for field in FIELDS)}
    if unknown := [part for part in name.split("+") if "".join(part.partition("=")[:2]) not in known]:
        raise UserError(f"recipe {name}: {unknown[0]}: no such recipe or lever.{did_you_mean(unknown[0], known)}")
    return frozenset(levers(RecipeConfig(**fields_of(name))).values())


# --- studies: from a list of levers to a list of recipes ------------------------------------------


def check_study(bench: BenchConfig) -> None:
    """Raise UserError for keys that only a study of levers reads."""
    for key in ("levers", "base") if bench.study.name not in STUDIES else ():
        if (value := getattr(bench.study, key)) != getattr(StudyConfig(), key):
            studies = " or ".join(f"study={name}" for name in STUDIES)
            raise UserError(f"study.{key}={value}: study={bench.study.name} reads no levers and no base; add {studies}")


STUDIES: dict[str, Callable[[str, Sequence[str]], list[list[str]]]] = {
    # the base, and the base with each step alone
    "one_at_a_time": lambda base, steps: [_parts(base), *(_parts(base, step) for step in steps)],
    # the base, and the base with the first step, the first two, and so on
    "ladder": lambda base, steps: [_parts(base, *steps[:count]) for count in range(len(steps) + 1)],
    # all steps, and all but each
    "leave_one_out": lambda base, steps: [
        _parts(base, *(step for step in steps if step != omitted)) for omitted in (None, *steps)
    ],
}


def _parts(*steps: str) -> list[str]:
    """Split `a+b` steps into YAMLs and, after them, `key=value`: the order in which Hydra applies them."""
    parts = {part.partition("=")[0]: part for step in steps for part in step.split("+")}  # the last value counts
    return sorted(parts.values(), key=lambda part: "=" in part)


def sweep(study: str, base: str, steps: Sequence[str]) -> str:
    """Return the recipes of a study as the value of a sweep: `[baseline],[baseline,tf32]`. Raises UserError."""
    if study not in STUDIES:
        raise UserError(f"study.name={study}: not one of {', '.join(STUDIES)}")
    if not steps or len(set(steps)) < len(steps):
        raise UserError(f"study.levers={list(steps)}: name at least one lever, and none twice")
    for part in _parts(base, *steps):
        known = FIELDS if "=" in part else (*bundles(), *LEVERS)
        key = part.partition("=")[0]
        if key not in known:
            guess = did_you_mean(key, known)
            have = " `inpaint-bench levers` lists all." if guess else f" Have: {', '.join(known)}"
            raise UserError(f"study: {part}: no such recipe or lever.{guess}{have}")
    recipes = STUDIES[study](base, list(steps))
    return ",".join(f"[{_escaped(','.join(parts))}]" for parts in recipes)


def _escaped(value: str) -> str:
    """Return a value with `\\=` for `=`, as Hydra's grammar needs it."""
    return re.sub(r"(?<!\\)=", r"\=", value)


def list_parts(override: str, *, swept: bool = False) -> str:
    """Return `recipe=a+b,c`, as reports spell recipes, with the lists that Hydra takes: `recipe=[a,b],c`.

    Several are `swept`; so is one with a number, which Hydra would look for among the files before points are split.
    """
    key, _, value = override.partition("=")
    if key in ("study.base", "study.levers") and not {*"'\""} & {*value}:
        return f"{key}={_escaped(value)}"
    if key != "recipe" or not {*"+="} & {*value} or "(" in value:  # functions are Hydra's own syntax
        return override
    if "]+" in value or "+[" in value:
        raise UserError(f"{override}: put all parts into the brackets, or leave the brackets out")
    value = re.sub("['\"]", "", value)
    choices = re.findall(r"\[[^]]*\]|[^][,]+", _escaped(value))
    lists = [f"[{choice.strip('[]').replace('+', ',')}]" if "+" in choice else choice for choice in choices]
    one_with_number = swept and len(lists) == 1 and "=" in lists[0]
    return f"recipe=choice({lists[0]})" if one_with_number else f"recipe={','.join(lists)}"


def requested_parts(overrides: Sequence[str]) -> list[str]:
    """Return the recipe that a point's overrides request, as in a study: YAMLs, then `key=value`; empty if none."""
    choices = [value for key, _, value in (override.partition("=") for override in overrides) if key == "recipe"]
    if not choices:
        return []
    names = [part.strip(" '\"") for part in choices[-1].strip("[]").split(",") if part]
    return names + [override.removeprefix("recipe.") for override in overrides if override.startswith("recipe.")]
