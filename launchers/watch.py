"""How a sweep stands: every point of its ledger, held against Slurm and against what lies on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from inpaint_bench.config import SiteConfig
from inpaint_bench.contract import PointState, Reason
from inpaint_bench.truth import GONE, Leavings, SchedulerWord, Verdict, verdict

from .ledger import Attempt, Ledger, PointRecord
from .scheduler import ask

OPEN = frozenset({PointState.QUEUED, PointState.RUNNING, PointState.UNKNOWN})


@dataclass(frozen=True, kw_only=True)
class Standing:
    record: PointRecord
    verdict: Verdict
    left: Leavings

    @property
    def open(self) -> bool:
        """Something may still happen without anyone's doing."""
        return self.verdict.state in OPEN


def look(ledger: Ledger) -> list[Standing]:
    """In order of point numbers. Asks every site of the sweep once."""
    records = ledger.points()
    sites = sites_of(ledger)
    asked: dict[str, list[str]] = {}
    for record in records.values():
        last = record.last
        if last and last.job_id and not last.job_id.startswith("pid:"):
            asked.setdefault(last.site, []).append(last.job_id)
    answers = {site: ask(sites[site], ids) for site, ids in asked.items()}
    standings = []
    for _, record in sorted(records.items()):
        last = record.last
        if last is None:
            where = f"waits in {record.plan}" if record.plan else "never planned: its launcher died"
            word = Verdict(state=PointState.PLANNED, reason=Reason.NEVER_STARTED, message=where)
            standings.append(Standing(record=record, verdict=word, left=Leavings()))
            continue
        left = Leavings.read(ledger.folder / last.subdir)
        word = verdict(
            submitted=last.job_id is not None,
            refused=last.refused,
            cancelled=last.cancelled,
            scheduler=_word(last, answers),
            left=left,
        )
        standings.append(Standing(record=record, verdict=word, left=left))
    return standings


def sites_of(ledger: Ledger) -> dict[str, SiteConfig]:
    """The sites as they were when the sweep was sent."""
    result = {}
    for name, content in ledger.sweep["sites"].items():
        site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SiteConfig), content))
        assert isinstance(site, SiteConfig)
        result[name] = site
    return result


def _word(attempt: Attempt, answers: dict[str, dict[str, SchedulerWord] | None]) -> SchedulerWord | None:
    job_id = attempt.job_id
    if job_id is None:
        return None
    if job_id.startswith("pid:"):
        return SchedulerWord(state="RUNNING" if _alive(int(job_id.removeprefix("pid:"))) else GONE)
    answer = answers.get(attempt.site)
    return answer.get(job_id) if answer is not None else None


def _alive(pid: int) -> bool:
    """A process of that id that submitit started; ids are used again, so its command line is looked at."""
    try:
        return b"submitit" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
