"""The site shows the code of every page as GitHub does: MkDocs reads Markdown by rules of its own."""

from __future__ import annotations

import runpy
from html.parser import HTMLParser
from pathlib import Path

import markdown
import pytest
from mkdocs.config import load_config

from inpaint_bench.core.paths import ROOT

from .pages import PAGES, blocks, code


class _Code(HTMLParser):
    """Collects the text of all code elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.depth = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "code":
            self.texts.append("")
            self.depth += 1

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "code"

    def handle_data(self, data: str) -> None:
        if self.depth:
            self.texts[-1] += data


def site_code(text: str) -> list[str]:
    """Return the text of all code of a page in order, as the site shows it."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    html = markdown.markdown(text, extensions=config.markdown_extensions, extension_configs=config.mdx_configs)
    return _Code(html).texts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_site_shows_the_code_of_a_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    source = page.read_text(encoding="utf-8")
    text = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))["_rewritten"](source, page.parent)
    assert blocks(text) == blocks(source), "changed with the links"
    shown = site_code(text)
    assert [part.split() for part in shown] == [part.split() for part in code(text)]
    assert {block.text.rstrip("\n") for block in blocks(source)} <= {part.rstrip("\n") for part in shown}


def test_every_block_of_docs_names_its_language() -> None:
    pages = {page.name: blocks(page.read_text(encoding="utf-8")) for page in PAGES[1:]}
    assert [(name, block.line) for name, found in pages.items() for block in found if not block.language] == []
