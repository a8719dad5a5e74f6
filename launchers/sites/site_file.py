"""Values written into a site file, and nothing else in it touched: comments, order and layout stay."""

from __future__ import annotations

import copy
import difflib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_bytes
from inpaint_bench.core.paths import PACKAGE
from inpaint_bench.core.schema import SNAPSHOT


class SiteFile:
    """The text of a site file as it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = path.read_bytes()
            self.text = self._bytes.decode("utf-8")
            values = yaml.safe_load(self.text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from None
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}

    def line(self, place: str) -> int | None:
        """Line number of a key, from 1; None where the file does not name it."""
        node: Node = _root(self.text)
        line = None
        for key in place.split("."):
            pair = _pair(node, key)
            if pair is None:
                return None
            line, node = pair[0].start_mark.line + 1, pair[1]
        return line

    def holds(self, block: str) -> bool:
        """The file has this mapping: limits, gpus.a40."""
        return self._mapping(block) is not None

    def values_at(self, block: str) -> dict[str, Any]:
        """What the file says in this mapping; empty where it has none."""
        return self._mapping(block) or {}

    def _mapping(self, block: str) -> dict[str, Any] | None:
        node: Any = self.values
        for key in block.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return node if isinstance(node, dict) else None

    def edited(self, changes: Mapping[str, Any]) -> str:
        """The text with these values at their places. Raises UserError for a layout that it cannot keep."""
        text, expected = self.text, copy.deepcopy(self.values)
        for place, value in changes.items():
            keys = place.split(".")
            text = _with(text, keys, as_yaml(value))
            _put(expected, keys, yaml.safe_load(as_yaml(value)))
        try:
            kept = yaml.safe_load(text) == expected
        except yaml.YAMLError:
            kept = False
        if not kept:
            raise UserError(f"{self.path}: its layout is not one that can be edited safely; write the lines by hand")
        return text

    def diff(self, text: str) -> str:
        before, after = self.text.splitlines(keepends=True), text.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, str(self.path), f"{self.path} (new)", n=1))

    def replace(self, text: str) -> None:
        """Whole or not at all. Raises UserError where the file is not the user's to write, or has changed since."""
        if why := locked(self.path):
            raise UserError(f"{self.path}: {why}")
        target = self.path.resolve()
        if target.read_bytes() != self._bytes:
            raise UserError(f"{self.path}: was changed meanwhile; run the command again")
        mode = stat.S_IMODE(target.stat().st_mode)
        try:
            replace_bytes(target, text.encode())
            target.chmod(mode)
        except OSError as error:
            raise UserError(f"{self.path}: not written ({error})") from None


def locked(path: Path) -> str | None:
    """Why a site file may not be written; None where it may."""
    target = path.resolve()
    if target.is_relative_to(PACKAGE):
        return "belongs to an installation; use a checkout of your own, whose conf/site you can edit"
    if any((parent / SNAPSHOT).is_file() for parent in target.parents):
        return "belongs to the code of a sweep, which stays as it was submitted"
    if not os.access(target, os.W_OK) or not os.access(target.parent, os.W_OK):
        return "you may not write it; copy the site file to one of your own"
    return None


def as_yaml(value: Any) -> str:
    """A scalar, a list or a mapping on one line, quoted only where YAML needs it. A date stays as it is."""
    text: str = yaml.dump(
        [value], Dumper=_Plain, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False
    )
    return text.strip()[1:-1]


class _Plain(yaml.SafeDumper):
    """Equal values are written out each time: no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _with(text: str, keys: list[str], value: str) -> str:
    node: Node = _root(text)
    for depth, key in enumerate(keys):
        pair = _pair(node, key)
        if pair is None:
            assert isinstance(node, MappingNode)
            return _inserted(text, node, keys[depth:], value, after="checked_on")
        name, node = pair
        if depth + 1 < len(keys) and not isinstance(node, MappingNode):
            raise UserError(f"{'.'.join(keys)}: {key} is no mapping in the file")
    start, end = node.start_mark.index, node.end_mark.index
    if start == end:  # `key:` and nothing behind it
        start = end = text.index(":", name.end_mark.index) + 1
        value = f" {value}"
    return text[:start] + value + text[end:]


def _inserted(text: str, mapping: MappingNode, keys: list[str], value: str, after: str) -> str:
    """A key that the file lacks: below the key `after`, or below the last one."""
    if mapping.flow_style:
        inside = text[: mapping.end_mark.index - 1].rstrip()
        nested = "".join(f"{key}: {{" for key in keys[:-1]) + f"{keys[-1]}: {value}" + "}" * (len(keys) - 1)
        return f"{inside}{', ' if mapping.value else ''}{nested}{text[mapping.end_mark.index - 1 :]}"
    pair = _pair(mapping, after) or mapping.value[-1]
    indent = mapping.value[0][0].start_mark.column
    lines = [f"{' ' * (indent + 2 * i)}{key}:" for i, key in enumerate(keys)]
    lines[-1] += f" {value}"
    rows = text.splitlines(keepends=True)
    last = _last_line(pair[1])
    if not rows[last].endswith("\n"):
        rows[last] += "\n"
    return "".join([*rows[: last + 1], "\n".join(lines) + "\n", *rows[last + 1 :]])


def _last_line(node: Node) -> int:
    """Where a value really ends: a block's own mark lies behind the comments that follow it."""
    if isinstance(node, ScalarNode) or getattr(node, "flow_style", False) or not node.value:
        ends_line = node.end_mark.column == 0 and node.end_mark.line > node.start_mark.line
        return int(node.end_mark.line - ends_line)
    last = node.value[-1]
    return _last_line(last[1] if isinstance(last, tuple) else last)


def _root(text: str) -> MappingNode:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, MappingNode):
        raise UserError("the site file holds no keys")
    return node


def _pair(node: Node, key: str) -> tuple[ScalarNode, Node] | None:
    if not isinstance(node, MappingNode):
        return None
    return next((pair for pair in node.value if pair[0].value == key), None)


def _put(values: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        values = values.setdefault(key, {})
    values[keys[-1]] = value
