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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from inpaint_bench.core.composed_file import holds_secret
from inpaint_bench.core.config.parse import without_hydra

from . import hydra_internals

if TYPE_CHECKING:
    from hydra._internal.config_repository import IConfigRepository

_PLAIN_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


@dataclass(frozen=True, kw_only=True)
class ComposedConfig:
    """A point's configuration: what Hydra composed for its groups, and what is set on a copy of that.

    A thousand points of the same groups hold one `base`; composed in full, each would take most of a megabyte.
    """

    base: DictConfig  # with Hydra's own node; never changed
    app: DictConfig  # the same without that node
    values: tuple[Override, ...] = ()
    lines: tuple[str, ...] | None = None  # the point's overrides as typed; None: Hydra composed `base` for this point
    edits: tuple[tuple[str, Any], ...] = ()  # set by our launcher, last

    def with_edits(self, edits: Mapping[str, Any]) -> ComposedConfig:
        """Return a copy that also sets these keys, which exist already or belong to Hydra's own node."""
        return replace(self, edits=tuple({**dict(self.edits), **edits}.items()))

    def build_app(self) -> DictConfig:
        """Return a new DictConfig without Hydra's own node and without edits. Raises what `build` does."""
        config = copy.deepcopy(self.app)
        hydra_internals.apply_overrides(self.values, config)
        return config

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


class _SharedConfig(NamedTuple):
    """What Hydra composed for a choice of groups."""

    base: DictConfig  # with Hydra's own node; never changed
    app: DictConfig  # the same without that node
    interpolated_keys: frozenset[str]  # keys of the application, not of Hydra's node


class Composition:
    """Composes points. `compose` is Hydra's own way from a point's overrides to its configuration."""

    def __init__(self, compose: Callable[[list[str]], DictConfig], files: IConfigRepository) -> None:
        self._compose = lambda lines: _with_environment(compose(lines))
        self._group_exists = cache(files.group_exists)
        self._shared_for = cache(self._compose_choices)

    def __call__(self, lines: Sequence[str]) -> ComposedConfig:
        """Compose one point. Raises Hydra's and OmegaConf's errors for overrides that do not fit."""
        if composed := self._compose_shared(lines):
            return composed
        config = self._compose(list(lines))
        return ComposedConfig(base=config, app=without_hydra(config))

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
            elif override.key_or_group.split(".")[0] != "hydra":
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
        return ComposedConfig(base=shared.base, app=shared.app, values=tuple(values), lines=tuple(lines))

    def _compose_choices(self, choices: tuple[str, ...]) -> _SharedConfig | None:
        try:
            config = self._compose(list(choices))
        except (HydraException, OmegaConfBaseException, ValueError):
            return None  # composed alone, the point raises the error that names what is wrong with it
        if config.hydra.job.env_copy:
            return None
        app = without_hydra(config)
        keys = _interpolations(OmegaConf.to_container(app, resolve=False))
        return _SharedConfig(base=config, app=app, interpolated_keys=frozenset(keys))

    def _is_group_choice(self, override: Override) -> bool:
        """Return whether it chooses a configuration file; Hydra takes `group={...}` for values."""
        return self._group_exists(override.key_or_group) and not isinstance(override.value(), dict)


@cache  # Hydra's parser takes as long for a line as setting its value, and most lines of a sweep are equal
def parsed(line: str) -> Override:
    """Parse the override of one point. Raises Hydra's error for a line that is none."""
    (override,) = OverridesParser.create().parse_overrides([line])
    return override


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
