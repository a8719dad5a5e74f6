"""The section of the workload `denoise_patch`."""

from __future__ import annotations

import polars as pl

from analysis import published
from analysis.report.tables import Table, TableBuilder, cell
from analysis.units import number
from inpaint_bench.core.workloads._denoisers import MODELS

from . import Section, _denoisers

RATES = {"patches_per_s": "Patches/s", "images_per_s": "Images/s"}
_TIE = 0.02  # of the images/s: as fast as the fastest
CONFOUNDED = (
    "With input_mode=host_random, as published, the timed call also draws the image on the CPU and copies it from "
    "pageable memory: the faster the network, the less such a time says of the GPU. input_mode=device_resident times "
    "the network alone."
)


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return tables and panels of time and memory over the size of patches and their batch."""
    cases = _add_predictions(_denoisers.means(results, ["patch_px", "num_patches"], RATES))
    note = f"A step is one image, i.e. all of its patches. Protocol: {_denoisers.SOURCE}."
    own, title = {"Patch [px]": "{patch_px}", "Patches": "{num_patches}"}, "Denoisers by patch size and batch"
    table = _denoisers.table_of_cases(build, "denoise-patch", title, note, cases, own, RATES, _choices(cases))
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
    return Section(
        title="Denoisers: patches",
        answer=_answer(cases),
        best=f"{number(cases['time_ms'].min())} ms per image",  # type: ignore[arg-type]
        paragraphs=[CONFOUNDED],
        tables=[table, _reference(build, cases)],
        figures=figures,
    )


def _choices(cases: pl.DataFrame) -> pl.DataFrame:
    """Return of each network the case with the least memory of those that are as fast as its fastest."""
    known = cases.drop_nulls(["time_ms", "allocated_peak_mib"])
    fast = known.filter(pl.col("time_ms") <= (1 + _TIE) * pl.col("time_ms").min().over("model"))
    fast = fast.sort("allocated_peak_mib", "time_ms", "model").group_by("model", maintain_order=True).first()
    return fast.sort(-pl.col("time_ms"), "model")


def _answer(cases: pl.DataFrame) -> str:
    """Return which patch and batch take the least time, and which the least memory."""
    fast = [
        f"{MODELS[case['model']]} {number(case['time_ms'])} ms and {number(case['allocated_peak_mib'])} MiB "
        f"({case['patch_px']} px, batch {case['batch']})"
        for case in _choices(cases).to_dicts()
    ]
    known = cases.drop_nulls("allocated_peak_mib").sort("allocated_peak_mib", "model").group_by("model").first()
    known = known.sort("patch_px", "batch")
    least = [
        f"{px} px, batch {batch}: {number(low)} to {number(high)} MiB"
        for px, batch, low, high in known.group_by("patch_px", "batch", maintain_order=True)
        .agg(pl.col("allocated_peak_mib").min(), pl.col("allocated_peak_mib").max().alias("most"))
        .iter_rows()
    ]
    return f"Least time per image: {', '.join(fast)}. Least memory: {'; '.join(least)}." if fast else ""


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
    applies = (pl.col("branch") == "direct") & (pl.col("num_patches") >= pl.col("batch"))
    return _denoisers.add_predictions(cases, table, ["patch_px", "batch"], applies)
