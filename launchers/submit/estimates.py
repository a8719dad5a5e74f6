"""What the points of a sweep will likely need: memory, minutes, service units and energy, before they are submitted."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.validation import override_key
from inpaint_bench.core.console import pluralize, share
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates import memory, rates
from inpaint_bench.core.estimates.memory import Peak
from inpaint_bench.core.estimates.rates import Interval, Rate, amount, scaled
from launchers.points.point import Point, by_site

WARN_ABOVE = 0.9  # share of the card's memory


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a point will likely need; None if it is not predicted."""

    peak: Peak | None
    share: float | None  # share of the card's memory
    card_gib: float
    rate: Rate | None
    minutes: Interval | None  # time of the run, without the queue
    service_units: Interval | None
    joules: float | None
    gco2: float | None

    @property
    def exceeds(self) -> bool:
        """Return whether the card has too little memory by more than the error of the prediction, which is known."""
        return self.peak is not None and self.peak.exceeds(1024 * self.card_gib)

    @property
    def shown(self) -> tuple[str | None, float | None]:
        """Return memory and minutes as the table of points has them."""
        shown = None
        if self.peak and self.share is not None:
            shown = f"{self.peak.needed_mib / 1024:.1f} of {self.card_gib:.1f} GiB, {100 * self.share:.0f} %"
        return shown, float(f"{self.minutes[0]:.2g}") if self.minutes else None


def estimate(points: Sequence[Point]) -> dict[int, Estimate]:
    """Return the estimates by the number of the point. Raises UserError for `datasets` that are none."""
    known = cache(rates.own_cells)

    @cache
    def find(folders: tuple[str, ...], work: rates.Work, gpu: str, batch: int, gpus: int, nodes: int) -> Rate | None:
        return rates.find(work, gpu, batch, known(folders), gpus=gpus, nodes=nodes)

    found: dict[int, Estimate] = {}
    for point in points:
        bench, peak, rate = point.bench, None, None
        if _is_predicted(bench) and not _changes_network_or_optimizer(point):
            work, shape = rates.work_of(bench), (bench.batch_size, bench.gpus, bench.nodes)
            peak = memory.predict_point(bench)
            rate = find(tuple(bench.datasets), work, bench.gpu.name, *shape)
        minutes = units = joules = None
        if rate:
            images = images_of(bench, rate.images_per_s)
            expected, least, longest = (seconds / 60 for seconds in rate.seconds(images))
            minutes = (expected, least, longest)
            of_job = _job_minutes(point, minutes)
            if point.service_units is not None:
                units = scaled(of_job, point.service_units / _most_minutes(point))
            joules = energy[0] * of_job[0] / expected if (energy := rate.joules(images)) else None
        room, grid = memory.usable_mib(bench.gpu), point.site.grid_gco2_per_kwh
        found[point.num] = Estimate(
            peak=peak,
            share=peak.needed_mib / room if peak and room else None,
            card_gib=room / 1024,
            rate=rate,
            minutes=minutes,
            service_units=units,
            joules=joules,
            gco2=joules / 3.6e6 * grid if joules and grid is not None else None,
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
        most = f"; the largest batch that fits is {memory.largest_batch(bench)}" if each.exceeds else ""
        problems[f"gpu={bench.gpu.name} batch={bench.batch}: {needed} ({each.peak.basis}, {error}){most}"] += 1
    return [f"{text} ({pluralize(count, 'point')})" if count > 1 else text for text, count in problems.items()]


def limit_problems(points: Sequence[Point], estimates: Mapping[int, Estimate]) -> list[str]:
    """Return a sentence for each configuration that will likely not end within its time limit."""
    problems: Counter[str] = Counter()
    for point in points:
        minutes, limit = estimates[point.num].minutes, point.request.time_min
        if minutes and minutes[0] > _most_minutes(point):
            needs = f"likely needs {minutes[0]:.2g} min and the start of the job, and its time limit is {limit} min"
            more = f" in each of {point.starts} starts" if point.starts > 1 else ""
            if limit < point.site.gpus[point.bench.gpu.name].max_minutes:
                way = "raise time_min"
            else:
                way = "raise rerun.timeout.requeues" if point.starts > 1 else "its partition allows no more"
            problems[f"gpu={point.bench.gpu.name} batch={point.bench.batch}: {needs}{more}; {way}"] += 1
    return [f"{text} ({pluralize(count, 'point')})" if count > 1 else text for text, count in problems.items()]


def leave_out(points: Sequence[Point], estimates: Mapping[int, Estimate]) -> tuple[list[Point], list[str]]:
    """Return the points that fit their cards by the prediction, and a sentence for each configuration that does not.

    A point stays if it fits within the error of the prediction, if that error is not known, and with
    memory_check=false. Raises UserError if none is left.
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
        minutes = _total(_job_minutes(p, likely) for p in members if (likely := estimates[p.num].minutes))
        parts = [f"{amount(scaled(minutes, 1 / 60), 'h')} of jobs"]
        if charged := [each.service_units for each in own if each.service_units]:
            parts.append(amount(_total(charged), unit))
            if price := members[0].site.charging.price_per_unit:
                total = sum(each[0] for each in charged) * price
                parts.append(f"{total:.2f} {members[0].site.charging.currency}")
        if joules := [each.joules for each in own if each.joules]:
            few = f" in {len(joules)} of them" if len(joules) < len(timed) else ""  # not known by a published ratio
            parts.append(f"{sum(joules) / 3.6e6:.3g} kWh of the GPUs{few}")
        if grams := sum(each.gco2 or 0.0 for each in own):
            parts.append(f"{grams / 1e3:.3g} kg of CO2")
        partly = f" for {share(len(timed), len(own), 'point')}" if len(timed) < len(own) else ""
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


def _changes_network_or_optimizer(point: Point) -> bool:
    """Return whether a point overrides a network of its model, or trains without AdamW: no known run did that."""
    changed = any(re.match(r"model\.(unet|transformer|vae|text_encoder)", override_key(o)) for o in point.overrides)
    return changed or getattr(point.bench.workload, "optimizer", "adamw") != "adamw"


def _most_minutes(point: Point) -> int:
    return point.starts * point.request.time_min


def _job_minutes(point: Point, minutes: Interval) -> Interval:
    """Return how long the job of a run of so many minutes takes, which ends at the time limit of its last start."""
    most = _most_minutes(point)
    return min(minutes[0], most), min(minutes[1], most), min(minutes[2], most)


def _total(values: Iterable[Interval]) -> Interval:
    expected, least, most = (sum(each) for each in zip(*values, strict=True))
    return expected, least, most
