"""Read a configuration file by the types that its keys are declared with, and refuse everything else by file and line.

A value is read as the declared type and not as YAML would guess: an account keeps its leading zero, `on` is a text
if a text is meant, and 1:30:00 is a time. Only keys without a declared type are left to YAML 1.2.
"""

import errno
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from inpaint_bench.core.errors import UserError, undecodable_byte
from inpaint_bench.core.files import read_plain

from .bench import BenchConfig, WorkloadConfig
from .validation import check_field, no_such_key

MAX_BYTES: Final = 64 * 1024  # the longest of ours has 4 KB; YAML of this size takes seconds at worst
MAX_VALUES: Final = 10_000  # with what aliases repeat: a few nested ones stand for billions
MAX_MESSAGE: Final = 1000  # a value may be as long as the file
NAMED_GROUPS: Final = ("gpu", "site")  # other files refer to these by name
_TAG: Final = "tag:yaml.org,2002:"
_TAGS: Final = {_TAG + name for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq", "merge")}
_INTEGER: Final = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_HYDRA_TEXTS: Final = ("hydra.sweep.dir", "hydra.run.dir", "hydra.job.name")
_NUMBER: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_READ_PROBLEMS: Final = {
    errno.ENXIO: "is not a file with text",
    errno.EFBIG: f"is larger than {MAX_BYTES // 1024} KiB, so it is no configuration file",
}
_BOOLEANS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class ConfigFileError(UserError):
    """A configuration file that cannot be used: which, where, and what would be right; on one line."""

    def __init__(self, message: str) -> None:
        shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
        super().__init__(shown if len(shown) <= MAX_MESSAGE else f"{shown[:MAX_MESSAGE]} ...")


def read_config_file(path: Path, group: str = "", package: str | None = None) -> dict[str, Any]:
    """Return the content of a configuration file of a Hydra group, `package` as in its header. Raises ConfigFileError.

    Values of declared keys have their type and lie in their range; interpolations are left to OmegaConf.
    """
    if package in (None, "_group_"):
        package = group.replace("/", ".") or "_global_"
    at_top = package == "_global_"
    declared: Any = BenchConfig if at_top else _declared_fields(BenchConfig).get(package, (Any, {}))[0]
    kind = declared if is_dataclass(declared) else Any  # as for Hydra's own node
    content = _Reader(path, "" if at_top else package).read(read_config_text(path), kind)
    # What another file of the defaults list gives is not known here.
    for spec in fields(kind) if is_dataclass(kind) and kind is not BenchConfig and "defaults" not in content else ():
        if spec.name not in content and spec.default is MISSING and spec.default_factory is MISSING:
            raise ConfigFileError(f"{path}: {spec.name} is missing")
    if group in NAMED_GROUPS and content.get("name") != path.stem:
        raise ConfigFileError(f"{path}: name is {content.get('name')}, it must be {path.stem}, as the file")
    return content


def read_config_text(path: Path) -> str:
    """Return the text of a configuration file. Raises ConfigFileError for what cannot be one."""
    try:
        content = read_plain(path, follow_links=True, max_bytes=MAX_BYTES)
    except OSError as error:
        problem = _READ_PROBLEMS.get(error.errno or 0, f"cannot be read ({error.strerror})")
        raise ConfigFileError(f"{path}: {problem}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, problem = undecodable_byte(error)
        raise ConfigFileError(f"{path}:{line}: {problem}; save the file as UTF-8") from None


def refuse_guessed_text(key: str, value: Any, typed: str) -> None:
    """Raise UserError for an override with true, false or a number for a text that is not the text as typed."""
    if isinstance(value, dict):
        for name, item in value.items():
            refuse_guessed_text(f"{key}.{name}", item, typed)
    elif isinstance(value, list):
        for item in value:
            refuse_guessed_text(f"{key}.", item, typed)  # an item has no name
    elif isinstance(value, bool | int | float) and _types_at(key) == [str]:
        key, text = key.rstrip("."), str(value).lower()
        if type(value) is int and re.search(rf"(?<![\w.+-]){text}(?![\w.])", typed):
            return
        quoted = f'{key}="{typed.strip()}"' if re.fullmatch(r"[\w.+\s-]+", typed) else '"..."'
        raise UserError(f"{key}={typed}: a text is needed, and this is read as {text} unless quoted: '{quoted}'")


def takes_text(key: str) -> bool:
    """Return whether a key of the root, or a folder of Hydra's, takes a text."""
    return str in _types_at(key)


def _types_at(key: str) -> list[Any]:
    """Return the types that a key of the root takes."""
    kind: Any = str if key in _HYDRA_TEXTS else BenchConfig
    limits: Mapping[str, Any] = {}
    for name in key.split(".") if kind is BenchConfig else ():
        kind, limits = _declared_child(kind, name, limits)
    return _alternatives(kind)[0]


@cache  # it takes a millisecond, and the points of a sweep have thousands of overrides
def _declared_fields(kind: Any) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return type and limits of the fields of a dataclass; nothing for another type."""
    if not is_dataclass(kind):
        return {}
    hints = get_type_hints(kind)
    return {spec.name: (hints[spec.name], spec.metadata) for spec in fields(kind)}


def _declared_child(kind: Any, name: str, limits: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return type and limits of a key in a block, or of an item of a list; Any if nothing is declared."""
    if declared := _declared_fields(kind):
        return declared.get(name, (Any, {}))
    return limits.get("values") or (get_args(kind) or (Any,))[-1], {}


class _Reader:
    """Converts the nodes of one file, which know their lines."""

    def __init__(self, path: Path, group: str) -> None:
        self._path = path
        self._group = group  # block of its keys; none if they are at the top
        self._yaml = YAML(typ="safe", pure=True)
        self._values = 0

    def read(self, text: str, kind: Any) -> dict[str, Any]:
        """Return the content as `kind` declares it. Raises ConfigFileError."""
        try:
            root = self._yaml.compose(text)
            if root is None or self._is_null(root):
                # A file of comments is a choice that changes nothing, such as profile=none.
                if kind is Any or kind is BenchConfig:
                    return {}
                raise ConfigFileError(f"{self._path}: is empty; it needs keys and values")
            if not isinstance(root, MappingNode):
                raise self._refusal(root, "", "needs keys and values at the top")
            content: dict[str, Any] = self._value(root, kind, {}, "")
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            tab = "; indent with spaces, not tabs" if "\t" in "".join(text.splitlines()[line - 1 : line]) else ""
            raise ConfigFileError(f"{self._path}:{line}: not YAML ({error.problem}{tab})") from None
        except (YAMLError, ValueError, RecursionError) as error:  # too deep is also a block that holds or merges itself
            reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
            raise ConfigFileError(f"{self._path}: not YAML ({reason})") from None
        return content

    def _refusal(self, node: Node, key: str, message: str) -> ConfigFileError:
        where = f"{self._path}:{node.start_mark.line + 1}: "
        return ConfigFileError(f"{where}{key}: {message}" if key else f"{where}{message}")

    def _value(self, node: Node, kind: Any, limits: Mapping[str, Any], key: str) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._refusal(node, key, "too many values, perhaps by aliases")
        if node.tag not in _TAGS:
            raise self._refusal(node, key, f"has the tag {node.tag}; leave it out")
        options, optional = _alternatives(int | str if "time_limit" in limits else kind)
        shape = _shape(options[0])
        if isinstance(node, ScalarNode):
            if "${" in node.value:
                return node.value
            if node.value == "???":  # OmegaConf's mark of a value to come: merged over a default, it has no effect
                raise self._refusal(node, f"{key}=???", f"is yet to be typed; needs {_describe(options)}")
            if self._is_null(node):
                if optional or kind is Any:
                    return None
                raise self._refusal(node, key, f"is empty; needs {_describe(options)}")
            value = self._scalar(node, options, key, limits)
        elif isinstance(node, MappingNode) and shape in (dict, Any):
            value = self._mapping(node, options[0], key, limits)
        elif isinstance(node, SequenceNode) and shape in (list, Any):
            item = _declared_child(options[0], "", limits)
            value = [self._value(child, *item, f"{key}[{n}]") for n, child in enumerate(node.value)]
        else:
            needed = limits["pattern"][1] if "pattern" in limits else _describe(options)
            found = "list" if isinstance(node, SequenceNode) else "block of keys"
            raise self._refusal(node, key, f"needs {needed}, not a {found}")
        try:
            return check_field(key, value, limits)
        except UserError as error:
            raise self._refusal(node, "", str(error)) from None

    def _mapping(self, node: MappingNode, kind: Any, key: str, limits: Mapping[str, Any]) -> dict[Any, Any]:
        valid = set(_declared_fields(kind))
        if not key:
            # Hydra's own: the defaults list of every file, and its node in those that are at the top.
            valid |= {"defaults", "hydra"} if kind is BenchConfig else {"defaults"}
        is_closed = is_dataclass(kind) and kind is not WorkloadConfig  # whose keys are known once all is composed
        content = {}
        for name_node, child in self._pairs(node, key):
            name = self._scalar(name_node, [Any], key, {}) if kind is Any else name_node.value
            path = f"{key}.{name}" if key else str(name)
            if (is_closed or not key) and is_dataclass(kind) and name not in valid:
                raise self._refusal(name_node, "", no_such_key(path, valid, group=self._group))
            if self._is_null(child):
                child.start_mark = name_node.start_mark  # an empty value is found only where the next key begins
            content[name] = self._value(child, *_declared_child(kind, str(name), limits), path)
        return content

    def _pairs(self, node: MappingNode, key: str) -> Iterator[tuple[ScalarNode, Node]]:
        """Yield keys and values, also those that a merge key `<<` brings. A key must not be given twice."""
        own: dict[str, tuple[ScalarNode, Node]] = {}
        merged: dict[str, tuple[ScalarNode, Node]] = {}
        for name, child in node.value:
            if not isinstance(name, ScalarNode) or self._is_null(name):
                raise self._refusal(name, key, "a key must be a word")
            if name.tag == _TAG + "merge":
                for block in child.value if isinstance(child, SequenceNode) else [child]:
                    if not isinstance(block, MappingNode):
                        raise self._refusal(child, key, "<< needs a block, or a list of them")
                    for pair in self._pairs(block, key):
                        merged.setdefault(pair[0].value, pair)
            elif name.value in own:
                first = own[name.value][0].start_mark.line + 1
                path = f"{key}.{name.value}" if key else name.value
                raise self._refusal(name, path, f"is given twice, first in line {first}; keep one of them")
            else:
                own[name.value] = name, child
        yield from (merged | own).values()

    def _scalar(self, node: ScalarNode, options: list[Any], key: str, limits: Mapping[str, Any]) -> Any:
        text = node.value
        if options == [Any]:
            guessed = node.tag in (_TAG + "int", _TAG + "float", _TAG + "bool")
            value = self._yaml.constructor.construct_object(node) if guessed else text
            if type(value) is int and str(value) != text:  # 007, 1_2, 0x10: what was meant is not known
                raise self._refusal(node, f"{key}={text}", f"is read as {value}; put it in quotes if it is a text")
            return value
        if int in options and _INTEGER.fullmatch(text):
            return int(text)
        if float in options and _NUMBER.fullmatch(text):
            return float(text.replace("_", ""))
        if bool in options and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        if str in options:
            return text
        raise self._refusal(node, f"{key}={shorten(text, 60)}", f"must be {_describe(options, limits)}")

    @staticmethod
    def _is_null(node: Node) -> bool:
        return isinstance(node, ScalarNode) and bool(node.tag == _TAG + "null")


def _alternatives(kind: Any) -> tuple[list[Any], bool]:
    """Return the members of a union without None, and whether None is one of them."""
    members = list(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else [kind]
    return [member for member in members if member is not type(None)], type(None) in members


def _shape(kind: Any) -> Any:
    """Return dict for a block of keys, list for a list, else the type of a single value, which may be Any."""
    return dict if is_dataclass(kind) else get_origin(kind) or kind


def describe_type(owner: type, name: str) -> str:
    """Return what a field of a dataclass takes: `an integer between 1 and 8`, `true or false` ..."""
    kind, limits = _declared_fields(owner)[name]
    if "time_limit" in limits:
        return f"minutes, or a time in one of Slurm's formats, or {'UNLIMITED' if limits['unlimited'] else 'auto'}"
    options, optional = _alternatives(kind)
    described = f"one of {', '.join(limits['choices'])}" if "choices" in limits else _describe(options, limits)
    if len(options) > 1:  # int | str, such as batch
        described += ", or auto"
    return described + ", or null" * optional


def _describe(options: list[Any], limits: Mapping[str, Any] | None = None) -> str:
    shape = _shape(options[0])
    if shape in (int, float):
        low, high = (limits or {}).get("range", (None, None))
        number = "an integer" if shape is int else "a number"
        return number if low is None else f"{number} between {low:,} and {high:,.12g}"
    names = {list: "a list, such as [a, b]", dict: "a block of keys and values", bool: "true or false", str: "a text"}
    return names.get(shape, "a value")
