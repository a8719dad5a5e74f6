"""What a manifest says of the comparison that its run belongs to: study, levers, parity, quality, resumption.

Manifests that are older than these fields have null in every column of theirs.
"""

from __future__ import annotations

import json
import re
from typing import Any

from analysis.columns import PARITY
from analysis.units import number
from inpaint_bench.core.recipe import requested_parts

AUTO = "auto"  # a batch that each run searches for


def with_batch(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the batch that was run, where it was searched for; null where the run did not get so far."""
    if not isinstance(manifest.get("batch"), str):
        return manifest
    return {**manifest, "batch": (manifest.get("workload_facts") or {}).get("batch")}


def facts(manifest: dict[str, Any]) -> dict[str, Any]:
    """The columns, for runs that failed too: an unavailable lever must still be found in its study."""
    workload = manifest.get("workload_facts") or {}
    study = manifest.get("study") or {}
    parity = manifest.get("parity") or {}
    in_study = study.get("name") not in (None, "none")
    return {
        "study_name": study["name"] if in_study else None,
        "study_base": study.get("base") if in_study else None,
        "study_levers": ",".join(study.get("levers") or []) if in_study else None,
        "recipe_parts": ",".join(requested_parts(manifest.get("overrides") or [])) or None,
        "seed": _seed(manifest),
        "levers": _json(manifest.get("levers")),
        "parity_reference": parity.get("reference"),
        "parity_unavailable": parity.get("unavailable"),
        "parity_exceeded": parity.get("far"),
        **{name: parity.get(name.removeprefix("parity_")) for name in PARITY},
        "compile_s": workload.get("compile_s"),
        "setup_s": workload.get("setup_s"),
        "encodes_online": workload.get("encodes_online"),
        "text_online": workload.get("text_online"),
        "cache": _json(workload.get("cache")),
        "batch_requested": AUTO if AUTO in (workload.get("batch_requested"), manifest.get("batch")) else None,
        "resumed_from_step": _resumed(manifest),
        **_quality(manifest.get("quality") or {}),
    }


def nulls(manifest: dict[str, Any]) -> dict[str, str]:
    """Why a column of a completed run is null, where there is more to say than that nothing was recorded."""
    parity, found = manifest.get("parity") or {}, {}
    why = parity.get("unavailable")
    if not why and manifest.get("recipe") and parity.get("reference") == manifest["recipe"]:
        why = "this recipe is the reference"
    if why:
        found.update(dict.fromkeys(PARITY, str(why)))
    if not (manifest.get("quality") or {}).get("validation"):
        found["validation_first_loss"] = found["validation_last_loss"] = "no validation"
    return found


def _quality(quality: dict[str, Any]) -> dict[str, Any]:
    losses = [one for one in quality.get("validation") or [] if one.get("loss") is not None]
    losses.sort(key=lambda one: one["step"])
    found: dict[str, Any] = {
        "validation": _json(losses),
        "quality_metrics": _json(quality.get("metrics")),
        "sample_grid": quality.get("pictures"),
    }
    for which, index in (("first", 0), ("last", -1)):
        one = losses[index] if losses else {}
        found[f"validation_{which}_loss"], found[f"validation_{which}_step"] = one.get("loss"), one.get("step")
    return found


def warnings(manifest: dict[str, Any]) -> list[str]:
    """A recipe that is no longer the baseline's computation, and what became of checkpoints, in words."""
    words = _far(manifest.get("parity") or {})
    for one in manifest.get("resumed") or []:
        if one.get("step") is not None:
            words.append(f"resumed from step {one['step']}; windows that the break cut are left out")
        elif one.get("reason"):
            words.append(f"checkpoint {one.get('checkpoint')} was not used: {one['reason']}")
        elif one.get("problem"):
            words.append(f"a checkpoint could not be written: {one['problem']}")
    return words


def _far(parity: dict[str, Any]) -> list[str]:
    if not parity.get("far"):
        return []
    unlike = [name.removeprefix("parity_") for name in PARITY]
    errors = {name.removesuffix("_rel"): parity.get(name) for name in unlike}
    known = [f"{name} {number(error)}" for name, error in errors.items() if error is not None]
    known += [f"{name.removesuffix('_rel')} not finite" for name in parity.get("not_finite") or []]
    figures = f" (relative errors: {', '.join(known)})" if known else ""
    return [f"does not compute what {parity.get('reference') or 'the baseline'} does{figures}"]


def _resumed(manifest: dict[str, Any]) -> int | None:
    """The step from which the last resumption went on."""
    steps = [one["step"] for one in manifest.get("resumed") or [] if one.get("step") is not None]
    return steps[-1] if steps else None


def _override(manifest: dict[str, Any], key: str) -> str | None:
    """The last value that the point's overrides give to a key, without brackets."""
    given = [str(text).partition("=") for text in manifest.get("overrides") or []]
    values = [re.sub(r"[\[\]\s'\"]", "", value) for name, _, value in given if name.strip() == key]
    return values[-1] if values else None


def _seed(manifest: dict[str, Any]) -> int | None:
    text = _override(manifest, "seed")
    return int(text) if text and text.isdecimal() else None


def _json(value: Any) -> str | None:
    return json.dumps(value) if value else None
