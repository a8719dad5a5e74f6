"""`merge`, `report`, `compare`: datasets of run directories, and what they say.

Analysis is imported where it is used: `--help` does without it.
"""

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from inpaint_bench.core import schema
from inpaint_bench.core.console import Terminal, echo, echo_json, pluralize, sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import check_can_be_made, replace_bytes


def run_merge(roots: Sequence[Path], output: Path, *, threads: int | None, allow_mixed: str, as_json: bool) -> None:
    """Merge the run directories below `roots` into `output`, and list what is left out, not valid or missing."""
    from analysis.ingest import planned
    from analysis.merge import merge
    from inpaint_bench.core import seal

    mixed = [name for name in allow_mixed.split(",") if name]
    metadata = merge(list(roots), output, threads=threads or min(8, _usable_cores()), allow_mixed=mixed)
    runs, skipped = seal.read_table(output / schema.RUNS), seal.read_table(output / schema.SKIPPED)
    invalid = runs.filter(~runs["valid"])
    if as_json:
        invalid = invalid.select("run_id", "invalid_reason")
        lists = {"skipped": skipped.to_dicts(), "not_valid": invalid.to_dicts()}
        names = ("run_directories", "runs", "runs_valid", "mixed", "points_without_run")
        echo_json({"dataset": str(output), **{name: metadata[name] for name in names}, **lists})
        return
    for row in skipped.iter_rows(named=True):
        prefix = "WARNING: " if row["code"] == "conflict" else ""
        echo(f"{prefix}skipped [{row['code']}] {row['path']}: {row['reason']}", error=True)
    for row in invalid.iter_rows(named=True):
        echo(f"not valid: {row['run_id']}: {row['invalid_reason']}", error=True)
    for description in metadata["mixed"]:
        echo(f"separate cells: {description}", error=True)
    for sentence in planned.describe(metadata["points_without_run"]):
        echo(sentence, error=True)
    merged = f"runs merged: {metadata['runs']}, valid: {metadata['runs_valid']}; entries skipped: {metadata['skipped']}"
    print(f"run directories: {metadata['run_directories']}; {merged}")
    echo(f"dataset: {output}")


def _usable_cores() -> int:
    """Return the cores that this process may use: fewer than the machine has inside a Slurm job."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_report(
    dataset: Path,
    output: Path,
    *,
    export: str,
    accept_disagreement: bool,
    compare: Path | None,
    figures: Path | None,
    as_json: bool,
) -> None:
    """Write the report of `dataset`, or of every dataset in it, into `output`, and print the answers.

    Adds a comparison with dataset `compare`, and writes figures for a paper into the folder `figures`.
    """
    from analysis.report import report

    formats = report.parse_formats(export)
    options: dict[str, Any] = {"formats": formats, "accept_disagreement": accept_disagreement}
    if not (dataset / schema.DATASET).exists() and any(dataset.glob(f"*/{schema.DATASET}")):
        if figures or as_json or compare:
            raise UserError(f"{dataset} holds several datasets; give one of them for --figures, --json or --compare.")
        reports, passed_over = report.write_index(dataset, output, **options)
        for each in reports:
            echo(f"{each.title}: {each.answered[0].answer}")
        for sentence in passed_over:
            echo(sentence, error=True)
        echo(f"index: {output / report.INDEX}")
        return
    if figures:
        if figures.exists() and not figures.is_dir():
            raise UserError(f"{figures} is not a folder; give a folder for the figures.")
        check_can_be_made(figures)
    if as_json and "csv" not in formats:
        raise UserError(f"--json: prints the tables as --export csv writes them, and --export is {export}")
    written = report.write(dataset, output, compared_with=compare, **options)
    names = report.write_for_paper(written, figures) if figures else []
    page = output / report.PAGE
    if as_json:
        tables = {}
        for path in sorted((output / "tables").glob("*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                tables[path.stem] = list(csv.DictReader(file))
        echo_json({"report": str(page), "tables": tables})
        return
    report.print_answer(written)
    if figures:
        echo(f"figures: {', '.join(str(figures / name) for name in names)}" if names else "figures: none to draw")
    echo(f"report: {page}")


def run_compare(
    old: Path, new: Path | None, *, gpu: str | None, fail_on: str | None, junit: Path | None, as_json: bool
) -> int:
    """Print the comparison. Returns 1 if `fail_on` is given and a cell is worse by more, or cannot be compared.

    `gpu` names the card of each side, `h100,h200`: their cells are compared as if they were of one.
    """
    tolerance = None if fail_on is None else _fraction(fail_on)
    if junit and (tolerance is None or not junit.absolute().parent.is_dir()):
        missing = "needs --fail-on, which says what a failure is" if tolerance is None else "its folder does not exist"
        raise UserError(f"--junit {junit}: {missing}")
    if junit:
        check_can_be_made(junit.absolute().parent)

    from analysis.dataset import open_dataset
    from analysis.report import render
    from analysis.report.sections import dataset_comparison
    from analysis.report.tables import TableBuilder

    if new is None and gpu is None:
        raise UserError(f"compare {old}: give a second dataset, or two GPUs of this one, such as --gpu h100,h200")
    before = open_dataset(old)
    after = before if new is None else open_dataset(new)
    notes = [f"{data.folder}: {note}" for data in (before, *([after] if new else [])) for note in data.notes]
    if gpu:
        before, after = dataset_comparison.of_gpus(before, after, gpu)
        notes.append(f"Old: {gpu.partition(',')[0]}, new: {gpu.partition(',')[2]}.")
    comparison = dataset_comparison.compare(before.runs, after.runs)
    notes += [dataset_comparison.COPY] if comparison.is_copy else []
    if not comparison.pairs:
        first, second = (data.runs["gpu"].drop_nulls().unique() for data in (before, after))
        hint = ""
        if len(first) and len(second) and not {*first} & {*second}:
            cards = f"{first[0]},{second[0]}"
            sides = dataset_comparison.of_gpus(before, after, cards)
            if dataset_comparison.compare(*(data.runs for data in sides)).pairs:
                hint = f"; --gpu {cards} compares two cards"
        both = f"{old} and {new or old} have no cell in common"
        raise UserError(f"{both}: no work, GPU, recipe and batch has valid runs in both{hint}")
    build = TableBuilder(runs=after.runs)
    tables = dataset_comparison.tables(build, comparison, before, after, tolerance)
    failures = [] if tolerance is None else comparison.failures(tolerance)
    if junit:
        compared = [*comparison.only_old, *(pair.new for pair in comparison.pairs)]
        _write_junit(junit, [dataset_comparison.cell_name(cell) for cell in compared], failures)
    if as_json:
        rows = {
            table.id: list(csv.DictReader(render.to_csv(table, demonstration=build.demonstration).splitlines()))
            for table in tables
        }
        echo_json({"failures": failures, "notes": notes, "tables": rows})
        return int(bool(failures))
    for note in notes:
        echo(f"NOTE: {note}")
    for table in tables:
        if table.id == dataset_comparison.RECIPES:
            # As lines, which a terminal does not break: they are to be pasted.
            for recipe, overrides in table.rows:
                echo(f"To launch {recipe}: {overrides}")
        else:
            # What differs is shown whole: `brief` leaves out a side that knows none of these facts.
            whole = replace(table.brief(range(len(table.rows))), note=table.note) if table.lead_columns else table
            render.to_terminal(whole, Terminal())
            if len(whole.columns) < len(table.columns):
                echo("The means, and how many runs and cards they are of: --json.", "")
    if tolerance is not None:
        echo(f"{pluralize(len(failures), 'failure')} with --fail-on {fail_on}" + (":" if failures else ""))
        for text in failures:
            echo(f"  {text}")
    return int(bool(failures))


def _write_junit(path: Path, cells: Sequence[str], failures: Sequence[str]) -> None:
    """Write a test case per cell, which holds the sentences of `failures` that begin with its name."""
    suite = ElementTree.Element("testsuite", name="inpaint-bench compare", tests=str(len(cells)))
    for name in cells:
        case = ElementTree.SubElement(suite, "testcase", classname="cell", name=sanitize(name))
        if texts := [text for text in failures if text.startswith(f"{name}: ")]:
            ElementTree.SubElement(case, "failure", message=sanitize("; ".join(texts)))
    suite.set("failures", str(sum(len(case) for case in suite)))
    replace_bytes(path, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _fraction(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if 0 < percent < 1 and "%" not in text:  # repeats_target=0.03 is 3 %
        raise UserError(f"--fail-on {text}: write {100 * percent:g}% or {percent:g}%, whichever you mean")
    if not 0 <= percent < 100:
        raise UserError(f"--fail-on {text}: is not a percentage from 0 to below 100, such as 3%")
    return percent / 100
