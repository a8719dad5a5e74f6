"""Points for a site out of reach: a plan file, and the command that runs it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from inpaint_bench.contract import PLAN_PATTERN, SCHEMA_VERSION
from inpaint_bench.errors import UserError
from inpaint_bench.files import replace_text

from .point import Point
from .repetition import Order


@dataclass(frozen=True, kw_only=True)
class Plan:
    sweep_id: str
    site: str
    points: tuple[tuple[int, tuple[str, ...]], ...]  # number in the original sweep, overrides
    order: Order | None = None  # of the original sweep


def write(folder: Path, site: str, sweep: dict[str, Any], points: Sequence[Point]) -> Path:
    """The site's plan file in `folder`, with these points of `sweep` beside what it already held."""
    path = folder / PLAN_PATTERN.format(site=site)
    waiting = dict(read(path).points) if path.exists() else {}
    waiting |= {point.num: tuple(point.overrides) for point in points}
    content = {
        "schema_version": SCHEMA_VERSION,
        "sweep_id": sweep["sweep_id"],
        "site": site,
        "order": sweep.get("order"),
        "points": [{"num": num, "overrides": list(overrides)} for num, overrides in sorted(waiting.items())],
    }
    head = f"# Points of sweep {sweep['sweep_id']} that {site} has to run. There: {command(path.name)}\n"
    replace_text(path, head + OmegaConf.to_yaml(OmegaConf.create(content)))
    return path


def command(path: str | Path) -> str:
    return f"python -m inpaint_bench.launch --plan {path}"


def read(path: Path) -> Plan:
    """Raises UserError where the file is none of ours."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such plan file") from None
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: not a plan file ({str(error).splitlines()[0]})") from None
    try:
        assert isinstance(content, dict)
        assert content["points"]
        points = tuple((int(p["num"]), tuple(str(o) for o in p["overrides"])) for p in content["points"])
        order = Order.recorded(content.get("order"))
        return Plan(sweep_id=str(content["sweep_id"]), site=str(content["site"]), points=points, order=order)
    except (AssertionError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path}: not a plan file; it needs sweep_id, site, and points with num and overrides"
        ) from None
