"""Composed configurations of many points, at a fraction of what composing each of them costs.

Hydra composes a point in about 0.1 s, nearly all of which goes into the defaults list and the files that it names. Both
hang on the choices of groups alone; every other override is set on the result. So points that choose alike share what
Hydra composed for their choices, and their own values are set on a copy, in their order, by the function with which
Hydra sets them. All that differs is that Hydra's own node is complete by then, which a value can see only through an
interpolation. Hence a point is composed by Hydra, whole, where

- an override's key is not a plain one (`+` and `~` are fine, a package is not); of Hydra's own node a point may only
  change values, which are then part of what is shared;
- what lies at an override's key, or on the way there, is an interpolation, or becomes one by another override;
- Hydra copies variables of the environment (`hydra.job.env_copy`), whose names may be interpolations.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from inpaint_bench.core.config import BenchConfig, parse_changed, parse_config, parse_unchecked, without_hydra

_KEYS = frozenset(spec.name for spec in fields(BenchConfig))
_CONSTANT = re.compile(r"\$\{(oc\.env|testbed):[^${}]*\}")  # interpolations that read no configuration
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A point's configuration, folded: what Hydra composed, and what is set on a copy of it. Picklable.

    A thousand points of one choice hold one `base`; unfolded, each would be most of a megabyte.
    """

    base: bytes  # pickled DictConfig, with Hydra's own node
    values: tuple[Override, ...] = ()
    lines: tuple[str, ...] | None = None  # the point's overrides as given; None: `base` is of this very point
    edits: tuple[tuple[str, Any], ...] = ()  # by our launcher, after all else

    @classmethod
    def whole(cls, config: DictConfig) -> Composed:
        return cls(base=_pickled(config))

    def edited(self, edits: Mapping[str, Any]) -> Composed:
        """With keys set that exist already, or that Hydra's own node may be given."""
        return replace(self, edits=tuple({**dict(self.edits), **edits}.items()))

    def config(self) -> DictConfig:
        """A new DictConfig. Raises what Hydra raises where a value does not fit its key."""
        config = pickle.loads(self.base)  # made by `whole` in this process, or in a pickle that is trusted as a whole
        assert isinstance(config, DictConfig)
        if self.lines is not None:
            self.set_values(config)
            _record(config, self.lines)
        if self.edits:
            with read_write(config), open_dict(config):
                for key, value in self.edits:
                    OmegaConf.update(config, key, value, merge=False)
        return config

    def set_values(self, config: DictConfig) -> None:
        ConfigLoaderImpl._apply_overrides_to_config(list(self.values), config)


def _pickled(config: DictConfig) -> bytes:
    return pickle.dumps(config, pickle.HIGHEST_PROTOCOL)


def _record(config: DictConfig, lines: Sequence[str]) -> None:
    """Tell Hydra's node of the point's own overrides, as Hydra does when it composes."""
    task = [line for line in lines if not _parsed(line).is_hydra_override()]
    config.hydra.overrides.task.clear()
    config.hydra.overrides.task.extend(task)
    how = config.hydra.job.config.override_dirname
    config.hydra.job.override_dirname = get_overrides_dirname(
        overrides=[_parsed(line) for line in task],
        kv_sep=how.kv_sep,
        item_sep=how.item_sep,
        exclude_keys=how.exclude_keys,
    )


@dataclass(frozen=True, kw_only=True)
class _Shared:
    base: Composed
    interpolations: frozenset[str]  # keys of the application at which there is one

    @classmethod
    def of(cls, config: DictConfig) -> _Shared:
        own = OmegaConf.to_container(without_hydra(config), resolve=False)
        return cls(base=Composed.whole(config), interpolations=frozenset(_interpolations(own)))


@dataclass(frozen=True, kw_only=True)
class _Typed:
    config: bytes  # pickled DictConfig, without Hydra's own node
    bench: BenchConfig | None  # None: the choices alone make no whole configuration
    interpolating: frozenset[str]  # keys below which something is an interpolation that can lead to another key

    @classmethod
    def of(cls, config: DictConfig) -> _Typed:
        own = without_hydra(config)
        try:
            bench = parse_unchecked(own)
        except OmegaConfBaseException:
            bench = None
        interpolating = frozenset(str(key) for key in own if "${" in _CONSTANT.sub("", repr(own._get_node(key))))
        return cls(config=_pickled(own), bench=bench, interpolating=interpolating)


class Composition:
    """Composes points. `compose` is Hydra's own way from a point's overrides to its configuration."""

    def __init__(
        self,
        compose: Callable[[list[str]], DictConfig],
        *,
        loader: ConfigLoader,
        config_name: str = "config",
        hydra_overrides: Sequence[str] = (),
    ) -> None:
        self._compose = compose
        assert isinstance(loader, ConfigLoaderImpl)
        # with hydra.searchpath followed, so that it knows every group that Hydra would find
        _, self._files = loader._parse_overrides_and_create_caching_repo(config_name, list(hydra_overrides))
        self._groups: dict[str, bool] = {}
        self._shared: dict[tuple[str, ...], _Shared | None] = {}  # by choices
        self._typed: dict[bytes, _Typed] = {}  # by base

    def __call__(self, lines: Sequence[str]) -> Composed:
        """Raises Hydra's own errors, and those of omegaconf, for overrides that do not fit."""
        return self._folded(lines) or Composed.whole(self._compose(list(lines)))

    def _folded(self, lines: Sequence[str]) -> Composed | None:
        choices: list[str] = []
        own: list[Override] = []  # of Hydra's node
        values: list[Override] = []
        for line in lines:
            override = _parsed(line)
            if self._is_choice(override):
                choices.append(line)
            elif not _is_plain(override):
                return None
            elif override.key_or_group.split(".")[0] != "hydra":
                values.append(override)
            elif override.type is OverrideType.CHANGE:
                choices.append(line)
                own.append(override)
            else:
                return None
        shared = self._composed_for(tuple(choices))
        if shared is None or _reads_another(own + values):
            return None
        if any(_on_the_way(value.key_or_group) & shared.interpolations for value in values):
            return None
        return replace(shared.base, values=tuple(values), lines=tuple(lines))

    def _composed_for(self, choices: tuple[str, ...]) -> _Shared | None:
        if choices not in self._shared:
            try:
                config = self._compose(list(choices))
            except (HydraException, OmegaConfBaseException, ValueError):
                shared = None  # whole, the point tells what is wrong with it
            else:
                shared = None if config.hydra.job.env_copy else _Shared.of(config)
            self._shared[choices] = shared
        return self._shared[choices]

    def typed(self, composed: Composed) -> tuple[BenchConfig, DictConfig]:
        """As objects, checked, and what they were made of, without Hydra's node. Raises UserError, omegaconf's errors.

        Only what the point's own values touch is made anew, and what an interpolation may lead to one of them from;
        the rest is that of its choices.
        """
        if composed.lines is None:
            config = without_hydra(composed.config())
            return parse_config(config), config
        if composed.base not in self._typed:
            self._typed[composed.base] = _Typed.of(pickle.loads(composed.base))
        shared = self._typed[composed.base]
        config = pickle.loads(shared.config)
        composed.set_values(config)
        touched = {value.key_or_group.split(".")[0] for value in composed.values}
        if shared.bench is None or not touched <= _KEYS:
            return parse_config(config), config
        return parse_changed(config, shared.bench, touched | shared.interpolating), config

    def _is_choice(self, override: Override) -> bool:
        """Of a group; Hydra takes `group={...}` for values."""
        key = override.key_or_group
        if key not in self._groups:
            self._groups[key] = self._files.group_exists(key)
        return self._groups[key] and not isinstance(override.value(), dict)


@cache
def _parsed(line: str) -> Override:
    """Hydra's parser takes as long for a line as setting its value, and most lines of a sweep are alike."""
    (override,) = OverridesParser.create().parse_overrides([line])
    return override


def _is_plain(override: Override) -> bool:
    plain = override.package is None and not override.is_sweep_override()
    return plain and _PLAIN_KEY.fullmatch(override.key_or_group) is not None


def _reads_another(overrides: Sequence[Override]) -> bool:
    """A key is given an interpolation, and then more is done at that key or below it."""
    given = [one for one in overrides if "${" in str(one.value())]
    return any(_overlap(a.key_or_group, b.key_or_group) for a in given for b in overrides if b is not a)


def _on_the_way(key: str) -> set[str]:
    """The key, and all in which it lies."""
    names = key.split(".")
    return {".".join(names[: count + 1]) for count in range(len(names))}


def _interpolations(value: Any, key: str = "") -> Iterator[str]:
    """Keys at which there is an interpolation, of an unresolved container."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _interpolations(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str) and "${" in value:
        yield key


def _overlap(one: str, other: str) -> bool:
    """One of the keys is the other, or lies in it."""
    return all(a == b for a, b in zip(one.split("."), other.split("."), strict=False))
