"""How a sweep stands: every point of its ledger, held against Slurm and against what lies on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from inpaint_bench.config import SiteConfig
from inpaint_bench.contract import PointState, Reason
from inpaint_bench.truth import GONE, Leavings, SchedulerWord, Verdict, verdict

from .ledger import Attempt, Ledger, PointRecord
from .local import alive, process_of
from .scheduler import ask, find

OPEN = frozenset({PointState.QUEUED, PointState.RUNNING, PointState.UNKNOWN})


@dataclass(frozen=True, kw_only=True)
class Standing:
    record: PointRecord
    verdict: Verdict
    left: Leavings
    folder: Path | None = None  # run directory of the last attempt

    @property
    def open(self) -> bool:
        """Something may still happen without anyone's doing."""
        return self.verdict.state in OPEN


def look(ledger: Ledger, *, holding_lock: bool = False) -> list[Standing]:
    """In order of point numbers. Asks every site of the sweep once."""
    records = ledger.points()
    sites = sites_of(ledger)
    silent = _adopt(records, sites)
    asked: dict[str, list[str]] = {}
    for record in records.values():
        last = record.last
        if last and last.job_id and not last.job_id.startswith("pid:"):
            asked.setdefault(last.site, []).append(last.job_id)
    answers = {site: ask(sites[site], ids) for site, ids in asked.items()}
    runner_here = not holding_lock and ledger.busy()
    return [
        _standing(record, ledger.folder, sites, answers, silent, runner_here) for _, record in sorted(records.items())
    ]


def _standing(
    record: PointRecord,
    folder: Path,
    sites: dict[str, SiteConfig],
    answers: dict[str, dict[str, SchedulerWord]],
    silent: set[str],
    runner_here: bool,
) -> Standing:
    last = record.last
    if last is None:
        where = f"waits in {record.plan}" if record.plan else "never planned: its launcher died"
        word = Verdict(state=PointState.PLANNED, reason=Reason.NEVER_STARTED, message=where)
        return Standing(record=record, verdict=word, left=Leavings())
    run_dir = folder / last.subdir
    left = Leavings.read(run_dir)
    if last.job_id is None and not last.cancelled and not left.manifest:
        if sites[last.site].reach.method == "local" and runner_here:
            word = Verdict(state=PointState.QUEUED, message="waits for its turn on this machine")
            return Standing(record=record, verdict=word, left=left)
        if last.site in silent:
            message = "Slurm did not answer, so whether its array was submitted is not known"
            return Standing(record=record, verdict=Verdict(state=PointState.UNKNOWN, message=message), left=left)
    scheduler = _word(last, answers)
    if scheduler is not None:
        scheduler.keep(run_dir)
    elif last.job_id is not None:
        scheduler = SchedulerWord.kept(run_dir)
    found = verdict(
        submitted=last.job_id is not None,
        refused=last.refused,
        cancelled=last.cancelled,
        scheduler=scheduler,
        left=left,
    )
    return Standing(record=record, verdict=found, left=left, folder=run_dir)


def _adopt(records: dict[int, PointRecord], sites: dict[str, SiteConfig]) -> set[str]:
    """Give attempts their job id whose launcher died, or was cut off by a time-out, in the sbatch call.

    Returns the sites that were asked for such arrays and did not answer.
    """
    open_ends: dict[str, list[Attempt]] = {}
    for record in records.values():
        last = record.last
        if last and last.job_id is None and not last.cancelled and sites[last.site].reach.method == "slurm":
            open_ends.setdefault(last.site, []).append(last)
    silent = set()
    for site, attempts in open_ends.items():
        names = {attempt.job_name for attempt in attempts if attempt.job_name}
        found = find(sites[site], sorted(names), min(attempt.planned_unix for attempt in attempts))
        if found is None:
            silent.add(site)
            continue
        for attempt in attempts:
            if array := found.get(attempt.job_name or ""):
                attempt.job_id = f"{array}_{attempt.task}"
    return silent


def sites_of(ledger: Ledger) -> dict[str, SiteConfig]:
    """The sites as they were when the sweep was sent."""
    result = {}
    for name, content in ledger.sweep["sites"].items():
        site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SiteConfig), content))
        assert isinstance(site, SiteConfig)
        result[name] = site
    return result


def _word(attempt: Attempt, answers: dict[str, dict[str, SchedulerWord]]) -> SchedulerWord | None:
    job_id = attempt.job_id
    if job_id is None:
        return None
    if job_id.startswith("pid:"):
        pid = process_of(job_id)
        return SchedulerWord(state="RUNNING" if alive(pid) else GONE) if pid is not None else None
    return answers.get(attempt.site, {}).get(job_id)
