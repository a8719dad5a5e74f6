"""Checks of whose files these are, and of facts that the manifest states twice."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from inpaint_bench.core.config import recipe
from inpaint_bench.core.records import Manifest
from inpaint_bench.core.schema import ATTEMPT_NAME, UNKNOWN

from .evidence import Evidence, number

AUTO = "auto"
FLOP_TOLERANCE = 1e-6
# Field of the recipe: name among the workload's facts.
REQUIRED = ("site", "workload", "recipe", "model", "gpu", "gpus", "batch", "started_unix_ns", "ended_unix_ns")
REQUIRED_OF_A_COMMAND = ("site", "workload", "recipe", "started_unix_ns", "ended_unix_ns")
CACHES = {"cache_image", "cache_masked", "cache_text"}
PRECISIONS = ("fp32", "bf16", "fp16")
STATED_LEVERS = {
    "tf32": "tf32",
    "channels_last": "channels_last",
    "precision": "precision",
    "weights": "weights_precision",
}


def check_run_id(evidence: Evidence) -> Iterator[str]:
    """Compare the run id in rows and in parts with the manifest's."""
    run_id = evidence.manifest.run_id
    for table, rows in evidence.tables.items():
        others = {str(other) for other in rows["run_id"].unique().cast(pl.String).drop_nulls()}
        others |= {footer["run_id"] for footer in evidence.files.footers.get(table, []) if "run_id" in footer}
        if foreign := sorted(others - {run_id}):
            yield f"{table} has rows of run {', '.join(foreign)}"


def check_footers(evidence: Evidence) -> Iterator[str]:
    """Compare the source and, of a run that started once, the boot in parts with the manifest's."""
    manifest = evidence.manifest
    source = manifest.telemetry.source if manifest.telemetry else None
    expected = {"source": source, "boot_id": None if evidence.started_before else manifest.boot_id}
    for table, footers in evidence.files.footers.items():
        for name, value in expected.items():
            written = {footer[name] for footer in footers if name in footer}
            if value and (other := sorted(written - {value, UNKNOWN})):
                yield f"parts of {table} were written with {name} {', '.join(other)}, the manifest has {value}"


def check_place(evidence: Evidence) -> Iterator[str]:
    """Compare point and attempt with the run directory, `<sweep>/<point>/attempt-<k>`."""
    folder, manifest = evidence.files.folder, evidence.manifest
    match = ATTEMPT_NAME.fullmatch(folder.name) if folder is not None else None
    # A single run in a directory that the user chose belongs to no sweep.
    if folder is None or match is None or manifest.sweep_id is None:
        return
    if manifest.attempt is not None and manifest.attempt != int(match[1]):
        yield f"{folder.name} holds the manifest of attempt {manifest.attempt}"
    point = folder.parent.name
    if manifest.point is not None and point.isdecimal() and manifest.point != int(point):
        yield f"the directory of point {point} holds the manifest of point {manifest.point}"


def check_overrides(evidence: Evidence) -> Iterator[str]:
    """Compare the overrides of the command line with what the manifest says that was run."""
    manifest, facts = evidence.manifest, evidence.manifest.workload_facts or {}
    state, study = manifest.telemetry, manifest.study
    stated = {
        "gpu": manifest.gpu,
        "batch": manifest.batch,
        "gpus": manifest.gpus and manifest.gpus // max(manifest.nodes, 1),  # per node
        "nodes": manifest.nodes,
        "seed": manifest.seed,
        "data.resolution_px": facts.get("resolution_px"),
        "workload.epochs": facts.get("epochs"),
        "workload.dataset_images": facts.get("dataset_images"),
        "telemetry.fast_hz": state and state.hz,
        # At most once per row, whatever was asked for.
        "telemetry.energy_hz": state.energy_hz if state and state.energy_hz != state.hz else None,
        "study": study and study.name,
        "recipe.precision": facts.get("precision") if facts.get("weights_precision") in (None, "fp32") else None,
    }
    # Of a key that is given twice the last one counts.
    requested = dict(text.lstrip("+").split("=", 1) for text in manifest.overrides if "=" in text)
    for name, value in stated.items():
        text = requested.get(name, AUTO).strip("'\"")
        if value is not None and text not in (AUTO, "null") and "$" not in text and not _is_equal(text, value):
            yield f"{name}={text} was requested, and the manifest says {value}"
    if isinstance(manifest.batch, int) and number(facts.get("batch")) not in (None, manifest.batch):
        yield f"the manifest has batch {manifest.batch}, its workload facts {facts['batch']}"
    asked = facts.get("batch_requested")
    if isinstance(manifest.batch, int) and isinstance(asked, int) and asked != manifest.batch:
        yield f"the manifest has batch {manifest.batch}, and its workload facts say that {asked} was requested"


def check_ranks(evidence: Evidence) -> Iterator[str]:
    """Compare the processes that the manifest names with its numbers of GPUs and nodes; one process has no list."""
    manifest = evidence.manifest
    nodes = sum(rank.local_rank == 0 for rank in manifest.ranks or []) or 1
    if manifest.ranks is not None and len(manifest.ranks) != manifest.gpus:
        yield f"the manifest names {len(manifest.ranks)} ranks in a run on {manifest.gpus} GPU(s)"
    if manifest.nodes != nodes:
        yield f"the manifest says {manifest.nodes} node(s), and its ranks ran on {nodes}"


def _is_equal(text: str, value: object) -> bool:
    try:
        return float(text) == float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return text.lower() == str(value).lower()


def check_levers(evidence: Evidence) -> Iterator[str]:
    """Compare the levers that the manifest lists with the workload's and the loader's own facts."""
    manifest, facts = evidence.manifest, evidence.manifest.workload_facts or {}
    levers = {lever.field: lever for lever in manifest.levers or []}
    baseline = recipe.baseline("cpu" if (manifest.recipe or "").split("+")[0] == "cpu" else "cuda")
    for name, fact in STATED_LEVERS.items():
        lever, stated = levers.get(name), facts.get(fact)
        # Weights in 16 bits decide the precision of the step.
        if stated is None or (name == "precision" and facts.get("weights_precision") not in (None, "fp32")):
            continue
        if lever is not None and lever.requested != stated:
            yield f"lever {lever.name} was requested, and the workload ran with {fact} {stated}"
        elif lever is None and manifest.levers is not None and stated != getattr(baseline, name):
            ran = fact if stated is True else f"{fact} {stated}"
            yield f"the workload ran with {ran}, which is not among the levers of recipe {manifest.recipe}"
    online, text = number(facts.get("encodes_online")), facts.get("text_online")
    if manifest.levers is not None and online is not None and text is not None:
        cached = len(levers.keys() & {"cache_image", "cache_masked"})
        if online != 2 - cached or text == ("cache_text" in levers):
            names = ", ".join(sorted(levers.keys() & CACHES)) or "none"
            stated = f"encoded {online:g} image(s) per sample and {'the' if text else 'no'} text online"
            yield f"of the caches the levers name {names}, and the workload {stated}"
    loader = manifest.data.loader if manifest.data else {}
    for name, lever in levers.items():
        effective = loader.get(name, {}).get("effective", lever.requested)
        if lever.active and effective != lever.requested:
            yield f"lever {lever.name} is called active, and the loader had {name} {effective}"


def check_required(evidence: Evidence) -> Iterator[str]:
    """Look for facts that every worker records, and that tell one cell from another."""
    manifest, facts = evidence.manifest, evidence.manifest.workload_facts or {}
    required = REQUIRED if not evidence.is_command else REQUIRED_OF_A_COMMAND
    if absent := [name for name in required if getattr(manifest, name) in (None, "", UNKNOWN)]:
        yield f"the manifest of a completed run has no {', '.join(absent)}"
    precision = facts.get("precision")
    if facts and precision not in PRECISIONS and not evidence.is_command:
        yield f"precision is {precision!r}, none of {', '.join(PRECISIONS)}"


def inactive_levers(manifest: Manifest) -> dict[str, str]:
    """Return the levers that the recipe names and that were not found active, with what was found."""
    inactive = {lever.name: lever.evidence or "no evidence" for lever in manifest.levers or [] if lever.active is False}
    if manifest.levers is not None and manifest.recipe:
        # Of a name the first part may be `baseline`, `cpu` or a bundle, whose levers are not spelled out.
        requested = recipe.requested_parts(manifest.overrides)
        listed = {lever.name for lever in manifest.levers} | {"baseline", "cpu"}
        listed |= {name for name in requested if not recipe.is_lever(name)}
        spelled = manifest.recipe.split("+")
        inactive |= {name: "the workload did not read it back" for name in spelled if name not in listed}
    return inactive


def warnings(evidence: Evidence) -> Iterator[str]:
    """Warn of levers that were requested and not found active."""
    if not evidence.manifest.workload_facts:
        yield "the manifest has no facts of the workload"
    for name, reason in inactive_levers(evidence.manifest).items():
        yield f"lever {name} was requested and not found active: {reason}"


def check_flop(evidence: Evidence) -> Iterator[str]:
    """Compare the operations of an image with their sum: forward and backward of the UNet, and the encoders."""
    facts = evidence.manifest.workload_facts or {}
    parts = facts.get("flop_parts")
    flop, encodes = number(facts.get("flop_per_image")), number(facts.get("encodes_online"))
    if not isinstance(parts, dict) or flop is None or encodes is None:
        return
    unet, image, text = (number(parts.get(name)) for name in ("unet_forward", "vae_encode", "text_encode"))
    if unet is None or image is None or text is None or "vae_decode" in parts:
        return
    # Of LoRA, which has no gradients of the frozen weights.
    step, text = number(parts.get("unet_step")) or 3 * unet, number(parts.get("text_step")) or text
    total = step + encodes * image + (text if facts.get("text_online") else 0)
    if abs(flop - total) > FLOP_TOLERANCE * total:
        yield f"flop_per_image is {flop:.4g}, and its parts add up to {total:.4g}"


CHECKS = (
    *(check_run_id, check_footers, check_place, check_required, check_overrides),
    *(check_ranks, check_levers, check_flop),
)
