"""Add pages to the documentation's site: the README as its first page, and references that come from the code.

A hook of MkDocs, see mkdocs.yml. Links of the README, out of docs/ and to code are rewritten; a target that does not
exist fails the build, as MkDocs' own checks do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
REPORTS = '\n<a href="reports/index.html">Reports of all measured datasets</a>\n'  # which `make docs` adds to the site
# Pages of the site that a clone does not have: there the code that they are made of is linked.
GENERATED = {"inpaint_bench/core/schema.py": "reference/reasons.md", "analysis/columns.py": "reference/columns.md"}
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the generated pages."""
    pages = {"index.md": _rewritten((ROOT / "README.md").read_text(encoding="utf-8"), ROOT) + REPORTS}
    pages["reference/levers.md"] = "\n".join(_levers())
    pages["reference/columns.md"] = "\n".join(_columns())
    pages["reference/reasons.md"] = "\n".join(_reasons())
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links out of docs/, which the site does not have."""
    return markdown if page.file.generated_by else _rewritten(markdown, ROOT / "docs")


def _rewritten(text: str, folder: Path) -> str:
    """Make links to files of docs/ relative to it, and other files of the repository a path."""

    def rewrite(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups()
        path = (folder / target).resolve()
        if not path.exists():
            raise PluginError(f"{target}: no such file, linked from a page of {folder.name}")
        if path.is_relative_to(ROOT) and (page := GENERATED.get(str(path.relative_to(ROOT)))):
            return f"[{label}]({page})"
        if not path.is_relative_to(ROOT / "docs") or path.suffix in (".py", ".ipynb"):
            return f"{label} (`{path.relative_to(ROOT)}`)" if label != str(path.relative_to(ROOT)) else f"`{label}`"
        return f"{image}[{label}]({path.relative_to(ROOT / 'docs')}{anchor or ''})"

    return LINK.sub(rewrite, text)


def _levers() -> Iterator[str]:
    from inpaint_bench.cli.levers import committed, list_levers

    yield "# Recipes and levers, with what was measured\n"
    yield "Effects are those of the committed datasets. `inpaint-bench levers` prints the same.\n"
    for lever in list_levers(committed()):
        yield f"## `{lever['name']}`\n\n{lever['description']}\n"
        yield from (f"- {text}" for text in lever["seen"])
        yield ""


def _columns() -> Iterator[str]:
    from analysis.columns import COLUMNS, WINDOW_SCHEMA
    from inpaint_bench.core import tables

    yield "# Columns\n\nUnits are in the names. What the figures mean: [the dataset](../dataset.md).\n"
    yield "## `runs.parquet`\n\n| column | type | definition | in a valid run |\n|---|---|---|---|"
    for column in COLUMNS:
        bounds = "{:g} to {:g}".format(*column.bounds) if column.bounds else ""
        yield f"| `{column.name}` | {column.kind} | {column.definition} | {bounds} |"
    yield "\n## `windows.parquet`\n\n| column | type |\n|---|---|"
    yield from (f"| `{name}` | {kind} |" for name, kind in WINDOW_SCHEMA.items())
    yield ""
    for name, schema in sorted(tables.SCHEMAS.items()):
        yield f"## `{name}`\n\n| column | type |\n|---|---|"
        yield from (f"| `{field.name}` | {field.type} |" for field in schema)
        yield ""


def _reasons() -> Iterator[str]:
    from inpaint_bench.core.schema import Null, Reason

    source = (ROOT / "inpaint_bench" / "core" / "schema.py").read_text(encoding="utf-8")
    comments = dict(re.findall(r'^ *[A-Z_]+ = "(\w+)" +# (.+)$', source, re.MULTILINE))
    yield "# Reasons\n\n## Why a point is not complete\n\nWhat `rerun` does about each: `rerun.*` in "
    yield "[configuration](../configuration.md).\n\n| reason | |\n|---|---|"
    yield from (f"| `{reason}` | {comments.get(reason, '')} |" for reason in Reason)
    yield "\n## Why a telemetry value is null\n\n| reason | |\n|---|---|"
    yield from (f"| `{reason}` | {comments.get(reason, '')} |" for reason in Null)
