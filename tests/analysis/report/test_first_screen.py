"""What a reader of the committed datasets sees first: title, answer, at most eight rows and one figure."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

from analysis.dataset import open_dataset
from analysis.report import contents, render, report
from analysis.report.contents import Report
from analysis.report.figures import base, svg
from analysis.report.page import html
from analysis.report.report import write_for_paper
from analysis.report.tables import FIRST_ROWS, TableBuilder
from tests.browser import Page

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
NAMES = sorted(path.parent.name for path in RESULTS.glob("*/dataset.json"))
FLAGSHIP = "2026-11-23-h100-h200"
OTHERS = [name for name in NAMES if name != FLAGSHIP]
WIDTHS = (390, 768, 1440)
ANSWERS = {
    "2026-11-23-h100-h200": "Take an H200, batch 64, recipe tuned_hopper: 173 images/s (2 runs, no interval), "
    "5 % faster than the H100, 4.3 times the earlier baseline. Caches hold what that loop encodes in every step.",
    "2026-11-27-h200-yardstick": "Take an H200, batch 16, recipe tuned_hopper: 172 images/s, 4.0 times the plain loop. "
    "Caches hold what that loop encodes in every step; tuned_online encodes it too: 93.9 images/s, 2.2 times that ",
    "2026-11-23-h200-ladder": "H200, batch 16: tuned_hopper reaches 159 images/s, "
    "4.5 times earlier_baseline; its last step, attn_flash4, adds 9.3 %; too few runs for an interval.",
    "2026-11-23-h200-two-gpus": "2 H200 reach 268 images/s: tuned 1.86 times 1 GPU (93 % of ideal, weak, batch 16)",
    "2026-11-23-h200-inference": "Making images takes 0.313 s per image at batch 1 with generate_tuned on an H200, "
    "5.7 times faster than the plain pipeline",
    "2026-11-25-h100-volumes": "On an H100, whole_head 128x128x128: 7.86 steps/s and 65.6 J/step with "
    "channels_last+compile. Med-DDPM's whole_head makes a scan of a whole head.",
    "2026-11-25-h100-inference": "Making images with generate_hopper on an H100 (1 run) takes 0.312 s per image of SD ",
    "2026-11-23-h200-denoisers": "Take for DRUNet patches of 128 px, 8 at a time (7.58 Mpx/s, 354 MiB); UNet "
    "patches of 256 px, 2 at a time",
    "2026-11-23-h200-volumes": "On an H200, whole_head 128x128x128: 4.56 steps/s and 136 J/step",
    "2026-11-26-h200-losses": "tuned_hopper trains like tuned_hopper+bf16_master: over 500 steps and 3 seeds its ",
    "2026-11-29-h200-two-gpus": "SD 1.5 inpainting fine-tune: 2 H200 reach 326 images/s: tuned_hopper"
    "+exchange_peer_copies 1.91 times 1 GPU",
    "2026-11-29-h200-plain-losses": "Take an H200, batch 16, recipe tuned_online: 91.0 images/s (1 run), 2.1 times ",
    "2026-11-30-h200-plain-losses": "Take an H200, batch 16, recipe tuned_online: 91.2 images/s (1 run), 2.2 times ",
    "2026-11-26-h200-fp8-losses": "tuned_dit+fp8+attn_flash4 trains like tuned_dit+attn_flash4: over 150 steps and "
    "3 seeds its losses differ by +0.018 % (+0.012 to +0.023), equal within 0.05 %.",
    "2026-11-23-h200-weights": "3 settings of tuned_hopper on an H200, batch 16, make no difference: 158 to 159",
}


@pytest.fixture(scope="module")
def committed() -> dict[str, tuple[Report, TableBuilder]]:
    """Compute the report of every committed dataset, without drawing its figures."""
    found = {}
    for name in NAMES:
        dataset = open_dataset(RESULTS / name)
        build = TableBuilder(runs=dataset.runs)
        found[name] = contents.make_report(dataset, build, [], []), build
    return found


Committed = Mapping[str, tuple[Report, TableBuilder]]


def test_titles_say_what_was_measured_and_differ(committed: Committed) -> None:
    titles = {name: each.title for name, (each, _) in committed.items()}
    rated = [title for name, title in titles.items() if not name.endswith("-losses")]  # whose rates count
    assert len(set(rated)) == len(rated)
    for name, title in titles.items():
        assert re.search(r" on (H100|(H100 and )?H200), (\d\d to )?\d\d Nov 2026$", title), name
    assert titles["2026-11-23-h100-h200"] == "SD 1.5 inpainting fine-tune on H100 and H200, 23 Nov 2026"
    assert titles["2026-11-26-h200-flux-1024"].startswith("FLUX.1 inpainting fine-tune at 1024 px: recipes")
    assert titles["2026-11-23-h200-volumes"].startswith("Training of 3-D volume diffusion on H200")
    # Regression: `recipes and batch sizes and recipes`.
    two = "SD 1.5 and FLUX.1 inpainting fine-tune: recipes and batch sizes on H200, 29 Nov 2026"
    assert titles["2026-11-29-h200-two-gpus-2"] == two


def test_a_title_begins_with_what_the_first_answer_is_of() -> None:
    """Regression: denoisers led the title of a report whose first answer was of a fine-tune, `1 more` in the title."""
    dataset = open_dataset(RESULTS / "2026-11-28-h200-breadth")
    dataset = replace(dataset, runs=dataset.runs.sort("workload").with_columns(coverage_pct=None))
    each = contents.make_report(dataset, TableBuilder(runs=dataset.runs), [], [])
    assert " inpainting fine-tune" in each.title.partition(",")[0]
    assert "lowest sample coverage: unknown;" in each.quality  # and not 0.0 % of runs without telemetry


def test_a_dataset_without_runs_has_a_title() -> None:
    """Regression: ` on no GPU`."""
    dataset = open_dataset(RESULTS / FLAGSHIP)
    dataset = replace(dataset, runs=dataset.runs.clear())
    assert contents.make_report(dataset, TableBuilder(runs=dataset.runs), [], []).title == "No run"


def test_an_index_shows_a_program_with_units(committed: Committed) -> None:
    """Regression: `46.9, 9.53`."""
    each, _ = committed["2026-11-23-h200-lora-sdxl"]
    (program,) = (section for section in each.answered if section.workload == "command")
    assert re.fullmatch(r"[\d,.]+ s and [\d,.]+ kJ( \(.* images/s\))?", program.best)
    (run,) = each.dataset.runs.filter(pl.col("workload") == "command").head(1).to_dicts()
    assert "None" not in base.run_title(run)


def test_every_dataset_has_an_answer(committed: Committed) -> None:
    for name, answer in ANSWERS.items():
        assert committed[name][0].answered[0].answer.startswith(answer)
    programs = committed["2026-11-23-h200-lora-sdxl"][0].answered
    assert [section.answer.partition(":")[0] for section in programs[:2]] == [
        "SD 1.5 inpainting fine-tune, adapters",
        "Take an H200, batch 16, recipe earlier_baseline",
    ], "below the title, which names both, the first names its work"
    assert re.match(r"dreambooth took [\d.]+ s and [\d.]+ kJ \([\d.]+ images/s\) on an H200", programs[-1].answer)
    for each, _ in committed.values():
        assert each.answered[0].best


def test_adapters_and_all_weights_are_different_work(committed: Committed) -> None:
    """Regression: `Take tuned_dit+attn_flash4`, which trains adapters, above `fsdp2` of all weights."""
    first, second = committed["2026-11-30-h200-two-gpus"][0].answered[:2]
    assert first.answer.startswith("FLUX.1 inpainting fine-tune, all weights: Take 2 H200, batch 4")
    assert (second.title, len(second.tables[0].rows)) == ("FLUX.1 inpainting fine-tune, adapters: what to take", 1)
    flux, whole = committed["2026-11-26-h200-flux"][0].answered
    assert flux.answer.startswith("FLUX.1 inpainting fine-tune, adapters: Take an H200, batch 8, recipe tuned_dit+fp8")
    assert whole.tables[0].rows[0][2] == "7.42"


def test_rows_of_denoisers_on_one_and_two_gpus_do_not_read_alike(committed: Committed) -> None:
    (patches,) = [
        each for each in committed["2026-11-30-h200-two-gpus"][0].answered if each.workload == "denoise_patch"
    ]
    brief = patches.tables[0].brief()
    assert [row[3] for row in brief.rows] == ["H200", "2 H200", "H200", "H200", "2 H200", "2 H200"]
    assert brief.columns[3] == "GPU"


def test_the_first_screen_has_at_most_five_rows_and_a_figure_of_every_run_that_it_is_about(
    committed: Committed,
) -> None:
    for name, (each, _) in committed.items():
        for section in each.answered:
            brief = section.tables[0].brief()
            # A ladder is whole, from its baseline to its last step, as in its figure.
            most = len(section.tables[0].rows) if section.kinds == ("ladder of levers",) else FIRST_ROWS
            assert 0 < len(brief.rows) <= most, name
            assert len(brief.columns) <= 8, name
    ladder, build = committed["2026-11-23-h200-ladder"]
    study = build.runs.filter("valid", pl.col("study_name") == "ladder")
    assert study.height == 18
    assert set(ladder.answered[0].figures[0].run_ids) == set(study["run_id"])


def test_the_flagship_is_not_tied_with_itself_under_another_name(committed: Committed) -> None:
    best = committed["2026-11-23-h100-h200"][0].answered[0]
    assert "tied" not in best.answer
    recipes = [row[0] for row in best.tables[0].rows]
    assert len(recipes) == len(set(recipes))
    assert not any("cached" in recipe for recipe in recipes)


def test_no_note_lists_runs_and_no_table_is_empty(committed: Committed) -> None:
    """Regression: the same footnote with run ids stood under five tables."""
    for each, build in committed.values():
        ids = build.runs["run_id"].to_list()
        for table in each.tables:
            assert table.rows
            named = sum(run_id in table.note for run_id in ids)
            assert named <= 2, table.id  # counters name the runs that they are of


def test_training_curves_count_by_their_own_validity(committed: Committed) -> None:
    """Regression: `losses` was cited with 0 of 6 runs valid and without a curve."""
    each, build = committed["2026-11-26-h200-losses"]
    assert not build.runs["valid"].any()
    section = each.answered[0]
    assert section.kinds == ("training curves",)
    assert section.figures[0].id == "fig-loss-curves"
    assert set(section.figures[0].run_ids) == set(build.runs["run_id"])
    assert "whether its rate is valid or not" in section.paragraphs[0]


def test_the_published_claims_of_med_ddpm_are_judged_as_they_are_worded(committed: Committed) -> None:
    """Regression: `overwhelmingly` agreed with 51 %, and a gain of 1.05e+05 times stood in the table."""
    tables = {table.id: table for table in committed["2026-11-23-h200-volumes"][0].tables}
    table = tables["volume3d-published"]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    shares = [row for row in rows if "all convolutions" in row["Measured"]]
    assert shares
    for row in shares:
        share = float(row["Measured"].rpartition(" ")[0].rpartition(" ")[2])
        assert row["Agrees"] == ("yes" if share >= 75 else "in part")
    assert not [row for row in rows if re.search(r"e\+\d|\d,\d{3}", row["Measured / published"])]


@pytest.mark.parametrize("name", NAMES)
def test_the_terminal_shows_the_answer_in_80_columns(
    committed: Committed, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    each, _ = committed[name]
    report.print_answer(each)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40 or name != FLAGSHIP
    pasted = ("Fastest: ", "Next run: ")
    assert [line for line in lines if len(line) > 80 and not line.startswith(pasted)] == []
    assert not re.search("\u00b7\\w", "".join(lines))  # regression: `H200 \u00b7baseline+`
    assert " ".join(lines).startswith(each.title[:60])
    assert each.answered[0].answer.replace(" ", "")[:100] in "".join(lines).replace(" ", "")
    # Each further answer says what it is of: `Take an H200, batch 64` could be of any of three models.
    assert all(section.title in lines for section in each.answered[1:])


def test_a_table_leaves_out_columns_before_it_cuts_one_off(
    committed: Committed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `GPU-h per million images` was `G`, `mil`, `im`, and a long name left no column for a result."""
    report.print_answer(committed["2026-11-25-h100-pipeline"][0])
    shown = capsys.readouterr().out
    assert re.search(r"\bmillion\b.*\bimages\b.*\b8\.61\b.*Too wide for this terminal: n, Cards\.", shown, re.DOTALL)
    report.print_answer(committed["2026-11-30-h200-items"][0])
    assert re.search(r"Volumes/s.*0\.0757", capsys.readouterr().out, re.DOTALL)


def test_the_fastest_recipe_is_named_with_the_data_that_its_caches_need(
    committed: Committed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `launch` refused the command: cache_image needs data=prepared."""
    report.print_answer(committed[FLAGSHIP][0])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Fastest: "))
    assert line == "Fastest: gpu=h200 batch=64 data=prepared data.root=/tmp/prepared 'recipe=[tuned_hopper]'"


def test_the_fastest_recipe_of_several_gpus_is_named_with_what_its_graph_needs(
    committed: Committed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `launch` refused the command."""
    report.print_answer(committed["2026-11-29-h200-two-gpus"][0])
    (line,) = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("Fastest: gpu=h200 batch=16 gpus=2")
    )
    assert "workload.warmup_steps=13" in line


def test_the_text_has_the_order_of_the_page(committed: Committed) -> None:
    each, _ = committed["2026-11-23-h200-lora-sdxl"]
    text = report.markdown(each)
    parts = [render.inline(section.answer) for section in each.answered]
    parts += [render.inline(each.quality)[:40], *(f"## {render.inline(section.title)}" for section in each.sections)]
    parts.append("## Method")
    places = [text.rindex(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize("name", [FLAGSHIP, *(pytest.param(name, marks=pytest.mark.faults) for name in OTHERS)])
def test_nothing_of_a_first_screen_is_off_a_screen_of_any_width(
    committed: Committed, name: str, page: Page, tmp_path: Path
) -> None:
    each, build = committed[name]
    file = tmp_path / "report.html"
    file.write_text(html(replace(each, folds=[]), build, ()))
    for width in WIDTHS:
        page.emulate(width=width)
        page.open(file)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        off = """[...document.querySelectorAll('.lead, .cards td, .cards th, figure svg')]
            .filter(part => part.checkVisibility() && part.getBoundingClientRect().right > innerWidth)
            .map(part => part.textContent.slice(0, 40))"""
        assert page.evaluate(off) == []
        lead = "document.querySelector('.lead').getBoundingClientRect().bottom"
        assert page.evaluate(lead) < 620, "on the first screen of a phone too"
        if width == WIDTHS[-1]:
            assert page.evaluate("document.querySelector('.cards').getBoundingClientRect().bottom") < 900


def test_the_leading_figures_fit_a_column_of_a_paper(committed: Committed, tmp_path: Path) -> None:
    """84 mm wide, text of 8 pt and more, colours that are told apart in grey, no scheme of the reader's."""
    names = write_for_paper(committed["2026-11-23-h100-h200"][0], tmp_path)
    assert names == ["fig-images_per_s.svg", "fig-images_per_s.pdf"]
    names = write_for_paper(committed["2026-11-21-h200-batches"][0], tmp_path)
    assert names == ["fig-images_per_s.svg", "fig-images_per_s.pdf", "fig-ladder-0.svg", "fig-ladder-0.pdf"]
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        if path.suffix == ".pdf":
            assert re.search(rb"/MediaBox ?\[ ?0 0 238\.1", content), "84 mm in points"
            continue
        root = ET.fromstring(content)
        assert root.get("width") == "84mm"
        points = 84 / 25.4 * 72 / float(root.attrib["viewBox"].split()[2])  # of a unit of the drawing
        sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)px"', content.decode())]
        assert min(sizes) * points >= 7.9
        assert b"var(" not in content


def test_the_first_colours_of_a_paper_differ_in_grey() -> None:
    grey = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in (bytes.fromhex(c[1:]) for c in svg.PAPER[:4])]
    assert min(b - a for a, b in pairwise(sorted(grey))) > 30
