"""What the points of a sweep will likely need: memory, minutes, service units and energy, before they are submitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates import memory, rates
from inpaint_bench.core.estimates.memory import Peak
from inpaint_bench.core.estimates.rates import Rate
from launchers.points.point import Point, by_site

WARN_ABOVE = 0.9  # of the card's memory


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a point will likely need; None where it is not predicted."""

    peak: Peak | None
    share: float | None  # of the card's memory
    card_gib: float
    rate: Rate | None
    minutes: tuple[float, float, float] | None  # expected, least, most; of the run, without the queue
    service_units: tuple[float, float, float] | None
    joules: float | None

    @property
    def exceeds(self) -> bool:
        """Return whether the card has too little memory, by a prediction whose error is known."""
        return bool(self.peak and self.peak.error_pct is not None and self.share and self.share > 1)

    @property
    def shown(self) -> tuple[str | None, float | None]:
        """Return memory and minutes as the table of points has them."""
        memory = minutes = None
        if self.peak and self.share is not None:
            memory = f"{self.peak.needed_mib / 1024:.1f} of {self.card_gib:.1f} GiB, {100 * self.share:.0f} %"
        if self.minutes:
            minutes = float(f"{self.minutes[0]:.2g}")
        return memory, minutes


def estimate(points: Sequence[Point]) -> dict[int, Estimate]:
    """Return the estimates by the number of the point. Raises UserError for `datasets` that are none."""
    found: dict[int, Estimate] = {}
    known: dict[tuple[str, ...], list[rates.Cell]] = {}
    seen: dict[tuple[tuple[str, ...], rates.Work, str, int, int, int], Rate | None] = {}
    for point in points:
        bench, peak, rate = point.bench, None, None
        if _is_predicted(bench):
            peak, folders = memory.predict_point(bench), tuple(bench.datasets)
            if folders not in known:
                known[folders] = rates.own_cells(folders)
            key = (folders, rates.work_of(bench), bench.gpu.name, bench.batch_size, bench.gpus, bench.nodes)
            if key not in seen:  # replicates are many
                seen[key] = rates.find(*key[1:4], known[folders], gpus=bench.gpus, nodes=bench.nodes)
            rate = seen[key]
        minutes = units = joules = None
        if rate:
            images = images_of(bench, rate.images_per_s)
            most = point.starts * point.request.time_min
            seconds = [images / (rate.images_per_s * factor) for factor in (1, 1 + rate.error, 1 / (1 + rate.error))]
            expected, least, longest = (min((each + rate.other_s) / 60, most) for each in seconds)
            minutes = (expected, least, longest)
            if (charge := point.service_units) is not None:
                units = (expected / most * charge, least / most * charge, longest / most * charge)
            joules = images * rate.joules_per_image or None
        room = memory.usable_mib(bench.gpu)
        share = peak.needed_mib / room if peak and room else None
        found[point.num] = Estimate(
            peak=peak, share=share, card_gib=room / 1024, rate=rate, minutes=minutes, service_units=units, joules=joules
        )
    return found


def images_of(bench: BenchConfig, images_per_s: float) -> float:
    """Return the images of a run's measured windows; of a training all of them."""
    workload, step = bench.workload, bench.batch_size * bench.ranks
    if steps := getattr(workload, "train_steps", None):
        return float(steps * step)
    shortest_s = workload.min_measure_s + getattr(workload, "min_warmup_s", 0.0)
    return max(workload.measure_steps * step, shortest_s * images_per_s)


def memory_problems(points: Sequence[Point], estimates: Mapping[int, Estimate]) -> list[str]:
    """Return a sentence for each configuration that takes nearly all memory of its card, or more, by the prediction."""
    problems: Counter[str] = Counter()
    for point in points:
        each, bench = estimates[point.num], point.bench
        if each.peak is None or each.share is None or each.share <= WARN_ABOVE:
            continue
        error = "its error is not known" if each.peak.error_pct is None else f"error up to {each.peak.error_pct:.0f} %"
        needed = f"needs {each.peak.needed_mib / 1024:.1f} GiB of the card's {each.card_gib:.1f}"
        most = f"; the largest batch that fits is {memory.largest_batch(bench)}" if each.share > 1 else ""
        problems[f"gpu={bench.gpu.name} batch={bench.batch}: {needed} ({each.peak.basis}, {error}){most}"] += 1
    return [f"{text} ({pluralize(count, 'point')})" if count > 1 else text for text, count in problems.items()]


def leave_out(points: Sequence[Point], estimates: Mapping[int, Estimate]) -> tuple[list[Point], list[str]]:
    """Return the points that fit their cards by the prediction, and a sentence for each configuration that does not.

    A point stays where the error of the prediction is not known, and with memory_check=false. Raises UserError where
    none is left.
    """
    unfit = {point.num for point in points if estimates[point.num].exceeds and point.bench.memory_check}
    fit = [point for point in points if point.num not in unfit]
    sentences = memory_problems([point for point in points if point.num in unfit], estimates)
    if not fit:
        listed = "; ".join([*sentences[:3], *([f"and {len(sentences) - 3} more like it"] if sentences[3:] else [])])
        raise UserError(f"no point fits its card: {listed}. memory_check=false submits them all the same")
    return fit, sentences


def lines(points: Sequence[Point], estimates: Mapping[int, Estimate]) -> Iterator[str]:
    """Yield what the sweep will likely take at each site, and how sure that is; and what is not predicted."""
    for name, members in by_site(points).items():
        own = [estimates[point.num] for point in members]
        timed = [each for each in own if each.minutes]
        if not timed:
            continue
        unit = members[0].site.charging.unit
        parts = [f"{_span([each.minutes for each in timed if each.minutes], 60)} h of jobs"]
        if charged := [each.service_units for each in own if each.service_units]:
            parts.append(f"{_span(charged)} {unit}")
            if price := members[0].site.charging.price_per_unit:
                total = sum(each[0] for each in charged) * price
                parts.append(f"{total:.2f} {members[0].site.charging.currency}")
        if joules := sum(each.joules or 0.0 for each in own):
            parts.append(f"{joules / 3.6e6:.3g} kWh of the GPUs")
        partly = f" for {len(timed)} of {len(own)} points" if len(timed) < len(own) else ""
        yield f"{name}: likely {', '.join(parts)}{partly}"
        basis = Counter(each.rate.source for each in timed if each.rate)
        yield "    " + "; ".join(f"{pluralize(count, 'point')}: {source}" for source, count in basis.items())
    checked = [point for point in points if _is_predicted(point.bench)]
    if missing := sum(estimates[point.num].peak is None for point in checked):
        yield f"memory: not predicted for {missing} of {pluralize(len(points), 'point')}"
    for problem in memory_problems(points, estimates):
        yield f"{problem}: it may run out of memory"


def _is_predicted(bench: BenchConfig) -> bool:
    """Return whether anything is predicted: not of a batch that is searched for, a demonstration, a CPU."""
    return not bench.searches_batch and not bench.demonstration and bool(bench.gpu.memory_gb)


def _span(values: Sequence[tuple[float, float, float]], over: float = 1) -> str:
    expected, least, most = (sum(each) / over for each in zip(*values, strict=True))
    return f"{expected:.3g} ({least:.3g} to {most:.3g})"
