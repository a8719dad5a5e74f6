"""The page in a real browser: readable in both schemes, wide and narrow, with few runs and with many."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis.report.report import write_report
from inpaint_bench.core import schema
from tests.browser import Browser, Page, packages
from tests.browser.chromium import LOCAL
from tests.testbed.errors import PackagesError

REQUIRE = "INPAINT_BENCH_REQUIRE_BROWSER"  # 1: fail where there is none
WIDE, NARROW = 1400, 390
PROBE = Path(__file__).with_name("page_probe.js").read_text()
MANY = 900


@pytest.fixture(scope="session")  # before the reports: no browser, no work for nothing
def browser() -> Iterator[Browser]:
    try:
        program = packages.require()
    except PackagesError as error:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, yet: {error}", pytrace=False)
        pytest.skip(str(error))
    with Browser(program) as running:
        yield running


@pytest.fixture(scope="module")
def few(whole_report: Path) -> Path:
    return whole_report


@pytest.fixture(scope="module")
def many(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """900 runs in six recipes: copies of the nine, of which only those have samples."""
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
    return write_report(folder / "ds", folder / "out")


@pytest.fixture(params=["few", "many"])
def report(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.page()
    yield opened
    opened.close()


def unfold(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")


@pytest.mark.parametrize(
    ("report", "width", "scheme"),
    [
        *(("few", width, scheme) for width in (WIDE, NARROW) for scheme in ("light", "dark")),
        ("many", WIDE, "light"),
        ("many", NARROW, "dark"),
    ],
    indirect=["report"],
)
def test_nothing_overflows_overlaps_fades_or_leads_nowhere(page: Page, report: Path, width: int, scheme: str) -> None:
    """Folded and unfolded; `page_probe.js` says what each word means."""
    page.look(width=width, scheme=scheme)
    page.open(report)
    for _ in ("folded", "unfolded"):
        found = page.evaluate(PROBE)
        counted = found.pop("counted")
        assert {name: list(texts) for name, texts in found.items() if texts} == {}
        assert counted["texts"] > 200
        assert counted["figures"] > 15
        unfold(page)


def test_the_page_asks_the_network_for_nothing_and_complains_of_nothing(page: Page, report: Path) -> None:
    page.open(report)
    unfold(page)
    page.evaluate("new Promise(done => setTimeout(done, 200))")
    page.collect()
    assert [url for url in page.requests if not url.startswith("data:")] == [report.as_uri()]
    assert page.complaints == []


def test_the_probe_and_the_browser_see_what_is_wrong(page: Page, few: Path, tmp_path: Path) -> None:
    """The checks above can fail: a page with every fault that they look for."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        """<!doctype html><html><body><main><p style="color:#aaa">faint</p><a href="#nowhere">dead</a>
        <div style="width:3000px">wide</div><img src="http://127.0.0.1:9/x.png">
        <figure id="f"><svg class="fig" viewBox="0 0 99 99" width="99" aria-label="two words">
        <text x="5" y="20">one word</text><text x="9" y="20">another</text></svg></figure>
        <script>console.error("oh")</script></main></body></html>"""
    )
    page.open(bad)
    found = page.evaluate(PROBE)
    empty = [name for name, texts in found.items() if not texts]
    assert empty == []
    page.collect()
    assert [url for url in page.requests if not url.startswith(LOCAL)] == ["http://127.0.0.1:9/x.png"]
    assert "oh" in page.complaints


def test_the_scheme_of_the_reader_decides_page_and_figures(page: Page, few: Path) -> None:
    script = """[getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('svg.fig text')).fill]"""
    seen: dict[str, Any] = {}
    for scheme in ("light", "dark"):
        page.look(scheme=scheme)
        page.open(few)
        seen[scheme] = page.evaluate(script)
    assert seen["light"] == ["rgb(252, 251, 248)", "rgb(28, 28, 26)"]
    assert seen["dark"] == ["rgb(23, 23, 21)", "rgb(236, 234, 228)"]


@pytest.mark.parametrize(
    ("root", "words"), [(False, "only root may install chromium-headless-shell"), (True, "no apt-get here")]
)
def test_a_machine_without_a_browser_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, root: bool, words: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("os.geteuid", lambda: 0 if root else 1000)
    with pytest.raises(PackagesError, match=r"NO BROWSER: .*python -m tests\.browser install"):
        packages.require()
    with pytest.raises(PackagesError, match=words):
        packages.install()


def test_data_quality_is_the_first_section(page: Page, few: Path) -> None:
    page.open(few)
    assert page.evaluate("document.querySelector('main h2').textContent") == "Data quality"


def test_every_picture_has_a_name_for_a_screen_reader(page: Page, few: Path) -> None:
    page.open(few)
    unfold(page)
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    images = [node for node in nodes if not node["ignored"] and node["role"]["value"] in ("image", "img")]
    assert len(images) == page.evaluate("document.querySelectorAll('svg.fig, img').length")
    assert all(len(node["name"]["value"]) > 5 for node in images)


def test_a_long_table_unfolds_on_a_click(page: Page, many: Path) -> None:
    page.open(many)
    row = "document.querySelector('#runs tbody tr:nth-child(900)')"
    assert page.evaluate(f"{row}.checkVisibility()") is False
    spot = page.evaluate(
        """(() => { const fold = document.querySelector('#runs summary'); fold.scrollIntoView({block: 'center'});
        const box = fold.getBoundingClientRect(); return [box.x + 20, box.y + box.height / 2]; })()"""
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, x=spot[0], y=spot[1], button="left", clickCount=1)
    assert page.evaluate(f"{row}.checkVisibility()") is True


def test_a_link_to_a_run_opens_what_folds_it_away(page: Page, many: Path) -> None:
    page.open(many)
    target = "document.querySelector('.run:last-of-type')"
    assert page.evaluate(f"{target}.checkVisibility()") is False
    page.evaluate(f"location.hash = {target}.id")
    assert page.evaluate(f"{target}.checkVisibility()") is True
    top, height = page.evaluate(f"[{target}.getBoundingClientRect().top, innerHeight]")
    assert 0 <= top < height


def test_a_wide_table_scrolls_inside_its_box_and_by_keyboard(page: Page, few: Path) -> None:
    page.look(width=NARROW)
    page.open(few)
    box = "document.querySelector('#throughput .scroll')"
    inside, outside = page.evaluate(f"[{box}.scrollWidth, {box}.clientWidth]")
    assert inside > outside
    page.evaluate(f"{box}.focus({{preventScroll: false}})")
    for kind in ("rawKeyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    page.evaluate("new Promise(done => setTimeout(done, 300))")
    assert page.evaluate(f"{box}.scrollLeft") > 0
    assert page.evaluate("scrollX") == 0
