"""What a report of a merged dataset says, whatever it is written as: title, answers, and the folded sections."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt
import polars as pl

from analysis.dataset import Dataset
from analysis.metrics.energy import MAX_COUNTER_DEVIATION
from analysis.metrics.run_row import is_unavailable
from analysis.stats.cells import build_cells
from analysis.stats.study import comparisons
from analysis.units import gpu_label, gpu_order, made
from inpaint_bench.core.console import pluralize, share
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import COMMAND, KERNEL_TIMES, UNKNOWN, Status

from . import commands, names, workloads
from .figures import base, by_batch, points, step_time, svg, timeline
from .figures.base import Figure
from .sections import clock_energy, counters, curves, decision, nemo, poster, profiles, scaling, study_tables
from .tables import SUMMARIES, Section, Table, TableBuilder

_INVENTED = "synthetic"  # in the name of a recording that benchmarks/make_synthetic_captures.py made
_BEYOND = f"Runs with a counter more than {100 * MAX_COUNTER_DEVIATION:.0f} % off the integral"
_COMPANY = r"another process was on GPU .*"
CHART_KINDS = {"layer": alt.LayerChart, "hconcat": alt.HConcatChart, "vconcat": alt.VConcatChart}  # by their key
RUNS, TIMELINES = "Runs", "Timelines"  # sections that the page shows in their own way


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a report shows, whatever it is written as."""

    dataset: Dataset
    subject: str  # what was measured
    gpus: str
    days: str
    demonstration: str  # why the report is a demonstration; empty if it is none
    notes: list[str]  # what to know of how the dataset was merged, and which planned points it lacks
    answered: list[Section]  # the first is that of the first screen
    folds: list[Section]
    quality: str  # in one line
    conflicts: list[str]  # run directories that have the id of another run

    @property
    def title(self) -> str:
        # A dataset whose runs were all left out has no subject.
        what = f"{self.subject} on {self.gpus}" if self.subject else "No run"
        text = ", ".join(filter(None, [what, self.days]))
        return f"Demonstration: {text}" if self.demonstration else text

    @property
    def sections(self) -> list[Section]:
        return [*self.answered, *self.folds]

    @property
    def tables(self) -> list[Table]:
        return [table for section in self.sections for table in section.tables]

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]


def make_report(dataset: Dataset, build: TableBuilder, notes: list[str], compared: list[Section]) -> Report:
    """Compute the report of a dataset. A dataset without a valid run has one, too, whose answer says so."""
    runs = dataset.runs
    losses = curves.sections(dataset, build)
    studies = [_made(each, runs) for each in [*scaling.sections(build), *study_tables.sections(build)]]
    own = list(workloads.sections(dataset, build))
    decided = [_made(each, runs) for each in decision.sections(build, [*studies, *own])]
    quality = _quality(dataset, build.cells)
    # A study of losses has few valid rates: what they say comes second.
    leads = any(section.answer for section in losses) and runs["valid"].sum() < runs.height / 2
    sections = [
        *(losses if leads else []),
        *studies,
        *(section for section in decided if section.answer),
        *own,
        *commands.sections(build),
        *([] if leads else losses),
        *compared,
        *_folds(dataset, build, [section for section in decided if not section.answer], quality),
    ]
    sections = list(filter(None, map(_shown, sections)))
    if build.demonstration:
        sections = list(map(_demonstrated, sections))
    why = [f"{reason}: {pluralize(count, 'run')}" for reason, count in _reasons(runs.filter(~pl.col("valid")))[:3]]
    nothing = f"No run is valid; {'; '.join(why)}." if why else "There is no run with a figure to compare."
    answered = [section for section in sections if section.answer] or [Section(title="No result", answer=nothing)]
    return Report(
        dataset=dataset,
        subject=_subject(runs, answered),
        gpus=_gpus(runs),
        days=names.days([*runs["started"], *runs["ended"]]),
        demonstration=_demonstration(runs),
        notes=notes,
        answered=answered,
        folds=[section for section in sections if not section.answer],
        quality=_quality_line(quality, build.cells, runs),
        conflicts=dataset.skipped.filter(pl.col("code") == "conflict")["path"].to_list(),
    )


def _folds(dataset: Dataset, build: TableBuilder, decided: list[Section], quality: dict[str, str]) -> list[Section]:
    runs, cells = dataset.runs, build.cells
    every = [*map(build.summary, SUMMARIES), build.gpu_ratios(poster.ratios(runs))]
    every += [study_tables.recipe_comparison(build), build.cards(), build.recipes()]
    drawn = [*points.draw_energy(cells), step_time.draw(dataset, cells)]
    timelines = timeline.draw(dataset, base.gpu_colours(runs["gpu"].drop_nulls()))
    limits = build.bottlenecks(dataset.rows(KERNEL_TIMES))
    doubts = [build.excluded(), build.cell_remarks(), build.skipped_files(dataset.skipped)]
    return [
        _made(_fold("Every cell: speed, energy, temperature and memory", every, drawn, decided), runs),
        _fold("What limits the runs, and what to try", limits, [points.draw_roofline(runs)]),
        *clock_energy.sections(dataset, build),
        *profiles.sections(dataset, build),
        *counters.sections(dataset, build),
        _fold("Training quality", [build.training_quality()], points.draw_validation(runs)),
        *poster.sections(build),
        *nemo.text_to_image(build),
        *nemo.flux(build),
        Section(title="Data quality and energy audit", facts=quality, tables=doubts),
        _fold(TIMELINES, [], [timeline.READING, *timelines] if timelines else []),
        _made(Section(title=RUNS, tables=[build.run_list()]), runs),
        Section(title="Environment", facts=_facts(dataset), tables=[build.environment()]),
    ]


def _made(section: Section, runs: pl.DataFrame) -> Section:
    """Return the section with the units of what its workload makes, or the runs behind a table or figure."""
    workload_of = dict(runs.select("run_id", "workload").iter_rows())
    named = section.studied or section.workload
    whole = [named] if named else runs.filter("valid")["workload"].unique().to_list()
    tables = []
    for table in section.tables:
        own = {workload_of[run_id] for run_ids in table.row_runs for run_id in run_ids}
        tables.append(table.made_by(own or whole))
    figures = [each.made_by(workload_of) for each in section.figures]
    answer, best = (made(text, whole) for text in (section.answer, section.best))
    paragraphs = [made(text, whole) for text in section.paragraphs]
    return replace(section, answer=answer, best=best, paragraphs=paragraphs, tables=tables, figures=figures)


def _fold(title: str, tables: list[Table], drawn: Sequence[Figure | str], more: Sequence[Section] = ()) -> Section:
    """Return a section; of a figure that could not be drawn there is the reason."""
    figures = [each for each in drawn if isinstance(each, Figure)]
    return Section(
        title=title,
        paragraphs=[each for each in drawn if isinstance(each, str)],
        tables=[*(table for section in more for table in section.tables), *tables],
        figures=[*(figure for section in more for figure in section.figures), *figures],
    )


def _shown(section: Section) -> Section | None:
    """Return the section without its empty tables; None if nothing is left but text about them."""
    tables = [table for table in section.tables if table.rows]
    reasons = [] if section.tables else section.paragraphs  # why there is no table
    content = (section.answer, tables, section.figures, section.facts, reasons)
    return replace(section, tables=tables) if any(content) else None


def _demonstrated(section: Section) -> Section:
    title, answer = (text and f"Demonstration: {text}" for text in (section.title, section.answer))
    figures = [replace(figure, title=f"Demonstration: {figure.title}") for figure in section.figures]
    return replace(section, title=title, answer=answer, figures=figures)


def _reasons(invalid: pl.DataFrame) -> list[tuple[str, int]]:
    """Return the first reason of each run that is not valid and the number of these runs, the most frequent first."""
    reasons = invalid["invalid_reason"].fill_null("no reason given").str.split("; ").list.first()
    # Which process and card tells runs apart, not reasons.
    return reasons.str.replace(_COMPANY, "another process was on the GPU").value_counts(sort=True, name="runs").rows()


def _subject(runs: pl.DataFrame, answered: list[Section]) -> str:
    """Return what was measured: `SD 1.5 inpainting fine-tune at 1024 px: recipes`. Smaller images are not named."""
    known = runs.filter("valid") if runs["valid"].any() else runs
    groups = known.filter(pl.col("workload") != COMMAND).partition_by("workload", maintain_order=True)
    # In the order of the answers: the title begins with what the page begins with.
    order = [section.studied or section.workload for section in answered]
    groups.sort(key=lambda group: [*order, group["workload"][0]].index(group["workload"][0]))
    works = [names.work(group["workload"][0], group["model"]) + _size(group) for group in groups]
    programs = known.filter(pl.col("workload") == COMMAND)["recipe"].drop_nulls().unique(maintain_order=True)
    works += [f"{name} (external program)" for name in programs]
    kinds = dict.fromkeys(kind for section in answered for kind in section.kinds)
    text = ": ".join(filter(None, [names.join(list(dict.fromkeys(works))), names.join(list(kinds))]))
    return text if len(programs) and not groups else names.capitalize(text)


def _size(runs: pl.DataFrame) -> str:
    sizes = runs["resolution_px"].unique()
    return f" at {sizes[0]} px" if len(sizes) == 1 and (sizes[0] or 0) > 512 else ""  # side of the studies' images


def _gpus(runs: pl.DataFrame) -> str:
    known = sorted(runs["gpu"].drop_nulls().unique(), key=gpu_order)
    return names.join([names.gpu(gpu) if gpu in ("cpu", UNKNOWN) else gpu_label(gpu) for gpu in known]) or "no GPU"


def _demonstration(runs: pl.DataFrame) -> str:
    marked = runs.filter("demonstration")
    if marked.is_empty():
        return ""
    sources = marked["source"].fill_null("").str.to_lowercase()
    replayed = int(sources.str.contains("replay", literal=True).sum())
    text = share(marked.height, runs.height, "run", "are demonstrations", "is a demonstration")
    text += f", {replayed} of them with telemetry replayed from a recording. " if replayed else ". "
    invented = marked.filter(sources.str.contains(_INVENTED, literal=True))["gpu"].unique().to_list()
    if invented:
        names = " and ".join(map(gpu_label, sorted(invented, key=gpu_order)))
        text += f"The telemetry of {names} is invented: a program made the recording, no card was measured. "
    return f"{text}The numbers show how the pipeline works; they say nothing about the GPUs they name."


def _facts(dataset: Dataset) -> dict[str, str]:
    runs, metadata = dataset.runs, dataset.metadata
    workload, model, site = (
        ", ".join(runs[name].drop_nulls().unique().sort()) for name in ("workload", "model", "site")
    )
    times = runs.select(pl.col("started").min(), pl.col("ended").max()).row(0)
    return {
        "Workload": f"{workload}, model {model or 'unknown'}",
        "Sites": site,
        "Time": " to ".join(f"{time:%Y-%m-%d %H:%M}" for time in times if time) + " UTC" if any(times) else "unknown",
        "Merged": f"{str(metadata.get('merged_at'))[:16]} UTC from {', '.join(metadata.get('roots', []))}",
        "Software": str(metadata.get("producer")),
    }


def _quality(dataset: Dataset, cells: pl.DataFrame) -> dict[str, str]:
    """Return counts of runs, without those that are zero, and the ranges that tell how far to trust the figures."""
    runs, valid = dataset.runs, dataset.runs.filter("valid")
    invalid = runs.filter((pl.col("status") == "completed") & ~pl.col("valid")).height
    unavailable = sum(map(is_unavailable, runs.select("status", "reason").to_dicts()))
    ratios, covered = (valid[name].drop_nulls().to_list() for name in ("energy_ratio", "coverage_pct"))
    counts = {
        "Run directories": dataset.metadata.get("run_directories"),
        "Runs merged": runs.height,
        "Valid": valid.height,
        "Completed but invalid": invalid,
        "Failed or unfinished": runs.height - valid.height - invalid - unavailable,
        "Unavailable": unavailable,
        "Planned points without a run": sum(each["points"] for each in dataset.metadata.get("points_without_run", [])),
        "Skipped files": dataset.skipped.height,
        "Code versions": valid["code_version"].drop_nulls().n_unique(),
        _BEYOND: sum(abs(ratio - 1) > MAX_COUNTER_DEVIATION for ratio in ratios),
    }
    return {name: str(count) for name, count in counts.items() if count} | {
        "Runs per cell": _range(cells["n"].to_list(), "d"),
        "Lowest sample coverage": f"{min(covered):.1f} %" if covered else "unknown",
        "Energy counter / integral": _range(ratios, ".3f"),
    }


def _range(values: list[Any], form: str) -> str:
    ends = (min(values), max(values)) if values else ()
    return "\u2013".join(dict.fromkeys(f"{end:{form}}" for end in ends)) or "unknown"


def _quality_line(quality: dict[str, str], cells: pl.DataFrame, runs: pl.DataFrame) -> str:
    parts = [f"{share(int(quality.get('Valid', 0)), int(quality.get('Runs merged', 0)), 'run', 'are')} valid"]
    counts = ("Completed but invalid", "Failed or unfinished", "Unavailable")
    common = _reasons(runs.filter((pl.col("status") == Status.COMPLETED.value) & ~pl.col("valid")))[:1]
    why = [*(f" (most often: {reason})" for reason, _ in common), "", ""] if common else ["", "", ""]
    parts += [
        f"{quality[name]} {name.lower()}{more}" for name, more in zip(counts, why, strict=True) if name in quality
    ]
    measured = ("Runs per cell", "Lowest sample coverage", "Energy counter / integral") if cells.height else ()
    parts += [f"{name.lower()}: {quality[name]}" for name in measured]
    if withheld := cells.filter("withheld").height:
        parts.append(f"{pluralize(withheld, 'cell')} without a mean, because runs disagree")
    return f"{'; '.join(parts)}."


def charts(dataset: Dataset) -> dict[str, Any]:
    """Return the figures as Altair charts, by the name of their files in the report; without the timelines of runs."""
    if not isinstance(dataset, Dataset):
        raise UserError("charts: takes a dataset, as in charts(open_dataset('dataset'))")
    runs, cells = dataset.runs, build_cells(dataset.runs)
    drawn: list[Any] = [*by_batch.draw(cells), *points.draw_energy(cells), *map(study_tables.draw, comparisons(runs))]
    drawn += [*points.draw_validation(runs), step_time.draw(dataset, cells), points.draw_roofline(runs)]
    found = {}
    workload_of = dict(runs.select("run_id", "workload").iter_rows())
    for each in drawn:
        if isinstance(each, Figure):
            each = each.made_by(workload_of)
            spec = svg.in_light_scheme(each.titled_spec)
            kind = next((kind for key, kind in CHART_KINDS.items() if key in spec), alt.Chart)
            # Altair's validation takes seconds if there are thousands of points.
            found[each.id] = kind.from_dict(spec, validate=False)
    return found
