"""The arguments of `launch`: Hydra's options and overrides in any order, their completion, help and refusal."""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn

from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.recipe import list_parts
from inpaint_bench.core.config.validation import did_you_mean, no_such_choice
from inpaint_bench.core.console import console, output
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.key_docs import WORKLOAD, Key, groups, keys_of, summary
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import split_choices

# Options of other verbs, and of `launch --plan`, that are keys here.
_KEYS = {"--dry-run": "dry_run=true", "--wait": "wait=true"}

VERBS = (  # somebody may have meant one of them: cli/app.py declares what they do
    *("advise", "cancel", "collect", "compare", "doctor", "launch", "levers"),
    *("merge", "new", "prepare", "report", "rerun", "restore", "status", "watch"),
)
_QUIET, _JSON = {"-q", "--quiet"}, "--json"


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an option of one value that is given twice, of which argparse keeps the last."""
        for action in (action for action in self._actions if type(action) is argparse._StoreAction):
            given = [word for word in args or () if word.partition("=")[0] in action.option_strings]
            if len(given) > 1:
                raise UserError(f"{given[0]} is given twice; keep one of them")
        return super().parse_known_args(args, namespace)


def read(arguments: Sequence[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return what `parser`, which is Hydra's, finds; `options` and `overrides` are words in the order that Hydra reads.

    `runs` is false if Hydra only prints something. Raises UserError for what is neither option nor override.
    """
    output.quiet, output.as_json = bool(_QUIET & set(arguments)), _JSON in arguments
    typed = [_KEYS.get(argument, argument) for argument in arguments if argument not in _QUIET | {_JSON}]
    known = Parser(parents=[parser], add_help=False, allow_abbrev=False)
    found, unknown = known.parse_known_intermixed_args(typed)
    overrides = found.overrides
    if found.info or found.hydra_help:
        raise UserError("--info, --hydra-help: are Hydra's; --help lists the keys, --cfg job prints a configuration")
    if found.cfg and found.multirun:
        raise UserError("--cfg: prints the configuration of one point; leave out -m. --dry-run lists the points of -m")
    flags = [flag for action in known._actions for flag in action.option_strings]
    for argument in unknown:
        if argument.startswith("-"):
            _refuse_option(argument, typed, [*flags, *_KEYS, *_QUIET, _JSON])
    for position, override in enumerate(overrides):
        following = overrides[position + 1] if position + 1 < len(overrides) else ""
        if override in VERBS or override == "help":
            meant = "inpaint-bench launch --help" if override == "help" else f"inpaint-bench {override}"
            raise UserError(f"{override}: is not KEY=VALUE; the command is `{meant}`")
        if override == "+" and position and following:
            spaced = (overrides[position - 1], following)
            raise UserError(f"{' + '.join(spaced)}: write {'+'.join(spaced)} without spaces")
        if "=" in override or override.startswith("~") or ":" in override:
            continue
        if following.startswith("="):
            raise UserError(f"{override} {following}: write {override}=VALUE without spaces")
        if following and "=" not in following:
            raise UserError(f"{override} {following}: is not KEY=VALUE; write {override}={following}")
    if output.as_json and "dry_run=true" not in overrides:
        raise UserError("--json: only together with --dry-run; `status --json` tells about a sweep that was submitted")
    found.options = [argument for argument in typed if argument not in overrides]
    lists = [list_parts(override, swept=found.multirun) for override in overrides]
    found.overrides = lists if found.multirun else split_choices(lists)
    found.config_dir = found.config_dir and Path(found.config_dir)
    found.runs = not (found.cfg or found.shell_completion)
    return found


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


# --- help and completion --------------------------------------------------------------------------

_HEADER = """Usage: inpaint-bench launch [OPTIONS] KEY=VALUE ...

Submit a sweep to the Slurm partitions of every site (-m), or run one point here.

Examples:
  inpaint-bench launch -m gpu=a40,a100,h200 batch=8,16,32 --dry-run
  inpaint-bench launch -m gpu=a40,a100,h200 batch=8,16,32 --wait
  inpaint-bench launch -m site=local gpu=h200 batch=4,8,16,32 repeats=3
  inpaint-bench launch --plan plan.delta.yaml

Options:
  -m, --multirun      submit a sweep; several values of a key are swept, as batch=8,16
  --dry-run           dry_run=true: print the plan and write the scripts, submit nothing
  --wait              wait=true: return when all points have finished
  --config-dir DIR    a folder with further configuration files: site/, gpu/, recipe/ ...
  -q, --quiet         print warnings and errors only
  --json              print the plan of a dry run as JSON
  --plan FILE         submit the points of a plan file (see launch --plan FILE --help)
  --help [GROUP ...]  this, or every key of a group
"""


def choices(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Return the names that each group of configuration files offers, and for `recipe` the levers."""
    files = {(path.parent.name, path.stem) for folder in folders for path in folder.glob("*/*.yaml")}
    names: dict[str, list[str]] = {}
    for group, name in sorted(files | {("recipe", name) for name in recipe.choices()}):
        names.setdefault(group, []).append(name)
    return names


def complete(words: Sequence[str], incomplete: str) -> list[str]:
    """Return what can stand for `incomplete`: keys with "=", or values of the key before it.

    bash breaks words at "=": there `words` end with the key, or with the key and "=".
    """
    key, equals, value = incomplete.rpartition("=")
    if words and words[-1] == "=" and len(words) > 1:
        key, equals, value = words[-2], "=", incomplete
    elif words and incomplete == "=":
        key, equals, value = words[-1], "=", ""
    if not equals:
        return _complete_key(incomplete)
    prefix = f"{key}=" if "=" in incomplete and incomplete != "=" else ""
    return [f"{prefix}{text}" for text in _complete_value(key, value)]


def _complete_key(incomplete: str) -> list[str]:
    blocks = groups()
    if "." in incomplete:
        group = incomplete.partition(".")[0]
        group = f"{WORKLOAD}=finetune_inpaint" if group == WORKLOAD else group
        offered = [f"{key.path}=" for key in keys_of(group)] if group in blocks else []
    else:
        offered = [f"{key.path}=" for key in keys_of("")] + [f"{group}=" for group in choices([conf_dir()])]
        offered += [f"{group.partition('=')[0]}." for group in blocks if group] * bool(incomplete)
    offered += ["--multirun", "--dry-run", "--wait", "--config-dir", "--plan", "--help"]
    return sorted({word for word in offered if word.startswith(incomplete) and "<name>" not in word})


def _complete_value(name: str, value: str) -> list[str]:
    """Return what can stand for the last of several values or levers, after those before it."""
    last = re.split(r"[][,+]", value)[-1]
    values = choices([conf_dir()]).get(name) or _values(name)
    return [f"{value.removesuffix(last)}{text}" for text in values if text.startswith(last)]


def _values(name: str) -> list[str]:
    """Return the values of a key that takes one of a few, else none."""
    block = name.partition(".")[0] if "." in name else ""
    keys = keys_of(block) if block in groups() else []
    taken = next((key.values for key in keys if key.path == name), "")
    if taken == "true or false":
        return ["true", "false"]
    return taken.removeprefix("one of ").split(", ") if taken.startswith("one of ") else []


def print_help(arguments: Sequence[str]) -> None:
    """Print the help of the groups that are named beside --help, else of everything.

    Raises UserError for a group that does not exist.
    """
    parser = Parser(add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path, action="append", default=[])
    parser.add_argument("words", nargs="*")
    asked_for, _ = parser.parse_known_intermixed_args(list(arguments))
    folders = [conf_dir(), *asked_for.config_dir]
    known = groups()
    asked = []
    for word in asked_for.words:
        name = word if word in known else word.partition("=")[0]
        if name == "sites":
            name = "site"
        if name not in known and name not in choices(folders):
            raise UserError(no_such_choice(word, {*filter(None, known), *choices(folders)}))
        asked += [name] if name in known or name != WORKLOAD else [key for key in known if key.startswith(f"{name}=")]
    width = min(console().width, 120)
    print("\n".join(_groups(asked, folders, width) if asked else _everything(folders, width)))


def _groups(names: Sequence[str], folders: Sequence[Path], width: int) -> Iterator[str]:
    for name in names:
        if offered := choices(folders).get(name.partition("=")[0]):
            yield from wrap(
                f"{name.partition('=')[0]}=NAME, one of: {', '.join(offered)}", width, subsequent_indent="  "
            )
        if name in groups():
            yield from wrap(summary(name), width)
            yield ""
            yield from _lines(keys_of(name), width)


def _everything(folders: Sequence[Path], width: int) -> Iterator[str]:
    yield from [_HEADER, "Groups, chosen with GROUP=NAME (inpaint-bench launch --help GROUP lists the keys):"]
    for group, names in choices(folders).items():
        yield from wrap(f"{group}: {', '.join(names)}", width, initial_indent="  ", subsequent_indent="      ")
    blocks = ", ".join(name for name in groups() if name and "=" not in name and name not in choices(folders))
    yield from ["", f"Blocks of keys without files: {blocks}", "", "Keys at the top:", ""]
    yield from _lines(keys_of(""), width)


def _lines(keys: Sequence[Key], width: int) -> Iterator[str]:
    for key in keys:
        yield f"  {key.path}" + (f"={key.default}" if key.default else "")
        yield from wrap(f"{key.description} ({key.values})", width, initial_indent="      ", subsequent_indent="      ")
