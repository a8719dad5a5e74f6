"""Submit points a second time: what a sweep still lacks, by failure reason.

The policies are configuration (`rerun.<reason>`). Overrides given to the command take precedence, and `--only` submits
what a policy would leave alone. A point that ran out of GPU memory is only ever submitted under another recipe, and so
under another label: equal labels mean equal execution.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from omegaconf import OmegaConf

from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.conflicts import lever_problem
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.config.validation import override_key
from inpaint_bench.core.console import console, pluralize, sanitize, table
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.hydra_support import refuse_wrong_overrides
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.schema import CHECKPOINT, CHECKPOINTS, PointState, Reason
from launchers.points.compose import Composer, composer, parsed
from launchers.points.placement import node_mem_gb
from launchers.points.point import Point
from launchers.remote import plan_file
from launchers.status.survey import PointStatus, poll_sweep, sites_of
from launchers.sweep.ledger import Ledger
from launchers.sweep.private_dirs import check_own
from launchers.sweep.sweep_record import FORMAT_VERSION

from .equal_points import refuse_equal
from .soonest import soonest
from .submit import Submission

log = logging.getLogger(__name__)

# Slurm may carry out a request whose sender is gone or has timed out (MessageTimeout: 10 s by default). An sbatch that
# outlived the command that was killed holds the sweep's lock.
CONFIRM_S = 60.0

_NODE = re.compile(r"\w[\w-]*(\.[\w-]+)*", re.ASCII)
_FIXED: Mapping[str, str] = {
    "dry_run": "use --dry-run, which submits nothing",
    "wait": "use --wait",
    "repeats": "use --repeats N, which adds repetitions",
    "identity": "every attempt gets its own",
    **dict.fromkeys(
        ("out", "name", "hydra", "study", "order_seed"), "a sweep keeps it as launched; launch another one"
    ),
}
_ONLY_WITH_REPEATS = dict.fromkeys(("repeats_target", "repeats_max"), "only --repeats auto uses it")
_NOT_WITH_REPEATS = {"seed": "repetitions have seeds of their own"}


def rerun(
    folder: Path,
    *,
    only: frozenset[Reason] | None,
    changes: Sequence[str] = (),
    dry_run: bool,
    wait: bool,
) -> None:
    """Submit what failed or was never submitted, each point as a new attempt.

    The policies (`rerun.<reason>`) decide which points, and with what changes; `only` names reasons instead. Points are
    composed from the configuration files as they are now, so a corrected site file takes effect, with the overrides of
    the launch and `changes`. Points in a plan file are left to the machine that runs it. Raises PointsFailedError for
    points whose state is unknown, which are left alone, UserError, and what `Submission.run` raises.
    """
    unknown: list[PointStatus] = []

    def choose_points(ledger: Ledger, compose: Composer) -> list[Point]:
        sites = sites_of(ledger)
        points = _poll(ledger, sites)
        # In place: the list is read after the points were submitted.
        unknown[:] = [point for point in points if point.state is PointState.UNKNOWN]
        # A plan file is carried to its site; those for a site over ssh are tried again instead.
        plans = {p.record.num: p.record.plan for p in points if not sites[p.record.site].connection.over_ssh}
        if only is None or Reason.NEVER_STARTED in only:
            for plan in sorted({plan for plan in plans.values() if plan}):
                log.info(f"{plan} is left alone: its points run elsewhere ({plan_file.launch_command(plan)})")
        decisions = decide([p for p in points if not plans.get(p.record.num)], compose, only=only, changes=changes)
        submitted = [decision.point for decision in decisions if decision.point is not None]
        recorded = {point.record.num: point.record.overrides for point in points}
        refuse_equal(submitted, recorded, compose, changes)
        if changes and not decisions:  # so that a wrong override is reported although nothing is submitted
            compose(0, merge_overrides(ledger.sweep.points[0].overrides or [], changes))
        if decisions:
            rows = [(d.num, str(d.reason), d.action, " ".join(d.changes)) for d in decisions]
            console().print(table(("point", "reason", "action", "changes"), rows))
        return submitted

    check_changes(changes)
    advice = "launch your own to submit its points"
    has_submitted = submit_again(folder, choose_points, advice=advice, dry_run=dry_run, wait=wait)[0]
    if unknown:
        messages = "; ".join(dict.fromkeys(point.message for point in unknown))
        prefix = "" if has_submitted else "nothing was submitted: "
        count = f"the state of {pluralize(len(unknown), 'point')} is unknown"
        raise PointsFailedError(sanitize(f"{prefix}{count} ({messages}); rerun once it is known"))
    if not has_submitted:
        log.info("Nothing to submit.")


def submit_again(
    folder: Path,
    choose_points: Callable[[Ledger, Composer], list[Point]],
    *,
    advice: str,
    dry_run: bool,
    wait: bool,
) -> tuple[bool, bool]:
    """Submit what `choose_points` returns for an existing sweep, composed as at its launch.

    Returns whether there were points, and whether they were waited for. `choose_points` is called under the sweep's
    lock, except in a dry run: what it has seen still holds when points are submitted.
    `advice` is for the sweep of another user. Raises UserError, and what `Submission.run` raises.
    """
    ledger = Ledger.open(folder.absolute())
    check_own(ledger.folder, advice)
    if ledger.sweep.format_version < FORMAT_VERSION:
        raise UserError(
            f"{folder}: was launched by an earlier version; finish this sweep with the version that launched it"
        )
    with composer(ledger.sweep.launch_context) as compose:
        compose.soonest = soonest
        submission = Submission(
            folder=ledger.folder,
            wait_for_jobs=wait,
            preview_only=dry_run,
        )
        points = submission.run(lambda ledger: choose_points(ledger, compose))
    return bool(points), submission.waited


def _poll(ledger: Ledger, sites: Mapping[str, SiteConfig]) -> list[PointStatus]:
    """Return the status of every point. With the lock held, all that was submitted is in it."""
    points = poll_sweep(ledger).points
    last = [point.record.last for point in points if point.record.last]
    # Their sbatch call has no recorded end, and Slurm does not list the array.
    if not ledger.holds_lock or not any(a.is_unconfirmed and sites[a.site].connection.submits_here for a in last):
        return points
    wait_s = min(CONFIRM_S, CONFIRM_S - ledger.age_s())
    if wait_s <= 0:
        return points
    log.info(f"Waits {wait_s:.0f} s: Slurm may not list yet what an interrupted command submitted.")
    time.sleep(wait_s)
    return poll_sweep(ledger).points


# --- policies ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """What becomes of one point."""

    num: int
    reason: Reason
    action: str  # in words
    changes: tuple[str, ...] = ()  # overrides that differ from the last attempt's
    point: Point | None = None  # None: it is left alone


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A point that failed, or was never submitted."""

    status: PointStatus
    reason: Reason
    named: bool  # `--only` names the reason
    changes: tuple[str, ...]  # the user's
    composer: Callable[[int, Sequence[str]], Point]

    def compose(self, *changes: str) -> Point:
        """Compose the next attempt with the overrides of the last one, those of the user, and these."""
        record = self.status.record
        overrides = merge_overrides(record.overrides, (*self.changes, *changes))
        point = self.composer(record.num, overrides)
        point.attempt = record.last.attempt + 1 if record.last else 1
        return point

    def sets(self, key: str) -> bool:
        return any(override_key(change) == key for change in self.changes)

    def submit(self, action: str, *changes: str) -> Decision:
        """Decide to submit the point with these changes."""
        every = (*self.changes, *changes)
        return Decision(self.status.record.num, self.reason, action, every, self.compose(*changes))

    def skip(self, explanation: str) -> Decision:
        return Decision(self.status.record.num, self.reason, f"left alone: {explanation}")


def decide(
    points: Iterable[PointStatus],
    composer: Callable[[int, Sequence[str]], Point],
    *,
    only: frozenset[Reason] | None = None,
    changes: Sequence[str] = (),
) -> list[Decision]:
    """Decide about every point that failed or was never submitted, less those that `only` leaves out.

    Each point has the policies that it composes to. `only` submits what a policy would leave alone.
    """
    decisions: list[Decision] = []
    for point in points:
        reason = point.reason
        if point.state not in (PointState.FAILED, PointState.PLANNED) or reason is None:
            continue
        if only is not None and reason not in only:
            continue
        candidate = _Candidate(
            status=point, reason=reason, named=only is not None, changes=tuple(changes), composer=composer
        )
        # Composed with the changes of the user, which may set rerun.* as well.
        policies = candidate.compose().bench.rerun
        # An attempt that Slurm refused has not run and does not count.
        attempts = sum(attempt.job_id is not None for attempt in point.record.attempts)
        if attempts >= policies.max_attempts:
            limit = f"it had its {attempts} attempts; a higher rerun.max_attempts than {policies.max_attempts}"
            decisions.append(candidate.skip(f"{limit} allows more"))
        elif not candidate.named and not getattr(policies, reason.value).send:
            decisions.append(candidate.skip(f"--only {reason} submits it"))
        else:
            decisions.append(_ACTIONS.get(reason, _unchanged)(candidate))
    return decisions


def merge_overrides(overrides: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return overrides and changes, which replace earlier overrides of the same key."""
    last = {override_key(change): change for change in changes}
    return [*(override for override in overrides if override_key(override) not in last), *last.values()]


def check_changes(changes: Sequence[str], *, repeating: bool = False) -> None:
    """Raise UserError for a key that a rerun must not change or would not use, and Hydra's error for wrong syntax.

    `repeating`: the command adds repetitions.
    """
    refused = {**_FIXED, **(_NOT_WITH_REPEATS if repeating else _ONLY_WITH_REPEATS)}
    for change in changes:
        # hydra.sweep.dir and hydra/launcher both count as hydra.
        key = parsed(change).key_or_group.partition(".")[0].partition("/")[0]
        if key in refused:
            raise UserError(f"{change}: {refused[key]}")
    refuse_wrong_overrides(changes, [conf_dir()], multirun=False)


# --- actions by failure reason -------------------------------------------------------------------


def _unchanged(candidate: _Candidate) -> Decision:
    if not candidate.status.record.attempts:
        return candidate.submit("submitted for the first time")
    return candidate.submit("submitted with changes" if candidate.changes else "submitted unchanged")


def _timeout(candidate: _Candidate) -> Decision:
    """Ask for a longer limit; at the partition's limit, only a checkpoint makes another attempt worthwhile."""
    point = candidate.compose()
    site, limit = point.site, point.request.time_min
    gpu = site.gpus[point.bench.gpu.name]
    checkpoint = _newest_checkpoint(candidate.status)
    resumes = f"; resumes from {checkpoint}" if checkpoint else ""
    if candidate.sets("time_min"):
        return candidate.submit(f"time limit of {limit} min, as requested{resumes}")
    longer = min(math.ceil(limit * point.bench.rerun.timeout.time_factor), gpu.max_minutes)
    if longer > limit:
        return candidate.submit(f"time limit of {longer} min instead of {limit}{resumes}", f"time_min={longer}")
    action = f"it had the {gpu.max_minutes} min that {gpu.partition or site.name} allows"
    if checkpoint:
        return candidate.submit(action + resumes)
    if site.connection.is_remote:  # checkpoints stay at the site
        return candidate.submit(f"{action}; whether {site.name} has a checkpoint is not known here")
    action += "; there is no checkpoint to resume from"
    # The user asks for it: with fewer train_steps, for example, the same limit may do.
    if candidate.named or candidate.changes:
        return candidate.submit(action)
    return candidate.skip(f"{action}; --only {candidate.reason} submits it")


def _node_fail(candidate: _Candidate) -> Decision:
    point, node = candidate.compose(), _failed_node(candidate.status)
    site = point.site
    excluded = [name for listed in site.exclude_nodes for name in _expanded(listed) or [listed]]
    key = f"sites.{site.name}.exclude_nodes"
    if not point.bench.rerun.node_fail.exclude_node or not site.connection.has_slurm or candidate.sets(key):
        return _unchanged(candidate)
    if node is None:
        return candidate.submit("submitted unchanged: which node failed is not known")
    if node in excluded:
        return _unchanged(candidate)
    return candidate.submit(f"node {node} excluded", f"{key}=[{','.join([*excluded, node])}]")


def _oom_gpu(candidate: _Candidate) -> Decision:
    """Change the recipe until its label differs from the one that did not fit; the user's changes may do that too."""
    point = candidate.compose()
    previous = _label(candidate.composer(point.num, candidate.status.record.overrides))
    if _label(point) != previous:
        return candidate.submit(f"submitted as {_label(point)}, as requested")
    relief = point.bench.rerun.oom_gpu.relief
    # The steps of earlier attempts are among the overrides, so each attempt takes the next one.
    for place, change in enumerate(relief):
        if any(_is_set(point, later) for later in relief[place:] if override_key(later) == override_key(change)):
            continue  # this step, or a later one of the same key, was not enough
        label = _label(changed := candidate.compose(change))
        # A step that changes nothing under this recipe, or cannot be in it, is passed over.
        if label != previous and lever_problem(changed.bench) is None:
            return candidate.submit(f"submitted as {label}, reported under that label", change)
    return candidate.skip("rerun.oom_gpu.relief has no further step; a smaller batch=... makes another point")


def _oom_host(candidate: _Candidate) -> Decision:
    """Request more host memory, up to the node's."""
    point = candidate.compose()
    if not point.site.connection.has_slurm or candidate.sets("mem_gb"):
        return _unchanged(candidate)
    mem_gb, node_gb = point.request.mem_gb, node_mem_gb(point.site.gpus[point.bench.gpu.name])
    if mem_gb is None:
        return _unchanged(candidate) if candidate.changes else candidate.skip("it requested none; mem_gb=... does")
    more_gb = math.ceil(mem_gb * point.bench.rerun.oom_host.mem_factor)
    more_gb = more_gb if node_gb is None else min(more_gb, node_gb)
    if more_gb > mem_gb:
        return candidate.submit(f"host memory of {more_gb} G instead of {mem_gb}", f"mem_gb={more_gb}")
    if candidate.changes:
        return _unchanged(candidate)
    return candidate.skip(f"it had the {node_gb} G of a node")


_ACTIONS: dict[Reason, Callable[[_Candidate], Decision]] = {
    Reason.TIMEOUT: _timeout,
    Reason.NODE_FAIL: _node_fail,
    Reason.OOM_GPU: _oom_gpu,
    Reason.OOM_HOST: _oom_host,
}


def _label(point: Point) -> str:
    return f"{recipe.name(point.bench)} at batch {point.bench.batch}"


def _is_set(point: Point, override: str) -> bool:
    """Return whether the point has the value of an override already."""
    value: object = point.bench
    for name in override_key(override).split("."):
        value = getattr(value, name, None)
    # Parsed by OmegaConf: the text "true" becomes True.
    return bool(value == OmegaConf.select(OmegaConf.from_dotlist([override]), override_key(override)))


def _newest_checkpoint(status: PointStatus) -> str | None:
    """Return the name of the newest checkpoint of all attempts. Whether it is intact only the run finds out."""
    if status.run_dir is None:
        return None
    # Step numbers are padded with zeros, so the names sort by step.
    checkpoints = status.run_dir.parent.glob(f"attempt-*/{CHECKPOINTS}/step-*/{CHECKPOINT}")
    return max((file.parent.name for file in checkpoints), default=None)


def _failed_node(status: PointStatus) -> str | None:
    """Return the node that the last attempt ran on, by Slurm, else by its manifest; None if it had several."""
    manifest, listed = status.artifacts.manifest, status.scheduler.nodes if status.scheduler else ""
    if not listed and manifest and manifest.slurm and manifest.nodes == 1:
        listed = manifest.slurm.node or ""
    nodes = _expanded(listed)
    return nodes[0] if len(nodes) == 1 else None


def _expanded(listed: str) -> list[str]:
    """Return the names in one of Slurm's lists of nodes; none if it is not such a list."""
    try:
        nodes = list(NodeSet(listed, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return []
    return nodes if all(_NODE.fullmatch(node) for node in nodes) else []
