"""`doctor gpu`: what one GPU of this machine answers, how fresh that is and what it costs; about 20 s."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from inpaint_bench.core.console import console, table
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_json
from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.telemetry.nvml.api import NvmlError
from inpaint_bench.telemetry.nvml.capture_file import SUFFIX, save
from inpaint_bench.telemetry.nvml.probe import SECONDS, Phases, choose, probe
from inpaint_bench.telemetry.nvml.real import RealNvml
from inpaint_bench.telemetry.nvml.recorder import Recording

_NO_DRIVER: Final = (9, 12)
_SEEN: Final = {
    "yes": "a process that we started on the GPU was listed by its own id: co-tenants are told apart",
    "this_namespace": "a process that we started on the GPU was listed by its own id, in a container's pid namespace: "
    "who computes from outside of it may not be listed, so that a run can never be called alone",
    "other_namespace": "a process that we started was listed under an id that is not its own here (a container's "
    "pid namespace): other processes are counted, but a run can never be called alone",
    "hidden": "a process that we started was not listed: co-tenants would not be seen either",
    "not_tried": "the list answers; whether it shows our own processes was not tried",
    "no_list": "no list, so co-tenants are not seen",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to examine, and where to write it."""

    uuid: str | None
    seconds: float
    out: Path | None
    note: str
    loop_from_s: float
    json_file: Path | None


def run_gpu(options: Options) -> None:
    """Probe a GPU and print the findings. Raises UserError for impossible options or without a GPU."""
    shortest, longest = SECONDS
    if not shortest <= options.seconds <= longest:
        raise UserError(f"--seconds {options.seconds:g}: a probe takes {shortest:g} to {longest:g} s")
    phases = Phases.of(options.seconds)
    _check(options, phases)
    try:
        nvml = RealNvml()
        nvml.open()
        findings, recording = probe(nvml, choose(nvml, options.uuid), phases)
        nvml.close()
    except ValueError as error:
        raise UserError(str(error)) from None
    except NvmlError as error:
        raise UserError(in_words(error)) from None
    show(console(), findings)
    try:
        _keep(options, findings, recording)
    except OSError as error:
        raise UserError(f"not written: {error}") from None


def _keep(options: Options, findings: dict[str, Any], recording: Recording) -> None:
    if options.json_file:
        replace_json(options.json_file, {"producer": PRODUCER, **findings})
        print(f"{options.json_file}: the findings")
    if options.out:
        meta = {**recording.meta, "note": options.note, "loop_from_ms": options.loop_from_s * 1000}
        save(options.out, meta, recording.calls)
        size_kb = options.out.stat().st_size / 1000
        print(f"{options.out}: a recording of {findings['recorded_s']:g} s, {size_kb:.1f} kB")
        print(f"replay it with telemetry=replay telemetry.capture={options.out}")


def _check(options: Options, phases: Phases) -> None:
    """Before 20 s are spent."""
    if options.out and not options.out.name.endswith(SUFFIX):
        raise UserError(f"--out {options.out}: a recording's name ends in {SUFFIX}")
    for path in filter(None, (options.out, options.json_file)):
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise UserError(f"{path} is a folder")
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"{path}: nothing may be written into {path.parent}")
    if not 0 <= options.loop_from_s < phases.record_s:
        raise UserError(
            f"--loop-from {options.loop_from_s:g}: must lie within the recording, which takes {phases.record_s:g} of "
            f"the {options.seconds:g} s"
        )


def in_words(error: NvmlError) -> str:
    if error.code in _NO_DRIVER:
        return f"this machine has no working NVIDIA driver ({error}), so there is no GPU to probe"
    return f"the probe was ended by {error}"


def show(out: Console, found: dict[str, Any]) -> None:
    """The findings of `telemetry.probe.probe` as tables."""
    identity = found["identity"]
    facts = [(name, _fact(name, value, identity["nulls"])) for name, value in identity.items() if name != "nulls"]
    out.print(table(("the card", ""), facts))
    keys = ("lane", "name", "function", "id", "answer", "code")
    out.print(table(("lane", "column or fact", "NVML call", "id", "answer", "code"), _rows(found["answers"], keys)))
    _print_freshness(out, found)
    _print_costs(out, found)
    _print_checks(out, found)
    missing = [(entry["name"], entry["null"], entry["without"]) for entry in found["answers"] if entry["code"]]
    if missing:
        out.print(table(("missing here", "reason", "what that means for results"), missing))
    else:
        print("Nothing is missing: every question was answered.")


def _fact(name: str, value: Any, nulls: dict[str, str]) -> str:
    if value is None:
        return f"not given: {nulls.get(name, 'unknown')}"
    if name in ("persistence_mode", "ecc_mode", "mig_mode"):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rows(entries: Iterable[dict[str, Any]], keys: Sequence[str]) -> list[tuple[Any, ...]]:
    return [tuple(entry[key] for key in keys) for entry in entries]


def _print_freshness(out: Console, found: dict[str, Any]) -> None:
    keys = ("median_ms", "p10_ms", "p90_ms", "changes", "polls", "poll_gap_ms", "misses")
    rows = [(name, str(entry["field"]), *(entry[key] for key in keys)) for name, entry in found["updates"].items()]
    heads = ("changes every", "field", "median ms", "p10 ms", "p90 ms", "changes", "polls", "poll gap ms", "misses")
    out.print(table(heads, rows))


def _print_costs(out: Console, found: dict[str, Any]) -> None:
    keys = ("n", "p50_us", "p99_us", "max_us")
    rows = [(e["function"], _feeds(e["feeds"]), *(e[key] for key in keys)) for e in found["costs"]]
    out.print(table(("cost of a call", "feeds", "n", "p50 us", "p99 us", "max us"), rows))
    rows = [(e["column"], e["lane"], str(e["field"]), *(e[key] for key in keys)) for e in found["fields"]]
    out.print(table(("driver's own time", "lane", "field", "n", "p50 us", "p99 us", "max us"), rows))
    rows = [(name, e["hz"], *(e[key] for key in keys)) for name, e in found["lanes"].items()]
    out.print(table(("cost of a lane's read", "Hz", "n", "p50 us", "p99 us", "max us"), rows))


def _feeds(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _print_checks(out: Console, found: dict[str, Any]) -> None:
    rows = [
        ("GPM", _gpm_words(found["gpm"])),
        ("energy", _energy_words(found["energy"])),
        ("VRAM", _vram_words(found["vram"])),
        ("processes", _process_words(found["processes"])),
        ("Xids", _xid_words(found["xids"])),
        ("permissions", _permission_words(found["permissions"])),
    ]
    out.print(table(("check", "finding"), rows))


def _gpm_words(gpm: dict[str, Any]) -> str:
    if not gpm["windows"]:
        return f"no window: {gpm['refused'] or 'none came'}. {_TIER_2}"
    given = [f"{metric}: {entry['given']}/{entry['asked']}" for metric, entry in gpm["metrics"].items()]
    return f"{gpm['windows']} windows of {gpm['window_ms']:g} ms; answers per metric {', '.join(given)}"


_TIER_2: Final = (
    "What held a run back is then judged by the sweep (bottleneck tier 2), unless telemetry.dcgm_url names an exporter"
)


def _energy_words(energy: dict[str, Any]) -> str:
    if energy["seconds"] is None:
        return "the counter did not answer twice: no joules here"
    words = [f"{energy['counter_j']:g} J by the counter in {energy['seconds']:g} s, {energy['mean_w']:g} W"]
    for name in ("instant", "avg1s"):
        ratio = energy[f"counter_over_{name}"]
        words.append(f"counter / integral of {name} power " + ("not known" if ratio is None else f"{ratio:.4f}"))
    edge = energy["edge_error"]
    words.append("the counter did not move" if edge is None else f"edge error at most {100 * edge:.2g} %")
    return "; ".join(words)


def _vram_words(vram: dict[str, Any]) -> str:
    if "reason" in vram:
        return str(vram["reason"])
    parts = " + ".join(f"{vram[f'{name}_mib']:g} {name}" for name in ("reserved", "used", "free"))
    rest = vram["unaccounted_bytes"]
    holds = "holds to the byte" if rest == 0 else f"leaves {rest} bytes over"
    return f"{vram['total_mib']:g} MiB total = {parts}: {holds}"


def _process_words(processes: dict[str, Any]) -> str:
    words = _SEEN[processes["verdict"]]
    if processes["reason"]:
        words += f" ({processes['reason']})"
    if before := processes.get("before"):
        words += "; before that: " + ", ".join(f"{count} {kind}" for kind, count in before.items())
    return words


def _xid_words(xids: dict[str, Any]) -> str:
    if xids["code"]:
        return f"cannot be listened for: {xids['answer']} (NVML code {xids['code']}); the count of a run is null"
    return f"registration answers; heard during the probe: {', '.join(map(str, xids['heard'])) or 'none'}"


def _permission_words(found: dict[str, Any]) -> str:
    refused = found["no_permission"]
    words = ["run as root" if found["root"] else "run without root"]
    words += [f"{node} {access or 'no access'}" for node, access in found["device_files"].items()]
    words.append(f"refused for want of permission: {', '.join(refused) or 'nothing'}")
    admin = {True: "root only", False: "every user", None: "not known"}[found["profiling_admin_only"]]
    words.append(f"profiling counters (DCGM, ncu): {admin}")
    return "; ".join(words)
