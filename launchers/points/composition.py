"""Composed configurations of many points, at a fraction of the cost of composing each of them.

Hydra composes a point in about 0.1 s, nearly all of which goes into the defaults list and the files that it names. Both
depend only on the groups that a point chooses; every other override is set on the result. So points that choose the
same groups share one composition, and their values are set on a copy of it, in their order, by the function with which
Hydra sets them. The only difference is that Hydra's own node is complete by then, which a value can see only through an
interpolation. Hence a point is composed by Hydra alone if

- the key of an override has a package (`+` and `~` are fine); in Hydra's own node a point may only change values, which
  then belong to the shared composition;
- there is an interpolation in the value of an override, at its key or above it;
- Hydra copies environment variables (`hydra.job.env_copy`), whose names may be interpolations.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from inpaint_bench.core.composed_file import holds_secret
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.config.parse import parse_changed, parse_config, parse_unchecked, without_hydra

from . import hydra_internals

if TYPE_CHECKING:
    from hydra._internal.config_repository import IConfigRepository

_KEYS = frozenset(spec.name for spec in fields(BenchConfig))
_CONSTANT = re.compile(r"\$\{(oc\.env|testbed):[^${}]*\}")  # interpolations that read no configuration
_KEPT = 64  # changed keys of a shared composition whose conversion is kept
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


@dataclass(frozen=True, kw_only=True)
class ComposedConfig:
    """A point's configuration: what Hydra composed for its groups, and what is set on a copy of that.

    A thousand points of the same groups hold one `base`; composed in full, each would take most of a megabyte.
    """

    base: DictConfig  # with Hydra's own node; never changed
    values: tuple[Override, ...] = ()
    lines: tuple[str, ...] | None = None  # the point's overrides as typed; None: Hydra composed `base` for this point
    edits: tuple[tuple[str, Any], ...] = ()  # set by our launcher, last

    def with_edits(self, edits: Mapping[str, Any]) -> ComposedConfig:
        """Return a copy that also sets these keys, which exist already or belong to Hydra's own node."""
        return replace(self, edits=tuple({**dict(self.edits), **edits}.items()))

    def build(self) -> DictConfig:
        """Return a new DictConfig. Raises OmegaConf's errors if a value does not fit its key."""
        config = copy.deepcopy(self.base)
        if self.lines is not None:
            hydra_internals.apply_overrides(self.values, config)
            _record_overrides(config, self.lines)
        if self.edits:
            # Hydra makes its own node read-only, and struct mode forbids new keys.
            with read_write(config), open_dict(config):
                for key, value in self.edits:
                    # Not merged: only the keys of the chosen site may remain in the node `site`.
                    OmegaConf.update(config, key, value, merge=False)
        return config


def _with_environment(config: DictConfig) -> DictConfig:
    """Set what comes from environment variables to its value here, as a job may lack them; secrets are left to it."""

    def visit(block: DictConfig | ListConfig) -> None:
        for key in range(len(block)) if isinstance(block, ListConfig) else list(block):
            node: Any = block._get_node(key)
            if isinstance(node, DictConfig | ListConfig):
                visit(node)
            elif "${oc.env:" in str(node) and not holds_secret(str(node)):
                node._set_value(block[key])

    with read_write(config):
        visit(config)
    return config


def _record_overrides(config: DictConfig, lines: Sequence[str]) -> None:
    """Write the point's own overrides into Hydra's node, as Hydra does when it composes."""
    task = [line for line in lines if not parsed(line).is_hydra_override()]
    # The shared composition has recorded the choices of groups alone.
    config.hydra.overrides.task.clear()
    config.hydra.overrides.task.extend(task)
    config.hydra.job.override_dirname = hydra_internals.override_dirname([parsed(line) for line in task], config)


@dataclass(frozen=True, kw_only=True)
class _SharedConfig:
    """What Hydra composed for a choice of groups, also as typed objects, of which points replace what they change."""

    base: DictConfig  # with Hydra's own node; never changed
    content: DictConfig  # the same without that node; a point's values are set on it and taken back
    bench: BenchConfig | None  # None: the groups alone make no complete configuration
    interpolated_keys: frozenset[str]  # keys of the application, not of Hydra's node
    reading_keys: frozenset[str]  # top-level keys with an interpolation that may read another key
    replaced: dict[str, Any] = field(default_factory=dict)  # nodes of `content` before the last point's values
    # by the lines that change a top-level key, the last used last: its node and its checked object
    changed: dict[tuple[str, ...], tuple[Any, Any]] = field(default_factory=dict)
    hashed: dict[tuple[str, ...], str] = field(default_factory=dict)  # by the same, or by the key that is not changed
    checked: set[str] = field(default_factory=set)  # top-level keys of `bench` whose values are within their limits

    @classmethod
    def from_config(cls, config: DictConfig) -> _SharedConfig:
        """Wrap what Hydra composed."""
        content = without_hydra(config)
        try:
            bench = parse_unchecked(content)
        except OmegaConfBaseException:
            bench = None
        return cls(
            base=config,
            content=content,
            bench=bench,
            interpolated_keys=frozenset(_interpolations(OmegaConf.to_container(content, resolve=False))),
            reading_keys=frozenset(
                str(key) for key in content if "${" in _CONSTANT.sub("", repr(content._get_node(key)))
            ),
        )


class Composition:
    """Composes points. `compose` is Hydra's own way from a point's overrides to its configuration."""

    def __init__(self, compose: Callable[[list[str]], DictConfig], files: IConfigRepository) -> None:
        self._compose = lambda lines: _with_environment(compose(lines))
        self._group_exists = cache(files.group_exists)
        self._shared: dict[tuple[str, ...], _SharedConfig | None] = {}  # by group choices
        self._by_base: dict[int, _SharedConfig] = {}  # by the identity of the base

    def __call__(self, lines: Sequence[str]) -> ComposedConfig:
        """Compose one point. Raises Hydra's and OmegaConf's errors for overrides that do not fit."""
        return self._compose_shared(lines) or ComposedConfig(base=self._compose(list(lines)))

    def _compose_shared(self, lines: Sequence[str]) -> ComposedConfig | None:
        """Compose on a shared base; None if Hydra has to compose the point alone."""
        # Split the overrides: those that the composition depends on, and those that are set on a copy of it.
        choices: list[str] = []
        values: list[Override] = []
        for line in lines:
            override = parsed(line)
            if self._is_group_choice(override):
                choices.append(line)
            elif not _is_plain(override):
                return None
            elif _top_key(override) != "hydra":
                # batch=16
                values.append(override)
            elif override.type is OverrideType.CHANGE:
                choices.append(line)
            else:
                return None
        shared = self._shared_for(tuple(choices))
        # At or below an interpolation the result could depend on what Hydra sets only after the overrides.
        if shared is None or any(_prefixes(value.key_or_group) & shared.interpolated_keys for value in values):
            return None
        return ComposedConfig(base=shared.base, values=tuple(values), lines=tuple(lines))

    def _shared_for(self, choices: tuple[str, ...]) -> _SharedConfig | None:
        if choices not in self._shared:
            try:
                config = self._compose(list(choices))
            except (HydraException, OmegaConfBaseException, ValueError):
                shared = None  # composed alone, the point raises the error that names what is wrong with it
            else:
                shared = None if config.hydra.job.env_copy else _SharedConfig.from_config(config)
            self._shared[choices] = shared
            if shared:
                self._by_base[id(shared.base)] = shared
        return self._shared[choices]

    def typed(self, composed: ComposedConfig) -> tuple[BenchConfig, DictConfig]:
        """Return typed, checked objects and the DictConfig, without Hydra's node, that they were made of.

        Only keys that the point changes as no point did lately, and keys with interpolations, are converted anew. The
        DictConfig is valid until the next call. Raises UserError and OmegaConf's errors.
        """
        if composed.lines is None:
            config = without_hydra(composed.build())
            return parse_config(config), config
        shared = self._by_base[id(composed.base)]
        lines = _lines_by_key(composed.values)
        # `+note=x` adds a key that BenchConfig has no field for, so it cannot be replaced there.
        if shared.bench is None or not lines.keys() <= _KEYS:
            config = copy.deepcopy(shared.content)
            hydra_internals.apply_overrides(composed.values, config)
            return parse_config(config), config
        config = shared.content
        content = config.__dict__["_content"]  # set without conversion: these nodes were there before
        content.update(shared.replaced)
        shared.replaced.clear()
        # Points of a sweep change a key in few ways: what is known of an earlier point is not set and checked again.
        shared.replaced.update({key: content[key] for key in lines})
        known = {key: shared.changed.pop(of_key) for key, of_key in lines.items() if of_key in shared.changed}
        content.update({key: known[key][0] if key in known else copy.deepcopy(content[key]) for key in lines})
        new = [value for value in composed.values if _top_key(value) not in known]
        hydra_internals.apply_overrides(new, config)
        base = replace(shared.bench, **{key: checked for key, (_, checked) in known.items()})
        within_limits = shared.checked - lines.keys() | known.keys()
        bench = parse_changed(config, base, lines.keys() - known.keys() | shared.reading_keys, within_limits)
        shared.checked.update(within_limits - lines.keys())
        shared.changed.update({lines[key]: (content[key], getattr(bench, key)) for key in lines})
        while len(shared.changed) > _KEPT:
            del shared.changed[next(iter(shared.changed))]
        return bench, config

    def config_hash(self, composed: ComposedConfig, config: DictConfig) -> str:
        """Return `config_hash(config)` of what `typed` has returned last."""
        shared = self._by_base.get(id(composed.base))
        if shared is None or config is not shared.content:
            return config_hash(config)
        states = {str(key): (str(key),) for key in config} | _lines_by_key(composed.values)
        texts = {key: shared.hashed[state] for key, state in states.items() if state in shared.hashed}
        result = config_hash(config, texts)
        shared.hashed.update({states[key]: texts[key] for key in texts.keys() - shared.reading_keys})
        return result

    def _is_group_choice(self, override: Override) -> bool:
        """Return whether it chooses a configuration file; Hydra takes `group={...}` for values."""
        return self._group_exists(override.key_or_group) and not isinstance(override.value(), dict)


@cache  # Hydra's parser takes as long for a line as setting its value, and most lines of a sweep are equal
def parsed(line: str) -> Override:
    """Parse the override of one point. Raises Hydra's error for a line that is none."""
    (override,) = OverridesParser.create().parse_overrides([line])
    return override


def _top_key(override: Override) -> str:
    return override.key_or_group.split(".")[0]


def _lines_by_key(values: Iterable[Override]) -> dict[str, tuple[str, ...]]:
    """Return the lines that change each top-level key."""
    lines: dict[str, tuple[str, ...]] = {}
    for value in values:
        lines[_top_key(value)] = (*lines.get(_top_key(value), ()), str(value.input_line))
    return lines


def _is_plain(override: Override) -> bool:
    plain = override.package is None and not override.is_sweep_override() and "${" not in str(override.value())
    return plain and _PLAIN_KEY.fullmatch(override.key_or_group) is not None


def _prefixes(key: str) -> set[str]:
    """Return the key and all keys above it."""
    names = key.split(".")
    return {".".join(names[: length + 1]) for length in range(len(names))}


def _interpolations(value: Any, key: str = "") -> Iterator[str]:
    """Yield the keys of an unresolved container at which there is an interpolation."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _interpolations(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str) and "${" in value:
        yield key
