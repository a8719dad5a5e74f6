"""Tables of the committed datasets in Markdown, and the rows of some of them; results_list.py lists the tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from textwrap import fill

import polars as pl

from analysis import published
from analysis.dataset import Dataset, open_dataset
from analysis.recipe_labels import on_one_gpu
from analysis.stats.cells import CELL_KEYS, RUN_COUNTS
from analysis.units import gpu_label, gpu_order
from inpaint_bench.core.config.recipe import bundles
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.workloads._denoisers import MODELS as DENOISERS

RESULTS = ROOT / "benchmarks" / "results"
DASH = "\u2013"
LEVERS = pl.col("levers").fill_null("[]").str.json_decode(pl.List(pl.Struct({"name": pl.String})))
LEVERS = LEVERS.list.eval(pl.element().struct.field("name"))  # their names
OF_RUN = ["run_id", "valid", "reason", "gpu", "gpu_uuid", "steady", "gpus", "recipe", "levers"]  # what a case has of it
WINDOWS = {"warmup_s": "of warm-up", "window_s": "measured"}


def header(names: Sequence[str]) -> list[str]:
    """Return the first two lines of a table."""
    return [row(names), "|" + "---|" * len(names)]


def row(cells: Sequence[object]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def wrap(text: str) -> str:
    """Wrap a paragraph; links and options stay whole."""
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def link(path: Path) -> str:
    """Return a link from a page of docs/ to a file or folder of the repository."""
    name = path.relative_to(ROOT)
    return f"[{name}](../{name})"


@dataclass(frozen=True)
class Figure:
    """A column of a table: heading, value of each run or case, digits behind the point."""

    heading: str
    value: str | pl.Expr
    digits: int = 1

    def text(self, rows: pl.DataFrame) -> str:
        """Return the range over the valid rows, or why none is valid."""
        value = pl.col(self.value) if isinstance(self.value, str) else self.value
        valid = rows.filter("valid")
        low, high = valid.select(low=value.min(), high=value.max()).row(0)
        if low is not None:
            return " to ".join(dict.fromkeys(f"{end:,.{self.digits}f}" for end in (low, high)))
        return DASH if valid.height else ", ".join(rows["reason"].drop_nulls().unique().sort()) or "not valid"

    def mean_text(self, rows: pl.DataFrame) -> str:
        """Return the mean over the valid rows with their range, or the one value; a dash without rows."""
        ends = self.text(rows) if rows.height else DASH
        mean = rows.filter("valid").select(self.value).mean().item()
        return f"{mean:,.{self.digits}f} ({ends})" if " to " in ends else ends


BOUND, ENERGIES = Figure("energy error, at most [%]", "energy_error_pct"), ("J/image", "J/step")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A table of datasets: a row for each combination of `rows`; with `across`, a column for each of its values."""

    title: str
    datasets: tuple[str, ...]
    text: str
    rows: Mapping[str, str]  # the column of the dataset by its heading
    figures: Sequence[Figure]  # with `across` a single one
    across: str = ""
    where: pl.Expr = field(default_factory=lambda: pl.lit(True))
    cases: Callable[[Dataset], pl.DataFrame] = lambda dataset: in_order(dataset.runs)

    def lines(self) -> Iterator[str]:
        """Yield the section. Raises UserError for a missing dataset, and for a row that mixes cells."""
        datasets = [open_dataset(RESULTS / name) for name in self.datasets]
        parts = [self.cases(dataset).filter(self.where) for dataset in datasets]
        for name, part in zip(self.datasets, parts, strict=True):
            if part.is_empty():
                raise UserError(f"{self.title}: no run of {name} is selected")
        table = parts[0] if len(parts) == 1 else in_order(pl.concat(parts, how="diagonal_relaxed"))
        values = table[self.across].unique().sort().to_list() if self.across else []
        # Beside an energy its bound; the last column only if a run was not steady.
        shown = [each for figure in self.figures for each in (figure, *([BOUND] if figure.heading in ENERGIES else []))]
        counted = ["n", "cards", *(["not steady"] if (table["steady"] == "no").any() else [])]
        inside = ", ".join([*(figure.heading for figure in shown[1:]), *counted])
        figures = [f"{shown[0].heading}, {self.across} {value} ({inside})" for value in values]
        yield f"## {self.title}\n\n{wrap(self.text)}\n"
        yield from header([*self.rows, *(figures or [*(figure.heading for figure in shown), *counted])])
        for key, rows in table.group_by(list(self.rows.values()), maintain_order=True):
            cells = [rows.filter(pl.col(self.across) == value) for value in values] or [rows]
            texts = []
            for cell in cells:
                self._check(key, cell.filter("valid"))
                first, *more = [*(figure.text(cell) for figure in shown), *_counts(cell)[: len(counted)]]
                known = cell["valid"].any()
                texts += [first, *more] if not values else [f"{first} ({', '.join(more)})" if known else first]
            yield row([*map(_key_text, self.rows.values(), key), *texts])
        named = {*self.rows.values(), self.across}
        yield f"\n{source(datasets, table['run_id'].unique().to_list(), named)}\n"

    def _check(self, key: tuple[object, ...], runs: pl.DataFrame) -> None:
        mixed = [name for name in CELL_KEYS if name in runs and runs[name].n_unique() > 1]
        if mixed:
            raise UserError(f"{self.title}: the row {key} mixes runs that differ in {', '.join(mixed)}")


def _counts(rows: pl.DataFrame) -> list[str]:
    """Return how many valid runs, different cards and unsteady runs a row has."""
    own = rows.filter("valid").unique("run_id")
    known = own.select(**RUN_COUNTS).row(0, named=True)
    return [str(own.height), *(str(known[name] or DASH) for name in ("cards", "unsteady"))]


def _key_text(column: str, value: object) -> str:
    text = str(value)
    return gpu_label(text) if column == "gpu" else f"`{text}`" if column == "recipe" else DENOISERS.get(text, text)


def source(datasets: Sequence[Dataset], run_ids: list[str], shown: Collection[str]) -> str:
    """Return the datasets and what their valid runs have in common, but for the columns that the table shows."""
    runs = pl.concat([each.runs for each in datasets], how="diagonal_relaxed")
    windows = pl.concat([each.windows for each in datasets], how="diagonal_relaxed")
    runs = runs.filter("valid", pl.col("run_id").is_in(run_ids))
    warmup_s = (pl.col("t_end_mono_ns") - pl.col("t_start_mono_ns")).sum() / 1e9
    warmups = windows.filter(pl.col("kind") == "warmup").group_by("run_id").agg(warmup_s=warmup_s)
    runs = runs.join(warmups, "run_id", how="left")
    forms = {"model": "{}", "resolution_px": "{} px", "batch": "batch {}"}
    values = {name: runs[name].drop_nulls().unique().sort() for name in (*forms, "driver", "torch")}
    facts = [forms[name].format(values[name][0]) for name in forms if name not in shown and len(values[name]) == 1]
    limit_w = pl.col("power_limit_w") / pl.col("gpus")
    for (board, limit), same in runs.group_by("gpu_name", limit_w, maintain_order=True):
        cards = same["gpu_uuid"].str.split(", ").explode().n_unique()
        facts.append(f"{board} ({limit:.0f} W, cards: {cards})")
    facts += [f"{name} {', '.join(values[name])}" for name in ("driver", "torch") if len(values[name])]
    spans = {name: Figure("", name).text(runs) for name in ("warmup_s", "window_s")}
    facts += [f"{spans[name]} s {word}" for name, word in WINDOWS.items() if spans[name] != DASH]
    days = runs["started"].dt.date()
    facts.append(" to ".join(dict.fromkeys(str(day) for day in (days.min(), days.max()))))
    return wrap(f"{', '.join(link(each.folder) for each in datasets)}: {', '.join(facts)}.")


def in_order(runs: pl.DataFrame) -> pl.DataFrame:
    """Sort runs by model, GPU, number of levers, recipe and batch."""
    number = {gpu: place for place, gpu in enumerate(sorted(runs["gpu"].unique(), key=gpu_order))}
    gpu = pl.col("gpu").replace_strict(number)
    return runs.sort("model", gpu, "gpus", LEVERS.list.len(), "recipe", "batch", maintain_order=True)


def ladder(dataset: Dataset) -> pl.DataFrame:
    """Return the runs of a ladder with `step`: what a recipe adds to the one before, and the bundle that it then is."""
    runs = in_order(dataset.runs.filter(pl.col("study_name") == "ladder"))
    levers = dict(runs.select("recipe", LEVERS).iter_rows())
    first = runs["recipe"][0]
    steps = {first: f"`{first}`"}
    for before, after in pairwise(dict.fromkeys(runs["recipe"])):
        added = [name for name in levers[after] if name not in levers[before]]
        steps[after] = f"`+{'+'.join(added)}`" + (f", which is `{after}`" if after in bundles() else "")
    return runs.with_columns(step=pl.col("recipe").replace_strict(steps))


def volumes_as_sets(dataset: Dataset) -> pl.DataFrame:
    """Return the runs that made volumes with trained weights, with the metrics of their sets, one value a run."""
    metrics = ["trained_with", "mmd", "pair_ms_ssim", "real_pair_ms_ssim", "other_weights_rel"]
    rows = dataset.rows("results_volume3d_sample").filter(pl.col("mmd").is_not_null())
    return dataset.runs.join(rows.select("run_id", *metrics).unique(), "run_id")


def scaling(dataset: Dataset) -> pl.DataFrame:
    """Return the runs with their rate in percent of the ideal, which is one GPU's mean rate times the GPUs.

    `weak` compares with one GPU at the same batch per GPU, `strong` at the same batch in total.
    """
    alone = pl.col("recipe").map_elements(on_one_gpu, return_dtype=pl.String)
    runs = in_order(dataset.runs).with_columns(total=pl.col("batch") * pl.col("gpus"), alone=alone)
    single = (
        runs.filter("valid", pl.col("gpus") == 1).group_by("alone", "batch").agg(ideal=pl.col("images_per_s").mean())
    )
    for name, batch in (("weak", "batch"), ("strong", "total")):
        runs = runs.join(single.rename({"batch": batch, "ideal": name}), ["alone", batch], how="left")
    percent = 100 * pl.col("images_per_s") / pl.col("gpus")
    shares = [pl.when(pl.col("gpus") > 1).then(percent / pl.col(name)).alias(name) for name in ("weak", "strong")]
    return runs.with_columns(shares).sort("recipe", "gpus", "batch", maintain_order=True)


def images(dataset: Dataset) -> pl.DataFrame:
    """Return the runs of sd_inference with the lowest PSNR of their pictures."""
    psnr = dataset.rows("results_sd_inference").group_by("run_id").agg(pl.col("psnr_db").min())
    return in_order(dataset.runs).join(psnr, "run_id", how="left", maintain_order="left")


def denoised(table: str, rate: str, predicted: str, names: Mapping[str, str]) -> Callable[[Dataset], pl.DataFrame]:
    """Return the function that reads the cases of a denoiser: mean rate, memory, and the tensors' predicted sum.

    `names` translates columns of the file `predicted`, in which each network has a column of its own.
    """

    def cases(dataset: Dataset) -> pl.DataFrame:
        sums = published.read(predicted).rename(dict(names))
        keys = [*names.values(), *(name for name in ("batch",) if name in sums.columns)]
        peaks = sums.unpivot([f"{model}_peak_mib" for model in DENOISERS], index=keys, value_name="predicted_mib")
        peaks = peaks.with_columns(model=pl.col("variable").str.strip_suffix("_peak_mib"))
        rows = dataset.rows(table).filter(pl.col("tiling") == "library")
        means = rows.group_by("run_id", "model", *keys, maintain_order=True).agg(
            (1 / (1 / pl.col(rate)).mean()).alias(rate),  # all work over all of its time
            peak_gib=pl.col("allocated_peak_mib").max() / 1024,
            tensors_mib=(pl.col("allocated_peak_mib") - pl.col("weights_mib")).max(),
        )
        means = means.join(peaks, ["model", *keys], how="left").join(dataset.runs[OF_RUN], "run_id")
        excess = pl.col("tensors_mib") - pl.col("predicted_mib")
        order = pl.col("model").replace_strict({name: place for place, name in enumerate(DENOISERS)})
        means = means.with_columns(excess_pct=100 * excess / pl.col("predicted_mib"), excess_gib=excess / 1024)
        return means.sort(order, *keys)

    return cases


def tiled(dataset: Dataset) -> pl.DataFrame:
    """Return mean time and memory of DRUNet by tiling, of images 2,048 px high of four widths."""
    rows = dataset.rows("results_denoise_shape").filter(pl.col("width_px").is_in([1024, 1408, 1472, 2048]))
    rows = rows.filter(pl.col("model") == "drunet", pl.col("series_px") == 64)
    means = rows.group_by("run_id", "model", "tiling", "width_px").agg(
        pl.col("time_ms").mean(), peak_gib=pl.col("allocated_peak_mib").max() / 1024
    )
    means = means.join(dataset.runs[[*OF_RUN, "batch"]], "run_id")
    return means.sort("width_px", "tiling", "run_id", descending=[False, True, False])
