"""Checks of a run on several GPUs: its ranks with each other, and its cards by the rows of one sidecar."""

from collections.abc import Iterator
from itertools import combinations

import polars as pl

from analysis.metrics.facts import Facts
from analysis.units import number
from inpaint_bench.core.console import list_some, pluralize
from inpaint_bench.core.records import RankFacts
from inpaint_bench.telemetry.report import TelemetryReport

from .bounds import MIN_USED_SHARE

MAX_MEMORY_RATIO = 1.1  # largest ratio of ranks that do the same; two H200 differed by less than 0.1 %
MAX_SPREAD_S = 1.0  # between the rows of one tick: cards are read one after the other
PROBED = 2  # steps after the last one that counts, in which levers are read back
MAX_LACKING = 0.1  # share of rows that a card may lack, compared with the others of its sidecar


def check_ranks(facts: Facts) -> Iterator[str]:
    manifest, ranks = facts.manifest, facts.manifest.ranks or []
    nodes = sum(rank.local_rank == 0 for rank in ranks) or 1
    if manifest.ranks is not None and len(ranks) != manifest.gpus:
        yield f"the manifest names {pluralize(len(ranks), 'rank')} in a run on {pluralize(manifest.gpus or 0, 'GPU')}"
    for rank in (rank for rank in ranks if rank.rank):  # the tables tell it for rank 0
        stated = (
            # If steps differ in their work, the results tell what each rank did.
            *(("steps", "data_wait_s") if facts.uniform_steps else ()),
            *(("gpu_uuid",) if rank.device == "cuda" else ()),
            *(("allocated_peak_mib",) if rank.device == "cuda" and facts.uniform_steps else ()),
        )
        if missing := [name for name in stated if getattr(rank, name) is None]:
            yield f"rank {rank.rank} states no {', '.join(missing)}"
    if manifest.nodes != nodes:
        yield f"the manifest says {pluralize(manifest.nodes, 'node')}, and its ranks ran on {nodes}"
    if sorted(rank.rank for rank in ranks) != list(range(len(ranks))):
        yield f"the manifest numbers its ranks {', '.join(str(rank.rank) for rank in ranks)}"
    # Two nodes of Slurm can be one host, whose processes and GPUs differ all the same.
    per_node = max(1, len(ranks) // max(1, manifest.nodes))
    places: dict[str, list[tuple[int | str, int | str]]] = {
        "local rank": [(rank.rank // per_node, rank.local_rank) for rank in ranks],
        "process": [(rank.node, rank.pid) for rank in ranks],
        "GPU": [(rank.node, rank.gpu_uuid) for rank in ranks if rank.gpu_uuid is not None],
    }
    for name, taken in places.items():
        if twice := sorted({str(place) for node, place in taken if taken.count((node, place)) > 1}):
            yield f"two ranks of one node have {name} {', '.join(twice)}"
    listed, used = facts.gpu_uuids, {rank.gpu_uuid for rank in ranks if rank.gpu_uuid}
    if listed and used and used != listed and not facts.replayed:
        yield f"the ranks ran on GPUs {list_some(sorted(used))}, and the manifest lists {list_some(sorted(listed))}"
    yield from _check_work(facts, ranks)


def _check_work(facts: Facts, ranks: list[RankFacts]) -> Iterator[str]:
    """Compare what the ranks did: all take part in each step, and the slowest decides how long it takes."""
    steps = {rank.rank: rank.steps for rank in ranks if rank.steps is not None}
    manifest, progress = facts.manifest, facts.manifest.progress
    if progress is not None and manifest.profile is None and not facts.started_before:
        steps.setdefault(0, progress.step + (PROBED if manifest.levers else 0))
    if len(set(steps.values())) > 1:
        yield f"ranks differ in steps: {', '.join(f'rank {rank} has {count}' for rank, count in sorted(steps.items()))}"
    ends = [window.t_end_mono_ns for window in facts.own_windows if window.t_end_mono_ns is not None]
    if ends:
        length_s = (max(ends) - min(window.t_start_mono_ns for window in facts.own_windows)) * 1e-9
        for rank in ranks:
            if rank.data_wait_s is not None and not 0 <= rank.data_wait_s <= length_s:
                yield f"rank {rank.rank} waited {rank.data_wait_s:.1f} s for data, in windows of {length_s:.1f} s"
    totals = [device.memory_mib for device in facts.manifest.devices if device.memory_mib is not None]
    peaks = {rank.rank: rank.allocated_peak_mib for rank in ranks if rank.allocated_peak_mib is not None}
    if peaks and totals and (peak := max(peaks.values())) > max(totals):
        yield f"a rank allocated {number(peak)} MiB, of {number(max(totals))} MiB"
    used = facts.samples["samples_slow"].group_by("gpu_uuid").agg(pl.col("vram_used_mib").max())
    by_card = {str(uuid): mib for uuid, mib in used.iter_rows()}
    for rank in ranks:
        own, mib = rank.allocated_peak_mib, by_card.get(rank.gpu_uuid or "")
        if own is not None and mib is not None and mib < MIN_USED_SHARE * own and not facts.replayed:
            in_use = f"at most {number(mib)} MiB of its GPU's memory were in use by NVML"
            yield f"rank {rank.rank} allocated {number(own)} MiB, and {in_use}"
    divided = any(lever.field == "sharding" for lever in facts.manifest.levers or [])
    if not divided and len(peaks) > 1 and max(peaks.values()) > MAX_MEMORY_RATIO * min(peaks.values()):
        texts = ", ".join(f"rank {rank} {number(peak)} MiB" for rank, peak in sorted(peaks.items()))
        yield f"ranks differ in the memory that they allocated: {texts}"


def check_cards(facts: Facts, _: TelemetryReport | None) -> Iterator[str]:
    """Compare the cards that one sidecar sampled: it reads all of them at each tick."""
    if facts.replayed:
        return
    rows = facts.measured_samples["samples_fast"].group_by("gpu_uuid")
    cards = dict(sorted((str(uuid), own) for (uuid,), own in rows))
    most = max((own.height for own in cards.values()), default=0)
    for uuid, own in cards.items():
        if own.height < (1 - MAX_LACKING) * most - 1:
            yield f"GPU {uuid} has {own.height} rows in samples_fast, another one of the node {most}"
    for (one, first), (other, second) in combinations(cards.items(), 2):
        both = first.join(second, on="tick_seq", suffix="_other")
        apart_s = float((both["t_mono_ns"] - both["t_mono_ns_other"]).abs().median() or 0) * 1e-9  # type: ignore[arg-type]
        if apart_s > MAX_SPREAD_S:
            yield f"GPUs {one} and {other} are {apart_s:.2f} s apart in the rows of one tick"
