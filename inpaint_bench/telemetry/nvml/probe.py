"""What a real GPU answers, how fresh, and at what cost: about 20 s, of which most is a recording.

In turn: every question of the sidecar with its return code; the update periods of power and energy, by polling
faster than a run ever does; the cost of every call; a recording at the sidecar's rates, in which energy is
compared with power; last, whether the process list shows a process that we start on the GPU. Reads only:
nothing is set, and no root is needed.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from inpaint_bench.telemetry.devices import describe, open_device
from inpaint_bench.telemetry.sampling.streams import FAST, GPM, LANES, PROBES, SLOW, Reader, null_reason
from inpaint_bench.telemetry.sampling.ticker import ENOUGH_FOR_P99
from inpaint_bench.telemetry.sources.co_tenants import tell_apart

from . import cuda_context
from .api import CODES, Handle, Nvml, NvmlError, gpu_uuid
from .queries import QUESTIONS, WITHOUT, Question
from .recorder import HZ, Recording, our_root, record

POLL_S: Final = 0.005
COST_GAP_S: Final = 0.025
_GPM_GAP_S: Final = 0.2  # more than the 100 ms that NVIDIA asks for
_NOT_FOUND: Final = 6
_POLLED: Final = {"power_instant_w": (186, 0), "power_avg1s_w": (185, 0), "energy_mj": (83, 0)}
_PARAMS: Final = Path("/proc/driver/nvidia/params")
SECONDS: Final = (2.0, 3600.0)  # shortest and longest probe


@dataclass(frozen=True)
class Phases:
    """How long each part takes. The recording gets what polling and costs leave."""

    poll_s: float
    rounds: int
    record_s: float

    @classmethod
    def of(cls, seconds: float) -> Phases:
        """Of 20 s: 3 s of polling, 100 rounds of costs, a recording of 13.5 s. Longer ones only record longer."""
        share = min(seconds, 20.0) / 20.0
        poll_s, rounds = 3.0 * share, round(100 * share)
        return cls(poll_s, rounds, max(1.0, seconds - poll_s - rounds * COST_GAP_S - 1.0))


def choose(nvml: Nvml, given: str | None) -> str:
    """The GPU to look at. Raises ValueError with a sentence: none, several, a MIG slice, not a UUID."""
    if given is not None:
        return gpu_uuid(given)
    uuids = nvml.uuids()
    if not uuids:
        raise ValueError("NVML lists no GPU that this process may open")
    if len(uuids) > 1:
        raise ValueError(f"{len(uuids)} GPUs are here; name one with --uuid: {', '.join(uuids)}")
    return uuids[0]


def probe(nvml: Nvml, uuid: str, phases: Phases) -> tuple[dict[str, Any], Recording]:
    """The findings, JSON-ready, and the recording behind them. Raises NvmlError, ValueError (no such GPU, MIG)."""
    handle = open_device(nvml, uuid)
    identity = {"driver": nvml.driver_version(), "nvml": nvml.nvml_version(), **describe(nvml, handle)}
    if identity["mig_mode"]:
        raise ValueError(f"{uuid} is in MIG mode: its power and utilisation belong to no single job")
    answers = ask_all(nvml, handle)
    updates = update_periods(nvml, handle, phases.poll_s)
    costs, lanes = call_costs(nvml, handle, phases.rounds)
    recording = record(nvml, uuid, phases.record_s)
    return {
        "identity": identity,
        "answers": answers,
        "updates": updates,
        "costs": costs,
        "fields": field_costs(recording),
        "lanes": lanes,
        "recorded_s": round(recording.meta["duration_ms"] / 1000, 1),
        "gpm": _gpm(recording),
        "energy": energy(recording, updates),
        "vram": vram(nvml, handle),
        "xids": _xids(recording),
        "processes": processes(nvml, handle, uuid),
        "permissions": permissions(identity["minor"], answers),
    }, recording


def ask_all(nvml: Nvml, handle: Handle) -> list[dict[str, Any]]:
    """Every question, what was refused again up to three times: one miss does not make a sensor absent.

    One entry per column or fact. GPM has one try more, as its first read has no window.
    """
    codes: dict[int, list[int]] = {}
    for _ in range(1 + PROBES):
        open_questions = [i for i in range(len(QUESTIONS)) if i not in codes or any(codes[i])]
        for place in open_questions:
            answer = QUESTIONS[place].ask(nvml, handle)
            if answer is not None:
                before = codes.get(place, answer)
                codes[place] = [min(pair, key=abs) for pair in zip(before, answer, strict=True)]
        if open_questions:
            time.sleep(_GPM_GAP_S)
    return [
        _entry(question, name, words, code)
        for place, question in enumerate(QUESTIONS)
        for name, words, code in zip(
            question.feeds, question.ids, codes.get(place, [_NOT_FOUND] * len(question.feeds)), strict=True
        )
    ]


def _entry(question: Question, name: str, words: str, code: int) -> dict[str, Any]:
    return {
        "lane": question.lane,
        "name": name,
        "function": question.function,
        "id": words,
        "code": code,
        "answer": "yes" if code == 0 else CODES.get(code, "NVML error"),
        "null": None if code == 0 else null_reason(code).value,
        "without": None if code == 0 else WITHOUT.get(name, f"{name} stays null"),
    }


def update_periods(nvml: Nvml, handle: Handle, seconds: float) -> dict[str, dict[str, Any]]:
    """How often power and energy change, by polling every 5 ms.

    A period is the time between two changes, so a value that stays the same over an update makes it look longer:
    the median is the figure, p10 and p90 its spread. misses: error codes and zeros, which polling below 50 ms
    is known to give.
    """
    start_ns = time.monotonic_ns()
    seen: dict[str, list[tuple[int, float]]] = {name: [] for name in _POLLED}
    misses = dict.fromkeys(_POLLED, 0)
    polls = 0
    while (now_ns := time.monotonic_ns()) - start_ns < seconds * 1e9:
        try:
            answers = nvml.fields(handle, list(_POLLED.values()))
        except NvmlError:
            answers = []
        middle_ns = (now_ns + time.monotonic_ns()) // 2
        polls += 1
        for index, name in enumerate(_POLLED):
            answer = answers[index] if index < len(answers) else None
            if answer is None or answer.code != 0 or not answer.value:
                misses[name] += 1
            elif not seen[name] or seen[name][-1][1] != answer.value:
                seen[name].append((middle_ns, answer.value))
        time.sleep(max(0.0, start_ns + polls * POLL_S * 1e9 - time.monotonic_ns()) / 1e9)
    gap_ms = (time.monotonic_ns() - start_ns) / 1e6 / max(polls, 1)
    return {
        name: {
            "field": _POLLED[name][0],
            "polls": polls,
            "poll_gap_ms": round(gap_ms, 2),
            "misses": misses[name],
            "changes": max(0, len(changes) - 1),
            **_periods([at_ns for at_ns, _ in changes[1:]]),  # the first value is no change
        }
        for name, changes in seen.items()
    }


def _periods(times_ns: Sequence[int]) -> dict[str, float | None]:
    gaps = sorted((b - a) / 1e6 for a, b in pairwise(times_ns))
    shares = {"median_ms": 0.5, "p10_ms": 0.1, "p90_ms": 0.9}
    return {name: round(_quantile(gaps, share), 1) if gaps else None for name, share in shares.items()}


def call_costs(nvml: Nvml, handle: Handle, rounds: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Wall time as Python sees it of each question, refused ones too, and of each lane's read as the sidecar does it.

    Every 25 ms, GPM every 200 ms; fewer rounds where the calls take more than twice the time for them. The GPM
    lane is one question, so its cost is that question's.
    """
    asked_us: list[list[float]] = [[] for _ in QUESTIONS]
    lane_us: dict[str, list[float]] = {FAST.name: [], SLOW.name: []}
    readers = [Reader(lane) for lane in (FAST, SLOW)]
    start_ns = time.monotonic_ns()
    for turn in range(rounds):
        if time.monotonic_ns() - start_ns > 2e9 * rounds * COST_GAP_S:
            break
        for question, us in zip(QUESTIONS, asked_us, strict=True):
            if question.lane == GPM.name and turn % round(_GPM_GAP_S / COST_GAP_S):
                continue
            before_ns = time.monotonic_ns()
            question.ask(nvml, handle)
            us.append((time.monotonic_ns() - before_ns) / 1000)
        for reader in readers:
            lane_us[reader.lane.name].append(reader.read(nvml, handle).read_us)
        due_ns = start_ns + (turn + 1) * COST_GAP_S * 1e9
        time.sleep(max(0.0, due_ns - time.monotonic_ns()) / 1e9)
    costs = [
        {"function": question.function, "lane": question.lane, "feeds": list(question.feeds), **_spread(us)}
        for question, us in zip(QUESTIONS, asked_us, strict=True)
    ]
    lane_us[GPM.name] = next(us for question, us in zip(QUESTIONS, asked_us, strict=True) if question.lane == GPM.name)
    return costs, {lane: {"hz": HZ[lane], **_spread(us)} for lane, us in lane_us.items()}


def field_costs(recording: Recording) -> list[dict[str, Any]]:
    """The driver's own time for each field of the lanes: one call asks for several, and they cost very unlike."""
    found = []
    for lane in LANES:
        for item in lane.fields:
            series = recording.calls.get(f"field:{item.field_id}:{item.scope}", {})
            if us := series.get("driver_us"):
                found.append({"lane": lane.name, "column": item.column, "field": item.field_id, **_spread(us)})
    return found


def _spread(us: Sequence[float]) -> dict[str, Any]:
    """p99_us is null for fewer than 100."""
    ordered = sorted(us)
    shares = {"p50_us": 0.5, "p99_us": 0.99, "max_us": 1.0}
    found: dict[str, Any] = {name: round(_quantile(ordered, share), 1) for name, share in shares.items()}
    return {"n": len(us), **found, **({"p99_us": None} if len(us) < ENOUGH_FOR_P99 else {})}


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: an element that was measured."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def energy(recording: Recording, updates: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The counter's difference over the recording beside the integrals of both powers over the same span.

    edge_error: how wrong the counter can be at most, by its update period at both ends.
    """
    counter = _good(recording, "field:83:0", 1e-3)
    if len(counter) < 2 or counter[-1][0] <= counter[0][0]:
        return {"seconds": None}
    (t0, first_j), (t1, last_j) = counter[0], counter[-1]
    found: dict[str, Any] = {"seconds": round(t1 - t0, 2), "counter_j": round(last_j - first_j, 3)}
    update_ms = updates["energy_mj"]["median_ms"]
    found["edge_error"] = None if update_ms is None else round(2 * update_ms / 1000 / (t1 - t0), 4)
    for name, field_id in (("instant", 186), ("avg1s", 185)):
        samples = [(t, watts) for t, watts in _good(recording, f"field:{field_id}:0", 1e-3) if t0 <= t <= t1]
        joules = _integral(samples)
        found[f"{name}_j"] = None if joules is None else round(joules, 3)
        found[f"counter_over_{name}"] = round((last_j - first_j) / joules, 4) if joules else None
    found["mean_w"] = round((last_j - first_j) / (t1 - t0), 2)
    return found


def _good(recording: Recording, key: str, scale: float) -> list[tuple[float, float]]:
    """(s, value) of every answer that was given."""
    series = recording.calls.get(key, {"t_ms": [], "code": [], "value": []})
    columns = zip(series["t_ms"], series["code"], series["value"], strict=True)
    return [(t_ms / 1000, value * scale) for t_ms, code, value in columns if code == 0 and value is not None]


def _integral(samples: Sequence[tuple[float, float]]) -> float | None:
    if len(samples) < 2:
        return None
    return sum((t1 - t0) * (w0 + w1) / 2 for (t0, w0), (t1, w1) in pairwise(samples))


def vram(nvml: Nvml, handle: Handle) -> dict[str, Any]:
    """Memory info v2 in MiB, and what total leaves over of reserved + used + free (0 where the identity holds)."""
    try:
        memory = nvml.memory(handle)
    except NvmlError as error:
        return {"reason": str(error)}
    mib = {name: round(amount / 2**20, 1) for name, amount in memory._asdict().items()}
    rest = memory.total - memory.reserved - memory.used - memory.free
    return {**{f"{name}_mib": amount for name, amount in mib.items()}, "unaccounted_bytes": rest}


def _gpm(recording: Recording) -> dict[str, Any]:
    """Windows of the recording and how many of them gave each metric."""
    series = recording.calls.get("gpm_window_ms", {"code": [], "value": []})
    windows = sorted(ms for ms, code in zip(series["value"], series["code"], strict=True) if code == 0)
    refused = [code for code in series["code"] if code]
    metrics = {
        key.removeprefix("gpm:"): {
            "given": item["code"].count(0),
            "asked": len(item["code"]),
            "last": next((v for v, c in zip(item["value"][::-1], item["code"][::-1], strict=True) if c == 0), None),
        }
        for key, item in recording.calls.items()
        if key.startswith("gpm:")
    }
    return {
        "windows": len(windows),
        "window_ms": round(statistics.median(windows), 1) if windows else None,
        "refused": None if not refused else f"{CODES.get(refused[-1], 'NVML error')} (NVML code {refused[-1]})",
        "metrics": metrics,
    }


def _xids(recording: Recording) -> dict[str, Any]:
    series = recording.calls["xids"]
    code = series["code"][0]
    heard = [number for number in series["value"] if number is not None]
    return {"code": code, "answer": "listening" if code == 0 else CODES.get(code, "NVML error"), "heard": heard}


def processes(nvml: Nvml, handle: Handle, uuid: str) -> dict[str, Any]:
    """Whether the process list shows a process that we start on the GPU, by its own id.

    verdict: yes; this_namespace (yes, in a container, whose list may hold nobody from outside); other_namespace
    (the list grows, by an id that is not ours: a container); hidden (it does not grow); not_tried (no context could
    be made); no_list. Sorted as the sidecar would, counts only.
    """
    try:
        before = nvml.compute_processes(handle)
        with cuda_context.holding(uuid) as (pid, word):
            during = nvml.compute_processes(handle)
    except NvmlError as error:
        return {"verdict": "no_list", "reason": str(error)}
    found = tell_apart(before, our_root())
    counts = {"ours": len(found.ours), "foreign": len(found.strangers), "unknown": len(found.unknown)}
    if pid in during:
        verdict = "yes" if found.trusted else "this_namespace"
    elif word != "ready":
        verdict = "not_tried"
    else:
        verdict = "other_namespace" if set(during) - set(before) else "hidden"
    return {"verdict": verdict, "reason": None if word == "ready" else word, "before": counts, "trusted": found.trusted}


def permissions(minor: int | None, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Who we are to the driver: user, device files, what it refused, who may read profiling counters."""
    nodes = ["/dev/nvidiactl"] + ([] if minor is None else [f"/dev/nvidia{minor}"])
    modes = {"r": os.R_OK, "w": os.W_OK}
    access = {node: "".join(letter for letter, mode in modes.items() if os.access(node, mode)) for node in nodes}
    params = _PARAMS.read_text() if _PARAMS.is_file() else ""
    restricted = re.search(r"^RmProfilingAdminOnly: ([01])$", params, re.MULTILINE)
    return {
        "root": os.geteuid() == 0,
        "device_files": access,
        "no_permission": [entry["name"] for entry in answers if entry["code"] == 4],
        "profiling_admin_only": None
        if restricted is None
        else restricted[1] == "1",  # DCGM's and ncu's counters; GPM does not ask for it
    }
