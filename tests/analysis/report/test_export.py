"""The exported files: tables as CSV and LaTeX, figures as PDF and PNG."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from PIL import Image

from analysis.report import render
from analysis.report.estimate import Estimate
from analysis.report.report import parse_formats
from analysis.report.tables import Table
from analysis.units import number
from inpaint_bench.cli import app
from tests.analysis.conftest import HOSTILE
from tests.testbed.errors import PackagesError
from tests.testbed.packages import apt_get

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"

MEAN = Estimate(1234.5678, 1200.25, 1268.75, form=number)
LOW_N = Estimate(0.5, form=number, remarks=["n = 2"])
GAIN = Estimate(-3.21, -7.0, 0.5, form=lambda v: f"{v:+.1f}", unit="%", verdict="tie")


def table(*rows: list[str], columns: tuple[str, ...] = ("Name", "Images/s [1/s]", "Change"), note: str = "") -> Table:
    """Make a table whose first column is text."""
    return Table(
        id="some_table",
        title="Some 5 % title",
        columns=list(columns),
        rows=list(rows),
        text_columns=frozenset({0}),
        note=note,
    )


def read(text: str) -> list[dict[str, str]]:
    """Parse CSV."""
    return list(csv.DictReader(io.StringIO(text)))


def rows_of(tex: str) -> list[str]:
    """Return the lines of the table body without their line ends."""
    body = tex.partition(r"\endfoot")[2].partition(r"\end{longtable}")[0]
    body = body or tex.partition(r"\midrule")[2].partition(r"\bottomrule")[0]
    return [line.removesuffix(r" \\") for line in body.strip().splitlines()]


@pytest.fixture
def study(whole_report: Path) -> Path:
    """Return the folder of a report with every export."""
    return whole_report.parent


def test_an_estimate_is_text_that_knows_its_interval() -> None:
    assert (MEAN, LOW_N) == ("1,235 (1,200 to 1,269)", "0.500 (n = 2)")
    assert GAIN == "tie (-3.2 %, -7.0 to +0.5)"
    assert Estimate(1.0, 1.0, 1.0, form=number, narrow=False) == "1.00"
    assert Estimate(1.0, 1.0, 1.0, form=number) == "1.00 (1.00 to 1.00)"


def test_a_range_is_labelled_in_every_format_and_shown_only_without_an_interval() -> None:
    span = Estimate(78.3, least=72.64, most=81.9, form=number)
    assert span == "78.3 (range 72.6 to 81.9)"
    assert Estimate(78.3, 70.0, 80.0, least=72.6, most=81.9, form=number) == "78.3 (70.0 to 80.0)"
    assert Estimate(78.3, least=78.31, most=78.32, form=number) == "78.3"
    both = table(["a", span, "1.00"], ["b", MEAN, "2.00"])
    assert rows_of(render.to_latex(both))[0] == "a & 78.3 (range 72.6 to 81.9) & 1.00"
    first, second = read(render.to_csv(both, demonstration=False))
    ends = ("low 95 %", "high 95 %", "lowest run", "highest run")
    assert [first[f"Images/s [1/s], {end}"] for end in ends] == ["", "", "72.64", "81.9"]
    assert [second[f"Images/s [1/s], {end}"] for end in ends] == ["1200.25", "1268.75", "", ""]


def test_csv_has_unrounded_means_and_columns_for_their_intervals() -> None:
    rows = read(render.to_csv(table(["a", MEAN, GAIN], ["b", "\u2013", "unavailable"]), demonstration=False))
    assert rows[0] == {
        "Name": "a",
        "Images/s [1/s]": "1234.5678",
        "Images/s [1/s], low 95 %": "1200.25",
        "Images/s [1/s], high 95 %": "1268.75",
        "Change [%]": "-3.21",
        "Change [%], low 95 %": "-7.0",
        "Change [%], high 95 %": "0.5",
        "Change, remark": "tie",
    }
    assert (rows[1]["Images/s [1/s]"], rows[1]["Change [%]"], rows[1]["Change, remark"]) == ("", "", "unavailable")


def test_csv_has_plain_numbers_no_formulas_and_marks_demonstrations() -> None:
    text = render.to_csv(table(["=SUM(A1)", "1,234", "-1.20"], ["+ tf32", "\u2013", "8, 16"]), demonstration=True)
    assert [list(row.values()) for row in read(text)] == [
        ["'=SUM(A1)", "1234", "-1.20", "yes"],
        ["'+ tf32", "", "8, 16", "yes"],
    ]


def test_latex_aligns_numbers_right_and_shows_intervals_as_the_page_does() -> None:
    tex = render.to_latex(table(["a", MEAN, GAIN], ["b", LOW_N, "\u2013"]))
    assert r"\begin{longtable}{@{}lrr@{}}" in tex
    assert "Name & Images/s {[}1/s{]} & Change" in tex
    assert rows_of(tex) == [
        r"a & 1,235 (1,200 to 1,269) & tie ($-$3.2 \%, $-$7.0 to +0.5)",
        r"b & 0.500 (n = 2) & \textendash{}",
    ]


def test_latex_escapes_commands_and_special_characters() -> None:
    escaped = render.escape_latex(HOSTILE)
    assert escaped == (
        r"\textbackslash{}input\{/etc/passwd\} 50\% of \$x\_1 \& y\textasciicircum{}2 \#3 \{a\} \textasciitilde{} "
        r"\textless{}b\textgreater{} {[}c{]} -{}- '{}'d'{}' \textbar{}e\textbar{}"
    )
    assert render.escape_latex("\u00e9\u0142 \u6f22\x1b[0m\n\u00b0") == r"éł \texttt{U+6F22}?{[}0m?\textdegree{}"


def test_every_latex_row_has_as_many_cells_as_columns(study: Path) -> None:
    files = sorted((study / "tables").glob("*.tex"))
    assert {"throughput.tex", "runs.tex", "ladder-0.tex", "excluded.tex"} <= {path.name for path in files}
    for path in files:
        tex = path.read_text()
        form = re.search(r"\\begin\{(?:longtable|tabularx)\}(?:\{\\linewidth\})?\{@\{\}(.*)@\{\}\}", tex)
        assert form, path
        columns = len(re.findall(r"[lrpX]", re.sub(r"\{[^}]*\}", "", form[1])))
        for line in rows_of(tex):
            spans = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
            assert len(re.findall(r"(?<!\\)&", line)) + 1 + spans == columns, (path.name, line)
        bare = re.sub(r"\\[\\{}%$&#_]", "", tex)
        assert bare.count("{") == bare.count("}")
        assert bare.count("$") % 2 == 0
        assert bare.isascii()
        for name in re.findall(r"\\begin\{(\w+)\}", tex):
            assert tex.count(rf"\begin{{{name}}}") == tex.count(rf"\end{{{name}}}")


@pytest.fixture
def pdflatex() -> str:
    """Install LaTeX where it is missing, or skip."""
    if not shutil.which("pdflatex"):
        try:
            apt_get(["texlive-latex-base", "texlive-latex-recommended"], "NO LATEX")
        except PackagesError as error:
            pytest.skip(str(error))
    return "pdflatex"


def compiled(program: str, folder: Path, kind: str, inputs: list[Path]) -> str:
    """Return the log of an article with these tables."""
    text = "\n".join(rf"\input{{{path}}}\clearpage" for path in inputs)
    packages = r"\usepackage[T1]{fontenc}\usepackage{booktabs,longtable,tabularx}"
    (folder / "all.tex").write_text(rf"\documentclass{kind}{packages}\begin{{document}}{text}\end{{document}}")
    command = [program, "-interaction=nonstopmode", "-halt-on-error", "-draftmode", "all.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return (folder / "all.log").read_text(errors="replace")


@pytest.mark.faults
def test_pdflatex_compiles_every_table(study: Path, tmp_path: Path, pdflatex: str) -> None:
    (tmp_path / "long.tex").write_text(render.to_latex(table(*[[HOSTILE, MEAN, GAIN]] * 60, note=HOSTILE)))
    compiled(pdflatex, tmp_path, "{article}", [tmp_path / "long.tex", *sorted((study / "tables").glob("*.tex"))])


@pytest.mark.faults
@pytest.mark.parametrize("name", ["2026-11-23-h100-h200", "2026-11-23-h200-ladder", "2026-11-23-h200-finetune"])
def test_what_to_take_fits_a_column_of_an_article(name: str, tmp_path: Path, pdflatex: str) -> None:
    """Regression: decision.tex was wider than a page."""
    assert app.main(["report", str(RESULTS / name), "-o", str(tmp_path / "out"), "--export", "latex"]) == 0
    log = compiled(pdflatex, tmp_path, "[twocolumn]{article}", [tmp_path / "out" / "tables" / "decision.tex"])
    assert re.findall(r"Overfull \\hbox \(([\d.]+)pt too wide\)", log) == []


def test_a_wide_table_is_one_of_a_column_with_few_columns() -> None:
    """The structure that the test above compiles where LaTeX is installed."""
    names = tuple(f"Column {index}" for index in range(12))
    row = ["H200 \u00b7 tuned_hopper", MEAN, *["1.00"] * 10]
    tex = render.to_latex(replace(table(row, columns=names), lead_columns=names[:4]))
    assert r"\begin{tabularx}{\linewidth}{@{}>{\raggedright\arraybackslash}Xrrr@{}}" in tex
    assert "longtable" not in tex
    mean = r"\shortstack[r]{1,235\\\tiny 1,200 to 1,269}"
    assert rows_of(tex) == [rf"H200 \textperiodcentered{{}} tuned\_\allowbreak{{}}hopper & {mean} & 1.00 & 1.00"]


def test_every_table_and_figure_is_exported_in_every_format(study: Path) -> None:
    page = (study / "report.html").read_text()
    shown = set(re.findall(r'<figure id="([^"]+)"><svg', page))
    for suffix in ("svg", "pdf", "png"):
        assert {path.stem for path in (study / "figures").glob(f"*.{suffix}")} == shown
    tables = {path.stem for path in (study / "tables").glob("*.csv")}
    assert tables == {path.stem for path in (study / "tables").glob("*.tex")}
    assert tables == set(re.findall(r'<section id="([^"]+)">', page))
    throughput = pl.read_csv(study / "tables" / "throughput.csv")
    a40 = throughput.filter((pl.col("GPU") == "A40") & (pl.col("Batch") == 8))
    assert a40["Images/s"].item() == pytest.approx(8.533333, abs=1e-6)  # 64 steps of 8 in 60 s


def test_png_has_the_light_scheme_on_white_at_twice_the_size(study: Path) -> None:
    figure = (study / "figures" / "fig-images_per_s.svg").read_text()
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', figure)
    assert size
    with Image.open(study / "figures" / "fig-images_per_s.png") as shot:
        assert shot.size == pytest.approx([2 * float(side) for side in size.groups()], abs=2)
        pixels = shot.convert("RGB")
        assert pixels.getpixel((0, 0)) == (255, 255, 255)
        colours = {colour for _, colour in pixels.getcolors(1 << 24)}
    assert (0x00, 0x67, 0xA5) in colours  # the first of svg.LIGHT
    pdf = (study / "figures" / "fig-images_per_s.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-")


def test_formats_are_selected_and_an_unknown_one_is_a_user_error(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = str(study.parent / "ds")
    assert parse_formats("png,csv") == ("csv", "png")
    assert app.main(["report", dataset, "-o", str(tmp_path / "none"), "--export", "none"]) == 0
    assert not (tmp_path / "none" / "tables").exists()
    assert {path.suffix for path in (tmp_path / "none" / "figures").iterdir()} == {".svg"}
    assert "tables/" not in (tmp_path / "none" / "report.html").read_text()
    capsys.readouterr()
    assert app.main(["report", dataset, "-o", str(tmp_path / "wrong"), "--export", "csv,docx"]) == 2
    error = capsys.readouterr().err
    assert error == "error: --export csv,docx: unknown format 'docx'; give all, none, or any of csv,latex,pdf,png.\n"
    assert not (tmp_path / "wrong").exists()
