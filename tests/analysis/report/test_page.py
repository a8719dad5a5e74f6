"""The page in a real browser: readable in both colour schemes, wide and narrow, with few runs and with many."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis.report.report import write_report
from inpaint_bench.core import schema, seal
from tests.analysis.build import rewrite_json
from tests.browser import Page
from tests.browser.chromium import LOCAL

WIDE, NARROW = 1400, 390
PROBE = Path(__file__).with_name("page_probe.js").read_text()
MANY = 900


@pytest.fixture(scope="module")
def few(whole_report: Path) -> Path:
    """Return the page with few runs."""
    return whole_report


@pytest.fixture(scope="module")
def many(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of 900 runs in six recipes: copies of nine, which alone have samples."""
    folder = tmp_path_factory.mktemp("many")
    shutil.copytree(few.parents[1] / "ds", folder / "ds")
    runs = pl.read_parquet(folder / "ds" / schema.RUNS).filter(pl.col("run_id").str.starts_with("r-01k"))
    recipes = ["baseline", "tf32", "compile", "adamw_fused", "channels_last", "tuned"]
    copies = [
        runs.with_columns(
            pl.col("run_id") + f"-{seed}" if seed else "run_id",
            pl.lit(recipes[seed % len(recipes)]).alias("recipe"),
            pl.lit(seed, runs.schema["seed"]).alias("seed"),
            pl.lit(f"p-{seed:03d}").alias("point"),
        )
        for seed in range(MANY // runs.height)
    ]
    pl.concat(copies).write_parquet(folder / "ds" / schema.RUNS)
    rewrite_json(folder / "ds", schema.DATASET, lambda metadata: seal.seal(metadata, folder / "ds"))
    return write_report(folder / "ds", folder / "out")


@pytest.fixture(params=["few", pytest.param("many", marks=pytest.mark.faults)])
def report(request: pytest.FixtureRequest) -> Path:
    """Return the page with few or with many runs."""
    path: Path = request.getfixturevalue(request.param)
    return path


def expand(page: Page) -> None:
    """Open every collapsed part of the page."""
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true })")


@pytest.mark.parametrize(
    ("report", "width", "scheme"),
    [
        *(("few", width, scheme) for width in (WIDE, NARROW) for scheme in ("light", "dark")),
        pytest.param("many", WIDE, "light", marks=pytest.mark.faults),
        pytest.param("many", NARROW, "dark", marks=pytest.mark.faults),
    ],
    indirect=["report"],
)
def test_page_has_no_overflow_overlap_low_contrast_or_dead_links(
    page: Page, report: Path, width: int, scheme: str
) -> None:
    """Check the page collapsed and expanded; `page_probe.js` defines each problem."""
    page.emulate(width=width, scheme=scheme)
    page.open(report)
    for texts, figures in ((30, 1), (200, 15)):  # collapsed, expanded
        problems = page.evaluate(PROBE)
        counted = problems.pop("counted")
        assert {name: list(texts) for name, texts in problems.items() if texts} == {}
        assert counted["texts"] > texts
        assert counted["figures"] >= figures
        expand(page)


def test_page_makes_no_request_and_logs_no_error(page: Page, report: Path) -> None:
    page.open(report)
    expand(page)
    page.evaluate("new Promise(done => setTimeout(done, 200))")
    page.collect()
    assert [url for url in page.requests if not url.startswith("data:")] == [report.as_uri()]
    assert page.complaints == []


def test_probe_and_browser_detect_a_faulty_page(page: Page, few: Path, tmp_path: Path) -> None:
    """The checks above can fail: this page has every fault that they detect."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        """<!doctype html><html><body><main><p style="color:#aaa">faint</p><a href="#nowhere">dead</a>
        <div style="width:3000px">wide</div><img src="http://127.0.0.1:9/x.png">
        <figure id="f"><svg class="fig" viewBox="0 0 99 99" width="99" aria-label="two words">
        <text x="5" y="20">one word</text><text x="9" y="20">another</text></svg></figure>
        <script>console.error("oh")</script></main></body></html>"""
    )
    page.open(bad)
    problems = page.evaluate(PROBE)
    assert [name for name, texts in problems.items() if not texts] == []
    page.collect()
    assert [url for url in page.requests if not url.startswith(LOCAL)] == ["http://127.0.0.1:9/x.png"]
    assert "oh" in page.complaints


def test_page_and_figures_follow_the_readers_colour_scheme(page: Page, few: Path) -> None:
    script = """[getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('svg.fig text')).fill]"""
    colours: dict[str, Any] = {}
    for scheme in ("light", "dark"):
        page.emulate(scheme=scheme)
        page.open(few)
        colours[scheme] = page.evaluate(script)
    assert colours["light"] == ["rgb(252, 251, 248)", "rgb(28, 28, 26)"]
    assert colours["dark"] == ["rgb(23, 23, 21)", "rgb(236, 234, 228)"]


def test_the_page_begins_with_the_answer_and_folds_everything_else(page: Page, few: Path) -> None:
    page.open(few)
    visible = """[...document.querySelectorAll('main h2, main .lead, main .quality, main table, main figure')]
        .filter(part => part.checkVisibility()).map(part => part.className || part.tagName)"""
    shown = page.evaluate(visible)
    assert shown[:4] == ["lead", "cards", "FIGURE", "note quality"]
    assert set(shown) <= {"lead", "cards", "FIGURE", "note quality", "H2"}
    heads = page.evaluate("[...document.querySelectorAll('summary h2')].map(head => head.textContent)")
    assert heads[0] == "Every cell: speed, energy, temperature and memory"
    assert heads[-4:] == ["Timelines", "Runs", "Environment", "Method"]


def test_no_column_is_cut_off_on_a_wide_screen_and_no_answer_on_a_narrow_one(page: Page, report: Path) -> None:
    cut = """[...document.querySelectorAll('SELECTOR')].filter(box => box.scrollWidth > box.clientWidth + 1)
        .map(box => box.getAttribute('aria-label'))"""
    page.open(report)
    top, height = page.evaluate("[document.querySelector('.cards').getBoundingClientRect().top, innerHeight]")
    assert top < height / 2
    expand(page)
    assert page.evaluate(cut.replace("SELECTOR", ".scroll")) == []
    page.emulate(width=NARROW)
    assert page.evaluate("Math.max(...[...document.querySelectorAll('.cards td, .cards th, .lead')]"
                         ".map(cell => cell.getBoundingClientRect().right))") <= NARROW  # fmt: skip


def test_a_table_is_sorted_by_a_click_on_a_heading_and_filtered_by_words(page: Page, few: Path) -> None:
    page.open(few)
    expand(page)
    cells = """[...document.querySelectorAll('#throughput tbody tr')].filter(row => !row.hidden)
        .map(row => row.cells[COLUMN].textContent.trim())"""
    heads = page.evaluate("[...document.querySelectorAll('#throughput th')].map(head => head.textContent)")
    rates, gpus = (cells.replace("COLUMN", str(heads.index(name))) for name in ("Images/s", "GPU"))
    for order in (False, True):
        page.evaluate(f"document.querySelectorAll('#throughput th button')[{heads.index('Images/s')}].click()")
        values = [float(text.split(" ")[0].split("(")[0].replace(",", "")) for text in page.evaluate(rates)]
        assert values == sorted(values, reverse=order)
        assert len(set(values)) > 1
    page.evaluate("""(() => { const field = document.querySelector('#throughput input'); field.value = 'h200';
        field.dispatchEvent(new Event('input')); })()""")
    assert set(page.evaluate(gpus)) == {"H200"}


def test_every_number_of_the_first_screen_leads_to_a_run_behind_it(page: Page, few: Path) -> None:
    page.open(few)
    links = page.evaluate("[...document.querySelectorAll('.cards td a')].map(link => link.hash)")
    assert links
    for link in dict.fromkeys(links):
        card = page.evaluate(f"document.getElementById('{link[1:]}').textContent")
        assert "Overrides" in card
        assert "commit" in card
        assert "J/image" in card


def test_every_image_has_a_label_for_screen_readers(page: Page, few: Path) -> None:
    page.open(few)
    expand(page)
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    images = [node for node in nodes if not node["ignored"] and node["role"]["value"] in ("image", "img")]
    assert len(images) == page.evaluate("document.querySelectorAll('svg.fig, img').length")
    assert all(len(node["name"]["value"]) > 5 for node in images)


@pytest.mark.faults
def test_a_fold_with_a_long_table_opens_on_a_click(page: Page, many: Path) -> None:
    page.open(many)
    row = "document.querySelector('#runs tbody tr:nth-child(900)')"
    assert page.evaluate(f"{row}.checkVisibility()") is False
    spot = page.evaluate(
        """(() => { const fold = document.querySelector('#runs').closest('details').querySelector('summary');
        fold.scrollIntoView({block: 'center'});
        const box = fold.getBoundingClientRect(); return [box.x + 20, box.y + box.height / 2]; })()"""
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, x=spot[0], y=spot[1], button="left", clickCount=1)
    assert page.evaluate(f"{row}.checkVisibility()") is True


def test_a_link_to_a_run_expands_the_list_it_is_in(page: Page, few: Path) -> None:
    page.open(few)
    target = "[...document.querySelectorAll('.run')].at(-1)"
    assert page.evaluate(f"{target}.checkVisibility()") is False
    page.evaluate(f"location.hash = {target}.id")
    assert page.evaluate(f"{target}.checkVisibility()") is True
    top, height = page.evaluate(f"[Math.round({target}.getBoundingClientRect().top), innerHeight]")
    assert 0 <= top < height


def test_a_wide_table_scrolls_by_keyboard_within_its_box(page: Page, few: Path) -> None:
    page.emulate(width=NARROW)
    page.open(few)
    expand(page)
    box = "document.querySelector('#throughput .scroll')"
    inside, outside = page.evaluate(f"[{box}.scrollWidth, {box}.clientWidth]")
    assert inside > outside
    page.evaluate(f"{box}.focus({{preventScroll: false}})")
    for kind in ("rawKeyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    page.evaluate("new Promise(done => setTimeout(done, 300))")
    assert page.evaluate(f"{box}.scrollLeft") > 0
    assert page.evaluate("scrollX") == 0
