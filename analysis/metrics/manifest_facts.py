"""The columns of a run that its manifest gives, also if the run did not complete."""

import datetime as dt
import json
import math
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from analysis.columns import COLUMNS, PARITY, SCHEMA, STRING, Column
from analysis.units import number
from inpaint_bench.core import records
from inpaint_bench.core.config.recipe import requested_parts
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.records import Manifest

from .facts import Facts, inactive_levers

# Parameters of the UNet, or of the network, of each shipped model.
PARAMETERS = {"sd15": 859_520_964, "sd15_inpaint": 859_535_364, "sdxl_inpaint": 2_567_478_084}
PARAMETERS |= {"flux_fill": 11_902_391_360, "sd35_medium": 2_243_171_520}
PARAMETERS |= {"flux2_klein": 3_875_544_576, "flux2_klein_text": 3_875_544_576, "flux2_klein_9b": 9_078_581_248}
PARAMETERS |= {"whole_head": 40_226_433, "brats": 57_562_564}
PARAMETERS |= {"drunet": 32_640_960, "unet": 8_564_163, "dncnn": 668_227}
WITHOUT_FP8 = "counted without the layers whose frozen weights are in FP8"
SKIPPED_SHOWN = 50  # skipped images listed per run; all of them are counted
# Columns that are copied: the manifest has them under the same name.
_SAME_NAME = [name for name in SCHEMA if name in Manifest.__struct_fields__]


def manifest_columns(manifest: Manifest) -> dict[str, Any]:
    """Return the columns, also of runs that failed: an unavailable lever must still be found in its study."""
    facts = manifest.workload_facts or {}
    env, slurm = manifest.environment or records.Environment(), manifest.slurm or records.SlurmJob()
    data, study = manifest.data or records.DataFacts(), manifest.study or records.Study()
    resumed = [event.step for event in manifest.resumed or [] if event.step is not None]
    limits = [device.power_limit_w for device in manifest.devices if device.power_limit_w is not None]
    clocks = [device.max_sm_clock_mhz for device in manifest.devices if device.max_sm_clock_mhz]
    columns: dict[str, Any] = {
        **{name: getattr(manifest, name) for name in _SAME_NAME},
        **{column.name: _fact(manifest, column) for column in COLUMNS if column.fact},
        **_validation_columns(manifest.quality or records.Quality()),
        "batch_requested": "auto" if "auto" in (facts.get("batch_requested"), manifest.batch_requested) else None,
        "demonstration": bool(manifest.demonstration),
        "started": _time(manifest.started_unix_ns),
        "ended": _time(manifest.ended_unix_ns),
        "gpu_name": _join(device.name for device in manifest.devices),
        "gpu_uuid": _join(device.uuid for device in manifest.devices),
        # The power limit is the sum over all GPUs, like power_w; the clock limit is the lowest of all GPUs.
        "power_limit_w": sum(limits) if limits else None,
        "sm_clock_mhz_limit": min(clocks, default=None),
        "node": slurm.node or env.hostname,
        "code_version": _code_version(env.git or records.GitState()),
        "inactive_levers": _join(inactive_levers(manifest)),
        "overrides": shlex.join(manifest.overrides) or None,
        "recipe_parts": ",".join(requested_parts(manifest.overrides)) or None,
        "resumed_from_step": resumed[-1] if resumed else None,
        "images_skipped": None if data.found is None else len(data.skipped),
        "skipped_images": _json(data.skipped[:SKIPPED_SHOWN]),
    }
    if study.name not in (None, "none"):
        columns |= {"study_name": study.name, "study_base": study.base, "study_levers": ",".join(study.levers)}
    if facts.get("own_shapes"):  # not the model of that name: never in one cell with it, nor beside the poster
        columns["model"] = f"{manifest.model} of other shapes, {facts.get('parameters') or 0:,} parameters"
    fp8 = any(lever.field == "linears" for lever in manifest.levers or [])
    if lacks_fp8(columns["model"], columns["parameters"], fp8):
        columns["parameters"] = None
    return {
        name: str(value) if SCHEMA[name] == STRING and value is not None else value for name, value in columns.items()
    }


def lacks_fp8(model: str | None, parameters: float | None, fp8: bool) -> bool:
    """Return whether a number of parameters leaves out layers in FP8: versions until 2026-11-27 did, beneath LoRA."""
    return fp8 and (parameters or math.inf) < PARAMETERS.get(model or "", 0)


def _fact(manifest: Manifest, column: Column) -> Any:
    """Return what the manifest has at the path of a column, as JSON if it has parts."""
    value: Any = manifest
    for name in column.fact.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return _json(value) if column.definition.startswith("JSON") else value


def _code_version(git: records.GitState) -> str | None:
    # The digest tells two states of changed files apart.
    known = git.content_sha256 or git.commit
    return known and known[:12] + ("-dirty" if git.dirty and not git.content_sha256 else "")


def null_reasons(manifest: Manifest) -> dict[str, str]:
    """Return why columns of a completed run are null, if there is more to say than that nothing was recorded."""
    parity, reasons = manifest.parity or records.Parity(), {}
    reference = "this recipe is the reference" if manifest.recipe and parity.reference == manifest.recipe else None
    if reason := parity.unavailable or reference:
        reasons = dict.fromkeys(PARITY, reason)
    reasons |= {"parameters": WITHOUT_FP8} if (manifest.workload_facts or {}).get("parameters") else {}
    if not (manifest.quality and manifest.quality.validation):
        reasons["validation_first_loss"] = reasons["validation_last_loss"] = "no validation"
    return reasons


def warnings(facts: Facts) -> Iterator[str]:
    """Yield warnings on losses and on checkpoints."""
    manifest, stated = facts.manifest, facts.manifest.workload_facts or {}
    counts = {"losses_not_finite": ("loss", "not finite"), "skipped_steps": ("optimizer step", "skipped")}
    found = [(stated.get(name) or 0, *text) for name, text in counts.items()]
    yield from (f"{pluralize(count, noun)} {verb}" for count, noun, verb in found if count > 0)
    for event in manifest.resumed or []:
        if event.step is not None:
            yield f"resumed from step {event.step}; windows cut by the interruption are left out"
        elif event.reason:
            yield f"checkpoint {event.checkpoint} was not used: {event.reason}"
        elif event.problem:
            yield f"a checkpoint could not be written: {event.problem}"


def check_parity(facts: Facts) -> Iterator[str]:
    """Judge the relative errors against the reference anew: beyond the tolerance something else was computed."""
    parity = facts.manifest.parity or records.Parity()
    known = {name.removeprefix("parity_"): getattr(parity, name.removeprefix("parity_")) for name in PARITY}
    errors = {name.removesuffix("_rel"): error for name, error in known.items() if error is not None}
    far = bool(parity.not_finite) or any(not 0 <= error <= records.PARITY_TOLERANCE for error in errors.values())
    if far or parity.far:
        figures = [f"{name} {number(error)}" for name, error in errors.items()]
        figures += [f"{name.removesuffix('_rel')} not finite" for name in parity.not_finite]
        listed = f" (relative errors: {', '.join(figures)})" if figures else ""
        yield f"does not compute what {parity.reference or 'the reference'} does{listed}"
    if parity.far is not None and parity.far != far:
        yield f"the manifest says that an error is {'too large' if parity.far else 'small enough'}, and it is not"


def _validation_columns(quality: records.Quality) -> dict[str, Any]:
    losses = [validation for validation in quality.validation if validation.get("loss") is not None]
    losses.sort(key=lambda validation: validation["step"])
    columns = {"validation": _json(losses)}
    for end, validation in (("first", losses[0]), ("last", losses[-1])) if losses else ():
        columns[f"validation_{end}_loss"] = validation["loss"]
        columns[f"validation_{end}_step"] = validation["step"]
    return columns


def _join(values: Iterable[str | None]) -> str | None:
    return ", ".join(dict.fromkeys(value for value in values if value)) or None


def _time(unix_ns: int | None) -> dt.datetime | None:
    return None if unix_ns is None else dt.datetime.fromtimestamp(unix_ns / 1e9, dt.UTC)


def _json(value: Any) -> str | None:
    return json.dumps(msgspec.to_builtins(value)) if value else None
