"""The report: one page without external resources, in which text from jobs is escaped."""

from __future__ import annotations

import base64
import hashlib
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

from analysis.report.figures import svg, timeline
from inpaint_bench.cli import app
from inpaint_bench.core.schema import SCHEMA_VERSION
from tests.analysis.build import write_run, write_study

EVIL = "</td><script>alert(1)</script><img src=http://evil.example/x>"


class Page(HTMLParser):
    """Collects the resources that a browser would load, the ids, links and headings of a page."""

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
        """Collect ids, links and resources; overrides HTMLParser."""
        attributes = dict(attrs)
        self.tags.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "srcset", "poster", "data", "xlink:href") and v]
        self.loads += (
            [attributes["href"] or ""] if tag in ("link", "image", "use", "base") and "href" in attributes else []
        )
        self.ids += [attributes["id"] or ""] if "id" in attributes else []
        self.links += [attributes["href"] or ""] if tag == "a" and "href" in attributes else []
        self._open = tag if tag in ("h3", "title", "h1") else None
        if self._open:
            self.headings.append("")

    def handle_data(self, data: str) -> None:
        """Collect the text of headings; overrides HTMLParser."""
        if self._open:
            self.headings[-1] += data

    def handle_endtag(self, tag: str) -> None:
        """End a heading; overrides HTMLParser."""
        self._open = None if tag == self._open else self._open


def report_of(tmp_path: Path) -> tuple[str, Page]:
    """Merge the runs below `in` and write the report; return its page as text and parsed."""
    assert app.main(["merge", str(tmp_path / "in"), "-o", str(tmp_path / "ds")]) == 0
    assert app.main(["report", str(tmp_path / "ds"), "-o", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    return text, Page(text)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Page]:
    """Write the report of nine runs at two sites."""
    tmp_path = tmp_path_factory.mktemp("study")
    write_study(tmp_path / "in" / "grace", tmp_path / "in" / "delta")
    return tmp_path, *report_of(tmp_path)


def test_the_page_loads_no_resource(study: tuple[Path, str, Page]) -> None:
    _, text, page = study
    assert page.loads == []
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)  # ours, the only one that the policy allows
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert page.tags.count("script") == 1


def test_ids_are_unique_and_every_link_has_a_target(study: tuple[Path, str, Page]) -> None:
    tmp_path, _, page = study
    assert len(page.ids) == len(set(page.ids))
    inner = [link[1:] for link in page.links if link.startswith("#")]
    assert set(inner) <= set(page.ids)
    assert sum(name.startswith("run-") for name in page.ids) == 9
    for link in page.links:
        assert link.startswith("#") or (tmp_path / "out" / unquote(link)).exists(), link


def test_measured_runs_are_not_called_a_demonstration(study: tuple[Path, str, Page]) -> None:
    assert "Demonstration" not in study[1]


def test_markdown_csv_and_figures_are_written_beside_the_page(study: tuple[Path, str, Page]) -> None:
    out = study[0] / "out"
    assert "| A40 | 8 |" in (out / "report.md").read_text()
    assert pl.read_csv(out / "runs.csv").height == 9
    shown = set(re.findall(r'<figure id="([^"]+)">', study[1]))
    assert sum(name.startswith("timeline-") for name in shown) == 9
    for suffix in ("svg", "pdf"):
        assert {path.stem for path in (out / "figures").glob(f"*.{suffix}")} == shown
    text = (out / "figures" / "fig-images_per_s.svg").read_text()
    assert "prefers-color-scheme:dark" in text


def test_every_title_of_a_demonstration_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "in", "r-01", source="replay:a40-synthetic", demonstration=True)
    write_run(tmp_path / "in", "r-02", gpu="h200", site="delta")
    text, page = report_of(tmp_path)
    assert "Demonstration, not a measurement" in text
    assert "1 of 2 runs is a demonstration, 1 of them with telemetry replayed" in text
    assert "The telemetry of A40 is invented: a program made the recording" in text
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


def test_html_in_messages_and_ids_is_escaped(tmp_path: Path) -> None:
    write_run(tmp_path / "in" / "a", "r-01", status="failed", reason="app_error", message=EVIL)
    write_run(tmp_path / "in" / "b", "r-02", recipe=EVIL.replace("/", ""), site="<b>x")
    bad = tmp_path / "in" / "c" / "steps"
    bad.mkdir(parents=True)
    (bad / "<img src=x onerror=1>.parquet").write_text("no")
    text, page = report_of(tmp_path)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert page.loads == []
    assert "&lt;script&gt;" in text


def test_a_dataset_without_valid_runs_has_a_report(tmp_path: Path) -> None:
    write_run(tmp_path / "in", "r-01", status="failed", reason="oom_gpu", message="out of memory", windows=False)
    text, _ = report_of(tmp_path)
    assert "status failed (oom_gpu)" in text
    assert "No run is valid; status failed (oom_gpu): 1 run." in (tmp_path / "out" / "report.md").read_text()
    assert ">oom<" in text


def test_a_report_replaces_only_files_of_the_previous_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "in", "r-01")
    report_of(tmp_path)
    own_file = tmp_path / "out" / "figures" / "mine.svg"
    own_file.write_text("mine")
    (tmp_path / "in").rename(tmp_path / "old")
    shutil.rmtree(tmp_path / "ds")  # merge replaces no dataset of other runs
    write_run(tmp_path / "in", "r-02")
    report_of(tmp_path)
    assert own_file.read_text() == "mine"
    assert not (tmp_path / "out" / "figures" / "timeline-r-01.svg").exists()
    (tmp_path / "other" / "figures").mkdir(parents=True)
    (tmp_path / "other" / "report.md").write_text("mine")
    assert app.main(["report", str(tmp_path / "ds"), "-o", str(tmp_path / "other")]) == 2
    assert "is not empty and not the folder of a report" in capsys.readouterr().err
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


def test_the_page_shows_skipped_images_telemetry_and_runs_per_cell(tmp_path: Path) -> None:
    data = {"found": 10, "used": 9, "skipped": [{"file": "<b>a.jpg", "reason": "truncated"}]}
    write_run(tmp_path / "in", "r-01", data=data)
    write_run(tmp_path / "in", "r-02", data=data, workload_facts={"precision": "fp32"})
    text, _ = report_of(tmp_path)
    assert "Skipped files" in text
    assert "&lt;b&gt;a.jpg" in text
    assert "Telemetry: nvml" in text
    assert "MFU [%]" in text
    assert re.search(r"<dt>Runs per cell</dt><dd>1</dd>", text)
    assert "&lt;b>a.jpg" in (tmp_path / "out" / "report.md").read_text()


def test_one_timeline_per_cell_is_drawn_of_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_RUNS", 2)
    for number in range(3):
        write_run(tmp_path / "in", f"r-0{number}", batch=8 if number else 16)
    report_of(tmp_path)
    drawn = {path.name for path in (tmp_path / "out" / "figures").glob("timeline-*.svg")}
    assert drawn == {"timeline-r-00.svg", "timeline-r-01.svg"}


def test_a_timeline_shows_samples_of_its_own_card_near_its_windows() -> None:
    times = pl.Series([0, 10**9, 900 * 10**9])
    samples = pl.DataFrame({"t_mono_ns": [*times, 10**9], "gpu_uuid": ["GPU-a", "GPU-a", "GPU-a", "GPU-b"]})
    windows = pl.DataFrame({"t_start_mono_ns": [0], "t_end_mono_ns": [2 * 10**9]})
    own = timeline.own_samples(samples.lazy(), {"gpu_uuid": "GPU-a"}, windows).collect()
    assert own["t_mono_ns"].to_list() == [0, 10**9]


def test_binning_a_timeline_preserves_a_spike() -> None:
    samples = pl.DataFrame({"t_mono_ns": [i * 10**8 for i in range(10_000)], "v": [100.0] * 10_000})
    spiked = samples.with_columns(pl.when(pl.col("t_mono_ns") == 777 * 10**8).then(900.0).otherwise("v").alias("v"))
    bins = timeline.bin_samples(spiked.lazy(), "v", 0)
    assert bins.height == timeline.BINS
    assert bins["high"].max() == 900
    assert bins["low"].min() == 100


def test_palette_has_enough_contrast_in_both_schemes() -> None:
    def luminance(colour: str) -> float:
        """Return the relative luminance of WCAG."""
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for palette, background in ((svg.LIGHT, "#fcfbf8"), (svg.DARK, "#171715")):
        for colour in palette:
            dark, light = sorted((luminance(colour), luminance(background)))
            assert (light + 0.05) / (dark + 0.05) >= 3, (colour, background)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge", "{t}/file", "-o", "{t}/ds"], "is a file"),
        (["merge", "{t}/empty", "-o", "{t}/ds"], "No run directory below"),
        (["merge", "{t}/runs", "-o", "{t}/full"], "holds no dataset.json"),
        (["merge", "{t}/runs", "-o", "{t}/file"], "holds no dataset.json"),
        (["report", "{t}/runs", "-o", "{t}/out"], "is not a merged dataset"),
        (["report", "{t}/damaged", "-o", "{t}/out"], "not valid JSON"),
        (["report", "{t}/old", "-o", "{t}/out"], "schema version 0"),
        (["report", "{t}/hollow", "-o", "{t}/out"], "not a complete dataset"),
        (["report", "{t}/good", "-o", "{t}/good/out"], "inside the dataset"),
    ],
)
def test_user_errors_are_one_sentence_with_exit_code_2(
    study: tuple[Path, str, Page],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "runs").symlink_to(study[0] / "in")
    (tmp_path / "good").symlink_to(study[0] / "ds")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, text in (("full", None), ("damaged", "{"), ("old", '{"schema_version": 0}'), ("hollow", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("x" if text is None else "dataset.json")).write_text(text or "x")
    (tmp_path / "hollow" / "dataset.json").write_text(f'{{"schema_version": {SCHEMA_VERSION}}}')
    assert app.main([part.format(t=tmp_path) for part in arguments]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert message in output.err
    assert "Traceback" not in output.err
    assert not (tmp_path / "ds").exists()


def test_merge_lists_skipped_files_and_report_prints_the_page_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "in" / "a", "r-01")
    write_run(tmp_path / "in" / "b", "r-01", power_w=1.0)
    write_run(tmp_path / "in" / "c", "r-02")
    assert app.main(["merge", str(tmp_path / "in"), "-o", str(tmp_path / "ds")]) == 0
    assert "WARNING: skipped [conflict]" in capsys.readouterr().err
    assert app.main(["report", str(tmp_path / "ds"), "-o", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    assert "CONFLICT" in out
    headings = ["SD 1.5 ", "CONFLICT", "Take an A40", "Fastest: gpu=a40", "Next run: ", "1 of 2 runs is valid"]
    places = [next(at for at, line in enumerate(out.splitlines()) if line.startswith(heading)) for heading in headings]
    assert places == sorted(places)


def test_a_folder_of_datasets_gets_an_index_with_a_row_and_a_report_each(
    study: tuple[Path, str, Page], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs", "r-1", gpu="h200", steps_per_s=30.0)
    datasets, out = tmp_path / "datasets", tmp_path / "out"
    assert app.main(["merge", str(tmp_path / "runs"), "-o", str(datasets / "one & two")]) == 0
    shutil.copytree(study[0] / "ds", datasets / "study")
    (datasets / "notes").mkdir()
    for _ in ("first", "again"):
        capsys.readouterr()
        assert app.main(["report", str(datasets), "-o", str(out), "--export", "none"]) == 0
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "report 1 of 3: notes",
        "report 2 of 3: one & two",
        "report 3 of 3: study",
        f"Passed over: {datasets / 'notes'} is not a merged dataset (no dataset.json); use `inpaint-bench merge`.",
    ]
    assert output.out.splitlines()[-1] == f"index: {out / 'index.html'}"
    text = (out / "index.html").read_text()
    index = Page(text)
    assert sorted(map(unquote, index.links)) == ["one & two/report.html", "study/report.html"]
    for link in index.links:
        assert (out / unquote(link)).is_file()
    assert "240\u00a0images/s" in text
    assert "Passed over: " in text
    assert index.loads == []
    assert "script" not in index.tags


@pytest.mark.parametrize("option", [["--json"], ["--figures", "f"], ["--compare", "{ds}"]])
def test_an_index_refuses_what_is_of_one_dataset(
    study: tuple[Path, str, Page], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "study").symlink_to(study[0] / "ds")
    more = [part.format(ds=study[0] / "ds") for part in option]
    assert app.main(["report", str(tmp_path / "all"), "-o", str(tmp_path / "out"), *more]) == 2
    assert "holds several datasets; give one of them for" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_figures_for_a_paper_are_written_into_a_folder_of_the_users(
    study: tuple[Path, str, Page], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper = tmp_path / "paper"
    command = ["report", str(study[0] / "ds"), "-o", str(tmp_path / "out"), "--export", "none", "--figures"]
    assert app.main([*command, str(paper)]) == 0
    assert "figures: " in capsys.readouterr().out
    assert {path.name for path in paper.iterdir()} == {"fig-images_per_s.pdf", "fig-images_per_s.svg"}
    (tmp_path / "file").write_text("mine")
    assert app.main([*command, str(tmp_path / "file")]) == 2
    assert "is not a folder; give a folder for the figures" in capsys.readouterr().err


def test_a_report_into_a_closed_pipe_has_all_its_files(study: tuple[Path, str, Page], tmp_path: Path) -> None:
    """Regression: `report | head` wrote nothing, because the tables were printed first."""
    command = [sys.executable, "-m", "inpaint_bench", "report", str(study[0] / "ds"), "-o", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        assert process.wait() == 141
    assert (tmp_path / "out" / "report.html").read_text().endswith("</html>")
    assert (tmp_path / "out" / "figures" / "fig-images_per_s.svg").exists()


def test_a_long_message_is_shortened_in_tables_and_complete_in_csv(tmp_path: Path) -> None:
    message = "CUDA out of memory. " * 20
    write_run(tmp_path / "in", "r-01", status="failed", workload_facts={}, windows=False, message=message.strip())
    text, _ = report_of(tmp_path)
    assert message.strip() not in text
    assert "CUDA out of memory. CUDA out of memory." in text
    assert "are complete in runs.csv" in text
    assert pl.read_csv(tmp_path / "out" / "runs.csv")["message"][0] == message.strip()


def test_analysis_imports_neither_torch_nor_hydra_nor_diffusers() -> None:
    code = (
        "import sys, analysis.report.report, analysis.merge, vl_convert\n"
        "heavy = {'torch', 'hydra', 'diffusers', 'submitit'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
