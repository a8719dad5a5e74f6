"""`doctor`: software and GPUs of this machine and the sites that it can reach; a site file beside its Slurm; a GPU.

`doctor site` prints the corrections of a site file, and writes them if requested. `doctor gpu` says which values a GPU
gives, how often they change and what a call costs, in about 20 s; of several GPUs, how they are linked.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from hydra import compose
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from inpaint_bench.core import child, environment
from inpaint_bench.core.config.parse import parse_unchecked
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.config.user_file import user_file, user_overrides
from inpaint_bench.core.config.validation import NEW_NAME, did_you_mean
from inpaint_bench.core.config.yaml_file import ConfigFileError, read_config_file
from inpaint_bench.core.console import console, echo, pluralize, table
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import refuse_hidden_files
from inpaint_bench.core.paths import conf_dir, import_path
from inpaint_bench.telemetry.driver import DriverError, Fault
from inpaint_bench.telemetry.nvml.links import links
from inpaint_bench.telemetry.nvml.real import RealNvml
from inpaint_bench.telemetry.nvml.replay import SUFFIX, save
from launchers.points.compose import composer
from launchers.points.site_catalog import Reachability, SiteCatalog, reachability, refuse_unused_keys
from launchers.remote.ssh import SshConnection
from launchers.sites.compare import Agreement, Finding, compare, compare_container, compare_paths
from launchers.sites.site_file import SiteFile, as_yaml, not_writable
from launchers.sites.slurm_facts import query_cluster
from launchers.sweep.sweep_record import LaunchContext

if TYPE_CHECKING:
    from inpaint_bench.telemetry.nvml.probe import GpuFindings

SBATCH_TIMEOUT_S = 10
ALL_REDUCE_MIB, ALL_REDUCE_TIMEOUT_S = 256, 120
DISTRIBUTION = "inpaint-bench"
ALL = "all"


def run_machine(overrides: Sequence[str] | None, config_dir: Path | None) -> None:
    """Print this machine's software and GPUs, and which sites can be reached from it."""
    out, sites = console(), site_files(overrides or [], config_dir)
    facts = environment.fingerprint()
    names = ("python", "driver", "cpu", "cores", "kernel")
    rows = [(name, "not found" if (fact := getattr(facts, name)) is None else fact, None) for name in names]
    out.print(table(("this machine", "", "required"), [*rows, ("sbatch", _sbatch(), None), *_packages()]))
    print(_gpus())
    out.print(table(("site", "file", "reachable", "why", "blocks verified", "blocks to check"), sites))
    echo(f"your own file: {user_file() or 'none; docs/sites.md says where it would be'}")
    print("blocks to check: not compared with the site's Slurm, and the file names fewer than two sources of them")
    print("inpaint-bench doctor site NAME compares a site file with its Slurm")


def _packages() -> list[tuple[str, str, str | None]]:
    """Return name, installed and required version of each dependency and of what runs need besides (extra `train`).

    Without metadata of our own (not installed) the main ones are listed.
    """
    try:
        # A dependency of an extra is marked: peft>=1; extra == "lora".
        lines = [line.partition(";") for line in metadata.requires(DISTRIBUTION) or ()]
        requirements = [line for line, _, mark in lines if "extra ==" not in mark or "train" in mark]
    except metadata.PackageNotFoundError:
        requirements = list(environment.PACKAGES)
    rows = []
    for requirement in sorted(requirements):
        match = re.match(r"[\w.-]+", requirement)
        assert match is not None
        try:
            installed = metadata.version(match[0])
        except metadata.PackageNotFoundError:
            installed = "not installed"
        rows.append((match[0], installed, requirement[match.end() :].strip() or None))
    return rows


def _sbatch() -> str:
    path = shutil.which("sbatch")
    if path is None:
        return "not on PATH"
    try:
        done = child.run(["sbatch", "--version"], timeout_s=SBATCH_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path}, which fails: {error}"
    version = done.stdout.decode(errors="replace").strip()
    return f"{path}, {version}" if done.returncode == 0 else f"{path}, no Slurm is set up here"


def _gpus() -> str:
    try:
        gpus = _uuids()
    except DriverError as error:
        return f"{nvml_problem(error)}; where there is one, inpaint-bench doctor gpu examines it"
    listed = f"NVML lists {pluralize(len(gpus), 'GPU')}: {', '.join(gpus) or 'none'}"
    return f"{listed}\ninpaint-bench doctor gpu examines one, for about 20 s"


@dataclass(kw_only=True)
class SiteCheck:
    """One site with its file and the findings about it."""

    site: SiteConfig  # in force: the file with this command's overrides
    file: SiteFile
    reach: Reachability
    findings: list[Finding] = field(default_factory=list)

    @property
    def differing(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.agreement is Agreement.DIFFERS]

    @cached_property
    def values(self) -> DictConfig:
        """Return the values of the file itself, with the defaults of what it does not have."""
        config = OmegaConf.merge(OmegaConf.structured(SiteConfig), read_config_file(self.file.path, "site"))
        assert isinstance(config, DictConfig)
        return config

    def is_overridden(self, finding: Finding) -> bool:
        """Return whether an override of this command replaces the value of the file."""
        return bool(OmegaConf.select(self.values, finding.key) != finding.configured)


def run_site(site: str, overrides: Sequence[str] | None, *, config_dir: Path | None, write: bool) -> int:
    """Compare a site file, or ALL, with the live Slurm; return 1 if something still differs at the end, else 0.

    `config_dir` has further configuration files, as --config-dir of the launch. Raises UserError if no site can be
    reached.
    """
    out = console()
    with composer(_launch_context(config_dir)) as composed:
        config = _config(overrides or [])
        checks = []
        for check in _site_checks(composed.catalog, site, config):
            if check.reach.ok:
                checks.append(check)
            else:
                echo(f"{check.site.name}: skipped, it cannot be reached from here ({check.reach.reason})")
        if not checks:
            raise UserError("no site can be reached from here; run this on a login node")
        # Before anything is queried.
        if write and config.demonstration:
            raise UserError("--write: this profile replaces the sites by a demonstration, whose values are not theirs")
        for check in checks if write else ():
            if reason := not_writable(check.file.path):
                raise UserError(f"{check.file.path}: {reason}")
        for check in checks:
            cluster = query_cluster(check.site)
            check.findings = [*_hostnames(check), *compare(check.site, cluster), *compare_paths(check.site, cluster)]
            check.findings += compare_container(check.site)
            _print_check(out, check, cluster.summary)
            if check.site.connection.over_ssh and (problem := SshConnection(check.site.connect).startup_problem()):
                echo(f"{check.site.name}: {problem}")
    # A list, not a generator: every file is written.
    agree = [_write(check) if write else not check.differing for check in checks]
    return int(not all(agree))


def site_files(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[str, ...]]:
    """Return a row per site file: name, path, whether it can be reached and why (not), and what is known how well."""
    rows: list[tuple[str, ...]] = []
    with composer(_launch_context(config_dir)) as composed:
        config = _config(overrides)
        for name in composed.catalog.names:
            path = str(composed.catalog.file(name))
            try:
                site = composed.catalog.site(name, config)
            except ConfigFileError as error:
                rows.append((name, path, "no", str(error), "-", "-"))
                continue
            reach = reachability(site)
            blocks = {key: block for key, block in (vars(site) | site.gpus).items() if getattr(block, "source", "")}
            verified = f"{sum(block.verified for block in blocks.values())} of {len(blocks)}"
            doubtful = [key for key, block in blocks.items() if not block.verified and len(block.sources) < 2]
            rows.append((name, path, "yes" if reach.ok else "no", reach.reason, verified, ", ".join(doubtful) or "-"))
    return rows


def _launch_context(config_dir: Path | None) -> LaunchContext:
    if config_dir is None:
        return LaunchContext()
    refuse_hidden_files([conf_dir(), config_dir])
    return LaunchContext(config_dirs=(str(config_dir.absolute()),))


def _config(overrides: Sequence[str]) -> DictConfig:
    config = compose("config", overrides=[*user_overrides(overrides), *overrides], return_hydra_config=True)
    refuse_unused_keys(parse_unchecked(config).site, overrides)
    return config


def _site_checks(catalog: SiteCatalog, name: str, config: DictConfig) -> list[SiteCheck]:
    if name not in (ALL, *catalog.names):
        names = [*catalog.names, ALL]
        add = did_you_mean(name, names)
        add += f" `inpaint-bench new site {name}` adds one" if NEW_NAME.fullmatch(name) else ""
        raise UserError(f"{name}: no such site; have: {', '.join(names)}.{add}")
    sites = catalog.sites(config) if name == ALL else [catalog.site(name, config)]
    checks = [
        SiteCheck(site=site, file=SiteFile(catalog.file(site.name)), reach=reachability(site))
        for site in sites
        if site.connection.has_slurm
    ]
    if not checks:
        raise UserError(f"{name}: has no Slurm to compare with; `doctor` alone checks this machine")
    if name != ALL and not checks[0].reach.ok:
        reason = checks[0].reach.reason
        raise UserError(f"{name} cannot be reached from here ({reason}); run this on one of its login nodes")
    return checks


def _hostnames(check: SiteCheck) -> list[Finding]:
    if not (patterns := check.site.connect.hostnames):
        return []
    hostnames = Finding("connect.hostnames", list(patterns))
    if check.reach.on_site:
        return [hostnames.same("one matches this machine")]
    return [hostnames.unknown(f"none matches this machine; {check.reach.reason}")]


def _print_check(out: Console, check: SiteCheck, summary: Mapping[str, str]) -> None:
    name, path = check.site.name, check.file.path
    rows = [(f.key, _text(f.configured), f.reported, str(f.agreement), f.note) for f in check.findings]
    out.print(table(("key", "site file", "Slurm", "comparison", "note"), rows, title=f"{name}: {path}"))
    if summary:
        echo(", ".join(f"{key}={value}" for key, value in summary.items()))
    if quotas := check.site.storage.file_quotas:
        echo("quotas of files: " + ", ".join(f"{folder} {number:,}" for folder, number in quotas.items()))
    counts = {kind: sum(f.agreement is kind for f in check.findings) for kind in Agreement}
    echo(f"{name}: " + ", ".join(f"{number} {kind}" for kind, number in counts.items() if number))
    if corrections := _corrections(check):
        echo("", f"corrections for {path}:", *(f"  {line}" for line in corrections))
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
    # An override hides the file's own value, so nothing is known about that one and it is not corrected.
    uncorrected = [f for f in check.differing if not f.corrections or check.is_overridden(f)]
    corrected = [f for f in check.differing if f not in uncorrected]
    changes = {key: value for finding in corrected for key, value in finding.corrections.items()}
    for block in dict.fromkeys(finding.block for finding in check.findings if finding.block):
        if isinstance(check.file.get(block), dict):
            changes |= _dates(check, block, uncorrected)
    if changes:
        print(check.file.write(check.file.edited(changes)), end="")
    echo(f"{check.file.path}: {'written' if changes else 'nothing to write'}")
    return not uncorrected


def _dates(check: SiteCheck, block: str, uncorrected: Sequence[Finding]) -> dict[str, Any]:
    """Return the keys that say when a block was verified: all of it, or the keys of it in `seen`."""
    findings = [finding for finding in check.findings if finding.block == block]
    if any(check.is_overridden(finding) for finding in findings):
        echo(f"{block}: not marked as verified, because an override replaces a value of the file")
        return {}
    today = datetime.date.today()
    # Differences that have a correction agree as soon as the file is written.
    agreeing = [f for f in findings if f.agreement is Agreement.SAME or (f in check.differing and f not in uncorrected)]
    before: dict[str, Any] = dict(check.file.get(f"{block}.seen") or {})
    # All keys agree: the block is verified as a whole and needs no list of those that do.
    if len(agreeing) == len(findings):
        dates: dict[str, Any] = {"checked_on": today, "verified": True} | ({"seen": {}} if before else {})
    else:
        # Dates of earlier checks stay, except for keys that Slurm contradicts now.
        contradicted = {finding.name for finding in findings if finding in uncorrected}
        after = {name: date for name, date in before.items() if name not in contradicted}
        after |= {finding.name: today for finding in agreeing if check.file.line(finding.key)}
        dates = {} if after == before else {"seen": after}
        if contradicted and OmegaConf.select(check.values, f"{block}.verified"):
            dates["verified"] = False
    dated = {f"{block}.{name}": value for name, value in dates.items()}
    return {key: value for key, value in dated.items() if check.file.get(key) != value}


def run_gpu(uuid: str | None, seconds: float, out: Path | None, note: str) -> None:
    """Examine a GPU, print the findings and save the recording; of several, print their links. Raises UserError."""
    if not 2 <= seconds <= 3600:
        raise UserError(f"--seconds {seconds:g}: an examination takes 2 to 3600 s")
    if out and not out.name.endswith(SUFFIX):
        raise UserError(f"--out {out}: the name of a recording ends in {SUFFIX}")
    if out and not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out}: {out.parent} is not a writable folder")
    from inpaint_bench.telemetry.nvml.probe import examine_gpu  # loads pyarrow

    try:
        if uuid is None and len(uuids := _uuids()) > 1:
            _print_links(console(), uuids, out)
            return
        findings = examine_gpu(uuid, seconds)
    except ValueError as error:
        raise UserError(str(error)) from None
    except DriverError as error:
        raise UserError(nvml_problem(error)) from None
    # Printed first: a full disk must not cost the findings.
    _print_findings(console(), findings)
    if out:
        findings.capture.meta.note = note
        try:
            save(out, findings.capture)
        except OSError as error:
            raise UserError(f"the recording was not saved: {error}") from None
        print(f"Replay the recording with telemetry=replay telemetry.capture={out}")


def _uuids() -> list[str]:
    with RealNvml() as nvml:
        return nvml.uuids()


def _print_links(out: Console, uuids: Sequence[str], recording: Path | None) -> None:
    """Print how GPUs are linked, and an all-reduce beside what the slowest link carries. Raises UserError."""
    choice = f"choose one with --uuid: {', '.join(uuids)}"
    if recording:
        raise UserError(f"--out {recording}: a recording is of one GPU; {choice}")
    with RealNvml() as nvml:
        pairs = links(nvml, uuids)
    rows = [(*(f"GPU {gpu}" for gpu in link.gpus), link.kind, link.gb_s) for link in pairs]
    out.print(table(("GPU", "and", "link", "GB/s one way"), rows))
    speeds = [link.gb_s for link in pairs if link.gb_s is not None]
    print(_all_reduce(uuids, min(speeds) if len(speeds) == len(pairs) else None))
    echo(f"`doctor gpu` examines one of {len(uuids)} GPUs: {choice}")


def _all_reduce(uuids: Sequence[str], link_gb_s: float | None) -> str:
    """Return the sentence on an all-reduce of all GPUs."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(uuids))]
    command = [sys.executable, *run, "-m", "inpaint_bench.profiling.all_reduce", str(ALL_REDUCE_MIB)]
    what = f"all-reduce of {ALL_REDUCE_MIB} MiB over {len(uuids)} GPUs"
    env = os.environ | {"PYTHONPATH": import_path(), "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ",".join(uuids)}
    try:
        done = child.run(command, timeout_s=ALL_REDUCE_TIMEOUT_S, env=env)
        measured = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"{what}: not measured, it did not end within {ALL_REDUCE_TIMEOUT_S} s"
    except ValueError:
        lines = done.stderr.decode(errors="replace").split("\n")
        errors = [line.strip() for line in lines if "Error" in line] or [f"exit code {done.returncode}"]
        return f"{what}: not measured ({errors[-1]})"
    bus_gb_s = measured["bus_gb_s"]
    share = f", {bus_gb_s / link_gb_s:.0%} of what the slowest link carries one way" if link_gb_s else ""
    return f"{what}: {measured['ms']:.2f} ms, {bus_gb_s:.3g} GB/s bus bandwidth{share}"


def nvml_problem(error: DriverError) -> str:
    """Return the sentence for a user whose GPU cannot be examined."""
    if error.fault is Fault.NO_DRIVER:
        return f"this machine has no working NVIDIA driver ({error}), so there is no GPU to examine"
    return f"the examination failed: {error}"


def _print_findings(out: Console, findings: GpuFindings) -> None:
    nulls = findings.device.nulls
    facts = {"driver": findings.capture.meta.driver, **msgspec.structs.asdict(findings.device)}
    shown = [(name, value) for name, value in facts.items() if name not in ("nulls", "index_visible")]
    out.print(table(("GPU", ""), [(name, f"null: {nulls[name]}" if name in nulls else value) for name, value in shown]))
    calls = [(c.call, c.feeds, c.num_calls, c.num_valid, c.median_us, c.max_us) for c in findings.calls]
    out.print(table(("NVML call", "feeds", "calls", "valid", "median us", "max us"), calls))
    updates = [(column, u.median_ms, u.changes, u.polls, u.failed) for column, u in findings.updates.items()]
    out.print(table(("changes every", "median ms", "changes", "polls", "failed polls"), updates))
    missing = [(call.feeds, call.missing, call.error) for call in findings.calls if call.missing]
    if missing:
        out.print(table(("missing: null in every run", "reason", "NVML"), missing))
