"""Checks of whose files these are, and of facts that the manifest states twice."""

import math
from collections.abc import Iterator

import polars as pl

from analysis.metrics.facts import Facts, inactive_levers, number
from analysis.metrics.manifest_facts import PARAMETERS, lacks_fp8
from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.bench import SHORT_WINDOW_HZ
from inpaint_bench.core.records import DataFacts
from inpaint_bench.core.schema import ATTEMPT_NAME, UNKNOWN
from inpaint_bench.core.workloads import declarations
from inpaint_bench.core.workloads._denoisers import CHANNELS

AUTO = "auto"
SMALL_SHARE = 0.1  # share of the parameters; adapters below it add less than a forward pass
REQUIRED = ("site", "workload", "recipe", "model", "gpu", "gpus", "batch", "started_unix_ns", "ended_unix_ns")
REQUIRED_OF_A_COMMAND = ("site", "workload", "recipe", "started_unix_ns", "ended_unix_ns")
CACHES = {"cache_image", "cache_masked", "cache_text"}
PRECISIONS = ("fp32", "bf16", "fp16")
# Field of the recipe: name among the workload's facts.
STATED_LEVERS = {name: name for name in ("tf32", "channels_last", "precision")} | {"weights": "weights_precision"}


def check_footers(run: Facts) -> Iterator[str]:
    """Compare run id, source and boot of rows and parts with the manifest."""
    manifest = run.manifest
    source = manifest.telemetry.source if manifest.telemetry else None
    expected = {"source": source, "boot_id": None if run.started_before else manifest.boot_id}
    for table, rows in run.tables.items():
        footers = run.files.footers.get(table, [])
        ids = {str(other) for other in rows["run_id"].unique().cast(pl.String).drop_nulls()}
        ids |= {footer["run_id"] for footer in footers if "run_id" in footer}
        if foreign := sorted(ids - {manifest.run_id}):
            yield f"{table} has rows of run {', '.join(foreign)}"
        for name, value in expected.items():
            written = {footer[name] for footer in footers if name in footer}
            if value and (other := sorted(written - {value, UNKNOWN})):
                yield f"parts of {table} were written with {name} {', '.join(other)}, the manifest has {value}"


def check_place(run: Facts) -> Iterator[str]:
    folder, manifest = run.files.folder, run.manifest
    match = ATTEMPT_NAME.fullmatch(folder.name) if folder is not None else None
    # A single run in a directory that the user chose belongs to no sweep.
    if folder is None or match is None or manifest.sweep_id is None:
        return
    if manifest.attempt is not None and manifest.attempt != int(match[1]):
        yield f"{folder.name} holds the manifest of attempt {manifest.attempt}"
    point = folder.parent.name
    if manifest.point is not None and point.isdecimal() and manifest.point != int(point):
        yield f"the directory of point {point} holds the manifest of point {manifest.point}"


def check_overrides(run: Facts) -> Iterator[str]:
    manifest, facts = run.manifest, run.manifest.workload_facts or {}
    state, study = manifest.telemetry, manifest.study
    limits = sorted({device.power_limit_w for device in manifest.devices if device.power_limit_w is not None})
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
        "telemetry.power_limit_w": limits[0] if len(limits) == 1 else limits or None,
        # At most once per row, and at least so often in short windows, whatever was asked for.
        "telemetry.energy_hz": None if not state or state.energy_hz in (state.hz, SHORT_WINDOW_HZ) else state.energy_hz,
        "study": study and study.name,
        "recipe.precision": facts.get("precision") if facts.get("weights_precision") in (None, "fp32") else None,
    }
    stated |= {f"recipe.{lever.field}": lever.requested for lever in manifest.levers or []}
    # If a key is given twice, the last one counts.
    requested = dict(text.lstrip("+").split("=", 1) for text in manifest.overrides if "=" in text)
    for name, value in stated.items():
        text = requested.get(name, AUTO).strip("'\"")
        if value is not None and text not in (AUTO, "null") and "$" not in text and not _is_equal(text, value):
            yield f"{name}={text} was requested, and the manifest says {value}"
    if manifest.seed is None and requested.get("seed", "").isdecimal():
        yield f"seed={requested['seed']} was requested, and the manifest has none"
    if isinstance(manifest.batch, int) and number(facts.get("batch")) not in (None, manifest.batch):
        yield f"the manifest has batch {manifest.batch}, its workload facts {facts['batch']}"
    asked = facts.get("batch_requested")
    if isinstance(manifest.batch, int) and isinstance(asked, int) and asked != manifest.batch:
        yield f"the manifest has batch {manifest.batch}, and its workload facts say that {asked} was requested"


def _is_equal(text: str, value: object) -> bool:
    try:
        return float(text) == float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return text.lower() == str(value).lower()


def check_levers(run: Facts) -> Iterator[str]:
    manifest, facts = run.manifest, run.manifest.workload_facts or {}
    levers = {lever.field: lever for lever in manifest.levers or []}
    baseline = recipe.without_levers("cpu" if (manifest.recipe or "").split("+")[0] == "cpu" else "cuda")
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
        declared = declarations().get(manifest.workload or "")
        inpaints = not declared or 9 in declared.Config.unet_channels
        encoded = {"cache_image", *(["cache_masked"] if inpaints else [])}
        if online != len(encoded - levers.keys()) or text == ("cache_text" in levers):
            names = ", ".join(sorted(levers.keys() & CACHES)) or "none"
            images = "1 image" if online == 1 else f"{online:g} images"
            stated = f"encoded {images} per sample and {'the' if text else 'no'} text online"
            yield f"of the caches the levers name {names}, and the workload {stated}"
    loader = manifest.data.loader if manifest.data else {}
    for name, lever in levers.items():
        effective = loader.get(name, {}).get("effective", lever.requested)
        if lever.active and effective != lever.requested:
            yield f"lever {lever.name} is called active, and the loader had {name} {effective}"


def check_read_back(run: Facts) -> Iterator[str]:
    refuted = inactive_levers(run.manifest)
    for lever in run.manifest.levers or []:
        if lever.active and lever.name in refuted:
            yield f"lever {lever.name} is called active, and {refuted[lever.name]}"


def check_parameters(run: Facts) -> Iterator[str]:
    manifest, facts = run.manifest, run.manifest.workload_facts or {}
    networks = facts.get("parameters_by_network")
    counts = {name: number(count) or 0 for name, count in networks.items()} if isinstance(networks, dict) else {}
    stated, model = number(facts.get("parameters")), (manifest.model or "").partition(",")[0].split(" ")[0]
    expected, fp8 = PARAMETERS.get(model), any(lever.field == "linears" for lever in manifest.levers or [])
    unknown = facts.get("own_shapes") or lacks_fp8(model, stated, fp8)
    if expected and stated not in (None, expected) and not unknown:
        yield f"{model} has {expected:,} parameters, and the workload {stated:,.0f}"
    if facts.get("channels") == [*CHANNELS]:
        for name, count in counts.items():
            if count != PARAMETERS.get(name, count):
                yield f"{name} has {PARAMETERS[name]:,} parameters, and the workload {count:,.0f}"
    trained = number(facts.get("parameters_trained"))
    divided = any(lever.field == "sharding" for lever in manifest.levers or [])
    if trained is None or "unet" not in counts or divided:
        return
    for lever in manifest.levers or []:
        found = lever.effective.get("parameters") if isinstance(lever.effective, dict) else None
        if lever.field == "lora_rank" and number(found) not in (None, trained):
            yield f"lever {lever.name} trains {found:,} parameters, and the workload {trained:,.0f}"
    if ("lora" in counts) != any(lever.field == "lora_rank" for lever in manifest.levers or []):
        yield f"adapters of {counts.get('lora', 0):,.0f} parameters were trained, which recipe {manifest.recipe} denies"


def check_required(run: Facts) -> Iterator[str]:
    manifest, facts = run.manifest, run.manifest.workload_facts or {}
    required = REQUIRED if not run.is_command else REQUIRED_OF_A_COMMAND
    if absent := [name for name in required if getattr(manifest, name) in (None, "", UNKNOWN)]:
        yield f"the manifest of a completed run has no {', '.join(absent)}"
    precision = facts.get("precision")
    if facts and precision not in PRECISIONS and not run.is_command:
        yield f"precision is {precision!r}, none of {', '.join(PRECISIONS)}"


def warnings(run: Facts) -> Iterator[str]:
    if not run.manifest.workload_facts:
        yield "the manifest has no facts of the workload"
    if run.manifest.ranks is None and (run.manifest.gpus or 1) > 1 and not run.is_command:
        yield f"the manifest names no ranks of a run on {run.manifest.gpus} GPUs"
    for name, reason in inactive_levers(run.manifest).items():
        yield f"lever {name} was requested and not found active: {reason}"


def check_data(run: Facts) -> Iterator[str]:
    data, stated = run.manifest.data or DataFacts(), number((run.manifest.workload_facts or {}).get("num_images"))
    if data.used is None:
        return
    if data.found is not None and data.found != data.used + len(data.skipped) + data.beyond_limit:
        parts = f"{data.used} used, {len(data.skipped)} skipped and {data.beyond_limit} beyond the limit"
        yield f"{data.found} images were found, and {parts}"
    if stated not in (None, data.used):
        yield f"{data.used} images are used, and the workload had {stated:.0f}"
    if (split := (data.train or 0) + (data.validation or 0)) > data.used:
        yield f"{data.used} images are used, and {split} are to train on or held out"


def check_flop(run: Facts) -> Iterator[str]:
    """Compare a step with adapters, which has no gradients of the frozen weights, with a forward pass."""
    facts = run.manifest.workload_facts or {}
    parts = facts.get("flop_parts") or {}
    forward = number(parts.get("unet_forward"))
    step = number(parts.get("unet_step")) or 3 * (forward or 0)
    few = (number(facts.get("parameters_trained")) or math.inf) < SMALL_SHARE * (number(facts.get("parameters")) or 0)
    if few and forward is not None and not forward < step < 3 * forward:
        passes = f"{step:.4g} operations, and a forward pass {forward:.4g}"
        yield f"a step with adapters has {passes}: more than one of them are needed, and less than three"
