"""Points for a site out of reach: a plan file, and the command that runs it there."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from inpaint_bench.core import console
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_text, replacing
from inpaint_bench.core.schema import CODE, PLAN_PATTERN, SCHEMA_VERSION
from launchers.points.point import Point
from launchers.points.repetitions import Order
from launchers.sweep.launch_context import Surroundings

from . import bundle

KIND = "plan"  # of a bundle


@dataclass(frozen=True, kw_only=True)
class Plan:
    sweep_id: str
    site: str
    points: tuple[tuple[int, tuple[str, ...]], ...]  # number in the original sweep, overrides
    order: Order | None = None  # of the original sweep
    attempts: dict[int, int] = field(default_factory=dict)  # of the points that were tried before: which comes next
    around: Surroundings = field(default_factory=Surroundings)  # of the launch, but for its working directory


def write(folder: Path, site: str, sweep: dict[str, Any], points: Sequence[Point]) -> Path:
    """The site's plan file in `folder`, with these points of `sweep` beside what it already held."""
    path = folder / PLAN_PATTERN.format(site=site)
    known = read(path) if path.exists() else None
    waiting = dict(known.points) if known else {}
    waiting |= {point.num: tuple(point.overrides) for point in points}
    attempts = (known.attempts if known else {}) | {point.num: point.attempt for point in points}
    around = replace(Surroundings.recorded(sweep.get("surroundings")), working_dir=None)
    _replace(path, site, sweep["sweep_id"], sweep.get("order"), waiting, attempts, around)
    return path


def forget(folder: Path, site: str, nums: Collection[int]) -> None:
    """These points need not be carried any more; a plan without points goes away."""
    path = folder / PLAN_PATTERN.format(site=site)
    if not path.exists():
        return
    plan = read(path)
    left = {num: overrides for num, overrides in plan.points if num not in nums}
    if left:
        order = plan.order.record() if plan.order else None
        _replace(path, site, plan.sweep_id, order, left, plan.attempts, plan.around)
    else:
        path.unlink()


def _replace(
    path: Path,
    site: str,
    sweep_id: str,
    order: Any,
    points: dict[int, tuple[str, ...]],
    attempts: dict[int, int],
    around: Surroundings,
) -> None:
    rows = [
        {"num": num, "overrides": list(overrides)} | ({"attempt": attempts[num]} if attempts.get(num, 1) > 1 else {})
        for num, overrides in sorted(points.items())
    ]
    head = {"schema_version": SCHEMA_VERSION, "sweep_id": sweep_id, "site": site, "order": order}
    content = {**head, "surroundings": around.record(), "points": rows}
    comment = f"# Points of sweep {sweep_id} that {site} has to run. There: {command(path.name)}\n"
    replace_text(path, comment + OmegaConf.to_yaml(OmegaConf.create(content)))


def packed(path: Path) -> Path:
    """What is to be carried: the plan with its code, where it was packed."""
    out = path.with_suffix(".tar")
    return out if out.exists() else path


def pack(path: Path, code: Path) -> Path:
    """The plan with the code that is to run it, in one file beside it."""
    plan, out = read(path), path.with_suffix(".tar")
    files = [(path.name, path)]
    files += [
        (f"{CODE}/{code.name}/{file.relative_to(code).as_posix()}", file)
        for file in sorted(code.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    ]
    sources = [bundle.Source(path=name, file=file) for name, file in files]
    with replacing(out) as handle:
        bundle.write(handle, {"kind": KIND, "sweep_id": plan.sweep_id, "site": plan.site}, bundle.listed(sources))
    return out


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[Path, Path]]:
    """The plan and the code of a packed plan, in a folder that is gone afterwards. Raises UserError."""
    index = bundle.verify(path)
    if index.head.get("kind") != KIND:
        raise UserError(f"{path}: holds no plan (results go to `collect`)")
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        root = Path(folder)

        def each(member: bundle.Member, chunks: Iterator[bytes]) -> None:
            target = root / member.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                out.writelines(chunks)

        with path.open("rb") as stream:
            bundle.read_files(stream, bundle.read_index(stream), each)
        found = [list(root.glob(pattern)) for pattern in (PLAN_PATTERN.format(site="*"), f"{CODE}/*")]
        if [len(files) for files in found] != [1, 1]:
            raise UserError(f"{path}: not a packed plan (it needs one plan and one snapshot of the code)")
        yield found[0][0], found[1][0]


def command(path: str | Path) -> str:
    return console.shell_command("launch", "--plan", path)


def read(path: Path) -> Plan:
    """Raises UserError where the file is none of ours."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such plan file") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a plan file ({getattr(error, 'strerror', None) or error})") from None
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: not a plan file ({str(error).splitlines()[0]})") from None
    try:
        assert isinstance(content, dict)
        assert content["points"]
        points = tuple((int(p["num"]), tuple(str(o) for o in p["overrides"])) for p in content["points"])
        order = Order.recorded(content.get("order"))
        attempts = {int(p["num"]): int(p["attempt"]) for p in content["points"] if "attempt" in p}
        return Plan(
            sweep_id=str(content["sweep_id"]),
            site=str(content["site"]),
            points=points,
            order=order,
            attempts=attempts,
            around=Surroundings.recorded(content.get("surroundings")),
        )
    except (AssertionError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path}: not a plan file; it needs sweep_id, site, and points with num and overrides"
        ) from None
