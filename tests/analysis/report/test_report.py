"""The report: one page that needs nothing, says what it is, and cannot be written into by a job's message."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import polars as pl
import pytest
from rich.console import Console

from analysis.dataset import open_dataset
from analysis.report import render
from analysis.report.figures import svg, timeline
from analysis.report.report import content
from inpaint_bench.cli import app
from tests.analysis.build import write_run, write_study

EVIL = "</td><script>alert(1)</script><img src=http://evil.example/x>"


class Page(HTMLParser):
    """Every resource that a browser would load, every id, every link inside the page, every title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.headings: list[str] = []
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "srcset", "poster", "data", "xlink:href") and v]
        self.loads += [found["href"] or ""] if tag in ("link", "image", "use", "base") and "href" in found else []
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found["href"] or ""] if tag == "a" and "href" in found else []
        self._open = tag if tag in ("h3", "title", "h1") else None
        if self._open:
            self.headings.append("")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.headings[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._open = None if tag == self._open else self._open


def report_of(tmp_path: Path) -> tuple[str, Page]:
    assert app.main(["merge", str(tmp_path / "in"), "-o", str(tmp_path / "ds")]) == 0
    assert app.main(["report", str(tmp_path / "ds"), "-o", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    return text, Page(text)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Page]:
    tmp_path = tmp_path_factory.mktemp("study")
    write_study(tmp_path / "in" / "grace", tmp_path / "in" / "delta")
    return tmp_path, *report_of(tmp_path)


def test_the_page_loads_nothing(study: tuple[Path, str, Page]) -> None:
    _, text, page = study
    assert page.loads == []
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert "script" not in page.tags
    assert "default-src 'none'" in text


def test_ids_are_unique_and_every_inner_link_has_its_target(study: tuple[Path, str, Page]) -> None:
    tmp_path, _, page = study
    assert len(page.ids) == len(set(page.ids))
    inner = [link[1:] for link in page.links if link.startswith("#")]
    assert set(inner) <= set(page.ids)
    assert sum(name.startswith("run-") for name in page.ids) == 9
    for link in page.links:
        assert link.startswith("#") or (tmp_path / "out" / unquote(link)).exists(), link


def test_a_real_study_is_not_called_a_demonstration(study: tuple[Path, str, Page]) -> None:
    assert "Demonstration" not in study[1]


def test_the_report_leaves_markdown_csv_and_figures_beside_the_page(study: tuple[Path, str, Page]) -> None:
    out = study[0] / "out"
    assert "| A40 | 8 |" in (out / "report.md").read_text()
    assert pl.read_csv(out / "runs.csv").height == 9
    shown = set(re.findall(r'<figure id="([^"]+)">', study[1]))
    assert sum(name.startswith("timeline-") for name in shown) == 9
    for suffix in ("svg", "pdf"):
        assert {path.stem for path in (out / "figures").glob(f"*.{suffix}")} == shown
    text = (out / "figures" / "fig-runtime_h.svg").read_text()
    assert "projected" in text
    assert "prefers-color-scheme:dark" in text


def test_every_figure_and_table_title_of_a_demonstration_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "in", "r-01", source="replay:a40-synthetic", demonstration=True)
    write_run(tmp_path / "in", "r-02", gpu="h200", site="delta")
    text, page = report_of(tmp_path)
    assert "Demonstration, not a measurement" in text
    assert "1 of 2 runs are demonstrations, 1 of them with telemetry replayed" in text
    labels = re.findall(r'<svg class="fig"[^>]*aria-label="([^"]*)"', text)
    assert len(labels) == text.count("<figure id=")
    assert all(title.startswith("Demonstration: ") for title in (*labels, *page.headings)), page.headings
    for path in (tmp_path / "out" / "figures").glob("*.svg"):
        assert "Demonstration: " in re.sub(r'aria-label="[^"]*"', "", path.read_text())
    for path in (tmp_path / "out" / "tables").glob("*.csv"):
        assert path.read_text().partition("\n")[0].endswith(",Demonstration")
    for path in (tmp_path / "out" / "tables").glob("*.tex"):
        assert r"\caption{Demonstration: " in path.read_text()
    titles = re.findall(r"^#+ (.*)$", (tmp_path / "out" / "report.md").read_text(), re.MULTILINE)
    assert all(title.startswith("Demonstration: ") for title in titles)


def test_html_in_a_message_or_an_id_is_text(tmp_path: Path) -> None:
    write_run(tmp_path / "in" / "a", "r-01", status="failed", reason="app_error", message=EVIL)
    write_run(tmp_path / "in" / "b", "r-02", recipe=EVIL.replace("/", ""), site="<b>x")
    bad = tmp_path / "in" / "c" / "steps"
    bad.mkdir(parents=True)
    (bad / "<img src=x onerror=1>.parquet").write_text("no")
    text, page = report_of(tmp_path)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.loads == []
    assert "&lt;script&gt;" in text


def test_a_dataset_without_a_valid_run_still_has_a_report(tmp_path: Path) -> None:
    write_run(tmp_path / "in", "r-01", status="failed", reason="oom_gpu", message="out of memory", windows=False)
    text, _ = report_of(tmp_path)
    assert "status failed (oom_gpu)" in text
    assert "No valid run to draw" in text
    assert ">oom<" in text


def test_a_report_replaces_only_what_the_last_report_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "in", "r-01")
    report_of(tmp_path)
    mine = tmp_path / "out" / "figures" / "mine.svg"
    mine.write_text("mine")
    (tmp_path / "in").rename(tmp_path / "old")
    write_run(tmp_path / "in", "r-02")
    report_of(tmp_path)
    assert mine.read_text() == "mine"
    assert not (tmp_path / "out" / "figures" / "timeline-r-01.svg").exists()
    (tmp_path / "other" / "figures").mkdir(parents=True)
    (tmp_path / "other" / "report.md").write_text("mine")
    assert app.main(["report", str(tmp_path / "ds"), "-o", str(tmp_path / "other")]) == 2
    assert "holds no report of ours" in capsys.readouterr().err
    assert [p.name for p in sorted((tmp_path / "other").iterdir())] == ["figures", "report.md"]


def test_a_marker_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "in", "r-01")
    report_of(tmp_path)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "out" / ".inpaint-report").write_text(
        json.dumps({"files": ["../outside", str(outside), "report.html", "report.md", "runs.csv"]})
    )
    for folder in ("figures", "tables"):
        shutil.rmtree(tmp_path / "out" / folder)
    report_of(tmp_path)
    assert outside.read_text() == "mine"


def test_photographs_telemetry_and_runs_per_cell_are_on_the_page(tmp_path: Path) -> None:
    data = {"found": 10, "used": 9, "skipped": [{"file": "<b>a.jpg", "reason": "truncated"}]}
    write_run(tmp_path / "in", "r-01", data=data)
    write_run(tmp_path / "in", "r-02", data=data, workload_facts={"precision": "fp32"})
    text, _ = report_of(tmp_path)
    assert "Photographs skipped" in text
    assert "&lt;b&gt;a.jpg" in text
    assert "Telemetry: nvml" in text
    assert "MFU [%]" in text
    assert re.search(r"<dt>Runs per cell</dt><dd>1</dd>", text)
    assert "&lt;b>a.jpg" in (tmp_path / "out" / "report.md").read_text()


def test_of_very_many_runs_one_timeline_per_cell_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MANY", 2)
    for number in range(3):
        write_run(tmp_path / "in", f"r-0{number}", batch=8 if number else 16)
    report_of(tmp_path)
    drawn = {path.name for path in (tmp_path / "out" / "figures").glob("timeline-*.svg")}
    assert drawn == {"timeline-r-00.svg", "timeline-r-01.svg"}


def test_a_timeline_shows_the_runs_own_card_near_its_windows() -> None:
    times = pl.Series([0, 10**9, 900 * 10**9])
    samples = pl.DataFrame({"t_mono_ns": [*times, 10**9], "gpu_uuid": ["GPU-a", "GPU-a", "GPU-a", "GPU-b"]})
    window = {"t_start_mono_ns": 0, "t_end_mono_ns": 2 * 10**9}
    kept = timeline._own(samples.lazy(), {"gpu_uuid": "GPU-a"}, [window]).collect()
    assert kept["t_mono_ns"].to_list() == [0, 10**9]


def test_a_timeline_is_thinned_without_losing_a_spike() -> None:
    samples = pl.DataFrame({"t_mono_ns": [i * 10**8 for i in range(10_000)], "v": [100.0] * 10_000})
    spiked = samples.with_columns(pl.when(pl.col("t_mono_ns") == 777 * 10**8).then(900.0).otherwise("v").alias("v"))
    thin = timeline.thin(spiked.lazy(), "v", 0)
    assert thin.height == timeline.BINS
    assert thin["high"].max() == 900
    assert thin["low"].min() == 100


def test_the_palette_is_readable_on_both_grounds() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for palette, ground in ((svg.LIGHT, "#fcfbf8"), (svg.DARK, "#171715")):
        for colour in palette:
            dark, light = sorted((luminance(colour), luminance(ground)))
            assert (light + 0.05) / (dark + 0.05) >= 3, (colour, ground)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["merge", "{t}/nowhere", "-o", "{t}/ds"], "does not exist"),
        (["merge", "{t}/file", "-o", "{t}/ds"], "is not a folder"),
        (["merge", "{t}/empty", "-o", "{t}/ds"], "No run directory below"),
        (["merge", "{t}/runs", "-o", "{t}/full"], "is not a dataset"),
        (["merge", "{t}/runs", "-o", "{t}/file"], "is not a folder"),
        (["report", "{t}/nowhere", "-o", "{t}/out"], "does not exist"),
        (["report", "{t}/runs", "-o", "{t}/out"], "is not a merged dataset"),
        (["report", "{t}/damaged", "-o", "{t}/out"], "not valid JSON"),
        (["report", "{t}/old", "-o", "{t}/out"], "schema version 0"),
        (["report", "{t}/hollow", "-o", "{t}/out"], "not a whole dataset"),
        (["report", "{t}/good", "-o", "{t}/good/out"], "inside the dataset"),
    ],
)
def test_a_users_mistake_is_a_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    write_run(tmp_path / "runs")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, text in (("full", None), ("damaged", "{"), ("old", '{"schema_version": 0}'), ("hollow", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("x" if text is None else "dataset.json")).write_text(text or "x")
    (tmp_path / "hollow" / "dataset.json").write_text('{"schema_version": 1}')
    app.main(["merge", str(tmp_path / "runs"), "-o", str(tmp_path / "good")])
    capsys.readouterr()
    assert app.main([part.format(t=tmp_path) for part in arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert words in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "ds").exists()


def test_merge_says_what_it_left_out_and_report_ends_with_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "in" / "a", "r-01")
    write_run(tmp_path / "in" / "b", "r-01", power_w=1.0)
    assert app.main(["merge", str(tmp_path / "in"), "-o", str(tmp_path / "ds")]) == 0
    assert "WARNING: skipped [conflict]" in capsys.readouterr().err
    assert app.main(["report", str(tmp_path / "ds"), "-o", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    assert "CONFLICT" in out
    said = ["1 of 1 runs count. Fastest:", "Best batch per GPU", "Throughput", "Runs", "Files left out"]
    places = [next(at for at, line in enumerate(out.splitlines()) if line.startswith(words)) for words in said]
    assert places == sorted(places), "the answer first, the books last"


@pytest.mark.parametrize("width", [100, 160])
def test_a_table_too_wide_for_the_terminal_goes_on_below_behind_its_keys(
    width: int, study: tuple[Path, str, Page]
) -> None:
    """Regression: `utilisati` and `on [%]` stood on two lines, and a recipe on five."""
    shown = content(open_dataset(study[0] / "ds"))
    out = io.StringIO()
    render.to_terminal(shown.results[0], Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert {word for name in shown.results[0].columns for word in name.split()} <= words
    heads = [line for line in lines if line.lstrip().startswith("Site")]
    assert len(heads) > (width == 100)
    assert all("Recipe" in line for line in heads)


def test_a_long_message_is_cut_in_the_tables_and_whole_in_the_csv(tmp_path: Path) -> None:
    message = "CUDA out of memory. " * 20
    write_run(tmp_path / "in", "r-01", status="failed", workload_facts={}, windows=False, message=message.strip())
    text, _ = report_of(tmp_path)
    assert message.strip() not in text
    assert "CUDA out of memory. CUDA out of memory." in text
    assert "runs.csv has them whole" in text
    assert pl.read_csv(tmp_path / "out" / "runs.csv")["message"][0] == message.strip()


def test_analysis_imports_neither_torch_nor_hydra_nor_diffusers() -> None:
    code = (
        "import sys, analysis.report.report, analysis.merge, vl_convert\n"
        "heavy = {'torch', 'hydra', 'diffusers', 'submitit'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
