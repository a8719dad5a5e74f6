"""A merged dataset as terminal tables, Markdown, CSV, LaTeX, figures and one page that needs no network."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from analysis import published, recipe_labels
from analysis.dataset import Dataset, open_dataset
from analysis.ingest import pictures
from analysis.metrics.run_row import is_unavailable
from analysis.stats import bottleneck, study
from analysis.stats import cells as aggregate
from analysis.units import gpu_label, gpu_order, number
from inpaint_bench.core import files
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError

from . import export, render, study_tables, tables
from . import poster as poster_tables
from .figures import base, quality, study_figures, svg, timeline
from .figures import overview as figures
from .tables import LONG_TABLE, Builder, Table

PAGE, TEXT, CSV = "report.html", "report.md", "runs.csv"
MARKER = ".inpaint-report"  # JSON: what the last report wrote here, the only files that the next one removes
_UNITS = re.compile(r"(?<=\d) (?=%|W\b|s\b|MiB\b|h\b)|(?<=\bn) (?==)|(?<=\bn =) ")
_RANGE = re.compile(r"(?<=\d)\u2013(?=\d)")
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class Content:
    """Everything that a report shows, whatever it is written as."""

    dataset: Dataset
    demonstration: bool
    why_demonstration: str
    headline: str
    facts: dict[str, str]  # what, where, when
    quality: dict[str, str]
    conflicts: list[str]
    best: Table  # what to take: the answer
    recipes: Table | None  # the key of short names
    not_counted: Table
    skipped: Table
    photographs: Table
    runs: Table
    results: list[Table]
    pipeline: list[Table]  # the poster's second study
    poster: list[Table]
    partings: list[Table]  # where the poster's text and its numbers part
    levers: list[Table]
    training: list[Table]  # how well it still trains
    findings: list[Table]
    environment: Table

    def all_tables(self) -> list[Table]:
        """The answer first, what it rests on next, the books last."""
        head = [self.best, *([self.recipes] if self.recipes else []), *self.results, *self.levers]
        poster = [*self.pipeline, *self.poster, *self.partings]
        books = [self.runs, self.not_counted, self.skipped, self.photographs, self.environment]
        return [*head, *self.findings, *poster, *self.training, *books]


def content(dataset: Dataset) -> Content:
    """Work out the report of a dataset. Reads the run table only, not the samples."""
    runs = dataset.runs
    build = Builder(runs=runs)
    poster = [table for metric in poster_tables.METRICS if (table := poster_tables.beside(build, metric))]
    trained, recipes = quality.table(build), study_tables.between(build)
    return Content(
        dataset=dataset,
        demonstration=build.demonstration,
        why_demonstration=_why_demonstration(runs),
        headline=_headline(build),
        facts=_facts(dataset),
        quality=_quality(dataset, build.cells),
        conflicts=dataset.skipped.filter(pl.col("code") == "conflict")["path"].to_list(),
        best=build.best_batch(),
        recipes=build.recipes(),
        not_counted=build.not_counted(),
        skipped=tables.skipped(dataset.skipped, build.title("Files left out")),
        photographs=tables.photographs_skipped(runs, build.title("Photographs skipped")),
        runs=build.run_list(),
        results=[build.throughput(), build.energy(), build.memory()],
        pipeline=poster_tables.pipeline(build),
        poster=poster if _has_poster_workload(runs) else [],
        partings=[poster_tables.partings(build)] if _has_poster_workload(runs) else [],
        levers=[study_tables.table(build, one) for one in study.comparisons(runs)],
        training=[trained] if trained else [],
        findings=[build.gpu_ratios(), *([recipes] if recipes else []), *build.bottlenecks()],
        environment=build.environment(),
    )


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Every figure of a page by its section, and the sample pictures."""

    overview: list[base.Figure]
    absent: list[str]  # why a figure of the overview could not be drawn, a sentence each
    levers: list[base.Figure]
    training: list[base.Figure]
    strips: list[base.Figure]
    strips_apart: list[base.Figure]  # timelines of runs that only the tables of levers show
    samples: list[pictures.Picture]
    samples_note: str

    @classmethod
    def of(cls, dataset: Dataset, build: Builder) -> Drawn:
        runs, demo = dataset.runs, build.demonstration
        strips = timeline.draw(dataset, base.gpu_colours(build.cells), demonstration=demo)
        named = {id for ids in build.cells["run_ids"].to_list() for id in ids}
        apart = set(runs.filter(study.is_study_run())["run_id"]) - named
        overview = figures.overview(dataset, build.cells, demonstration=demo)
        samples, note = pictures.embedded(dataset.folder, runs, aggregate.CELL_KEYS)
        return cls(
            overview=overview.figures,
            absent=overview.absent,
            levers=study_figures.draw(study.comparisons(runs), demonstration=demo),
            training=quality.draw(runs, demonstration=demo),
            strips=[strip for strip in strips if not apart.intersection(strip.run_ids)],
            strips_apart=[strip for strip in strips if apart.intersection(strip.run_ids)],
            samples=samples,
            samples_note=note,
        )

    def figures(self) -> list[base.Figure]:
        return [*self.overview, *self.levers, *self.training, *self.strips, *self.strips_apart]


def _has_poster_workload(runs: pl.DataFrame) -> bool:
    return bool((runs["workload"] == published.WORKLOAD).any())


def _why_demonstration(runs: pl.DataFrame) -> str:
    """In words: how many runs are no measurement of the GPU they name."""
    marked = runs.filter(pl.col("demonstration"))
    if marked.is_empty():
        return ""
    replayed = marked.filter(pl.col("source").str.contains("replay", literal=True)).height
    words = f"{marked.height} of {runs.height} runs are demonstrations"
    if replayed:
        words += f", {replayed} of them with telemetry replayed from a recording"
    return words + ". Their figures show how the pipeline works; they say nothing about the GPUs they name."


def _headline(build: Builder) -> str:
    """How much counts, and the fastest and the thriftiest cell with those not told from it: no claim beyond."""
    runs, words = build.runs, []
    words.append(f"{runs.filter(pl.col('valid')).height} of {runs.height} runs count.")
    cells = aggregate.build_cells(runs)  # of studies too: the fastest is the fastest
    kinds = cells.select(aggregate.WORK_KEYS).n_unique()
    for metric, lower_is_better, text, unit in (
        ("images_per_s", False, "Fastest", "images/s"),
        ("joules_per_image", True, "Least energy", "J per image"),
    ):
        known = cells.filter(pl.col(metric).is_not_null()).sort(metric, descending=not lower_is_better).to_dicts()
        if known and kinds == 1:
            top, others = known[0], known[1:]
            tied = [
                row
                for row in others
                if not aggregate.is_distinguishable(top, row, metric, lower_is_better=lower_is_better)
            ]
            said = f"{text}: {_named(top)}, {number(top[metric])} {unit}"
            words.append(f"{said}; not told from it: {_several(tied)}." if tied else f"{said}.")
    if kinds > 1:
        words.append("Several workloads, models, resolutions, or demonstrations among measurements: no fastest of all.")
    if cells.height and (cells["n"] == 1).all():
        words.append("One run per cell, so no intervals.")
    return ("As a demonstration: " if build.demonstration else "") + " ".join(words)


def _named(cell: dict[str, Any]) -> str:
    return f"{cell['series']} at batch {cell['batch']}"


def _several(cells: list[dict[str, Any]]) -> str:
    """The first three by name, the rest as a number."""
    rest = len(cells) - 3
    return ", ".join(map(_named, cells[:3])) + (f" and {rest} more" if rest > 0 else "")


def _listed(values: pl.Series) -> str:
    return ", ".join(sorted(str(v) for v in values.drop_nulls().unique().to_list())) or "unknown"


def _recipes(runs: pl.DataFrame) -> str:
    """Those of the overview by name; the many that only studies ran are counted."""
    shown = study.overview_runs(runs)[recipe_labels.COLUMN]
    further = runs[recipe_labels.COLUMN].drop_nulls().n_unique() - shown.drop_nulls().n_unique()
    return _listed(shown) + (f", and {further} more in studies" if further else "")


def _facts(dataset: Dataset) -> dict[str, str]:
    runs = dataset.runs
    gpus = sorted(runs["gpu"].drop_nulls().unique().to_list(), key=gpu_order)
    started, ended = (runs[name].drop_nulls().dt.strftime("%Y-%m-%d %H:%M").sort() for name in ("started", "ended"))
    moments = [*started.head(1), *ended.tail(1)]
    when = " to ".join(moments) + " UTC" if moments else "unknown"
    batches = ", ".join(str(b) for b in sorted(runs["batch"].drop_nulls().unique().to_list()))
    merged = str(dataset.metadata.get("merged_at"))[:16].replace("T", " ") + " UTC"
    return {
        "Workload": f"{_listed(runs['workload'])}, model {_listed(runs['model'])}",
        "GPUs": ", ".join(map(gpu_label, gpus)) or "none",
        "Batch sizes": batches or "none",
        "Recipe": _recipes(runs),
        "Sites": _listed(runs["site"]),
        "When": when,
        "Merged": f"{merged} from {', '.join(dataset.metadata.get('roots', []))}",
        "Producer": str(dataset.metadata.get("producer")),
    }


def _quality(dataset: Dataset, cells: pl.DataFrame) -> dict[str, str]:
    runs, account = dataset.runs, dataset.metadata
    valid = runs.filter(pl.col("valid"))
    completed = runs.filter((pl.col("status") == "completed") & ~pl.col("valid")).height
    unavailable = sum(map(is_unavailable, runs.select("status", "reason").to_dicts()))
    coverage = valid["coverage_pct"].drop_nulls().to_list()
    share = f"{min(coverage):.1f} %" if coverage else "none sampled"
    return {
        "Run directories found": str(account.get("run_directories")),
        "Runs merged": str(runs.height),
        "Valid": str(valid.height),
        "Completed but invalid": str(completed),
        "Failed or unfinished": str(runs.height - valid.height - completed - unavailable),
        **({"Unavailable here": str(unavailable)} if unavailable else {}),
        "Entries left out": str(dataset.skipped.height),
        "Sampled, lowest": share,
        "Energy counter / integral": _range(valid["energy_ratio"].drop_nulls().to_list(), ".3f"),
        "Runs per cell": _range(cells["n"].to_list(), "d"),
    }


def _range(values: list[Any], form: str) -> str:
    if not values:
        return "not known"
    return "\u2013".join(dict.fromkeys(f"{end:{form}}" for end in (min(values), max(values))))


def write_report(
    dataset_dir: Path, out: Path, *, terminal: bool = False, formats: Collection[str] = export.USUAL
) -> Path:
    """Write the page and what lies beside it; returns the page's path. Prints the tables if asked to."""
    dataset = open_dataset(dataset_dir)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is not a folder; give a folder for the report.")
    if out.resolve() == dataset_dir.resolve() or dataset_dir.resolve() in out.resolve().parents:
        raise UserError(f"{out} lies inside the dataset, which a new merge replaces; write the report elsewhere.")
    last = _last_report(out)
    report = content(dataset)
    if terminal:
        print_tables(report)
    build = Builder(runs=dataset.runs)
    drawn = Drawn.of(dataset, build)
    out.mkdir(parents=True, exist_ok=True)
    beside = export.planned(report.all_tables(), drawn.figures(), formats, demonstration=report.demonstration)
    names = [PAGE, TEXT, CSV, *beside]
    if foreign := [name for name in names if name not in last and (out / name).exists()]:
        some = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise UserError(f"{out} holds {some}, which no report of ours wrote; move it out first.")
    for name in last:
        (out / name).unlink(missing_ok=True)
    files.replace_json(out / MARKER, {"files": names})
    for name, content_of in beside.items():
        files.replace_bytes(out / name, content_of())
    render.runs_csv(dataset.runs.drop(recipe_labels.COLUMN), out / CSV)
    files.replace_text(out / TEXT, markdown(report))
    files.replace_text(out / PAGE, page(report, drawn, out, formats))
    return out / PAGE


def _last_report(out: Path) -> list[str]:
    """What the last report wrote into the folder. Raises UserError where the folder holds something else."""
    if not out.exists() or not any(out.iterdir()):
        return []
    try:
        account = files.read_json(out / MARKER)
    except ValueError:
        account = None
    names = account.get("files") if isinstance(account, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{out} is not empty and holds no report of ours ({MARKER}); give a new or empty folder.")
    home = out.resolve()
    return [name for name in names if home in (home / name).parent.resolve().joinpath(Path(name).name).parents]


def print_tables(report: Content) -> None:
    """Tables for the terminal; as wide as they need to be where the output is a file or a pipe."""
    from rich.text import Text

    from inpaint_bench.core.console import Terminal

    console = Terminal(highlight=False, width=None if sys.stdout.isatty() else 160)
    if report.demonstration:
        console.print(Text(f"DEMONSTRATION: {sanitize(report.why_demonstration)}\n", style="bold reverse"))
    for path in report.conflicts:
        console.print(Text(f"CONFLICT: {sanitize(path)}: see files left out\n", style="bold red"))
    console.print(Text(sanitize(report.headline) + "\n", style="bold"))
    console.print(Text(sanitize("   ".join(f"{k}: {v}" for k, v in report.quality.items())) + "\n"))
    for table in report.all_tables():
        render.to_terminal(table, console)


def markdown(report: Content) -> str:
    """The same tables as Markdown."""
    title = (
        f"# {'Demonstration: ' if report.demonstration else ''}Benchmark report\n\n{render.inline(report.headline)}\n"
    )
    banner = f"\n> **Demonstration.** {render.inline(report.why_demonstration)}\n" if report.demonstration else ""
    lists = [f"- {name}: {render.inline(value)}" for name, value in (*report.facts.items(), *report.quality.items())]
    body = "\n".join(render.to_markdown(table) for table in report.all_tables())
    return f"{title}{banner}\n" + "\n".join(lists) + f"\n\n{body}"


def page(report: Content, drawn: Drawn, out: Path, formats: Collection[str] = ()) -> str:
    """The HTML. Autoescape is on; the only markup passed through is our own SVG, whose text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(svg=lambda figure: Markup(figure.svg), anchor=anchor)
    environment.globals.update(long_table=LONG_TABLE, mark=study_tables.NOT_ACTIVE, formats=formats)
    environment.globals.update(figure_font=Markup(svg.FONT))
    environment.filters["unbroken"] = _unbroken
    return environment.get_template("report.html.j2").render(
        report=report,
        drawn=drawn,
        runs=_run_cards(report.dataset, out),
        rules=bottleneck.describe_rules(),
        source=published.SOURCE,
        figure_css=Markup(svg.css()),
    )


def _unbroken(text: str) -> str:
    """A figure and its unit, `n = 3` and `1.6\u20131.7` stay on one line."""
    return _RANGE.sub("\u2060\u2013\u2060", _UNITS.sub("\u00a0", text))


def anchor(run_id: str) -> str:
    """An id that is safe in an attribute and after a hash sign."""
    return "run-" + quote(run_id, safe="").replace("%", "_")


def _run_cards(dataset: Dataset, out: Path) -> list[dict[str, Any]]:
    """Per run: where it lies, what it warns of, and its files, linked relative to the page."""
    cards = []
    for row in dataset.runs.iter_rows(named=True):
        links = []
        for path in dataset.files(row["run_id"]):
            relative = os.path.relpath(path.resolve(), out.resolve())
            links.append({"href": quote(relative, safe="/="), "text": str(path.relative_to(dataset.folder))})
        what = base.series_title(row)
        cards.append({**row, "links": links, "what": what})
    return cards
