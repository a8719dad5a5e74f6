"""`doctor site`: compare site files with their live Slurm, print the corrections and write them if requested."""

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

from inpaint_bench.core.console import console, shell_command, table
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.site import SiteConfig
from inpaint_bench.run.node_probe import NodeFindings
from launchers.points.compose import Composer, composer
from launchers.points.site_catalog import Reachability, SiteCatalog, reachability
from launchers.sites import probe
from launchers.sites.compare import cluster_summary, compare
from launchers.sites.findings import Agreement, Finding
from launchers.sites.site_file import SiteFile, as_yaml, not_writable
from launchers.sites.slurm_facts import query_cluster

from . import node_report

ALL = "all"
MAX_WAIT_MIN = 7 * 24 * 60


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which site files to check, and what to do beyond printing."""

    site: str  # or ALL
    overrides: Sequence[str]
    write: bool
    probe: bool
    wait_min: float


@dataclass(kw_only=True)
class SiteCheck:
    """One site with its file and the findings about it."""

    site: SiteConfig  # in force: the file with this command's overrides
    file: SiteFile
    findings: list[Finding]

    @property
    def differing(self) -> list[Finding]:
        """Return the findings that contradict Slurm."""
        return [finding for finding in self.findings if finding.agreement is Agreement.DIFFERS]

    def value(self, key: str) -> Any:
        """Return the value in the file itself, or the default if the file has none."""
        return OmegaConf.select(self._file_config, key)

    def is_overridden(self, finding: Finding) -> bool:
        """Return whether an override of this command replaces the value of the file."""
        return bool(self.value(finding.key) != finding.configured)

    @cached_property
    def _file_config(self) -> DictConfig:
        config = OmegaConf.merge(OmegaConf.structured(SiteConfig), OmegaConf.load(self.file.path))
        assert isinstance(config, DictConfig)
        return config


def run_site(options: Options) -> bool:
    """Compare site files with their Slurm; return whether nothing differs any more when the command ends.

    Raises UserError if no site can be reached.
    """
    if not 0 <= options.wait_min <= MAX_WAIT_MIN:
        raise UserError(f"--wait-min {options.wait_min:g}: must be between 0 and {MAX_WAIT_MIN} (a week)")
    out = console()
    with composer() as composed:
        sites = _sites(composed.catalog, options)
        if options.write:
            _check_writable(sites, options)
        checks = []
        for site, file, reach in sites:
            if reach.ok:
                cluster = query_cluster(site)
                check = SiteCheck(site=site, file=file, findings=[*_hostnames(site, reach), *compare(site, cluster)])
                _print_check(out, check, cluster_summary(cluster))
                checks.append(check)
            else:
                print(f"{site.name}: skipped, it cannot be reached from here ({reach.reason})")
        if not checks:
            raise UserError("no site can be reached from here; run this on a login node")
        failed = options.probe and _probe(out, composed, checks, options)
    if options.write:
        differing = [check for check in checks if not _write(check)]
    else:
        differing = [check for check in checks if check.differing]
    return not differing and not failed


def run_probe_result(folder: Path) -> bool:
    """Print the result of an earlier probe job; return whether the node has what a job needs."""
    job = probe.load(folder)
    if (result := job.result) is None:
        log = f"; its log ends with\n{job.log_tail}" if job.log_tail else ""
        raise UserError(f"{job.site}: job {job.job_id} has not written its result into {folder} yet{log}")
    node_report.show(console(), job.site, result)
    return not node_report.lacks_essentials(result)


def site_files(overrides: Sequence[str]) -> list[tuple[str, str, str, str, str]]:
    """Return a row per site file: name, path, whether it can be reached and why (not), verified blocks."""
    rows = []
    with composer() as composed:
        config = _config(overrides)
        for name in composed.catalog.names:
            site = composed.catalog.site(name, config)
            reach = reachability(site)
            blocks = [block for block in (vars(site) | site.gpus).values() if getattr(block, "source", "")]
            verified = f"{sum(block.verified for block in blocks)} of {len(blocks)}"
            path = str(composed.catalog.file(name))
            rows.append((name, path, "yes" if reach.ok else "no", reach.reason, verified))
    return rows


def _config(overrides: Sequence[str]) -> DictConfig:
    return compose("config", overrides=list(overrides), return_hydra_config=True)


def _sites(catalog: SiteCatalog, options: Options) -> list[tuple[SiteConfig, SiteFile, Reachability]]:
    config = _config(options.overrides)
    if options.site != ALL and options.site not in catalog.names:
        raise UserError(f"{options.site}: no such site; have: {', '.join([*catalog.names, ALL])}")
    names = catalog.names if options.site == ALL else [options.site]
    configured = [(catalog.site(name, config), SiteFile(catalog.file(name))) for name in names]
    sites = [(site, file, reachability(site)) for site, file in configured if site.connect.method != "local"]
    if not sites:
        raise UserError(f"{options.site}: has no Slurm to compare with; `doctor` alone checks this machine")
    if options.site != ALL and not sites[0][2].ok:
        why = sites[0][2].reason
        raise UserError(f"{options.site} cannot be reached from here ({why}); run this on one of its login nodes")
    return sites


def _check_writable(sites: Sequence[tuple[SiteConfig, SiteFile, Reachability]], options: Options) -> None:
    """Raise UserError, before anything is queried, if --write may not write a file."""
    if _config(options.overrides).demonstration:
        raise UserError("--write: this profile replaces the sites by a demonstration, whose values are not theirs")
    for _, file, reach in sites:
        if reach.ok and (reason := not_writable(file.path)):
            raise UserError(f"{file.path}: {reason}")


def _hostnames(site: SiteConfig, reach: Reachability) -> list[Finding]:
    if not site.connect.hostnames:
        return []
    hostnames = Finding("connect.hostnames", list(site.connect.hostnames))
    if reach.on_site:
        return [hostnames.same("one matches this machine")]
    return [hostnames.unknown(f"none matches this machine; {reach.reason}")]


def _print_check(out: Console, check: SiteCheck, summary: Sequence[tuple[str, str]]) -> None:
    name, path = check.site.name, check.file.path
    rows = [(f.key, _text(f.configured), f.reported, str(f.agreement), f.note) for f in check.findings]
    out.print(table(("key", "site file", "Slurm", "comparison", "note"), rows, title=f"{name}: {path}"))
    if summary:
        print("; ".join(f"{label}: {value}" for label, value in summary))
    counts = {kind: sum(f.agreement is kind for f in check.findings) for kind in Agreement}
    print(f"{name}: " + ", ".join(f"{number} {kind}" for kind, number in counts.items() if number))
    if corrections := _corrections(check):
        print(f"\ncorrections for {path}:")
        print("\n".join(f"  {line}" for line in corrections))
    print()


def _corrections(check: SiteCheck) -> list[str]:
    """Return a line per correction; a difference whose right value is not known is a comment."""
    lines = []
    for finding in check.differing:
        for key, value in finding.corrections.items():
            number = check.file.line(key)
            where = f"line {number}" if number else "a new line"
            if check.is_overridden(finding):
                where += f", overridden here by {_text(finding.configured)}"
            lines.append(f"{key}: {as_yaml(value)}  # {where}")
        if not finding.corrections:
            lines.append(f"# {finding.key}: {finding.reported}; {finding.note}")
    return lines


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else as_yaml(value)


def _write(check: SiteCheck) -> bool:
    """Write corrections and dates into the file and print the diff; return whether nothing differs any more."""
    changes: dict[str, Any] = {}
    uncorrected = []
    for finding in check.differing:
        if finding.corrections and not check.is_overridden(finding):
            changes |= finding.corrections
        else:
            uncorrected.append(finding)
    for block in dict.fromkeys(finding.block for finding in check.findings if finding.block):
        if isinstance(check.file.get(block), dict):
            changes |= _dates(check, block, uncorrected)
    if changes:
        print(check.file.write(check.file.edited(changes)), end="")
    print(f"{check.file.path}: {'written' if changes else 'nothing to write'}")
    return not uncorrected


def _dates(check: SiteCheck, block: str, uncorrected: Sequence[Finding]) -> dict[str, Any]:
    """Return the keys that say when a block was verified: all of it, or the keys of it in `seen`."""
    findings = [finding for finding in check.findings if finding.block == block]
    if any(check.is_overridden(finding) for finding in findings):
        print(f"{block}: not marked as verified, because an override replaces a value of the file")
        return {}
    today = datetime.date.today()
    agreeing = [f for f in findings if f.agreement is Agreement.SAME or (f in check.differing and f not in uncorrected)]
    before: dict[str, Any] = dict(check.file.get(f"{block}.seen") or {})
    if len(agreeing) == len(findings):
        dates: dict[str, Any] = {"checked_on": today, "verified": True} | ({"seen": {}} if before else {})
    else:
        contradicted = {finding.name for finding in findings if finding in uncorrected}
        after = {name: date for name, date in before.items() if name not in contradicted}
        after |= {finding.name: today for finding in agreeing if check.file.line(finding.key)}
        dates = {} if after == before else {"seen": after}
        if contradicted and check.value(f"{block}.verified"):
            dates["verified"] = False
    dated = {f"{block}.{name}": value for name, value in dates.items()}
    return {key: value for key, value in dated.items() if check.file.get(key) != value}


def _probe(out: Console, composed: Composer, checks: Sequence[SiteCheck], options: Options) -> bool:
    """Submit a probe job to every site, then wait for them; what they find of the storage joins the findings.

    Returns whether a job was refused or lacks what every job needs; one that has not run yet says nothing.
    """
    jobs = []
    failed = False
    for check in checks:
        try:
            job = probe.submit(composed, check.site, options.overrides)
        except UserError as error:
            print(f"no probe: {error}")
            failed = True
            continue
        print(f"{job.site}: submitted probe as job {job.job_id}, result in {job.folder}", flush=True)
        jobs.append((check, job))
    deadline = time.monotonic() + 60 * options.wait_min
    for check, job in jobs:
        ended, state = probe.wait(job, check.site, deadline)
        if (result := job.result) is not None:
            node_report.show(out, job.site, result)
            failed = node_report.lacks_essentials(result) or failed
            check.findings += _storage(result)
            continue
        failed = failed or ended
        print(f"{job.site}: job {job.job_id}: {state}. Later: {shell_command('doctor', 'probe-result', job.folder)}")
        if job.log_tail:
            print(f"its log ends with\n{job.log_tail}")
    return failed


def _storage(result: NodeFindings) -> list[Finding]:
    findings = []
    for key, folder in result.folders.items():
        storage = Finding(key, folder.path)
        if folder.path is None:
            continue
        if folder.error is None:
            findings.append(storage.same("writable"))
        else:
            findings.append(storage.differs(folder.error, f"a job cannot write there on {result.node}"))
    return findings
