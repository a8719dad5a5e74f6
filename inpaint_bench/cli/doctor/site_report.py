"""`doctor site`: compare site files with their live Slurm, and correct them where asked."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from inpaint_bench.core.console import command, console, table
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.site import SiteConfig
from launchers.points.compose import Composer, composer
from launchers.points.site_catalog import Catalogue, Reachable, reachable
from launchers.sites import probe
from launchers.sites.allowances import summary
from launchers.sites.ask_cluster import inspect
from launchers.sites.compare import compare
from launchers.sites.finding import Agreement, Finding, differs, not_known, same
from launchers.sites.site_file import SiteFile, as_yaml, locked

from . import node_report

ALL = "all"
MAX_WAIT_MIN = 7 * 24 * 60


@dataclass(kw_only=True)
class Case:
    """One site: its file, and what was found about it."""

    site: SiteConfig  # as in force: the file, and what this command overrides
    file: SiteFile
    findings: list[Finding]

    @cached_property
    def _own(self) -> DictConfig:
        own = OmegaConf.merge(OmegaConf.structured(SiteConfig), OmegaConf.load(self.file.path))
        assert isinstance(own, DictConfig)
        return own

    def written(self, place: str) -> Any:
        """What the file itself says, or the default where it says nothing."""
        return OmegaConf.select(self._own, place)

    def overridden(self, finding: Finding) -> bool:
        return bool(self.written(finding.place) != finding.here)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which site files to check, and what to do beyond printing."""

    site: str  # or ALL
    overrides: Sequence[str]
    write: bool
    probe: bool
    wait_min: float


def run_site(options: Options) -> bool:
    """Compare site files with their Slurm; return whether nothing differs any more when the command ends.

    Raises UserError where no site is reached.
    """
    if not 0 <= options.wait_min <= MAX_WAIT_MIN:
        raise UserError(f"--wait-min {options.wait_min:g}: must lie between 0 and a week")
    if options.write:
        _check_writeable(options)
    out = console()
    with composer() as composed:
        cases = []
        for site, file, reach in _sites(composed.catalogue, options):
            if reach.yes:
                cluster = inspect(site)
                case = Case(site=site, file=file, findings=[*_reach(site, reach), *compare(site, cluster)])
                _show(out, case, summary(cluster))
                cases.append(case)
            else:
                print(f"{site.name} was not asked: it cannot be reached from here ({reach.why})")
        if not cases:
            raise UserError("no site can be reached from here; run it on a login node")
        failed = options.probe and _probe(out, composed, cases, options)
    left = [case for case in cases if _differing(case)]
    if options.write:
        left = [case for case in cases if not _update(case)]
    return not left and not failed


def run_probe_result(folder: Path) -> bool:
    """Print the result of an earlier probe job; return whether the node has what a job needs."""
    sent = probe.opened(folder)
    if (found := sent.found) is None:
        log = f"; its log ends with\n{sent.log}" if sent.log else ""
        raise UserError(f"{sent.site}: job {sent.job_id} has not written what it found, into {folder}{log}")
    node_report.show(console(), sent.site, found)
    return not node_report.fails(found)


def _config(options: Options) -> DictConfig:
    return compose("config", overrides=list(options.overrides), return_hydra_config=True)


def _sites(catalogue: Catalogue, options: Options) -> list[tuple[SiteConfig, SiteFile, Reachable]]:
    config = _config(options)
    if options.site != ALL and options.site not in catalogue.names:
        raise UserError(f"{options.site}: no such site; have: {', '.join([*catalogue.names, ALL])}")
    names = catalogue.names if options.site == ALL else [options.site]
    found = [(catalogue.site(name, config), SiteFile(catalogue.file(name))) for name in names]
    sites = [(site, file, reachable(site)) for site, file in found if site.connect.method != "local"]
    if not sites:
        raise UserError(f"{options.site}: has no Slurm to be asked; `doctor` alone checks this machine")
    if options.site != ALL and not sites[0][2].yes:
        why = sites[0][2].why
        raise UserError(f"{options.site} cannot be reached from here ({why}); run it on one of its login nodes")
    return sites


def _reach(site: SiteConfig, reach: Reachable) -> list[Finding]:
    if not site.connect.hostnames:
        return []
    place, here = "connect.hostnames", list(site.connect.hostnames)
    if reach.standing:
        return [same(place, here, "one is this machine's name")]
    return [not_known(place, here, f"this machine's name is none of them; {reach.why}")]


def _show(out: Console, case: Case, facts: Sequence[tuple[str, str]]) -> None:
    rows = [
        (finding.place, _shown(finding.here), finding.there, str(finding.agreement), finding.note)
        for finding in case.findings
    ]
    heads = ("fact", "in the YAML", "on the cluster", "verdict", "what that means")
    out.print(table(heads, rows, title=f"{case.site.name}: {case.file.path}"))
    if facts:
        print("; ".join(f"{words}: {value}" for words, value in facts))
    counts = {kind: sum(f.agreement is kind for f in case.findings) for kind in Agreement}
    print(f"{case.site.name}: " + ", ".join(f"{number} {kind}" for kind, number in counts.items() if number))
    lines = list(_right_lines(case))
    if lines:
        print(f"\nthe right lines of {case.file.path}, by place:")
        print("\n".join(f"  {line}" for line in lines))
    print()


def _right_lines(case: Case) -> list[str]:
    """A line per correction; what differs without a right value that could be told is a comment."""
    lines = []
    for finding in _differing(case):
        for place, value in finding.fix.items():
            number = case.file.line(place)
            where = f"line {number}" if number else "a new line"
            if case.overridden(finding):
                where = f"{where}, which an override replaces here by {_shown(finding.here)}"
            lines.append(f"{place}: {as_yaml(value)}  # {where}")
        if not finding.fix:
            lines.append(f"# {finding.place}: {finding.there}; {finding.note}")
    return lines


def _differing(case: Case) -> list[Finding]:
    return [finding for finding in case.findings if finding.agreement is Agreement.DIFFERS]


def _shown(value: Any) -> str | None:
    return None if value is None else value if isinstance(value, str) else as_yaml(value)


def _update(case: Case) -> bool:
    """Write what was seen into the file, with a diff. Whether nothing differs any more."""
    changes: dict[str, Any] = {}
    open_ends = []
    for finding in _differing(case):
        if finding.fix and not case.overridden(finding):
            changes |= finding.fix
        else:
            open_ends.append(finding)
    for block in dict.fromkeys(finding.block for finding in case.findings if finding.block):
        if case.file.holds(block):
            changes |= _marks(case, block, open_ends)
    text = case.file.edited(changes)
    if text == case.file.text:
        print(f"{case.file.path}: nothing to write")
        return not open_ends
    case.file.replace(text)
    print(case.file.diff(text), end="")
    print(f"{case.file.path}: written")
    return not open_ends


def _marks(case: Case, block: str, open_ends: Sequence[Finding]) -> dict[str, Any]:
    """What the file is to say of when its facts were seen: the whole block, or those of its keys that were."""
    mine = [finding for finding in case.findings if finding.block == block]
    if any(case.overridden(finding) for finding in mine):
        print(f"{block}: not marked as seen, because an override stands in for a value of the file")
        return {}
    differing, today = _differing(case), datetime.date.today()
    seen = [f for f in mine if f.agreement is Agreement.SAME or (f in differing and f not in open_ends)]
    before: dict[str, Any] = case.file.values_at(f"{block}.seen")
    if len(seen) == len(mine):
        return {f"{block}.checked_on": today, f"{block}.verified": True} | ({f"{block}.seen": {}} if before else {})
    gone = {finding.key for finding in mine if finding in open_ends}  # seen once, and not so any more
    after = {key: date for key, date in before.items() if key not in gone}
    after |= {finding.key: today for finding in seen if case.file.line(finding.place)}
    marks: dict[str, Any] = {} if after == before else {f"{block}.seen": after}
    if gone and case.written(f"{block}.verified"):
        marks[f"{block}.verified"] = False
    return marks


def _check_writeable(options: Options) -> None:
    """Raise UserError if a site file is not the user's to write, or if the profile only imitates the sites."""
    with composer() as composed:
        if _config(options).demonstration:
            raise UserError("--write: this profile stands in for the sites, so what it shows is no fact of theirs")
        for _, file, reach in _sites(composed.catalogue, options):
            if reach.yes and (why := locked(file.path)):
                raise UserError(f"{file.path}: {why}")


def _probe(out: Console, composed: Composer, cases: Sequence[Case], options: Options) -> bool:
    """A job per site, all sent before any is waited for. What it finds of the storage joins the findings.

    Whether one was refused, or lacks what a job needs; one that has not run yet says nothing.
    """
    sent = []
    failed = False
    for case in cases:
        try:
            one = probe.submit(composed, case.site, options.overrides)
        except UserError as error:
            print(f"no probe: {error}")
            failed = True
            continue
        print(f"{one.site}: probe sent as job {one.job_id}, into {one.folder}", flush=True)
        sent.append((case, one))
    until = time.monotonic() + 60 * options.wait_min
    for case, one in sent:
        over, state = probe.wait(one, case.site, until)
        found = one.found
        failed = failed or (over and found is None)
        if found is not None:
            node_report.show(out, one.site, found)
            failed = node_report.fails(found) or failed
            case.findings += _storage(found)
            continue
        print(f"{one.site}: job {one.job_id} {state}. To look again: {command('doctor', 'probe-result', one.folder)}")
        if one.log:
            print(f"its log ends with\n{one.log}")
    return failed


def _storage(found: dict[str, Any]) -> list[Finding]:
    findings = []
    for place, folder in found["folders"].items():
        if folder["path"] is None:
            continue
        if folder["ok"]:
            findings.append(same(place, folder["path"], "a job may write there"))
        else:
            findings.append(differs(place, folder["path"], folder["why"], f"on {found['node']} no job may write there"))
    return findings


def site_files(overrides: Sequence[str]) -> list[tuple[str, str, str, str, str]]:
    """Every site file: whether its site is reached from here, and how many of its blocks were seen on the cluster."""
    rows = []
    with composer() as composed:
        config = compose("config", overrides=list(overrides), return_hydra_config=True)
        for name in composed.catalogue.names:
            site = composed.catalogue.site(name, config)
            reach = reachable(site)
            blocks = [block for block in (vars(site) | site.gpus).values() if getattr(block, "source", "")]
            seen = sum(block.verified for block in blocks)
            path = str(composed.catalogue.file(name))
            rows.append((name, path, "yes" if reach.yes else "no", reach.why, f"{seen} of {len(blocks)}"))
    return rows
