"""How a sweep stands: every point of its ledger, held against Slurm and against what lies on disk."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import OmegaConf

from inpaint_bench.core.attempt_state import FINAL, GONE, LEFT, Leavings, SchedulerWord, Verdict, verdict
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import MANIFEST, SWEEP, PointState, Reason
from inpaint_bench.core.site import SiteConfig
from launchers.points.site_catalog import reachable
from launchers.remote import client
from launchers.slurm.local_executor import alive, process_of
from launchers.slurm.pending_reasons import Pending, explain
from launchers.slurm.query import NOT_ASKED, OK, Answer, ask, find, held
from launchers.sweep.ledger import Attempt, Ledger, PointRecord
from launchers.sweep.run_dir_facts import UNKNOWN

OPEN = frozenset({PointState.QUEUED, PointState.RUNNING, PointState.UNKNOWN})
READERS = 16  # files read at once: on a network file system one waits for each


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One attempt at a point, as it stands."""

    attempt: Attempt
    verdict: Verdict
    left: Leavings
    folder: Path  # its run directory, which need not exist
    word: SchedulerWord | None = None  # None: nobody answered, or nobody was to be asked


@dataclass(frozen=True, kw_only=True)
class Standing:
    record: PointRecord
    verdict: Verdict
    left: Leavings
    folder: Path | None = None  # run directory of the last attempt
    word: SchedulerWord | None = None  # of the last attempt
    pending: Pending | None = None  # why it waits, where Slurm says
    tries: tuple[Tried, ...] = ()  # oldest first

    @property
    def open(self) -> bool:
        """Something may still happen without anyone's doing."""
        return self.verdict.state in OPEN

    @property
    def is_here(self) -> bool:
        """Its manifest lies in this sweep directory: what ran over ssh is to be collected first."""
        return self.folder is not None and (self.folder / MANIFEST).is_file()


@dataclass(frozen=True, kw_only=True)
class Survey:
    """One look at a sweep. `answers`: how Slurm's commands did, by site; `notes`: what else should be known."""

    standings: list[Standing]
    sites: dict[str, SiteConfig]
    answers: dict[str, Answer]
    notes: list[str] = field(default_factory=list)
    looked_unix: float = field(default_factory=time.time)


def look(ledger: Ledger, *, holding_lock: bool = False) -> list[Standing]:
    """In order of point numbers. Asks every site of the sweep once."""
    return survey(ledger, holding_lock=holding_lock).standings


def survey(ledger: Ledger, *, holding_lock: bool = False) -> Survey:
    """Slurm first, then the files: an end that came in between is then told by both."""
    problems: list[str] = []
    records = ledger.points(problems)
    sites = sites_of(ledger)
    told = client.look(ledger, sites, records)
    attempts = [attempt for record in records.values() for attempt in record.attempts]
    away = _out_of_reach(sites, {attempt.site for attempt in attempts if _by_slurm(attempt, sites)})
    searched, silent = _name(records, sites, away)
    silent |= told.silent
    with ThreadPoolExecutor(READERS) as pool:
        folders = [ledger.folder / attempt.subdir for attempt in attempts]
        kept = dict(zip(map(_key, attempts), pool.map(SchedulerWord.kept, folders), strict=True))
        asked = [attempt for attempt in attempts if attempt.site not in away]
        answers = _ask(sites, asked, kept, pool, _owner(ledger.folder))
        answers = _together(answers, searched) | away | told.answers
        left = dict(zip(map(_key, attempts), pool.map(Leavings.read, folders), strict=True)) | told.left
    left |= {_key(one): _of_another(one, left[_key(one)]) for one in attempts if _is_strange(one, left[_key(one)])}
    runner_here = not holding_lock and ledger.busy()
    witnesses = _Witnesses(
        folder=ledger.folder, sites=sites, answers=answers, kept=kept, left=left, silent=silent, runner_here=runner_here
    )
    standings = [_standing(record, witnesses) for _, record in sorted(records.items())]
    _keep([tried for standing in standings for tried in standing.tries], kept)
    return Survey(standings=standings, sites=sites, answers=answers, notes=[*problems, *_notes(standings)])


_Key = tuple[int, int]  # point, attempt


def _key(attempt: Attempt) -> _Key:
    return attempt.point, attempt.attempt


@dataclass(frozen=True, kw_only=True)
class _Witnesses:
    folder: Path
    sites: dict[str, SiteConfig]
    answers: dict[str, Answer]
    kept: dict[_Key, SchedulerWord | None]
    left: dict[_Key, Leavings]
    silent: dict[str, str]  # why a site did not say whether an array was ever submitted
    runner_here: bool  # a command runs this sweep's points on this machine


def _ask(
    sites: dict[str, SiteConfig],
    attempts: Iterable[Attempt],
    kept: dict[_Key, SchedulerWord | None],
    pool: ThreadPoolExecutor,
    owner: str | None,
) -> dict[str, Answer]:
    """All jobs of a site in one question, all sites at once."""
    asked: dict[str, dict[str, str | None]] = {}
    settled: dict[str, set[str]] = {}
    for attempt in attempts:
        if _by_slurm(attempt, sites) and attempt.job_id and not attempt.job_id.startswith("pid:"):
            asked.setdefault(attempt.site, {})[attempt.job_id] = attempt.job_name
            word = kept[_key(attempt)]
            if word and word.state in FINAL:
                settled.setdefault(attempt.site, set()).add(attempt.job_id)
    answers = {
        site: pool.submit(ask, sites[site], jobs, settled=settled.get(site, set()), owner=owner)
        for site, jobs in asked.items()
    }
    return {site: answer.result() for site, answer in answers.items()}


def _out_of_reach(sites: dict[str, SiteConfig], names: Iterable[str]) -> dict[str, Answer]:
    """Those whose Slurm is not the one that answers on this machine: what it says of a job would be of another's."""
    reach = {name: reachable(sites[name]) for name in names}
    why = {name: one.why for name, one in reach.items() if not one.yes}
    return {name: client.Unreached(why=f"its Slurm cannot be asked from here ({why[name]})") for name in why}


def _together(answers: dict[str, Answer], searched: dict[str, Answer]) -> dict[str, Answer]:
    """How the commands did over both questions: that for jobs by their ids, and that for arrays by their names."""
    both = dict(answers)
    for site, search in searched.items():
        first = answers.get(site, search)
        squeue, sacct = (
            then if before in (OK, NOT_ASKED) else before
            for before, then in ((first.squeue, search.squeue), (first.sacct, search.sacct))
        )
        both[site] = replace(first, squeue=squeue, sacct=sacct)
    return both


def _is_strange(attempt: Attempt, left: Leavings) -> bool:
    owner = (left.manifest or {}).get("run_id")
    return bool(owner) and UNKNOWN not in (owner, attempt.run_id) and owner != attempt.run_id


def _of_another(attempt: Attempt, left: Leavings) -> Leavings:
    """Another run began in its directory before it: what lies there is not told of this one."""
    owner = (left.manifest or {}).get("run_id")
    return Leavings(damaged=f"{attempt.subdir}/{MANIFEST} is of run {owner}, not of this attempt's ({attempt.run_id})")


def _owner(folder: Path) -> str | None:
    """The user whose sweep it is, where that is somebody else."""
    record = folder / SWEEP
    uid = (record if record.exists() else folder).stat().st_uid
    if uid == os.getuid():
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _by_slurm(attempt: Attempt, sites: dict[str, SiteConfig]) -> bool:
    """It was sent by this sweep's own sbatch, not over ssh or by a plan."""
    return sites[attempt.site].connect.method == "slurm" and not attempt.carried


def _standing(record: PointRecord, witnesses: _Witnesses) -> Standing:
    if record.last is None:
        where = f"waits in {record.plan}" if record.plan else "never planned: its launcher died"
        word = Verdict(state=PointState.PLANNED, reason=Reason.NEVER_STARTED, message=where)
        return Standing(record=record, verdict=word, left=Leavings())
    tries = tuple(_tried(attempt, witnesses, last=attempt is record.last) for attempt in record.attempts)
    last, pending = tries[-1], None
    found = last.verdict
    if found.state is PointState.QUEUED and last.word and last.attempt.job_id:
        site, jobs = witnesses.sites[last.attempt.site], [last.attempt.job_id]
        pending = explain(last.word.detail, site, state=last.word.state or "", jobs=jobs)
        found = replace(found, message=pending.sentence)
    return Standing(
        record=record,
        verdict=found,
        left=last.left,
        folder=last.folder,
        word=last.word,
        pending=pending,
        tries=tries,
    )


def _tried(attempt: Attempt, witnesses: _Witnesses, *, last: bool) -> Tried:
    folder, left = witnesses.folder / attempt.subdir, witnesses.left[_key(attempt)]
    site = witnesses.sites[attempt.site]

    def so(found: Verdict, word: SchedulerWord | None = None) -> Tried:
        return Tried(attempt=attempt, verdict=found, left=left, folder=folder, word=word)

    if last and attempt.job_id is None and not left.manifest:
        if site.connect.method == "local" and witnesses.runner_here and not attempt.cancelled:
            return so(Verdict(state=PointState.QUEUED, message="waits for its turn on this machine"))
        if attempt.site in witnesses.silent and not attempt.refused_for_certain:
            message = f"{witnesses.silent[attempt.site]}, so whether its array was submitted is not known"
            said = f"; {attempt.refused}" if attempt.refused else ""
            return so(Verdict(state=PointState.UNKNOWN, message=message + said))
    word, silence = _word(attempt, witnesses.answers)
    kept = witnesses.kept[_key(attempt)]
    # what was kept is Slurm's own last word, and better than that it knows the job no more, or does not answer
    asked_in_vain = kept is not None and (kept.state in FINAL if word is None else word.state in _NO_WORD)
    if attempt.job_id is not None and asked_in_vain:
        word = kept
    # told to stop, but Slurm does not say whether it did: that alone ends nothing
    unheard = word is None and attempt.job_id is not None and _by_slurm(attempt, witnesses.sites)
    found = verdict(
        submitted=attempt.job_id is not None,
        refused=attempt.refused,
        cancelled=attempt.cancelled and not unheard,
        scheduler=word,
        left=left,
        silence=silence,
    )
    return so(found, word)


def _keep(tries: Iterable[Tried], kept: dict[_Key, SchedulerWord | None]) -> None:
    """Slurm's last words beside the manifests. Each waits for the disk, and after a night there are many."""
    fresh = [(tried.word, tried.folder) for tried in tries if tried.word and tried.word != kept[_key(tried.attempt)]]
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(lambda one: one[0].keep(one[1]), fresh))


def _notes(standings: Iterable[Standing]) -> list[str]:
    """Attempts that were given up and are none the less held by Slurm."""
    return [
        f"point {standing.record.num}: attempt {tried.attempt.attempt} ({tried.attempt.job_id}) is still "
        f"{tried.verdict.state} beside attempt {standing.tries[-1].attempt.attempt}"
        for standing in standings
        for tried in standing.tries[:-1]
        if tried.verdict.state in (PointState.QUEUED, PointState.RUNNING) and tried.word is not None
    ]


def _name(
    records: dict[int, PointRecord], sites: dict[str, SiteConfig], away: dict[str, Answer]
) -> tuple[dict[str, Answer], dict[str, str]]:
    """Give attempts their job id whose launcher died, or was cut off by a time-out, in the sbatch call.

    Returns how the sites did that were asked for such arrays, and why of those of a site that were not found nobody
    knows whether they were submitted. What sbatch refused for certain is not looked for.
    """
    open_ends: dict[str, list[Attempt]] = {}
    for record in records.values():
        last = record.last
        if last and last.job_id is None and last.job_name and not last.refused_for_certain and _by_slurm(last, sites):
            open_ends.setdefault(last.site, []).append(last)
    answers, silent = {}, {}
    for site, attempts in open_ends.items():
        if site in away:
            silent[site] = away[site].silence
            continue
        names = {attempt.job_name for attempt in attempts if attempt.job_name}
        found = find(sites[site], sorted(names), min(attempt.planned_unix for attempt in attempts))
        answers[site] = found.asked
        if found.silence:
            silent[site] = found.silence
        for attempt in attempts:
            if array := found.arrays.get(attempt.job_name or ""):
                attempt.job_id = f"{array}_{attempt.task}"
    return answers, silent


def slowest(sites: Iterable[SiteConfig]) -> SiteConfig | None:
    """The one that is to be asked the least often; a look asks all of them. None where no Slurm is asked."""
    asked = (site for site in sites if site.connect.method in ("slurm", "ssh"))
    return max(asked, key=lambda site: site.limits.poll_s, default=None)


def stoppable(site: SiteConfig, attempts: Collection[Attempt]) -> tuple[list[Attempt], list[str]]:
    """Those whose job this site's Slurm holds and can be told to stop, and in sentences why others cannot be."""
    jobs = {attempt.job_id: attempt.job_name for attempt in attempts if attempt.job_id}
    said = []
    if others := len(attempts) - len(jobs):
        points = pluralize(others, "point")
        said.append(f"Slurm did not say whether {points} had been submitted; cancel again when it does")
    if not jobs:
        return [], said
    if not (reach := reachable(site)).yes:
        return [], [*said, f"its Slurm cannot be told anything from here ({reach.why}); cancel there"]
    ours, why = held(site, jobs)
    return [attempt for attempt in attempts if attempt.job_id in ours], said + why


def sites_of(ledger: Ledger) -> dict[str, SiteConfig]:
    """The sites as they were when the sweep was sent."""
    result = {}
    for name, content in ledger.sweep["sites"].items():
        site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SiteConfig), content))
        assert isinstance(site, SiteConfig)
        result[name] = site
    return result


_NO_WORD = frozenset({None, LEFT})


def _word(attempt: Attempt, answers: dict[str, Answer]) -> tuple[SchedulerWord | None, str]:
    """What the scheduler says of an attempt, or None and why it says nothing."""
    job_id = attempt.job_id
    if job_id is None:
        return None, "it was not submitted"
    if job_id.startswith("pid:"):
        pid = process_of(job_id)
        if pid is None:
            return None, f"its process is on {job_id.partition('@')[2]}, which cannot be asked from here"
        state = "RUNNING" if alive(pid) else GONE
        said = f"process {pid} {'runs' if state != GONE else 'is gone'}"
        return SchedulerWord(state=state, said=said), ""
    answer = answers.get(attempt.site, Answer())
    return answer.words.get(job_id), answer.why_silent(job_id)
