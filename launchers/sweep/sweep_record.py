"""`sweep.json`: what was launched, how and where, with every point and the site files of the time."""

import contextlib
import hashlib
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.console import pluralize, sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_plain, replace_bytes
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.records import ManifestHead, decode_record, read_record, write_record
from inpaint_bench.core.schema import JOBS, LEDGER, MANIFEST, MULTIRUN, SWEEP, Status

from .attempt import Attempt

FORMAT_VERSION = 3
READABLE = (2, 3)  # 2: its jobs are pickles
MAX_NAME_BYTES = 255  # limit for a file name on every common file system
# Linux takes 4,096, and programs that keep a path in a buffer often 1,024; the files of a sweep need up to 200 of them.
MAX_PATH_BYTES = 800

# PYTHONPATH ends a folder at ":", Slurm reads "%" and "\\" in the paths of logs, Hydra reads "${"; quotes do not help.
_REFUSED_IN_PATHS = (":", "%", "\\", "${")


class LaunchContext(msgspec.Struct, frozen=True, kw_only=True):
    """Working directory, configuration folders and Hydra overrides of a launch: they decide what overrides mean.

    A rerun composes the same files and starts its jobs in the same directory, wherever it is called from.
    """

    working_dir: str | None = None  # base of relative paths and start directory of jobs; None: the current one
    config_dirs: tuple[str, ...] = ()  # Hydra's --config-dir
    config_path: str | None = None  # Hydra's --config-path, None for the project's own conf/
    config_name: str = "config"
    hydra_overrides: tuple[str, ...] = ()  # overrides of Hydra's own node, such as hydra.job.chdir=true

    @classmethod
    def from_config(cls, config: DictConfig) -> Self:
        """Read the context from a composed configuration that still has Hydra's own node."""
        runtime = config.hydra.runtime
        files = [source for source in runtime.config_sources if source.schema == "file"]
        # The project's own conf/ is not recorded: a rerun may come from another checkout.
        # Nor are folders, which exist by then: a resolved one may be no override, since override_dirname has commas.
        folders = ("hydra.sweep.dir=", "hydra.run.dir=")
        main = next((source.path for source in files if source.provider == "main"), None)
        return cls(
            working_dir=str(runtime.cwd),
            config_dirs=tuple(source.path for source in files if source.provider == "command-line"),
            config_path=main if main and Path(main) != conf_dir() else None,
            config_name=str(config.hydra.job.config_name),
            hydra_overrides=tuple(o for o in config.hydra.overrides.hydra if not o.lstrip("+").startswith(folders)),
        )

    @property
    def extra_config_dirs(self) -> tuple[str, ...]:
        """Return the folders with configuration files that are not the project's own."""
        return (*self.config_dirs, *([self.config_path] if self.config_path else []))

    @contextlib.contextmanager
    def activated(self) -> Iterator[None]:
        """Change to the working directory of the launch. Raises UserError if one of its folders is gone."""
        for folder in (*self.extra_config_dirs, *([self.working_dir] if self.working_dir else [])):
            if not Path(folder).is_dir():
                raise UserError(f"{folder} does not exist any more, and the launch used it: create it again")
        with contextlib.chdir(self.working_dir or Path.cwd()):
            yield


class RunOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers and order of the points of a sweep that repeats its cells: combinations, known by their position in it.

    Every cell runs once before any cell runs again, in another random order each time, so that drift (room temperature,
    neighbours, a file system) does not favour a cell. Order and numbers follow from `order_seed` alone: a repetition
    that is added later gets the number that it always had.
    """

    cells: Annotated[int, msgspec.Meta(ge=1)]
    repeats: int  # complete repetitions that the sweep starts with
    seed: int  # seed of the first repetition; each further one adds 1
    order_seed: int | None  # None: every repetition in the order of the command line

    @property
    def is_plain(self) -> bool:
        """Return whether nothing is repeated or shuffled: the points are the cells."""
        return self.repeats == 1 and self.order_seed is None

    def shuffled(self, repetition: int) -> list[int]:
        """Return the cells in the order in which this repetition runs them."""

        def rank(cell: int) -> bytes:
            # hashes, not random.shuffle: the order must survive a change of Python version
            return hashlib.sha256(f"{self.order_seed} {repetition} {cell}".encode()).digest()

        cells = range(self.cells)
        return list(cells) if self.order_seed is None else sorted(cells, key=rank)

    def locate(self, num: int) -> tuple[int, int]:
        """Return cell and repetition of a point number."""
        repetition, position = divmod(num, self.cells)
        return self.shuffled(repetition)[position], repetition

    def number(self, cell: int, repetition: int) -> int:
        """Return the point number of a repetition. Numbers of repetitions that never run stay unused."""
        return repetition * self.cells + self.shuffled(repetition).index(cell)

    def overrides(self, cell: Sequence[str], repetition: int) -> list[str]:
        """Return the cell's overrides with the seed of the repetition instead of their own."""
        others = (override for override in cell if override.partition("=")[0].strip().lstrip("+") != "seed")
        return [*others, f"seed={self.seed + repetition}"]

    def __str__(self) -> str:
        order = "in the order typed" if self.order_seed is None else f"order_seed={self.order_seed}"
        return f"{pluralize(self.cells, 'cell')}, {pluralize(self.repeats, 'repetition')}, {order}"


def new_sweep_id() -> str:
    """Return an id that no other sweep has: date and six random hex digits."""
    return f"s{time.strftime('%y%m%d', time.gmtime())}{secrets.token_hex(3)}"


class _Version(msgspec.Struct):
    format_version: int = 1  # the first format did not name its version


class SweepRecord(msgspec.Struct, kw_only=True):
    """Content of `sweep.json`. Written with all points before anything is submitted."""

    format_version: int = FORMAT_VERSION
    sweep_id: str
    created_unix: float = msgspec.field(default_factory=lambda: round(time.time(), 3))
    command: list[str] = msgspec.field(default_factory=lambda: list(sys.argv))
    overrides: list[str] = []  # overrides of the command line, before the sweep was expanded
    order: RunOrder | None = None  # None: the seed was swept, so nothing can be repeated
    launch_context: LaunchContext = LaunchContext()
    sites: dict[str, dict[str, Any]] = {}  # contents of the site files, by name
    points: list[Attempt] = []  # as launched

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record of a sweep directory. Raises UserError if it is missing, damaged or of another version."""
        path = folder / SWEEP
        try:
            content = read_plain(path)
            # The version first: the fields of another format would only give a puzzling message.
            version = decode_record(content, _Version).format_version
            if version not in READABLE:
                raise UserError(
                    f"{path}: has format {version}, and this version of inpaint_bench reads {FORMAT_VERSION}; use the "
                    "version that launched the sweep, or `merge`, which reads the runs without it"
                )
            record = decode_record(content, cls)
            for point in record.points:
                if point.site not in record.sites:
                    raise msgspec.ValidationError(f"point {point.point}: no site named {point.site}")
                if point.overrides is None:
                    raise msgspec.ValidationError(f"point {point.point}: no overrides")
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(_missing_record(folder)) from None
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; `merge` reads the runs without it") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            reason = sanitize(str(error))
            raise UserError(f"{path}: damaged ({reason}); `merge` reads the runs without it") from None
        return record

    def write(self, folder: Path) -> None:
        """Replace the record of a sweep directory."""
        write_record(folder / SWEEP, self)


def save_multirun(config: DictConfig, folder: Path) -> None:
    """Write Hydra's own record of a sweep, as its basic sweeper does; nothing here reads it."""
    replace_bytes(folder / MULTIRUN, OmegaConf.to_yaml(config).encode())


def check_path(folder: Path) -> None:
    """Raise UserError for a sweep directory that a job's script, PYTHONPATH, Slurm or Hydra would read as another."""
    path, problem = str(folder), None
    # Bytes that are not UTF-8 are surrogates here, which cannot be printed either.
    odd_name = any(name != name.strip() or name.startswith("-") for name in folder.parts)
    if odd_name or not path.isprintable() or any(text in path for text in _REFUSED_IN_PATHS):
        problem = (
            "a job would read it as another path: it may have no character that cannot be printed, no : % \\ ${, and "
            "no name that begins with a dash, or begins or ends with a space"
        )
    elif left := next((name for name in folder.parts if re.fullmatch(r"\$\w+", name)), None):
        problem = f"the shell left {left} as it is, perhaps in single quotes"
    elif max(map(len, map(os.fsencode, folder.parts))) > MAX_NAME_BYTES or len(os.fsencode(path)) > MAX_PATH_BYTES:
        problem = f"it is too long: a name may have {MAX_NAME_BYTES} bytes, and the path {MAX_PATH_BYTES}"
    if problem:
        shown = path if len(path) <= 2 * MAX_NAME_BYTES else f"{path[:MAX_NAME_BYTES]}..."
        raise UserError(f"hydra.sweep.dir={shown!r}: {problem}; choose another")


def check_unused(folder: Path) -> None:
    """Raise UserError if a new sweep would be mixed with what another one left."""
    if (folder / SWEEP).exists():
        raise UserError(f"{folder} holds a sweep already: choose another hydra.sweep.dir, or `rerun` that one")
    if has_runs(folder):
        raise UserError(f"{folder} holds runs of a sweep without its {SWEEP}: choose another hydra.sweep.dir")
    if (folder / MANIFEST).exists():
        raise UserError(f"{folder} holds a run without a sweep: choose another hydra.sweep.dir")
    refuse_mixed("hydra.sweep.dir", folder)


def refuse_mixed(key: str, folder: Path) -> None:
    """Raise UserError if a folder of runs lies in a sweep or in another run, or holds sweeps; `key` names it."""
    if any(any(folder.glob(f"{depth}/{SWEEP}")) for depth in ("*", "*/*")):
        raise UserError(f"{folder} holds other sweeps: choose another {key}; with out={folder} it is one in it")
    above = folder.absolute().parents
    if sweep := next((path for path in (folder.absolute(), *above) if (path / SWEEP).exists()), None):
        raise UserError(f"{key}={folder}: belongs to the sweep {sweep}, whose runs it would mix; name another")
    if (own := _run_in(folder)) and own.status == Status.COMPLETED:
        raise UserError(f"{key}={folder}: holds a completed run, whose files a new one would replace; name another")
    if run := next(filter(_run_in, above), None):
        raise UserError(f"{key}={folder}: lies in the run {run}, whose files it would mix; name another")


def _run_in(folder: Path) -> ManifestHead | None:
    with contextlib.suppress(OSError, ValueError):  # another program's file may have that name
        manifest = read_record(folder / MANIFEST, ManifestHead)
        return manifest if manifest and manifest.run_id else None
    return None


def has_runs(folder: Path) -> bool:
    """Return whether something was submitted from a folder, as far as its files show."""
    return any((folder / name).exists() for name in (LEDGER, JOBS)) or any(folder.glob("*/attempt-*"))


def _missing_record(folder: Path) -> str:
    """Explain a folder without a record. Nothing is rebuilt from its other files."""
    if folder.is_dir() and has_runs(folder):
        return (
            f"{folder}: {SWEEP} is missing, so it is not known which jobs were submitted. Restore it from a backup, or "
            "launch the sweep again; `merge` reads the runs without it"
        )
    reason = "it is a file" if folder.is_file() else f"no {SWEEP}" if folder.is_dir() else "no such folder"
    return (
        f"{folder}: not a sweep directory ({reason}); give the folder that `launch -m` printed. A dry run, and a "
        "launch that ended before it submitted anything, make none"
    )
