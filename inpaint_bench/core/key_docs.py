"""Descriptions of the keys of the configuration, read from the comments beside their declarations.

The comment of a field stands at the end of its lines or in the lines above it. The help of `launch`,
docs/configuration.md and the questions after a wrong key are made of it.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from . import workloads
from .config import BenchConfig
from .config_file import describe_type
from .site import SiteConfig

WORKLOAD, SITES = "workload", "sites"


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of the configuration."""

    path: str  # as it is set: recipe.num_workers
    values: str  # what it takes
    default: str  # as it is written on a command line; empty: its file gives it
    description: str


def groups() -> dict[str, type]:
    """Return the dataclass of each block of the configuration by its name; the root is the empty one.

    The keys of a workload are those of `workload=<name>`; a site's are also set with `sites.<name>.<key>`.
    """
    hints = get_type_hints(BenchConfig)
    blocks = {spec.name: hints[spec.name] for spec in fields(BenchConfig) if is_dataclass(hints[spec.name])}
    blocks |= {f"{WORKLOAD}={name}": module.Config for name, module in workloads.declarations().items()}
    return {"": BenchConfig, **{name: kind for name, kind in blocks.items() if name != WORKLOAD}}


def keys_of(group: str) -> list[Key]:
    """Return the keys of a block, those of its own blocks included; of the root only its own."""
    prefix = group.partition("=")[0]
    return list(_keys(groups()[group], prefix, nested=bool(group)))


def key_elsewhere(name: str) -> str | None:
    """Return the key of another block that ends with this name, the shortest one; None if there is none."""
    paths = [key.path for group in groups() if group for key in keys_of(group)]
    paths = [path.replace("site.", "sites.<name>.", 1) if path.startswith("site.") else path for path in paths]
    matching = [path for path in paths if path.split(".")[-1] == name]
    blocks = [path.partition(f".{name}.")[0] + f".{name}" for path in paths if f".{name}." in path]
    return min([*matching, *blocks], key=lambda path: (path.count("."), path), default=None)


def _keys(kind: type, prefix: str, *, nested: bool) -> Iterator[Key]:
    hints = get_type_hints(kind)
    for spec in fields(kind):
        path = f"{prefix}.{spec.name}" if prefix else spec.name
        hint = hints[spec.name]
        each = (get_args(hint) or (None,))[-1]  # of a dict
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _keys(hint, path, nested=True) if nested else ()
        elif is_dataclass(each) and isinstance(each, type) and each is not SiteConfig:
            yield from _keys(each, f"{path}.<name>", nested=True)
        else:
            yield Key(
                path=path, values=describe_type(kind, spec), default=_default(spec), description=comment(kind, spec)
            )


def _default(spec: Field[Any]) -> str:
    value = spec.default if spec.default is not MISSING else None
    if spec.default_factory is not MISSING:
        value = spec.default_factory()
    elif spec.default is MISSING:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return {"None": "null", "": '""'}.get(str(value), str(value))


def comment(kind: type, spec: Field[Any]) -> str:
    """Return the comment of a field, in its class or in one that this extends; empty if there is none."""
    owners = (base for base in kind.__mro__ if spec.name in inspect.get_annotations(base))
    return next(filter(None, (_comments(owner).get(spec.name) for owner in owners)), "")


@cache
def _comments(kind: type) -> dict[str, str]:
    """Return the comments of the fields of one class by name."""
    source = _source(kind.__module__)
    comments = {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (node,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    found = {}
    for statement in node.body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        while comments.get(first - 1, ("", False))[1]:
            first -= 1
        texts = [comments[line][0] for line in range(first, last + 1) if line in comments]
        found[statement.target.id] = " ".join(text.partition("noqa:")[0].strip() for text in texts).strip()
    return found


@cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])
