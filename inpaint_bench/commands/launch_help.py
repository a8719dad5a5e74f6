"""`launch --help [GROUP]`: the groups with their choices, and every key with what it takes, its default and meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.validation import no_such_choice
from inpaint_bench.core.console import console
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.key_docs import WORKLOAD, Key, groups, keys_of, summary
from inpaint_bench.core.paths import conf_dir

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


def print_help(words: Sequence[str], folders: Sequence[Path]) -> None:
    """Print the help of the groups in `words`, else of everything. Raises UserError for a group that does not exist."""
    known = groups()
    asked = []
    for word in words:
        name = word if word in known else word.partition("=")[0]
        if name == "sites":
            name = "site"
        if name not in known and name not in choices(folders):
            raise UserError(no_such_choice(word, [*filter(None, known), *choices(folders)]))
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
