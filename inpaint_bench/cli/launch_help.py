"""`launch --help [GROUP]`: the groups with their choices, and every key with what it takes, its default and meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

from inpaint_bench.core.console import console
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.key_docs import WORKLOAD, Key, groups, keys_of, summary
from inpaint_bench.core.validation import no_such_choice

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
  --plan FILE         submit the points of a plan file (see launch --plan FILE --help)
  --help [GROUP ...]  this, or every key of a group
"""


def choices(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Return the names that each group of configuration files offers."""
    files = {path for folder in folders for path in folder.glob("*/*.yaml")}
    found: dict[str, list[str]] = {}
    for group, name in sorted({(path.parent.name, path.stem) for path in files}):
        found.setdefault(group, []).append(name)
    return found


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
