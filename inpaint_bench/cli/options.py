"""What the verbs of the command share: style, examples and arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

PROGRAM = "inpaint-bench"
# No markup mode: help texts have square brackets, which rich would read as markup.
STYLE: dict[str, Any] = {"context_settings": {"help_option_names": ["-h", "--help"]}, "rich_markup_mode": None}
Overrides = Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Configuration, as for launch.")]
ConfigDir = Annotated[
    Path | None,
    Option(metavar="DIR", exists=True, file_okay=False, help="Folder with files of your own, such as site/mine.yaml."),
]


def examples(*arguments: str) -> str:
    """Return the epilog of a verb's help: complete commands."""
    # click does not rewrap a paragraph that begins with "\b".
    return "\n".join(["\b", "Examples:", *(f"  {PROGRAM} {line}" for line in arguments)])
