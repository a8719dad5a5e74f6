"""Edit a site file with ruamel.yaml, which keeps comments, order and quotes."""

import copy
import difflib
import io
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_bytes
from inpaint_bench.core.paths import PACKAGE
from inpaint_bench.core.schema import SNAPSHOT

NULL_TAG = "tag:yaml.org,2002:null"


class SiteFile:
    """A site file as it was read. Raises UserError if it is not YAML."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._content = path.read_bytes()
            self._document = _yaml().load(self._content.decode("utf-8"))
        except (OSError, UnicodeDecodeError, YAMLError) as error:
            raise UserError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from None
        if not isinstance(self._document, CommentedMap):
            raise UserError(f"{path}: has no keys")

    def get(self, key: str) -> Any:
        """Return the value of a dotted key; None if the file does not have it."""
        value: Any = self._document
        for name in key.split("."):
            value = value.get(name) if isinstance(value, CommentedMap) else None
        return value

    def line(self, key: str) -> int | None:
        """Return the line number of a dotted key, from 1; None if the file does not have it."""
        block, _, name = key.rpartition(".")
        parent = self.get(block) if block else self._document
        return parent.lc.key(name)[0] + 1 if isinstance(parent, CommentedMap) and name in parent else None

    def edited(self, changes: Mapping[str, Any]) -> str:
        """Return the text with the values of these dotted keys changed. A new key is placed below `checked_on`."""
        document = copy.deepcopy(self._document)
        for key, value in changes.items():
            *blocks, name = key.split(".")
            parent = document
            for block in blocks:
                parent = parent.setdefault(block, CommentedMap())
            if isinstance(value, dict):
                value = CommentedMap(value)
                value.fa.set_flow_style()
            if name in parent or "checked_on" not in parent:
                parent[name] = value
            else:
                parent.insert(list(parent).index("checked_on") + 1, name, value)
                # ruamel.yaml attaches the comment lines that follow a block to its last key.
                comment = parent.ca.items.get("checked_on")
                if comment and comment[2] and comment[2].value.startswith("\n"):
                    parent.ca.items[name] = parent.ca.items.pop("checked_on")
        stream = io.StringIO()
        _yaml().dump(document, stream)
        return stream.getvalue()

    def write(self, text: str) -> str:
        """Replace the file atomically and return the diff. Raises UserError if it has changed since it was read."""
        target = self.path.resolve()
        if target.read_bytes() != self._content:
            raise UserError(f"{self.path}: has changed since it was read; run the command again")
        # The replacement is a new file with the permissions of the umask.
        mode = stat.S_IMODE(target.stat().st_mode)
        try:
            replace_bytes(target, text.encode())
            target.chmod(mode)
        except OSError as error:
            raise UserError(f"{self.path}: not written ({error})") from None
        before = self._content.decode().splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, text.splitlines(keepends=True), str(self.path), "corrected", n=1))


def not_writable(path: Path) -> str | None:
    """Return why a site file must not be written, or not made; None if it may."""
    target = path.resolve()
    if target.is_relative_to(PACKAGE):
        return "belongs to an installation; edit conf/site of your own checkout"
    if any((parent / SNAPSHOT).is_file() for parent in target.parents):
        return "belongs to the code snapshot of a sweep, which must not change"
    if not all(os.access(each, os.W_OK) for each in (target, target.parent) if each.exists()):
        return "you have no permission to write it; copy the site file to one of your own"
    return None


def as_yaml(value: Any) -> str:
    """Return a value as YAML on one line, quoted only if necessary."""
    # Written as a list of one in flow style, whose brackets are then cut off.
    wrapped = CommentedSeq([value])
    wrapped.fa.set_flow_style()
    stream = io.StringIO()
    _yaml().dump(wrapped, stream)
    return stream.getvalue().strip()[1:-1]


def _yaml() -> YAML:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 10**6  # never fold a line
    yaml.indent(mapping=2, sequence=4, offset=2)
    # Write null as `null`, where ruamel.yaml would leave the place empty, and equal dates without an alias.
    yaml.representer.add_representer(type(None), lambda representer, _: representer.represent_scalar(NULL_TAG, "null"))
    yaml.representer.ignore_aliases = lambda value: not isinstance(value, dict | list)
    return yaml
