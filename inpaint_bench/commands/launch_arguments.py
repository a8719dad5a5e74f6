"""The arguments of `launch`: Hydra's options and overrides in any order, and what is refused in a sentence."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.recipe import list_parts
from inpaint_bench.core.config.validation import did_you_mean
from inpaint_bench.core.console import output
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.recipe_names import split_choices

# Options of other verbs, and of `launch --plan`, that are keys here.
_KEYS = {"--dry-run": "dry_run=true", "--wait": "wait=true"}

VERBS = (  # somebody may have meant one of them: cli/app.py declares what they do
    *("advise", "cancel", "collect", "compare", "doctor", "launch", "levers"),
    *("merge", "prepare", "report", "rerun", "restore", "status", "watch"),
)
_QUIET, _JSON = {"-q", "--quiet"}, "--json"


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """What was typed, in the order that Hydra reads: options, then overrides."""

    options: list[str]
    overrides: list[str]
    multirun: bool
    config_dir: Path | None
    config_path: str | None
    config_name: str | None
    runs: bool  # False: Hydra only prints something


def read(arguments: Sequence[str], parser: argparse.ArgumentParser) -> LaunchArguments:
    """Separate options and overrides. `parser` is Hydra's. Raises UserError for what is neither."""
    output.quiet, output.as_json = bool(_QUIET & set(arguments)), _JSON in arguments
    typed = [_KEYS.get(argument, argument) for argument in arguments if argument not in _QUIET | {_JSON}]
    known = Parser(parents=[parser], add_help=False, allow_abbrev=False)
    options, unknown = known.parse_known_intermixed_args(typed)
    overrides = list(options.overrides)
    flags = [flag for action in known._actions for flag in action.option_strings]
    for argument in unknown:
        if argument.startswith("-"):
            _refuse_option(argument, typed, [*flags, *_KEYS, *_QUIET, _JSON])
    for position, override in enumerate(overrides):
        following = overrides[position + 1] if position + 1 < len(overrides) else ""
        if override in VERBS or override == "help":
            meant = "inpaint-bench launch --help" if override == "help" else f"inpaint-bench {override}"
            raise UserError(f"{override}: is not KEY=VALUE; the command is `{meant}`")
        if "=" in override or override.startswith("~") or ":" in override:
            continue
        if following.startswith("="):
            raise UserError(f"{override} {following}: write {override}=VALUE without spaces")
        if following and "=" not in following:
            raise UserError(f"{override} {following}: is not KEY=VALUE; write {override}={following}")
    if output.as_json and "dry_run=true" not in overrides:
        raise UserError("--json: only together with --dry-run; `status --json` tells about a sweep that was submitted")
    return LaunchArguments(
        options=[argument for argument in typed if argument not in overrides],
        overrides=[list_parts(override) for override in overrides] if options.multirun else split_choices(overrides),
        multirun=options.multirun,
        config_dir=Path(options.config_dir) if options.config_dir else None,
        config_path=options.config_path,
        config_name=options.config_name,
        runs=not (options.cfg or options.info or options.hydra_help or options.shell_completion),
    )


def read_help(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the `words` beside --help, and `config_dir`, a list of at most one folder."""
    parser = Parser(add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path, action="append", default=[])
    parser.add_argument("words", nargs="*")
    options, _ = parser.parse_known_intermixed_args(list(arguments))
    return options


def _refuse_option(option: str, typed: Sequence[str], flags: Sequence[str]) -> NoReturn:
    name, equals, value = option.partition("=")
    key = name.lstrip("-").replace("-", "_")
    is_key = name.startswith("--") and key.partition(".")[0] in (spec.name for spec in fields(BenchConfig))
    if not is_key and (guess := did_you_mean(name, [flag for flag in flags if len(flag) > 2])):
        raise UserError(f"{option}: no such option.{guess}")
    position = typed.index(option)
    if not equals and position + 1 < len(typed) and "=" not in typed[position + 1]:
        value = typed[position + 1]
    if name.startswith("--"):
        raise UserError(f"{option}: no such option; keys are set without dashes, such as {key}={value or 'VALUE'}")
    raise UserError(f"{option}: no such option; `inpaint-bench launch --help` lists keys and options")
