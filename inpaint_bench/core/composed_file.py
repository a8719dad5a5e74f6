"""A composed configuration as YAML that another process reads back: the same types, values and hash.

Interpolations are written as their values, except those that only the reader can resolve: variables with a secret, and
what is known of a prepared dataset. Nothing that is read is executed.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core import workloads
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_plain

from .config.bench import BenchConfig
from .config.parse import resolved_values

SCHEMA = "workload_schema"  # key of the file: the workload whose keys the block `workload` has
_VARIABLE = re.compile(r"\$\{oc\.env:\s*(\w+)")

# The last word of a key, as in environment.variables.WANDB_API_KEY=..., {HF_TOKEN: ...} and export DB_PASSWORD=...; not
# `tokens`, which are counted.
_KEY = re.compile(
    r"(?P<key>[\w.]*(?:token|secret|passw(?:or)?d|passphrase|credentials?|(?<![a-z])key|apikey))['\"]?\s*[=:]\s*['\"]?"
    r"(?P<value>[^\s'\",}]+)",
    re.IGNORECASE,
)
_URL = re.compile(r"(?P<key>\w+://[^\s/:@]*):[^\s/@]+@")  # https://user:password@host
_KNOWN_FORM = re.compile(r"(?P<key>hf_|gh[oprsu]_|github_pat_|glpat-|xox[abp]-|sk-|AKIA)[A-Za-z0-9_-]{16,}")
_NO_VALUE = ("null", "none", "true", "false", "")


def write_yaml(file: Path, content: Mapping[str, Any]) -> None:
    """Write plain values. Raises UserError for text that is not Unicode."""
    try:
        # By libyaml: OmegaConf's own dumper takes 15 ms.
        file.write_bytes(yaml.dump(dict(content), Dumper=yaml.CSafeDumper, encoding="utf-8", sort_keys=False))
    except UnicodeEncodeError as error:
        text = ascii(error.object[max(0, error.start - 20) : error.end])
        raise UserError(f"{text}: is not Unicode, and jobs read their configuration from text") from None


def read_yaml(file: Path) -> Any:
    """Read plain values. Raises OSError."""
    return yaml.load(read_plain(file), Loader=yaml.CSafeLoader)  # makes plain values only


def plain_config(config: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain values, without Hydra's own node."""
    # Hydra's own node cannot be resolved here.
    content: dict[str, Any] = _resolved(OmegaConf.to_container(config), resolved_values(config, {"hydra"}))
    for site in [content.get("site"), *(content.get("sites") or {}).values()]:
        environment = site.get("environment") if isinstance(site, dict) else None
        if isinstance(environment, dict):
            _leave_secrets_out(environment)
    kind = OmegaConf.get_type(config.workload)
    schemas = (name for name, declaration in workloads.declarations().items() if declaration.Config is kind)
    return {SCHEMA: next(schemas, None), **content}


def typed_config(content: Mapping[str, Any], **others: Any) -> DictConfig:
    """Return the configuration that `plain_config` was called with; `others` are the types of blocks added to it."""
    values = dict(content)
    name = values.pop(SCHEMA)
    schema = OmegaConf.structured(BenchConfig)
    OmegaConf.set_struct(schema, False)
    OmegaConf.set_struct(schema.sites, False)
    if name is not None:
        schema.workload = OmegaConf.structured(workloads.declarations()[name].Config)
    for key, kind in others.items():
        schema[key] = OmegaConf.structured(kind)
        OmegaConf.set_struct(schema[key], False)
    # Overrides can add keys to these blocks, and remove some.
    for block, given in [(schema, values), *((schema[key], values[key]) for key in others)]:
        for key in block.keys() - given.keys():
            del block[key]
    config = OmegaConf.merge(schema, values)
    assert isinstance(config, DictConfig)
    OmegaConf.set_struct(config, True)
    return config


def find_secret(lines: Iterable[str]) -> str | None:
    """Return the key, or the beginning, of the first value that looks like a secret; None if nothing does."""
    for line in lines:
        for match in _KEY.finditer(line):
            if match["value"].lower() not in _NO_VALUE:
                return match["key"]
        if known := _URL.search(line) or _KNOWN_FORM.search(line):
            return f"{known['key']}..."
    return None


def holds_secret(text: str) -> bool:
    """Return whether a text is an interpolation of an environment variable with a secret."""
    names = _VARIABLE.findall(text)
    return find_secret(f"{name}={os.environ.get(name, 'null')}" for name in names) is not None


def _resolved(written: Any, value: Any) -> Any:
    """Return `value`, with interpolations that the reader resolves as they were written, and others as plain text."""
    if isinstance(value, dict):
        keys = written if isinstance(written, dict) else {}
        return {key: _resolved(keys.get(key), item) for key, item in value.items()}
    if isinstance(value, list):
        items = written if isinstance(written, list) else [None] * len(value)
        return [_resolved(*pair) for pair in zip(items, value, strict=True)]
    if isinstance(written, str) and "${" in written and ("${prepared:" in written or holds_secret(written)):
        return written
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _leave_secrets_out(environment: dict[str, Any]) -> None:
    """Remove from a site's environment the secrets, which a job gets from its script."""
    if isinstance(variables := environment.get("variables"), dict):
        secret = [name for name, value in variables.items() if find_secret([f"{name}={value}"])]
        variables |= {name: f"${{oc.env:{name},''}}" for name in secret}
    if isinstance(setup := environment.get("setup"), list):
        environment["setup"] = [f"# {key}" if (key := find_secret([str(line)])) else line for line in setup]
