"""The section of the workload `denoise_patch`."""

import re
from typing import Any

import polars as pl

from analysis import published
from analysis.dataset import Dataset
from analysis.report.sections import counters
from analysis.report.tables import DASH, Table, TableBuilder, cell
from analysis.units import gpu_label, number
from inpaint_bench.core.workloads._denoisers import MODELS
from inpaint_bench.core.workloads.denoise_patch import CASE_NAME, numbers

from . import Section, _denoisers

RATES = {"patches_per_s": "Patches/s", "images_per_s": "Images/s"}
_TIE = 0.02  # share of the images/s: as fast as the fastest
_FAST = 0.9  # share of the fastest rate from which the case with the least memory is the best trade-off
_BYTES = {"dram_read_bytes": "DRAM read [MiB per patch]", "dram_write_bytes": "DRAM written [MiB per patch]"}
_PERCENT = {"l2_hit_pct": "L2 hits [%]", "l1_hit_pct": "L1 hits [%]", "dram_pct": "DRAM [% of peak]"}
_CASE = re.compile(CASE_NAME.format(r"(\w+)", r"(\d+)", r"(\d+)"))
_MEASUREMENTS = 8  # measurements of the image in the published reconstruction: each of two GPUs has half of them
CONFOUNDED = (
    "With input_mode=host_random, as published, the timed call also draws the image on the CPU and copies it from "
    "pageable memory: the faster the network, the less such a time says of the GPU. input_mode=device_resident times "
    "the network alone."
)


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return tables and panels of time and memory over the size of patches and their batch."""
    cases = _denoisers.means(results, ["patch_px", "num_patches", "height_px", "width_px"], RATES)
    # A version that did not write the sides had patches that cover the image exactly.
    image_px = pl.coalesce(pl.col("height_px") * pl.col("width_px"), pl.col("num_patches") * pl.col("patch_px") ** 2)
    cases = _add_predictions(cases).with_columns(mpx_per_s=pl.col("images_per_s") * image_px / 1e6)
    note = "A step is one image, i.e. all of its patches; several GPUs take a part each, and the slowest one "
    note += f"decides its time. By GPU: of the last call. Protocol: {_denoisers.SOURCE}."
    own, title = {"Patch [px]": "{patch_px}", "Patches": "{num_patches}"}, "Denoisers by patch size and batch"
    for name, heading in _denoisers.BY_RANK.items():
        if cases[name].count():
            own[heading] = f"{{{name}}}"
            by_gpu = pl.col(name).map_elements(lambda by_rank: ", ".join(map(number, numbers(by_rank))), pl.String)
            cases = cases.with_columns(by_gpu.fill_null(DASH))
    choices = _choices(cases)
    first = [take["place"] for take, *_ in choices]
    table = _denoisers.table_of_cases(build, "denoise-patch", title, note, cases, own, RATES, first)
    figures = _denoisers.panels(
        "fig-denoise-patch",
        cases,
        x=("batch", "Patches per batch"),
        panel=("patch_px", "patches of {} px"),
        y={
            "memory": ("allocated_peak_mib", "Allocated peak [MiB]", "Denoisers: peak memory"),
            "time": ("time_ms", "Time [ms]", "Denoisers: time per image"),
            "patches": ("patches_per_s", "Patches/s", "Denoisers: patches per second"),
            "images": ("images_per_s", "Images/s", "Denoisers: images per second"),
        },
    )
    extremes = [
        f"{_denoisers.network(cases, take)}: {_case(fastest)} is the fastest, {_case(least)} needs the least memory."
        for take, fastest, least in choices
        # One case of each network leaves nothing to choose, and a CPU's memory is not measured.
        if cases.height > len(choices) and least["allocated_peak_mib"] is not None
    ]
    return Section(
        title="Denoisers: patches",
        answer=_answer(cases, choices),
        best=f"{number(cases['time_ms'].min())} ms per image",  # type: ignore[arg-type]
        paragraphs=[*([CONFOUNDED] if "host_random" in cases["input_mode"] else []), *extremes],
        tables=[table, _reference(build, cases), *_memory(build, cases)],
        figures=figures,
    )


def more_tables(build: TableBuilder, dataset: Dataset, results: pl.DataFrame, runs: pl.DataFrame) -> list[Table]:
    """Return the memory traffic of each case that profile=ncu counted; nothing if there is none."""
    rows = []
    for counted in counters.counted_runs(dataset, build):
        case, run = _CASE.fullmatch(counted.call), counted.run
        if run["workload"] != "denoise_patch" or case is None:
            continue
        model, patch_px, batch = case[1], int(case[2]), int(case[3])
        alike = {"model": model, "patch_px": patch_px, "batch": batch, "gpus": 1}
        alike |= {name: run[name] for name in ("site", "gpu", "recipe", "variant")}
        timed = results.filter(pl.col(name).eq_missing(pl.lit(value)) for name, value in alike.items())
        traffic = (counters.total(name) / batch / 2**20 for name in _BYTES)
        shares = (counters.weighted_mean(name, "sm_cycles") for name in _PERCENT)
        rate = timed.select(1 / (1 / pl.col("patches_per_s")).mean()).item()
        figures = [*counted.kernels.select(*traffic, *shares).row(0), rate]
        setting = ", ".join(filter(None, (run["recipe"], run["variant"])))
        texts = [run["site"], gpu_label(run["gpu"]), setting, MODELS.get(model, model), str(patch_px), str(batch)]
        rows.append([*texts, *map(cell, figures), str(counted.coverage())])
    columns = ["Site", "GPU", "Setting", "Model", "Patch [px]", "Batch", *_BYTES.values(), *_PERCENT.values()]
    columns += ["Patches/s", "Counted"]
    note = (
        "Counted by Nsight Compute (profile=ncu) of one batch of each case, in runs that time nothing: see the "
        "counters of kernels. Bytes are sums over the heaviest kernels, whose share of the kernel time is Counted; per "
        "cents are means weighted by cycles. Caches are empty when a kernel begins. Patches/s: timed, with this GPU "
        "and recipe."
    )
    title = "Denoisers: memory traffic by patch size and batch"
    return [build.table("denoise-patch-traffic", title, columns, rows, note=note)] if rows else []


def _choices(cases: pl.DataFrame) -> list[tuple[dict[str, Any], ...]]:
    """Return of each network and kind of GPU which case to take, the fastest, and that with the least memory.

    To take is the least memory of what reaches _FAST of the fastest, in pixels per second.
    """
    choices = []
    for _, group in cases.drop_nulls("mpx_per_s").group_by("model", "gpu", "gpus", maintain_order=True):
        by_memory = group.sort("allocated_peak_mib", -pl.col("mpx_per_s"), "place", nulls_last=True).to_dicts()
        fastest = max(by_memory, key=lambda case: case["mpx_per_s"])
        take = next(case for case in by_memory if case["mpx_per_s"] >= _FAST * fastest["mpx_per_s"])
        choices.append((take, fastest, by_memory[0]))
    return sorted(choices, key=lambda choice: (-choice[0]["time_ms"], choice[0]["model"]))


def _answer(cases: pl.DataFrame, choices: list[tuple[dict[str, Any], ...]]) -> str:
    parts = [f"{_denoisers.network(cases, take)} {_case(take)}" for take, *_ in choices]
    if parts and cases.height == len(parts):
        return f"One case each, nothing to choose from: {'; '.join(parts)}."
    known = all(take["allocated_peak_mib"] is not None for take, *_ in choices)
    rule = f"the least memory of what reaches {100 * _FAST:g} % of the fastest" if known else "the fastest"
    return f"Take for {'; '.join(parts)}: {rule}." if parts else ""


def _case(case: dict[str, Any]) -> str:
    memory = f", {number(case['allocated_peak_mib'])} MiB" if case["allocated_peak_mib"] is not None else ""
    return f"patches of {case['patch_px']} px, {case['batch']} at a time ({number(case['mpx_per_s'])} Mpx/s{memory})"


def _memory(build: TableBuilder, cases: pl.DataFrame) -> list[Table]:
    """Return the two published peaks of a reconstruction beside every case of the same image; nothing without any."""
    points = published.read("denoiser_reference_points.csv").filter(pl.col("study") == "highres_example")
    stated = {point["metric"]: point for point in points.to_dicts()}
    whole, patches = stated["peak_memory_single_gpu"], stated["peak_memory_2gpu"]
    # The image with published peaks, whole and as patches of 448 and twice 32 px.
    same_image = (pl.min_horizontal("height_px", "width_px") == 1366) & (
        pl.max_horizontal("height_px", "width_px") == 2048
    )
    rows = []
    for case in cases.filter(pl.col("model") == "drunet", same_image).drop_nulls("allocated_peak_mib").to_dicts():
        at_once = (case["gpus"], case["patch_px"], case["batch"]) == (2, 512, patches["batch"])
        point = whole if case["gpus"] == case["num_patches"] == 1 else patches if at_once else None
        own = case["allocated_peak_mib"] / _denoisers.MIB_PER_GB
        held = own + _MEASUREMENTS / case["gpus"] * 3 * 4 * case["height_px"] * case["width_px"] / 1e9
        figures = [f"{point['value']:g}" if point else DASH, number(own), number(held)]
        agrees = _denoisers.agreement(held / point["value"], _denoisers.TOLERANCE) if point else [DASH, DASH]
        texts = [str(case[name]) for name in ("patch_px", "num_patches", "batch")]
        rows.append([*_denoisers.setting_text(case), *texts, *figures, *agrees])
    columns = ["Site", "GPU", "Setting", "Patch [px]", "Patches", "Batch", "Published peak [GB]", "Measured peak [GB]"]
    columns += ["With measurements [GB]", "Ratio to published", "Agrees"]
    note = (
        f"Published: {_denoisers.SOURCE}, {whole['value']:g} GB for the whole image at once on one GPU, "
        f"{patches['value']:g} GB for {patches['batch']} patches at once on each of two; GPU and software are not "
        f"stated. Its peaks are of a reconstruction, which also holds {_MEASUREMENTS} measurements of the image, "
        "divided among its GPUs: their fp32 size is added before the ratio. Agrees: within "
        f"{100 * _denoisers.TOLERANCE:g} %. Peak: of the GPU with the most; it depends on the patches at once, not on "
        "the number of GPUs. GB: 10^9 bytes."
    )
    title = f"Denoisers: published peaks of an image of {whole['width_or_patch']} px"
    return [build.table("denoise-patch-memory", title, columns, rows, note=note)] if rows else []


def _reference(build: TableBuilder, cases: pl.DataFrame) -> Table:
    """Return which patch and batch give the most images/s, as the page states it and as measured."""
    points = published.read("denoiser_reference_points.csv").filter(pl.col("metric") == "rank_images_per_s")
    stated = points.row(0, named=True)
    rows = []
    for _, group in cases.drop_nulls("images_per_s").group_by([*_denoisers.SETTING, "model"], maintain_order=True):
        best, *_ = group.sort("images_per_s", descending=True).iter_rows(named=True)
        same = (pl.col("patch_px") == int(stated["width_or_patch"])) & (pl.col("batch") == stated["batch"])
        at = group.filter(same)["images_per_s"].to_list()
        ratio = at[0] / best["images_per_s"] if at else None
        texts = [MODELS[best["model"]], f"{stated['width_or_patch']} px, {stated['batch']}"]
        texts += [f"{best['patch_px']} px, {best['batch']}", cell(best["images_per_s"]), cell(at[0] if at else None)]
        rows.append([*_denoisers.setting_text(best), *texts, *_denoisers.agreement(ratio, _TIE)])
    columns = ["Site", "GPU", "Setting", "Model", "Published best patch and batch", "Measured best", "Images/s of it"]
    columns += ["Images/s of the published", "Published / measured best", "Agrees"]
    note = (
        f"Published: {_denoisers.SOURCE}, without figures; GPU and software are not stated. Agrees: its patch and "
        f"batch reach the measured best within {100 * _TIE:g} %. With input_mode=host_random the rate is bound by "
        "drawing and copying the image, so that the order of the cases says little about the GPU."
    )
    title = "Denoisers: fastest patches stated by the page"
    return build.table("denoise-patch-published", title, columns, rows, note=note)


def _add_predictions(cases: pl.DataFrame) -> pl.DataFrame:
    table = published.read("denoiser_predicted_batch.csv").rename({"patch": "patch_px"})
    # A patch has the same branch in an image of any size; a last batch may be smaller, never larger.
    applies = (pl.col("branch") == "direct") & (pl.col("num_patches") / pl.col("gpus") > pl.col("batch") - 1)
    return _denoisers.add_predictions(cases, table, ["patch_px", "batch"], applies)
