"""Hydra's side of the configuration: what it must know before it composes, and its errors as one sentence."""

import filecmp
import os
import re
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

from inpaint_bench.core import workloads
from inpaint_bench.core.config import recipe, yaml_file
from inpaint_bench.core.config.bench import PREPARED, BenchConfig, DataConfig
from inpaint_bench.core.config.levers import LEVERS
from inpaint_bench.core.config.validation import no_such_choice, no_such_key
from inpaint_bench.core.config.yaml_file import ConfigFileError, describe_type, read_config_file, read_config_text

from .console import echo
from .errors import UserError, first_line
from .files import expand_path, read_json
from .key_docs import key_elsewhere
from .paths import conf_dir, testbed_dir

CHDIR = "hydra.job.chdir"
_NOT_READ = {
    "prepare": "no run reads it; it is a key of `inpaint-bench prepare`",
    "identity": "is filled in by the launcher; leave it out",
    CHDIR: "relative paths are those of the folder where `launch` is called; leave it out",
    **{f"hydra.{name}": f"is chosen by hydra/{name}=NAME" for name in ("launcher", "sweeper")},
    "hydra.sweep.subdir": "run directories are named by point and attempt; leave it out",
}


def register() -> None:
    """Register the root schema and the resolvers of our configuration files; may be called again."""
    register_resolvers()
    schema = OmegaConf.structured(BenchConfig)
    # Overrides of site files may name any key: they are checked once the site is known.
    OmegaConf.set_struct(schema.sites, False)
    ConfigStore.instance().store(name="bench_schema", node=schema)
    # Not in the group `workload`, where they would be offered as choices.
    for name, declaration in workloads.declarations().items():
        ConfigStore.instance().store(name=f"{name}_schema", node=declaration.Config)
    for lever in LEVERS.values():
        ConfigStore.instance().store(group="recipe", name=lever.name, node={lever.field: lever.value})
    # Hydra finds the class of a search path entry by its scheme, and has no public way to replace one.
    SourcesRegistry.instance().types["file"] = CheckedFiles


def register_resolvers() -> None:
    """Register what a composed configuration needs to be read; may be called again."""
    OmegaConf.register_new_resolver("testbed", lambda: str(testbed_dir()), replace=True)
    OmegaConf.register_new_resolver("prepared", _prepared, replace=True)
    OmegaConf.register_new_resolver("recipes", recipe.sweep, replace=True)


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
        for file in folder.glob("*/*.yml"):
            if (conf_dir() / file.parent.name).is_dir():
                raise UserError(f"{file}: is not read; name it {file.stem}.yaml")
        for file in filter(Path.is_file, sorted(folder.glob("*/*.yaml"))):
            first = used.setdefault(file.relative_to(folder), file)
            if not filecmp.cmp(first, file, shallow=False):
                raise UserError(f"{file}: is not read, since {first} comes first on Hydra's search path; rename it")
            lever = LEVERS.get(file.stem) if file.parent.name == "recipe" else None
            # A copy of an older conf/ has a file of equal content for each lever.
            if lever and read_config_file(file, "recipe") != {lever.field: lever.value}:
                raise UserError(f"{file}: {lever.name} is the name of a lever; rename the file")


def refuse_wrong_overrides(overrides: Sequence[str], folders: Iterable[Path], *, multirun: bool | None) -> None:
    """Raise UserError for overrides that Hydra would take for something else than was meant, or refuse at length.

    `multirun` is None for a command that starts no run and sweeps nothing.
    """
    groups = {path.name for folder in folders for path in folder.glob("*") if path.is_dir()}
    parser = OverridesParser.create()
    given: dict[str, str] = {}
    for line in overrides:
        try:
            (override,) = parser.parse_overrides([line])
        except HydraException:
            raise UserError(explain_override(line)) from None
        key, typed = override.key_or_group, line.partition("=")[2]
        group = key.partition(".")[0]
        unread = _NOT_READ.get(key) or _NOT_READ.get(group)
        # false is Hydra's default of hydra.job.chdir
        if unread and (multirun is not None or group != "prepare") and (key, typed.lower()) != (CHDIR, "false"):
            raise UserError(f"{line}: {unread}")
        if multirun is None and key.startswith(("hydra.run.", "hydra.sweep.")):
            raise UserError(f"{line}: is a key of a run's or a sweep's folder, and this command makes neither")
        if key == "hydra.sweep.dir" and "${hydra:" in typed:
            raise UserError(f"{line}: a sweep has no ${{hydra:...}}, since its points differ; ${{now:%Y-%m-%d}} works")
        if multirun is not None and key.startswith("hydra.run." if multirun else "hydra.sweep."):
            right = "a sweep with -m has hydra.sweep.dir" if multirun else "a run without -m has hydra.run.dir"
            raise UserError(f"{line}: is not read; {right}")
        if key.endswith(".partition") and override.is_sweep_override():
            echo(f"{line}: makes points for each partition; none waits for either of them, as Slurm would", error=True)
        if re.fullmatch(r"\d+\.\.+\d+", typed):
            raise UserError(f"{line}: several values are listed, such as -m {key}=8,16,32")
        if key == "gpus" and re.search("[a-z]", line.partition("=")[2]):
            raise UserError(f"{line}: gpus is a number; cards are chosen with {line.replace('s', '', 1)}")
        first = given.setdefault(override.get_key_element().lstrip("+"), line)
        if first is not line:
            swept = first != line and multirun is not None
            several = f"; several values are swept with -m {key}=a,b" if swept else ""
            if key in groups:
                raise UserError(f"{key} is given twice, {first} and {line}; keep one of them{several}")
            # Scripts append overrides to their own, and with Hydra the last one counts.
            echo(f"{key} is given twice: {line} counts, {first} does not{several}", error=True)
        value = override.value()
        if not multirun and override.is_sweep_override():
            advice = [f"several values need -m, which submits a sweep: inpaint-bench launch -m {line} ..."]
            if multirun is None:
                advice = ["takes one value, or a list in brackets"]
            if yaml_file.takes_text(key):
                advice += [f"a text with a comma is quoted twice: '{key}=\"{typed}\"'"]
            raise UserError(f"{line}: {'; '.join(advice)}")
        values = value.list if isinstance(value, ChoiceSweep) else [value]
        for item in values:  # here: Hydra writes what it has read into the overrides of the points
            yaml_file.refuse_guessed_text(key, item, typed)
        for index, choice in enumerate(values if isinstance(value, ChoiceSweep) else []):
            if choice in values[:index]:
                raise UserError(f"{line}: {choice} is given twice; repeats=2 runs each point twice, with another seed")
        for choice in values if key in groups else []:
            is_list = isinstance(choice, list)
            if isinstance(choice, int | float | None) or (is_list and key != "recipe"):
                several = f"; several are swept with -m {key}=a,b" if is_list and multirun is not None else ""
                needed = f"the name of a file in conf/{key}{several}"
                if key == "recipe":
                    needed = "the name of a lever or bundle, or a list of them; `inpaint-bench levers` lists all"
                raise UserError(f"{override.input_line}: needs {needed}")


# Hydra registers a config source once per class name; keep the original name so that this one replaces it.
CheckedFiles.__name__ = FileConfigSource.__name__


def _prepared(key: str, root: str | None) -> Any:
    """Return a setting of the dataset that `prepare` wrote at `root`; the default if this machine cannot read it."""
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

    `prefix` is put before the key if only a part of the configuration was composed.
    """
    # Hydra wraps errors of OmegaConf in one of its own; key and value are in the cause.
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        return _explain_unknown_key(cause, cause.parent_node, prefix)
    if isinstance(cause, ValidationError):
        return _explain_wrong_type(cause, prefix)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        # Hydra gives the options of a group, but not if the choice is a list.
        files = (path.stem for path in (conf_dir() / group).glob("*.yaml"))
        options = error.options or (recipe.choices() if group == "recipe" else sorted(files))
        if group == "recipe":
            options = [option for option in options if option not in LEVERS or LEVERS[option].listed]
        if not group:
            return f"--config-name {name}: there is one root, config; files of your own are read with --config-dir DIR"
        refusal = no_such_choice(f"{group}={name}", options)
        if group == "gpu" and "Did you mean" not in refusal:
            here = f"site=local sites.local.gpus.{name}.request=none"
            refusal += f". For another card write gpu/{name}.yaml, in conf or --config-dir; on this machine add {here}"
        return refusal
    if isinstance(error, OverrideParseException):
        return explain_override(str(error.override))
    message = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if twice := re.match(
        r"Could not append to config. An item is already at '(.*?)'|Multiple values for (\S+)\. "
        r"|(\S+) appears more than once in the final defaults list",
        message,
    ):
        key = twice[twice.lastindex or 0]
        return f"+{key}: {key} has a value already; leave out the +"
    if kept := re.match(r"Could not delete from config. '(.*?)' does|Error merging override ~(\S+)", message):
        key = (kept[1] or kept[2]).partition("=")[0]
        return f"~{key}: cannot be deleted; {key}=null unsets a text or a number that may be absent"
    if "nterpolation" in message and (missing := re.search(r"\$\{([^}]*)\}|[Ii]nterpolation key '([^']*)'", message)):
        name = missing[1] or missing[2]
        return f"${{{name}}}: no such key; in a shell, a variable stands between double quotes or none"
    place = re.search(r" full_key: (\S+)( reference_type=\S+)?( object_type=\S+)?$", message)
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", message[: place.start()] if place else message)
    text = text.strip('"')
    return f"{place[1]}: {text}" if place else text


def explain_override(line: str) -> str:
    """Return a sentence about an override that Hydra cannot parse."""
    key, equals, value = line.partition("=")
    if not equals and Path(line).is_dir():
        return f"{line}: is not KEY=VALUE; a folder of images is data=folder data.root={line}"
    if not equals or not key:
        colon = re.fullmatch(r"([a-z_][\w.]*):(.+)", line)
        right = f"{colon[1]}={colon[2]}" if colon else f"{key or 'batch'}=VALUE"
        return f"{line}: is not KEY=VALUE; write it without spaces, such as {right}"
    if value.startswith("~"):
        return f"{line}: the shell left the ~ as it is; write {key}=$HOME{value.removeprefix('~')}"
    if value.endswith(","):
        return f"{line}: ends with a comma; write several values without spaces, such as {key}=a,b"
    if key == "recipe" and re.search(r"[\[,],|,[\],]", f"{value},"):
        joined = re.sub(r"choice|[][()\\]", "", value).replace(",", "+")
        return f"recipe={joined}: a name is missing beside a +"
    if value.startswith("[") and not value.endswith("]"):
        whole = "+".join(re.findall(r"[\w.-]+", value)) if key == "recipe" else f"[{value.strip('[]')}]"
        return f"{line}: a bracket is missing; write {key}={whole}"
    if value.startswith("[") and "=" in value:
        texts = ",".join(f'"{text}"' for text in re.findall(r'[^",]+', value.strip("[]")))
        return f"{line}: a list of texts has quotes within: '{key}=[{texts}]'"
    # Quotes that the shell leaves: for file names with a tilde, comma or bracket.
    quoted = f"{key}='\"{value}\"'"
    return (
        f"{line}: is not KEY=VALUE as Hydra reads it; several values are written as {key}=a,b, and a value with such "
        f"characters needs two pairs of quotes, {quoted}"
    )


def _explain_unknown_key(error: OmegaConfBaseException, parent: DictConfig, prefix: str) -> str:
    path = f"{prefix}{error.full_key or error.key}"
    if OmegaConf.get_type(parent) is dict:  # a dict may have any keys
        return f"{path}: no such key in {path.rpartition('.')[0]}; +{path}=... adds one"
    keys = [str(key) for key in parent if key != "hydra"]
    return no_such_key(path, keys, elsewhere=None if "." in path else key_elsewhere(path))


def _explain_wrong_type(error: ValidationError, prefix: str) -> str:
    """Return a sentence about a value of the wrong type, with the type and range that the key's dataclass declares."""
    key, message = f"{prefix}{error.full_key}", first_line(error)
    owner: Any = OmegaConf.get_type(error.parent_node) if isinstance(error.parent_node, DictConfig) else None
    value = re.match(r"Value '(.*?)' (of type|is not|could not)", message)
    if error.key not in ([spec.name for spec in fields(owner)] if is_dataclass(owner) else []):
        return f"{key}: {message}"
    needed = describe_type(owner, str(error.key))
    if "is not a ListConfig, list or tuple" in message:
        return f"{key}: must be {needed}"
    if not value:
        return f"{key}: must be {needed}"
    swept = ""
    if value[1].startswith("[") and "list" not in needed:
        swept = f"; several are swept with -m {key}={value[1].strip('[]').replace(' ', '')}"
    return f"{key}={value[1].replace(', ', ',')}: must be {needed}{swept}"
