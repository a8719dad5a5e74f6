"""Tables for terminals of any width."""

from __future__ import annotations

import io
import json
import logging

import pytest
from rich.console import Console

from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.console import echo, echo_json, share, table
from inpaint_bench.core.errors import UserError

COLUMNS = ("point", "site", "partition", "message")
ROWS = [(0, "grace", "gpu-a40", "a text"), (1, "delta", "gpuH200x8", "another text")]


def printed(width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table(COLUMNS, ROWS, optional=("partition", "site"), width=width))
    return out.getvalue()


def test_a_wide_terminal_has_every_column() -> None:
    assert [name for name in COLUMNS if name not in printed(80)] == []
    assert "also" not in printed(80)


def test_a_narrow_terminal_names_the_columns_that_it_lacks() -> None:
    text = printed(40)
    assert "gpuH200x8" not in text
    assert "grace" in text
    assert "in a wider terminal also: partition" in " ".join(text.split())
    assert "also: partition, site" in " ".join(printed(30).split())


FORGERIES = [
    *("\nerror: b", "\r\nerror: b", "\rerror: b", "\x1b[2K", "\x0b", "\x0c", "\x85"),
    *("\u2028", "\u2029", "\u202ea", "\u2066a"),
]


@pytest.fixture
def _log_of_a_command():
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.usefixtures("_log_of_a_command")
def test_a_name_forges_no_line(
    forgery: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = f"a{forgery}.jpg"
    shown = "".join(char if char.isprintable() else "?" for char in name)

    def command() -> int:
        for package in ("inpaint_bench.data", "launchers.submit", "analysis.merge"):
            logging.getLogger(package).warning("left out %s", name)
        raise UserError(f"{name}: cannot be read")

    echo(f"{name}: x", "second line")
    echo_json({"name": name})
    assert guarded(command) == 2
    out, err = capsys.readouterr()
    first, second, *document = out.removesuffix("\n").split("\n")
    assert (first, second) == (f"{shown}: x", "second line")
    assert json.loads("".join(document)) == {"name": name}
    assert err == f"error: {shown}: cannot be read\n"
    assert caplog.messages == [f"left out {shown}"] * 3
    out_of_table = io.StringIO()
    Console(file=out_of_table, width=80).print(table(("file", "why"), [(name, "why")], title=name))
    assert out_of_table.getvalue().count("\n") == 6
    assert out_of_table.getvalue().count(shown) == 2


@pytest.mark.usefixtures("_log_of_a_command")
def test_the_log_of_another_library_keeps_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    guarded(lambda: logging.getLogger("torch").warning("a\n\tb"))
    assert caplog.messages == ["a\n\tb"]


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (1, 1, "1 of 1 run is valid"),
        (0, 1, "0 of 1 run is valid"),
        (1, 2, "1 of 2 runs is valid"),
        (2, 2, "2 of 2 runs are valid"),
        (0, 0, "0 of 0 runs are valid"),
    ],
)
def test_part_of_a_whole_agrees_in_number(part: int, whole: int, text: str) -> None:
    """Regression: a report of a single run said `1 of 1 runs are valid`."""
    assert f"{share(part, whole, 'run', 'are')} valid" == text
    assert share(part, whole, "loss") in (f"{part} of {whole} losses", f"{part} of 1 loss")
