"""Rerun by cause: which points are sent again by themselves, and what is asked for differently.

The policies are configuration (`rerun.<reason>`). What a user says in the same command goes before them, and `--only`
sends what a policy would leave alone. A point that ran out of GPU memory is only ever sent under another recipe, and
so under another label: equal labels mean equal execution.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from omegaconf import OmegaConf
from rich.table import Table

from inpaint_bench.core import recipe
from inpaint_bench.core.config import RerunConfig
from inpaint_bench.core.console import table
from inpaint_bench.core.schema import CHECKPOINT, CHECKPOINTS, PointState, Reason
from launchers.points.placement import node_mem_gb
from launchers.points.point import Point
from launchers.status.survey import PointStatus


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of one point."""

    num: int
    cause: Reason
    what: str
    changes: tuple[str, ...] = ()  # overrides that differ from the last attempt's


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user of this `rerun` said."""

    only: frozenset[Reason] | None = None  # None: what the policies send
    changes: tuple[str, ...] = ()

    def names(self, reason: Reason) -> bool:
        return self.only is not None and reason in self.only

    def changed(self, key: str) -> bool:
        return any(_key(change) == key for change in self.changes)


Outcome = tuple[Decision, Point | None]  # no point: it is left alone


@dataclass(frozen=True, kw_only=True)
class Case:
    """A point that is to be sent again, unless there is nothing left to change about it."""

    standing: PointStatus
    cause: Reason
    asked: Asked
    compose: Callable[[Sequence[str]], Point]  # the point with the overrides of its last attempt and these
    point: Point  # as the user asks for it now

    def send(self, what: str, *changes: str) -> Outcome:
        every = (*self.asked.changes, *changes)
        return self._decision(what, every), self.compose(every) if changes else self.point

    def leave(self, why: str) -> Outcome:
        return self._decision(f"left alone: {why}"), None

    def _decision(self, what: str, changes: tuple[str, ...] = ()) -> Decision:
        return Decision(num=self.standing.record.num, cause=self.cause, what=what, changes=changes)


def decide(
    standings: Iterable[PointStatus], asked: Asked, compose: Callable[[int, Sequence[str]], Point]
) -> list[Outcome]:
    """What becomes of every point that failed or was never sent. Those that no word of `--only` means are left out.

    The policies are those of the first such point: they are one for the sweep.
    """
    outcomes: list[Outcome] = []
    rules: RerunConfig | None = None
    for standing in standings:
        cause = standing.reason
        if standing.state not in (PointState.FAILED, PointState.PLANNED) or cause is None:
            continue
        if asked.only is not None and cause not in asked.only:
            continue
        composed = partial(_compose, compose, standing)
        rules = rules or composed(asked.changes).bench.rerun
        if why := _why_not(standing, cause, asked, rules):
            decision = Decision(num=standing.record.num, cause=cause, what=f"left alone: {why}")
            outcomes.append((decision, None))
            continue
        point = composed(asked.changes)
        case = Case(standing=standing, cause=cause, asked=asked, compose=composed, point=point)
        outcomes.append(_TREATMENTS.get(cause, _as_it_was)(case))
    return outcomes


def decisions_table(decisions: Sequence[Decision]) -> Table:
    rows = [(one.num, str(one.cause), one.what, " ".join(one.changes)) for one in decisions]
    return table(("point", "cause", "what rerun does", "changes"), rows)


def merged(overrides: Sequence[str], more: Sequence[str]) -> list[str]:
    """Overrides with further ones, which take the place of earlier ones of their key."""
    last = {_key(change): change for change in more}
    return [*(one for one in overrides if _key(one) not in last), *last.values()]


def _compose(compose: Callable[[int, Sequence[str]], Point], standing: PointStatus, more: Sequence[str]) -> Point:
    record = standing.record
    point = compose(record.num, merged(record.overrides, more))
    point.attempt = record.last.attempt + 1 if record.last else 1
    return point


def _why_not(standing: PointStatus, cause: Reason, asked: Asked, rules: RerunConfig) -> str | None:
    tries = sum(attempt.job_id is not None for attempt in standing.record.attempts)
    if tries >= rules.max_attempts:
        return f"it had its {tries} attempts; a higher rerun.max_attempts than {rules.max_attempts} allows more"
    if not asked.names(cause) and not getattr(rules, cause.value).send:
        return f"--only {cause} sends it"
    return None


# --- what is done about a cause ------------------------------------------------------------------


def _as_it_was(case: Case) -> Outcome:
    if not case.standing.record.attempts:
        return case.send("sent for the first time")
    return case.send("sent with what differs" if case.asked.changes else "sent as it was")


def _timeout(case: Case) -> Outcome:
    bench, site, now = case.point.bench, case.point.site, case.point.request.time_min
    going_on = _checkpoint(case.standing)
    resumes = f", goes on from {going_on}" if going_on else ""
    if case.asked.changed("time_min"):
        return case.send(f"time limit of {now} min, as said here{resumes}")
    entry = site.gpus[bench.gpu.name]
    longer = min(math.ceil(now * bench.rerun.timeout.time_factor), entry.max_minutes)
    if longer > now:
        return case.send(f"time limit of {longer} min instead of {now}{resumes}", f"time_min={longer}")
    full = f"it has the {entry.max_minutes} min that {entry.partition or site.name} allows"
    if going_on:
        return case.send(full + resumes)
    if site.connect.method in ("ssh", "bundle"):  # checkpoints stay there
        return case.send(f"{full}; whether there is a checkpoint at {site.name} to go on from is not known here")
    if case.asked.names(case.cause) or case.asked.changes:
        return case.send(f"{full}; there is no checkpoint to go on from")
    return case.leave(f"{full}, and there is no checkpoint to go on from; --only {case.cause} sends it")


def _node_fail(case: Case) -> Outcome:
    site, node = case.point.site, _node(case.standing)
    if not case.point.bench.rerun.node_fail.exclude_node or site.connect.method == "local":
        return _as_it_was(case)
    if node is None:
        return case.send("sent as it was: which node failed is not known")
    key = f"sites.{site.name}.exclude_nodes"
    if case.asked.changed(key) or node in site.exclude_nodes:
        return _as_it_was(case)
    return case.send(f"sent past {node}", f"{key}=[{','.join([*site.exclude_nodes, node])}]")


def _oom_gpu(case: Case) -> Outcome:
    """Never under the label that did not fit. What the user changes may make another one, too."""
    before = _label(case.compose(()))
    if _label(case.point) != before:
        return case.send(f"sent as {_label(case.point)}, as said here")
    relief = case.point.bench.rerun.oom_gpu.relief
    for place, change in enumerate(relief):
        if any(_has(case.point, later) for later in relief[place:] if _key(later) == _key(change)):
            continue  # this step, or one beyond it, did not suffice
        label = _label(case.compose((*case.asked.changes, change)))
        if label != before:
            return case.send(f"sent as {label}, another point by its label", change)
    return case.leave("nothing of rerun.oom_gpu.relief is left to try; a smaller batch=… said here is another point")


def _oom_host(case: Case) -> Outcome:
    point = case.point
    if point.site.connect.method == "local" or case.asked.changed("mem_gb"):
        return _as_it_was(case)
    now, limit = point.request.mem_gb, node_mem_gb(point.site.gpus[point.bench.gpu.name])
    more = min(math.ceil(now * point.bench.rerun.oom_host.mem_factor), limit)
    if more > now:
        return case.send(f"host memory of {more} G instead of {now}", f"mem_gb={more}")
    if case.asked.changes:
        return _as_it_was(case)
    return case.leave(f"it had the {limit} G of a node")


_TREATMENTS: dict[Reason, Callable[[Case], Outcome]] = {
    Reason.TIMEOUT: _timeout,
    Reason.NODE_FAIL: _node_fail,
    Reason.OOM_GPU: _oom_gpu,
    Reason.OOM_HOST: _oom_host,
}


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _label(point: Point) -> str:
    return f"{recipe.name(point.bench.recipe)} at batch {point.bench.batch}"


def _has(point: Point, override: str) -> bool:
    """Whether the point already is as an override of relief has it."""
    now: object = point.bench
    for name in _key(override).split("."):
        now = getattr(now, name, None)
    return bool(now == OmegaConf.select(OmegaConf.from_dotlist([override]), _key(override)))


def _checkpoint(standing: PointStatus) -> str | None:
    """The newest checkpoint of the point's attempts, by name. Whether it is whole only the run finds out."""
    if standing.run_dir is None:
        return None
    saved = standing.run_dir.parent.glob(f"attempt-*/{CHECKPOINTS}/step-*/{CHECKPOINT}")
    return max((file.parent.name for file in saved), default=None)


def _node(standing: PointStatus) -> str | None:
    """Where the last attempt ran: its manifest says so, else Slurm's last word ("exit code 0:0, on gpua001")."""
    slurm = (standing.artifacts.manifest or {}).get("slurm") or {}
    if slurm.get("node"):
        return str(slurm["node"])
    found = re.search(r"\bon ([A-Za-z0-9][\w.-]*)", standing.message)
    return found[1] if found else None
