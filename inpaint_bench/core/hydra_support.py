"""Hydra's side of the configuration: what it must know before it composes, and its errors as one sentence."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from . import recipe, workloads
from .config import BenchConfig, DataConfig
from .config_file import ConfigFileError, read_config_file, read_config_text
from .errors import UserError
from .files import expand_path, read_json
from .paths import testbed_dir
from .schema import PREPARED
from .validation import no_such_key

_RESOLVER_PREFIX = "UserError raised while resolving interpolation: "


def register() -> None:
    """Register the root schema and the resolvers of our configuration files; may be called again."""
    OmegaConf.register_new_resolver("testbed", lambda: str(testbed_dir()), replace=True)
    OmegaConf.register_new_resolver("prepared", _prepared, replace=True)
    OmegaConf.register_new_resolver("recipes", recipe.sweep, replace=True)
    schema = OmegaConf.structured(BenchConfig)
    # Overrides of site files may name any key: they are checked once the site is known.
    OmegaConf.set_struct(schema.sites, False)
    ConfigStore.instance().store(name="bench_schema", node=schema)
    # Not in the group `workload`, where they would be offered as choices.
    for name, declaration in workloads.declarations().items():
        ConfigStore.instance().store(name=f"{name}_schema", node=declaration.Config)
    # Hydra finds the class of a search path entry by its scheme, and has no public way to replace one.
    SourcesRegistry.instance().types["file"] = CheckedFiles


class CheckedFiles(FileConfigSource):
    """Hydra's source of configuration files, with our reader in place of OmegaConf's."""

    def is_config(self, config_path: str) -> bool:
        """Return whether there is such a file, be it a folder or a broken link: those are refused and not passed by."""
        return os.path.lexists(self.file(config_path))

    def file(self, config_path: str) -> Path:
        """Return the path of a configuration file."""
        return Path(self.path, self._normalize_file_name(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file. Raises ConfigFileError."""
        file = self.file(config_path)
        try:
            header = self._get_header_dict(read_config_text(file))
        except ValueError as error:
            raise ConfigFileError(f"{file}: its `# @package` line cannot be read ({error})") from None
        content = read_config_file(file, config_path.rpartition("/")[0], header["package"])
        return ConfigResult(
            config=OmegaConf.create(content), path=f"file://{self.path}", provider=self.provider, header=header
        )


def refuse_hidden_files(folders: Iterable[Path]) -> None:
    """Raise UserError for a file that Hydra would pass by, because an earlier folder has another of the same name."""
    used: dict[Path, Path] = {}
    for folder in folders:
        for file in filter(Path.is_file, sorted(folder.glob("*/*.yaml"))):
            first = used.setdefault(file.relative_to(folder), file)
            if not filecmp.cmp(first, file, shallow=False):
                raise UserError(f"{file}: is not read, since {first} comes first on Hydra's search path; rename it")


def refuse_wrong_choices(overrides: Sequence[str], folders: Iterable[Path]) -> None:
    """Raise UserError for a choice of a group that is no name: a number, null, or a list, whose files Hydra would mix.

    The group `recipe` takes a list. Overrides that cannot be parsed are left to Hydra.
    """
    groups = {path.name for folder in folders for path in folder.glob("*") if path.is_dir()}
    lines = [line for line in overrides if line.lstrip("+").partition("=")[0].partition("@")[0] in groups]
    try:
        parsed = OverridesParser.create().parse_overrides(lines)
    except HydraException:
        return
    for override in parsed:
        value, group = override.value(), override.key_or_group
        values = value.list if isinstance(value, ChoiceSweep) else [value]
        lists = group == "recipe"
        for choice in values if isinstance(values, list) else []:
            if isinstance(choice, int | float | None) or (isinstance(choice, list) and not lists):
                several = f"; several are swept with -m {group}=a,b" if isinstance(choice, list) else ""
                kind = "the name of a file" + (" or a list of them" if lists else "")
                raise UserError(f"{override.input_line}: needs {kind} in conf/{group}{several}")


# By the name of a class Hydra recognises one that it would register again.
CheckedFiles.__name__ = FileConfigSource.__name__


def _prepared(key: str, root: str | None) -> Any:
    """Return a setting of the dataset that `prepare` wrote at `root`; the default where this machine cannot read it.

    Opening the data, where it is used, says what is wrong with it.
    """
    path = expand_path(root or "") / PREPARED
    try:
        return _prepared_settings(path, path.stat().st_mtime_ns)[key]
    except (OSError, ValueError, KeyError, TypeError):
        return {spec.name: spec.default for spec in fields(DataConfig)}[key]


@lru_cache  # a megabyte, and read for every key of every point
def _prepared_settings(path: Path, _modified_ns: int) -> dict[str, Any]:
    content: Any = read_json(path)
    split = content["split"]
    settings = {"resolution_px": content["resolution_px"], "seed": split["seed"], "block_m": split["block_m"]}
    return settings | {"validation_share": split["share"]}


def explain(error: Exception, prefix: str = "") -> str:
    """Return an error of Hydra or OmegaConf as one sentence: the key, its value, and what is allowed.

    `prefix` is put before the key where only a part of the configuration was composed.
    """
    # Hydra wraps errors of OmegaConf in one of its own; key and value are in the cause.
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        return _explain_unknown_key(cause, cause.parent_node, prefix)
    if isinstance(cause, ValidationError):
        return f"{prefix}{cause.full_key}: {str(cause).splitlines()[0]}{_describe_range(cause)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name}: no such choice; have: {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        message = str(error).splitlines()[0].removeprefix("LexerNoViableAltException: ")
        key, _, value = str(error.override).partition("=")
        # Quotes that the shell leaves: for file names with a tilde, comma or bracket.
        quoted = f"; a value with such characters needs two pairs of quotes, {key}='\"{value}\"'" if value else ""
        return f"{error.override}: not KEY=VALUE as Hydra reads it ({message}){quoted}"
    message = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return message.removeprefix(_RESOLVER_PREFIX)


def _explain_unknown_key(error: OmegaConfBaseException, parent: DictConfig, prefix: str) -> str:
    path = f"{prefix}{error.full_key or error.key}"
    if OmegaConf.get_type(parent) is dict:  # of any keys
        return f"{path}: no such key in {path.rpartition('.')[0]}; +{path}=... adds one"
    return no_such_key(path, (str(key) for key in parent if key != "hydra"))


def _describe_range(error: ValidationError) -> str:
    """Return the range that the field's dataclass declares, or nothing."""
    owner: Any = OmegaConf.get_type(error.parent_node) if isinstance(error.parent_node, DictConfig) else None
    if not is_dataclass(owner):
        return ""
    for spec in fields(owner):
        if spec.name == error.key and (bounds := spec.metadata.get("range")):
            # Fields of type `int | str`, such as batch, also take auto.
            if "str" in str(spec.type):
                return f"; allowed: an integer between {bounds[0]:,} and {bounds[1]:,}, or auto"
            return f"; allowed: {bounds[0]:,} to {bounds[1]:,}"
    return ""
