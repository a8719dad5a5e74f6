"""The pages of the documentation and their code, as CommonMark has it, which GitHub shows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt

from inpaint_bench.core.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_COMMONMARK = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code; `language` is empty where none is named."""

    line: int
    language: str
    text: str

    def commands(self) -> list[tuple[str, str]]:
        """Return the shell commands of a console or bash block, each with the output that is shown below it."""
        if self.language not in ("console", "bash", ""):
            return []
        found: list[tuple[str, str]] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if self.language != "console" or line.startswith("$ "):
                found.append((line.removeprefix("$ ").strip(), ""))
            elif found:
                found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        return [(command, output) for command, output in found if command and not command.startswith("#")]


def code(text: str) -> list[str]:
    """Return the text of all code of a page in order, blocks and spans."""
    tokens = [part for token in _COMMONMARK.parse(text) for part in (token.children or [token])]
    return [token.content for token in tokens if token.type in ("fence", "code_block", "code_inline")]


def blocks(text: str) -> list[Block]:
    """Return the blocks of code of a page."""
    tokens = [token for token in _COMMONMARK.parse(text) if token.type in ("fence", "code_block")]
    return [Block(line=(token.map or [0])[0] + 1, language=token.info.strip(), text=token.content) for token in tokens]


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command in a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";&|"):
            if words:
                yield words[1:] if words[0] in ("while", "do") else words
            words = []
        else:
            words.append(word)
